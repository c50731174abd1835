"""The handler's sender: takes entries from the level queue, puts them, counts their results, and ends in time.

It is a record source of a background sender: the handler's own, or that of a `BlockingProducer` of the application.
Threads that log wake it when it is idle. While it has work it looks at the queue every 20 ms by itself, which costs
those threads nothing. It never touches a logger, because a thread that closes a handler may hold logging's lock.
"""

import asyncio
import contextlib
import math
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from typing import Final

from kpl_core import BlockingProducer, BufferFull, Delivery, KplError, Producer, ProducerClosed, RecordResult
from kpl_core.background.process_end import SpareThread
from kpl_core.background.sender import BackgroundSender
from kpl_core.options.kinesis_limits import MIB
from kpl_core.producer.delivery import call_when_finished
from kpl_core.records.user_record import Tier
from kpl_integrations.logging_handler.entry import (
    Entry,
    LetterAndStub,
    LogPiece,
    OversizeLetters,
    SplitRecord,
    random_keys,
)
from kpl_integrations.logging_handler.formatter import LargeLine
from kpl_integrations.logging_handler.level_queue import (
    FORMAT_ERROR,
    SENDER_FAILED,
    SHUTDOWN,
    LogCounts,
    SenderQueue,
)
from kpl_integrations.logging_handler.options import LogSettings, WithoutRoom
from kpl_integrations.logging_handler.progress import (
    LOOK_SECONDS,
    DropNotices,
    TimeExtension,
    TroubleReport,
    error_text,
    write_to_stderr,
)

# The identities of the threads that send. No handler takes what is logged in them: it would never end.
SENDER_THREADS: Final[set[int]] = set()

_ignore: Final[Callable[[object], None]] = lambda _result: None  # noqa: E731 - one line
# How much leaves the queue at once: what the producer has no room for waits outside of the queue's bounds.
_CHUNK_RECORDS: Final = 500
_CHUNK_BYTES: Final = MIB
_POLL_SECONDS: Final = 0.02
_EMPTY_POLLS_BEFORE_IDLE: Final = 5
# The shares of the time to close after which the rest of the queue is spilled to disk, if configured, and given up.
SPILL_SHARE: Final = 0.3
_QUEUE_SHARE: Final = 0.6
# The share of the rest after which a notice reports what is lost, and the share then kept for disk and connections.
_FLUSH_SHARE: Final = 0.6
_END_SHARE: Final = 0.25
_JOIN_GRACE_SECONDS: Final = 0.3
# After dictConfig replaced a handler, threads still log to it for a moment.
_LINGER_SECONDS: Final = 0.3


