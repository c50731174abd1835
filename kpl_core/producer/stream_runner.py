"""One stream's runner: it polls the pipeline when the pipeline wants attention, and sends the requests that are due.

One task for each stream runs `run`, and each request in flight has a task. There is no task, timer or lock per user
record, and no fixed polling interval.

`TroubleLog` logs what goes wrong, for callers that look at no result and have no hook: a line when requests begin to
fail, one when that is over, and one for user records that failed. Each comes once a minute at most, however many
records there are.
"""

import logging
import math
import threading
import weakref
from asyncio import _get_running_loop
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.pipeline.send_queue import FAILURES_IN_A_ROW
from kpl_core.producer.in_flight import InFlightRequests
from kpl_core.producer.shard_map_refresher import ShardMapRefresher
from kpl_core.records.outcome import Outcome
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsRequest, RequestFailure
from kpl_core.transport.transport import KinesisTransport, answer_within, as_answer

_logger: Final = logging.getLogger("kpl_core")
# A round of the event loop starts requests up to this size.
_ROUND_BYTES: Final = 1_000_000
# The resolution of uvloop's timers; others have a finer one.
_TIMER_SECONDS: Final = 0.001

QUIET_SECONDS: Final = 60.0


class TroubleLog:
    """Logs what went wrong with one stream. Instants are seconds on the producer's clock."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        # Requests that failed as a whole, one after the other, and the last of them.
        self._failures = 0
        self.failure: RequestFailure | None = None
        # Since when they fail, if that was logged.
        self._failed_since: float | None = None
        # The time from which the next line of each kind may come.
        self._outages_from = self._losses_from = -math.inf
        # Failed user records by error code, as of the last line.
        self._logged: dict[str, int] = {}

    def answered(self, answer: PutRecordsAnswer, now: float) -> None:
        """Note how a request ended."""
        if not isinstance(answer, RequestFailure):
            self._failures, self.failure = 0, None
            if self._failed_since is not None:
                _logger.info(
                    "requests to stream %r are answered again, after %.1f s", self._stream, now - self._failed_since
                )
                self._failed_since = None
            return
        self._failures, self.failure = self._failures + 1, answer
        if self._failures < FAILURES_IN_A_ROW or self._failed_since is not None or now < self._outages_from:
            return
        self._failed_since = now
        self._outages_from = now + QUIET_SECONDS
        _logger.warning(
            "requests to stream %r fail (%s: %s); requests that a retry may help are tried again",
            self._stream,
            answer.code,
            answer.message,
        )

    def log_losses_if_due(self, failed: Mapping[str, int], now: float) -> None:
        """Log user records that failed since the last line; `failed` counts all of them by error code."""
        if failed and now >= self._losses_from and failed != self._logged:
            self._log_losses(failed)
            self._losses_from = now + QUIET_SECONDS

    def end(self, failed: Mapping[str, int]) -> None:
        """Log user records that failed since the last line now, and then nothing: the producer logs its report.

        A request that ends meanwhile still wakes its stream.
        """
        self._log_losses(failed)
        self._failed_since = None
        self._outages_from = self._losses_from = math.inf

    def _log_losses(self, failed: Mapping[str, int]) -> None:
        fresh = {code: count - self._logged.get(code, 0) for code, count in failed.items()}
        self._logged = dict(failed)
        reasons = ", ".join(f"{count:,} {code}" for code, count in sorted(fresh.items()) if count)
        if reasons:
            _logger.warning(
                "user records of stream %r were not delivered: %s; logged once a minute at most and at the end, "
                "each delivery has its attempts",
                self._stream,
                reasons,
            )


class StreamRunner:
    """Drives one pipeline. It calls `progress` after every change that may finish a record.

    A request fails if the transport has not answered it after `request_seconds`.
    """

    def __init__(
        self,
        pipeline: StreamPipeline,
        transport: KinesisTransport,
        in_flight: "InFlightRequests[StreamRunner]",
        refresher: ShardMapRefresher,
        *,
        request_seconds: float,
        clock: Callable[[], float],
        tasks: TaskGroup,
        progress: Callable[[], None],
    ) -> None:
        self.pipeline = pipeline
        # Weak, because the garbage collector does not look into an outcome.
        pipeline.new_outcome = partial(Outcome, batch_runner=weakref.ref(self))
        self._batch = pipeline.stages.batch
        self._thread: int | None = None
        self._transport = transport
        self._in_flight = in_flight
        self._refresher = refresher
        self._request_seconds = request_seconds
        self._clock = clock
        self._tasks = tasks
        self._progress = progress
        self._woken = anyio.Event()
        # Tasks whose request is answered. To start one costs 20 us, to wake one 5.
        self._idle: list[tuple[list[PutRecordsRequest], anyio.Event]] = []
        self.trouble = TroubleLog(pipeline.stream)
        # User records that failed, by error code; the pipeline counts on.
        self._failed = pipeline.ledger.failed

    def wake(self) -> None:
        """Poll the pipeline now instead of at its wake-up."""
        self.pipeline.attention = False
        self._woken.set()

    def put_batch(self) -> None:
        """Put the user records of the batch, because something waits for one; in the loop's thread only."""
        if self._thread == threading.get_ident():
            self._batch.drain()
            if self.pipeline.attention:
                self.wake()

    async def run(self) -> None:
        """Send the requests that are due, and sleep until the next wake-up; cancelled by the producer."""
        self._thread = threading.get_ident()
        now, loop = self._clock(), _get_running_loop()
        while True:
            woken = self._woken = anyio.Event()
            self.pipeline.attention = False
            wakeup = self._poll(now)
            self._progress()
            if wakeup <= now:
                await anyio.lowlevel.checkpoint()
            elif loop is None or wakeup == math.inf:
                with anyio.move_on_after(wakeup - now):
                    await woken.wait()
            else:
                # With uvloop, whose clock counts milliseconds, anyio's timer runs up to a millisecond in a busy loop.
                timer = loop.call_later(wakeup - now, woken.set)
                try:
                    await woken.wait()
                finally:
                    timer.cancel()
            now = self._clock()
            if wakeup - _TIMER_SECONDS < now < wakeup:
                # A timer may fire a moment early. Then nothing would be due, again and again.
                now = wakeup

    def _poll(self, now: float) -> float:
        """Start requests that are due and have a place; return when to poll again.

        One round of the event loop starts about 1 MB, because it takes milliseconds to seal and encode that. It polls
        for one request at a time, because a request's size is known only when it is built.
        """
        in_flight, size_bytes = self._in_flight, 0
        while True:
            free = in_flight.free_for(self)
            poll = self.pipeline.poll(now, min(free, 1))
            for request in poll.requests:
                self._start(request)
            may_send_more = poll.wants_more and free > 1
            # Most polls send nothing, and nobody waits for a place.
            if poll.requests or poll.wants_more or in_flight.waiting or in_flight.called:
                next_runner = in_flight.take(self, len(poll.requests), wants_more=poll.wants_more and not may_send_more)
                if next_runner is not None:
                    next_runner.wake()
            if not may_send_more:
                break
            size_bytes += sum([record.size_bytes for record in poll.requests[0].records])
            if size_bytes >= _ROUND_BYTES:
                break
        if self._failed:
            self.trouble.log_losses_if_due(self._failed, now)
        return now if may_send_more else poll.wakeup

    def _start(self, request: PutRecordsRequest) -> None:
        if self._idle:
            sending, given = self._idle.pop()
            sending.append(request)
            given.set()
        else:
            self._tasks.start_soon(self._send_each, [request])

    async def _send_each(self, sending: list[PutRecordsRequest]) -> None:
        """Send a request, and those that are given to this task later."""
        while True:
            # The task keeps no reference to the request while it is idle, so its records are freed.
            await self._send(sending.pop())
            given = anyio.Event()
            self._idle.append((sending, given))
            await given.wait()

    async def _send(self, request: PutRecordsRequest) -> None:
        try:
            answer = await answer_within(
                self._request_seconds, "put_records", partial(self._transport.put_records, request), as_answer
            )
        finally:
            next_runner = self._in_flight.release(self)
            if next_runner is not None:
                next_runner.wake()
        now = self._clock()
        self.pipeline.request_completed(request, answer, now)
        self.trouble.answered(answer, now)
        if self.pipeline.shard_map.refresh_wanted:
            self._refresher.wake()
        self.wake()
        self._progress()
