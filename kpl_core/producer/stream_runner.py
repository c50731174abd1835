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

    def wake(self) -> None:
        """Look at the pipeline now instead of when it wanted to be looked at."""
        self.pipeline.attention = False
        self._woken.set()

    async def run(self) -> None:
        """Send what is due, sleep until something is; cancelled by the producer."""
        now = self._clock()
        while True:
            self._woken = anyio.Event()
            self.pipeline.attention = False
            is_blocked = self._send_due(now)
            self.trouble.look(self.pipeline.failed, now)
            self._progress()
            wakeup = self.pipeline.next_wakeup(now, may_send=not is_blocked)
            timer_fired = True
            if wakeup > now:
                with anyio.move_on_after(wakeup - now):
                    await self._woken.wait()
                    timer_fired = False
            else:
                await anyio.lowlevel.checkpoint()
            # A timer may fire a hair early; then nothing would be due, again and again.
            now = max(self._clock(), wakeup) if timer_fired else self._clock()

    def _send_due(self, now: float) -> bool:
        """Start every request that is due; say whether one had to stay behind for want of a place."""
        pipeline = self.pipeline
        pipeline.advance(now)
        while pipeline.has_request(now):
            if not self._in_flight.try_take(self):
                return True
            request = pipeline.next_request(now)
            if request is None:
                self._call(self._in_flight.release(self))
                break
            self._tasks.start_soon(self._send, request)
        self._call(self._in_flight.give_up(self))
        return False

    async def _send(self, request: PutRecordsRequest) -> None:
        try:
            answer = as_answer(await self._transport.put_records(request))
        finally:
            self._call(self._in_flight.release(self))
        now = self._clock()
        self.pipeline.request_completed(request, answer, now)
        self.trouble.answered(answer, now)
        if self.pipeline.shard_map.refresh_wanted:
            self._refresher.wake()
        self.wake()
        self._progress()

    @staticmethod
    def _call(turn: object) -> None:
        """Wake the stream whose turn it is to send."""
        if isinstance(turn, StreamRunner):
            turn.wake()
