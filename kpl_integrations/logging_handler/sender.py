"""The one thread that sends: takes what waits, puts it, and ends in time.

Emitting threads wake it when it is idle; while there is work it looks again every 20 ms by itself, which
costs them nothing. It never touches a logger: whoever closes a handler may hold logging's lock.
"""

import asyncio
import contextlib
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Final

import msgspec

from kpl_core import InvalidUserRecord, KplError, Producer, ProducerClosed
from kpl_integrations.logging_handler.counts import EVICTED, NOT_KEPT, SENDER_FAILED, SHUTDOWN, LogCounts
from kpl_integrations.logging_handler.drop_notices import DropNotices, NoticeMaker
from kpl_integrations.logging_handler.entry import Entry
from kpl_integrations.logging_handler.entry_putter import EntryPutter, WithoutRoom
from kpl_integrations.logging_handler.level_queue import LevelQueue
from kpl_integrations.logging_handler.options import LogSettings
from kpl_integrations.logging_handler.own_threads import enter_own_thread, leave_own_thread
from kpl_integrations.logging_handler.sender_loop import SenderLoop

__all__ = ["SPILL_SHARE", "Intake", "Sender", "say"]

_CHUNK_RECORDS: Final = 500
_POLL_SECONDS: Final = 0.02
_EMPTY_POLLS_BEFORE_IDLE: Final = 5
# Of the time to close, after what the rest of the queue goes to disk, where there is one; and after what it is
# given up.
SPILL_SHARE: Final = 0.3
_QUEUE_SHARE: Final = 0.6
# Of what is left then, after what the stream is told which records are lost; and of the last part, what disk and
# connections have for their end.
_FLUSH_SHARE: Final = 0.6
_END_SHARE: Final = 0.25
_JOIN_GRACE_SECONDS: Final = 0.3
# A handler that dictConfig replaces is still logged to, for a moment.
_LINGER_SECONDS: Final = 0.3

# Makes the producer; with False one that keeps nothing on disk.
ProducerMaker = Callable[[bool], Producer]


class Intake(msgspec.Struct, frozen=True):
    """What waits to be sent, what never came so far, by reason, and the lock of both and of `Sender.is_idle`.

    Whoever waits for room in the queue waits for `room`.
    """

    queue: LevelQueue
    refused: Counter[str]
    room: threading.Condition