class LogSender:
    """Sends what is in a handler's queue, through a producer of its own or the application's `shared` one.

    Args:
        queue: its lock also guards `is_idle` and the counts.
        make_producer: makes the handler's own producer; with False one that keeps nothing on disk.
        make_notice: formats a notice of dropped records, by reason.
        ended: called in the sender's thread at its end.
    """

    def __init__(
        self,
        stream: str,
        queue: SenderQueue,
        settings: LogSettings,
        *,
        shared: BlockingProducer | None,
        make_producer: Callable[[bool], Producer],
        make_notice: Callable[[dict[str, int]], bytes],
        without_room: WithoutRoom,
        ended: Callable[["LogSender"], None],
    ) -> None:
        self._stream, self._queue, self._room = stream, queue.records, queue.room
        self._encode_large = queue.encode_large
        self._make_producer, self._ended = make_producer, ended
        self._without_room: WithoutRoom = without_room
        self._spills_when_crowded = settings.overflow in {"spool", "dlq"}
        self._is_shared = shared is not None
        self.background = (
            BackgroundSender(
                self._open_producer, self, name="kpl-log-sender", lock=queue.lock, own_threads=SENDER_THREADS
            )
            if shared is None
            else shared.sender
        )
        self._keys = random_keys()
        self._pieces: deque[LogPiece] = deque()
        self._pieces_put = 0
        self._timer: asyncio.TimerHandle | None = None
        self._empty_polls = 0
        self._deadline = self._spill_at = math.inf
        self._linger_until = 0.0
        self._extension = TimeExtension(settings.extra_seconds if without_room == "wait" else 0.0)
        # What the files of an earlier run held when the producer opened.
        self._found = 0
        self._delivered = self._kept = 0
        self._letters = OversizeLetters(queue.lock, self.count)
        # What was dropped behind the queue, by reason.
        self._dropped: Counter[str] = Counter()
        self._notice_seconds = settings.notice_seconds
        self._notices = DropNotices(stream, settings.notice_seconds, make_notice, time.monotonic())
        self._trouble = TroubleReport(stream, time.monotonic())
        self._has_reported_end = False
        self.is_idle = False
        self.is_closing = False
        self.is_finished = False
        # Why records are lost that come after the end.
        self.end_reason = SENDER_FAILED

    # Called by any thread

    def start(self, spare: SpareThread | None = None) -> bool:
        """Start the thread or the spare one, or join the shared producer's; return False if that is not open.

        It raises what `BackgroundSender.start` raises.
        """
        if not self._is_shared:
            self.background.start(spare)
            return True
        if not self.background.is_open:
            return False
        self.background.run_soon(self._join_shared)
        return True

    @property
    def is_current(self) -> bool:
        """Return True in the sender's own thread."""
        return self.background.is_current

    def wake(self) -> None:
        """Look at the queue soon; called with the lock held, and only if the sender is idle."""
        # In this order, because a signal handler may raise in the middle of it.
        self.background.run_soon(self._poll)
        self.is_idle = False

    def begin_flush(self, timeout: float) -> Callable[[float], bool]:
        """Start a flush of up to `timeout` seconds; return and raise as `BackgroundSender.begin`.

        It goes on while records are delivered, if `close_timeout` is not set.
        """
        self._extension.begin(timeout, time.monotonic())
        # A signal handler may flush in the middle of `emit`, which holds the lock of the queue.
        wait = self.background.begin(lambda: self._flush(timeout), self._room)
        return lambda timeout: wait(timeout, self._extended)

    def _extended(self) -> float:
        return self._extension.until(self._delivered, time.monotonic())

    def spill_from(self, instant: float) -> None:
        """Keep what finds no room on disk, if that is configured, from `instant` on the monotonic clock."""
        self._spill_at = min(self._spill_at, instant)

    def begin_close(self, timeout: float, *, linger: bool) -> None:
        """Start to close within `timeout` seconds, `join` included; a second call does nothing."""
        if self.is_closing:
            return
        self.is_closing = True
        now = time.monotonic()
        within = max(0.0, timeout - min(_JOIN_GRACE_SECONDS, 0.1 * timeout))
        self._deadline = now + within
        self._extension.begin(within, now)
        self._spill_at = min(self._spill_at, now + SPILL_SHARE * within)
        self._linger_until = now + (_LINGER_SECONDS if linger else 0.0)
        self.background.run_soon(self._begin_close_in_loop)

    def pause(self, timeout: float) -> Callable[[], object]:
        """Stop the thread while the process forks; see `BackgroundSender.pause`."""
        return (lambda: None) if self._is_shared else self.background.pause(timeout)

    def join(self, timeout: float) -> bool:
        """Wait for the end; return True if it came. Like `begin_flush`, wait longer while records are delivered."""
        while timeout >= 0:
            if self.background.join(timeout) if not self._is_shared else self._wait_for_end(timeout):
                return True
            if self.is_current:
                return self._is_shared
            timeout = self._extended() - time.monotonic()
        return False

    def _wait_for_end(self, timeout: float) -> bool:
        with self._room:
            return self._room.wait_for(lambda: self._has_reported_end, timeout)

    def counts(self) -> LogCounts:
        """Return where every record that was emitted is."""
        with self._room:
            dropped, emitted = self._drops(), self._queue.accepted + self._queue.refused
            delivered, kept = self._delivered, self._kept
        if not self._is_shared and self.background.producer is not None:
            report = self.background.producer.report()
            # What left the files since was delivered.
            still_kept = min(kept, max(0, report.spooled + report.dead_lettered - self._found))
            delivered, kept = delivered + kept - still_kept, still_kept
        kept += self._letters.kept
        buffered = emitted - delivered - kept - dropped.total()
        return LogCounts(emitted=emitted, delivered=delivered, kept=kept, dropped=dropped, buffered=buffered)

    def last_failure(self) -> str | None:
        """Return code and message of the latest request, if it failed, else None."""
        producer = self.background.producer
        return None if producer is None else producer.last_failure(self._stream)

    def _drops(self) -> Counter[str]:
        with self._room:
            return self._queue.dropped + self._dropped

    # In its thread

    @contextlib.asynccontextmanager
    async def _open_producer(self) -> AsyncIterator[Producer]:
        """Open the producer; if another process has its files, open one without them."""
        self._poll()
        async with contextlib.AsyncExitStack() as stack:
            try:
                producer = await stack.enter_async_context(self._make_producer(True))  # noqa: FBT003
            except KplError as error:
                if self._without_room == "wait":
                    raise
                write_to_stderr(self._stream, f"what cannot be delivered is lost, not kept: {error}")
                self._without_room = "wait"
                producer = await stack.enter_async_context(self._make_producer(False))  # noqa: FBT003
            self._found = producer.report().accepted
            asyncio.get_running_loop().call_soon(self._poll)
            yield producer

    def _join_shared(self) -> None:
        SENDER_THREADS.add(threading.get_ident())
        self.background.add_source(self)
        self._poll()

    def sender_ended(self) -> None:
        """Count what is left as dropped; called at the end of the thread."""
        failure = self.background.failure
        try:
            if failure is not None:
                write_to_stderr(self._stream, f"nothing can be sent: {error_text(failure)}")
        finally:
            self._finish(SHUTDOWN if failure is None or self.is_closing else SENDER_FAILED)

    def _finish(self, reason: str) -> None:
        if self._is_shared:
            self.background.remove_source(self)
            if not self.background.has_source_of(LogSender):  # else another handler still sends through this thread
                SENDER_THREADS.discard(threading.get_ident())
        if self._timer is not None:
            self._timer.cancel()
        self._give_up(reason)
        self.end_reason, self.is_finished = reason, True
        try:
            self._ended(self)
        finally:
            with self._room:
                self._has_reported_end = True
                self._room.notify_all()

    def watch_drained(self) -> Callable[[], bool]:
        """Return a function that returns True once everything that is queued now has been put."""
        with self._room:
            has_left_queue = self._queue.watch_drained()
        last = math.inf

        def is_drained() -> bool:
            nonlocal last
            if last == math.inf and has_left_queue():
                last = self._pieces_put + len(self._pieces)
            return self.is_finished or self._pieces_put >= last

        return is_drained

    def _poll(self) -> None:
        """Look at the queue, and decide when to look again."""
        if self.is_finished:
            return
        if self._timer is not None:
            self._timer.cancel()
        producer, delay = self.background.producer, _POLL_SECONDS
        try:
            if not self.is_closing:
                self._trouble.look(self.counts, self._dropped, producer, time.monotonic())
            if producer is not None:
                delay = self._drain_and_rest(producer)
        finally:
            self._timer = asyncio.get_running_loop().call_later(delay, self._poll)

    def _drain_and_rest(self, producer: Producer) -> float:
        """Drain the queue; return how many seconds later to look again."""
        self._notices.put_due(self._drops, producer, time.monotonic())
        taken = self.drain(producer)
        if taken or self._pieces or self.is_closing:
            self._empty_polls = 0
            return 0.0 if taken == _CHUNK_RECORDS and not self._pieces else _POLL_SECONDS
        self._empty_polls += 1
        if self._empty_polls > _EMPTY_POLLS_BEFORE_IDLE:
            with self._room:
                self.is_idle = not len(self._queue)
                if self.is_idle:
                    # A record that fails later is reported in time too, even if nothing is logged meanwhile.
                    look_seconds = LOOK_SECONDS if self._trouble.has_unsettled else math.inf
                    return min(look_seconds, self._notice_seconds)
        return _POLL_SECONDS

    def drain(self, producer: Producer) -> int:
        """Put what was taken before, then up to 500 more, as far as there is room; return how many those were."""
        if self._pieces:
            self._put_pieces(producer)
        if self._pieces or self.is_finished:
            return 0
        with self._room:
            taken = self._queue.take(_CHUNK_RECORDS, _CHUNK_BYTES)
            if taken:
                self._room.notify_all()
        deliveries: list[Delivery] = []
        try:
            self._put_entries(producer, taken, deliveries)
        finally:
            # Behind the puts, because what waits for a result puts the batch of its record.
            for delivery in deliveries:
                call_when_finished(delivery, self._record_finished)
        self._put_pieces(producer)
        return len(taken)

    def _put_entries(self, producer: Producer, taken: list[tuple[bool, Entry]], deliveries: list[Delivery]) -> None:
        entries = iter(taken)
        for is_highest, entry in entries:
            try:
                self._put_entry(producer, entry, "critical" if is_highest else "normal", deliveries)
            except BaseException as error:
                # A formatter's code encodes large lines here.
                self._entry_failed(self.count, SENDER_FAILED if isinstance(entry, bytes) else FORMAT_ERROR, error)
                if not isinstance(error, Exception):  # it ends this thread
                    for _ in entries:
                        self.count(SENDER_FAILED)
                    raise

    def _put_entry(self, producer: Producer, entry: Entry, tier: Tier, deliveries: list[Delivery]) -> None:
        # Most entries are one user record, put into a producer with room.
        if isinstance(entry, bytes) and not self._pieces and self._without_room == "wait":
            try:
                deliveries.append(
                    producer.put_nowait(self._stream, partition_key=next(self._keys), data=entry, tier=tier)
                )
            except KplError:
                # `_put_pieces` tries it once more, and knows what to do.
                self._add_pieces(producer, entry, tier)
        else:
            self._add_pieces(producer, entry, tier)

    def _add_pieces(self, producer: Producer, entry: Entry, tier: Tier) -> None:
        """Divide an entry into the user records to put."""
        key, data = entry if isinstance(entry, tuple) else (None, entry)
        key = next(self._keys) if key is None else key
        if isinstance(data, LargeLine):
            data = self._encode_large(data)
        if isinstance(data, bytes):
            self._pieces.append(LogPiece(key, data, tier, self._record_finished, self.count))
        elif isinstance(data, LetterAndStub):
            # The letter stands for the log record; what happens to the stub counts for nothing.
            self._pieces.append(LogPiece(key, data.stub, tier, _ignore, _ignore))
            self._letters.add(producer, self._stream, key, data, tier)
        else:
            split = SplitRecord(self.count, len(data))
            self._pieces.extend(LogPiece(key, piece, tier, split.finished, split.failed) for piece in data)

    def _put_pieces(self, producer: Producer) -> None:
        while self._pieces:
            key, data, tier, finished, failed = self._pieces[0]
            tier_now = self._tier_now(producer, len(key.encode(errors="replace")) + len(data), tier)
            if tier_now is None:
                return
            try:
                delivery = producer.put_nowait(self._stream, partition_key=key, data=data, tier=tier_now)
            except BufferFull:
                producer.internal.make_room()  # the sender comes back after progress, and `_poll` in 20 ms
                return
            except ProducerClosed:
                self._give_up_pieces(SHUTDOWN)
                return
            except KplError as error:
                # The stream takes less in one record than was known when this was formatted, or the spool refuses it.
                failed(type(error).__name__)
            except Exception as error:  # noqa: BLE001 - or this entry would stop all behind it
                self._entry_failed(failed, SENDER_FAILED, error)
            else:
                call_when_finished(delivery, finished)
            self._pieces.popleft()
            self._pieces_put += 1

    def _entry_failed(self, count: Callable[[str], object], reason: str, error: BaseException) -> None:
        """Count an entry that raised where it was taken or put, and report the cause."""
        count(reason)
        self._trouble.entry_failed(reason, error, time.monotonic())

    def _tier_now(self, producer: Producer, size_bytes: int, tier: Tier) -> Tier | None:
        """Return the tier to put with now, None if the record waits for room.

        Without room a producer with a spool keeps every tier on disk, and one with dead letters keeps bulk. So a
        record waits for room, unless waiting would lose the records behind it.
        """
        if self._without_room == "wait" or producer.buffer_limit.has_room(size_bytes=size_bytes, tier=tier):
            return tier
        if not (self._spills_when_crowded and self._queue.is_crowded) and time.monotonic() < self._spill_at:
            return None
        return tier if self._without_room == "spool" else "bulk"

    # Results

    def count(self, error_code: str | None, *, is_kept: bool = False) -> None:
        """Count a log record that has its result: an error code, or None."""
        with self._room:
            if self.is_finished:
                return
            if error_code is not None:
                self._dropped[error_code] += 1
            elif is_kept:
                self._kept += 1
            else:
                self._delivered += 1

    def _record_finished(self, result: RecordResult) -> None:
        if result.successful and not self.is_finished:
            # Only this thread counts these, so it needs no lock.
            self._delivered += 1
            return
        is_kept = result.kept is not None
        self.count(None if result.successful or is_kept else result.error_code or "", is_kept=is_kept)

    def _give_up(self, reason: str) -> None:
        """Drop what waits in the queue or behind it."""
        with self._room:
            left = len(self._queue.take(len(self._queue)))
            if left:
                self._dropped[reason] += left
            self._room.notify_all()
        self._give_up_pieces(reason)

    def _give_up_pieces(self, reason: str) -> None:
        while self._pieces:
            self._pieces.popleft().failed(reason)

    # Flushing and closing

    async def _flush(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        is_complete = (await self.background.flush_in_loop(timeout, self._extended)).complete
        while self._letters.pending and time.monotonic() < deadline:  # noqa: ASYNC110 - the spool's thread counts them
            await asyncio.sleep(_POLL_SECONDS / 4)
        return is_complete

    def _begin_close_in_loop(self) -> None:
        self._closing = asyncio.get_running_loop().create_task(self._close())

    async def _close(self) -> None:
        try:
            producer = await self.background.opened()
            await asyncio.sleep(self._linger_until - time.monotonic())
            await self.background.put_queued(self._time_left(_QUEUE_SHARE), self._extended)
            self._deadline = max(self._deadline, self._extended())
            self._give_up(SHUTDOWN)
            await producer.flush(self._time_left(_FLUSH_SHARE))
            # What is given up now is still reported in the stream, by a notice in the last request.
            self._notices.put(self._drops, producer)
            close = producer.flush if self._is_shared else producer.close
            await close(self._time_left(1.0 - _END_SHARE))
        finally:
            if self._is_shared:
                self._finish_shared()
            else:
                self.background.stop()

    def _finish_shared(self) -> None:
        with self._room:
            # The owner may still deliver these.
            counts = self.counts()
            if counts.buffered:
                self._dropped["Unknown"] += counts.buffered
        self._finish(SHUTDOWN)

    def _time_left(self, share: float) -> float:
        return max(0.0, self._deadline - time.monotonic()) * share
