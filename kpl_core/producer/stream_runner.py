"""One stream's sleeper: it wakes when its pipeline wants attention, and sends what is due.

One task for each stream runs `run`; each request is a task; there is no task,
timer or lock per user record, and no polling.
"""

from collections.abc import Callable

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.producer.in_flight import InFlightRequests
from kpl_core.producer.shard_map_refresher import ShardMapRefresher
from kpl_core.producer.trouble_log import TroubleLog
from kpl_core.records.put_records import PutRecordsRequest
from kpl_core.transport.transport import KinesisTransport, as_answer

__all__ = ["StreamRunner"]


class StreamRunner:
    """Drives one pipeline. `progress` is called after every change that may finish something."""

    def __init__(
        self,
        pipeline: StreamPipeline,
        transport: KinesisTransport,
        in_flight: InFlightRequests,
        refresher: ShardMapRefresher,
        *,
        clock: Callable[[], float],
        tasks: TaskGroup,
        progress: Callable[[], None],
    ) -> None:
        self.pipeline = pipeline
        self._transport = transport
        self._in_flight = in_flight
        self._refresher = refresher
        self._clock = clock
        self._tasks = tasks
        self._progress = progress
        self._woken = anyio.Event()
        self.trouble = TroubleLog(pipeline.stream)
        # User records that failed, by error code; the pipeline counts on.
        self._failed = pipeline.ledger.failed

    def wake(self) -> None:
        """Poll the pipeline now instead of at its wake-up."""
        self.pipeline.attention = False
        self._woken.set()

    async def run(self) -> None:
        """Send what is due, sleep until something is; cancelled by the producer."""
        now = self._clock()
        while True:
            self._woken = anyio.Event()
            self.pipeline.attention = False
            wakeup = self._poll(now)
            self._progress()
            timer_fired = True
            if wakeup > now:
                with anyio.move_on_after(wakeup - now):
                    await self._woken.wait()
                    timer_fired = False
            else:
                await anyio.lowlevel.checkpoint()
            # A timer may fire a moment early. Then nothing would be due, again and again.
            now = max(self._clock(), wakeup) if timer_fired else self._clock()

    def _poll(self, now: float) -> float:
        """Start every request that is due and has a place; return when to poll again."""
        in_flight = self._in_flight
        poll = self.pipeline.poll(now, in_flight.free_for(self))
        for request in poll.requests:
            self._tasks.start_soon(self._send, request)
        next_runner = in_flight.take(self, len(poll.requests), wants_more=poll.wants_more)
        if next_runner is not None:
            self._call(next_runner)
        if self._failed:
            self.trouble.look(self._failed, now)
        return poll.wakeup

    async def _send(self, request: PutRecordsRequest) -> None:
        try:
            answer = as_answer(await self._transport.put_records(request))
        finally:
            next_runner = self._in_flight.release(self)
            if next_runner is not None:
                self._call(next_runner)
        now = self._clock()
        self.pipeline.request_completed(request, answer, now)
        self.trouble.answered(answer, now)
        if self.pipeline.shard_map.refresh_wanted:
            self._refresher.wake()
        self.wake()
        self._progress()

    @staticmethod
    def _call(runner: object) -> None:
        """Wake the stream whose turn it is to send."""
        if isinstance(runner, StreamRunner):
            runner.wake()