class Sender:
    """Owns a thread, its loop and its producer, from `start` to the end of the thread; calls `ended` there."""

    def __init__(
        self,
        stream: str,
        intake: Intake,
        settings: LogSettings,
        *,
        make_producer: ProducerMaker,
        make_notice: NoticeMaker,
        without_room: WithoutRoom,
        ended: Callable[["Sender"], None],
    ) -> None:
        self._stream = stream
        self._queue, self._refused, self._room = intake.queue, intake.refused, intake.room
        self._make_producer = make_producer
        self._make_notice = make_notice
        self._without_room: WithoutRoom = without_room
        self._spills_when_crowded = settings.overflow in {"spool", "dlq"}
        self._notice_seconds = settings.notice_seconds
        self._ended = ended
        self._loop = SenderLoop()
        self._work = asyncio.Event()
        self._stop = asyncio.Event()
        self._deadline = self._spill_at = math.inf
        self._producer: Producer | None = None
        self._putter: EntryPutter | None = None
        self._held: list[tuple[bool, Entry]] = []
        self._found = 0
        self._linger_until = 0.0
        self.dropped: Counter[str] = Counter()
        self.failure: str | None = None
        self.is_idle = False
        self.is_closing = False
        self.is_finished = False
        self._thread = threading.Thread(target=self._run, name="kpl-log-sender", daemon=True)

    def start(self) -> None:
        """Start the thread; raises RuntimeError where the interpreter starts none any more."""
        try:
            self._thread.start()
        except RuntimeError:
            self._loop.close()
            raise

    # Called by any thread

    def wake(self) -> None:
        """Let it look at the queue; called with the lock held, and only if it is idle."""
        self.is_idle = False
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._work.set)

    def begin_flush(self, timeout: float) -> "Future[bool]":
        """Ask that everything emitted so far gets its result; the answer says whether it did, in time."""
        asked = self._flushed(self._queue.accepted, timeout)
        try:
            return asyncio.run_coroutine_threadsafe(asked, self._loop)
        except RuntimeError:
            asked.close()
            done: Future[bool] = Future()
            done.set_result(True)
            return done

    def spill_from(self, instant: float) -> None:
        """Keep what finds no room on disk, where there is one, from `instant` on the monotonic clock."""
        self._spill_at = min(self._spill_at, instant)

    def begin_close(self, timeout: float, *, linger: bool = False) -> None:
        """Ask it to end within `timeout` seconds, `join` included; a second call changes nothing."""
        if self.is_closing:
            return
        self.is_closing = True
        now = time.monotonic()
        within = max(0.0, timeout - min(_JOIN_GRACE_SECONDS, 0.1 * timeout))
        self._deadline = now + within
        self._spill_at = min(self._spill_at, now + SPILL_SHARE * within)
        self._linger_until = now + (_LINGER_SECONDS if linger else 0.0)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._begin_stop)

    def park(self, timeout: float) -> Callable[[], None]:
        """Stop the thread between two steps of its loop, while the process forks; return what lets it go on.

        A thread that is forked away inside an import leaves its child with a module nobody can ever import.
        """
        parked, go_on = threading.Event(), threading.Event()

        def stand_still() -> None:
            parked.set()
            go_on.wait(timeout)

        if self.is_own_thread or self.is_finished:
            return go_on.set
        try:
            self._loop.call_soon_threadsafe(stand_still)
        except RuntimeError:
            return go_on.set
        parked.wait(timeout)
        return go_on.set

    def join(self, timeout: float) -> bool:
        """Wait for its end; say whether it came."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def is_own_thread(self) -> bool:
        """Say whether it is the sender itself that asks."""
        return threading.current_thread() is self._thread

    def counts(self) -> LogCounts:
        """Return its part of the counts: what it took from the queue."""
        dropped = Counter(self.dropped)
        delivered = kept = 0
        if self._producer is not None and self._putter is not None:
            special = self._putter.special
            special.settle()
            report = self._producer.report()
            # What the files held before is not ours; once it is delivered there is less in them than there was.
            kept = report.spooled + report.dead_lettered - self._found - special.kept
            delivered = report.delivered - special.delivered + min(0, kept)
            kept = max(0, kept) + special.buried
            dropped.update(report.failed)
            dropped.subtract(special.failed)
            dropped[NOT_KEPT] += special.unburied
        dropped = +dropped
        taken = self._queue.taken
        return LogCounts(
            emitted=taken,
            delivered=delivered,
            kept=kept,
            dropped=dropped,
            buffered=taken - delivered - kept - dropped.total(),
        )

    def all_dropped(self) -> Counter[str]:
        """Return what was dropped at the door and behind it."""
        with self._room:
            dropped = self._queue.dropped + self._refused
        dropped.update(self.counts().dropped)
        return dropped

    # In its thread

    def _run(self) -> None:
        enter_own_thread()
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except KplError as error:
            self.failure = str(error)
            say(self._stream, f"nothing can be sent: {error}")
        finally:
            self._give_up_queue(SHUTDOWN if self.is_closing else SENDER_FAILED)
            self.is_finished = True
            self._ended(self)
            with contextlib.suppress(RuntimeError):
                self._loop.close()
            leave_own_thread()

    async def _main(self) -> None:
        async with AsyncExitStack() as stack:
            producer = await self._enter_producer(stack)
            self._found = producer.report().accepted
            self._putter = EntryPutter(
                self._stream, producer, without_room=self._without_room, cannot_wait=self._cannot_wait
            )
            self._producer = producer
            notices = DropNotices(
                self._putter,
                all_dropped=self.all_dropped,
                make_notice=self._make_notice,
                interval_seconds=self._notice_seconds,
                now=time.monotonic(),
            )
            pump = asyncio.create_task(self._pump(self._putter, notices))
            stopped = asyncio.create_task(self._stop.wait())
            await asyncio.wait({pump, stopped}, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            await asyncio.wait({pump}, timeout=self._time_left(_QUEUE_SHARE))
            pump.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await pump
            self._give_up_queue(SHUTDOWN)
            # What was given up, and what fails now, is told in the stream as long as anything can be.
            _ = await producer.flush(self._time_left(_FLUSH_SHARE))
            _ = notices.tell()
            await producer.close(timeout=self._time_left(1.0 - _END_SHARE))

    async def _enter_producer(self, stack: AsyncExitStack) -> Producer:
        """Open the producer; without its files, if another process has them."""
        try:
            return await stack.enter_async_context(self._make_producer(True))  # noqa: FBT003
        except KplError as error:
            if self._without_room == "wait":
                raise
            failure = error
        producer = await stack.enter_async_context(self._make_producer(False))  # noqa: FBT003
        self._without_room = "wait"
        say(self._stream, f"what cannot be delivered is lost, not kept: {failure}")
        return producer

    def _time_left(self, share: float) -> float:
        return max(0.0, self._deadline - time.monotonic()) * share

    def _cannot_wait(self) -> bool:
        return (self._spills_when_crowded and self._queue.is_crowded) or time.monotonic() >= self._spill_at

    def _begin_stop(self) -> None:
        self._stop.set()
        self._work.set()

    def _must_end(self) -> bool:
        return self._stop.is_set() and time.monotonic() >= self._linger_until

    async def _pump(self, putter: EntryPutter, notices: DropNotices) -> None:
        """Put what waits, until the queue is empty and the end was asked for."""
        empty_polls = 0
        while True:
            notices.tell_if_due(time.monotonic())
            with self._room:
                self._held = self._queue.take(_CHUNK_RECORDS)
                self._room.notify_all()
            if self._held:
                empty_polls = 0
                is_full_chunk = len(self._held) == _CHUNK_RECORDS
                await self._hand_over(putter)
                await asyncio.sleep(0 if is_full_chunk else _POLL_SECONDS)
            elif self._must_end():
                return
            elif empty_polls < _EMPTY_POLLS_BEFORE_IDLE or self._stop.is_set():
                empty_polls += 1
                await asyncio.sleep(_POLL_SECONDS)
            else:
                await self._sleep_until_woken()

    async def _sleep_until_woken(self) -> None:
        self._work.clear()
        with self._room:
            self.is_idle = not len(self._queue)
        if not self.is_idle or self._stop.is_set():
            return
        # What fails after it was put is told in time too, though nobody logs meanwhile.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._notice_seconds):
                await self._work.wait()
        with self._room:
            self.is_idle = False

    async def _hand_over(self, putter: EntryPutter) -> None:
        self._held.reverse()
        while self._held:
            is_highest, entry = self._held[-1]
            try:
                await putter.put(entry, is_highest=is_highest)
            except ProducerClosed:
                # A shared one, whose owner closed it first.
                self._give_up_held(SHUTDOWN)
                return
            except InvalidUserRecord:
                # The stream takes less in one record than was known when this was formatted.
                self.dropped["InvalidUserRecord"] += 1
            self._held.pop()

    def _give_up_queue(self, reason: str) -> None:
        with self._room:
            left = len(self._queue.take(len(self._queue)))
            self._room.notify_all()
        if left:
            self.dropped[reason] += left
        self._give_up_held(reason)

    def _give_up_held(self, reason: str) -> None:
        if self._held:
            self.dropped[reason] += len(self._held)
            self._held = []

    async def _flushed(self, accepted: int, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while self._producer is None or self._queue.taken + self._queue.dropped[EVICTED] < accepted or self._held:
            if time.monotonic() >= deadline:
                return False
            self._work.set()
            await asyncio.sleep(_POLL_SECONDS / 4)
        is_flushed = (await self._producer.flush(max(0.0, deadline - time.monotonic()))).complete
        special = None if self._putter is None else self._putter.special
        while special is not None and special.has_pending_letters and time.monotonic() < deadline:  # noqa: ASYNC110 - the spool's threads tell no loop
            await asyncio.sleep(_POLL_SECONDS / 4)
        return is_flushed


def say(stream: str, words: str) -> None:
    """Write to stderr, where what cannot be logged goes."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"KinesisHandler for stream {stream!r}: {words}\n")
