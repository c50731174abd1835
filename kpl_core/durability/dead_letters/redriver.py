"""Redrive: puts dead letters into a producer again, by itself when they are due, or on demand (`kpl dlq redrive`).

A letter leaves the queue only after Kinesis confirmed it, so an interrupted redrive is simply run again. Delivered
letters are gone from the queue; letters in flight (at most the pace's `in_flight_records`) may be delivered twice.

Redriving changes the file, so it needs the spool itself.
"""

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import anyio

from kpl_core.durability.dead_letters.dead_letter_queue import FIRST_LETTER, PAGE_LETTERS, DeadLetterQueue
from kpl_core.durability.delivery_pace import DeliveryPace
from kpl_core.durability.spool.async_spool import LoopMailbox
from kpl_core.durability.spool.envelope import SpooledPut, SpooledRecord
from kpl_core.durability.spool.spool_error import SpoolError
from kpl_core.durability.spool.tables import LetterFilter, StoredLetter
from kpl_core.errors import BufferFull, InvalidUserRecord
from kpl_core.records.record_result import RecordResult


class RedriveProgress(NamedTuple):
    """The progress of a redrive. `damaged` letters changed on the disk and were not sent."""

    total: int
    delivered: int
    failed: int
    damaged: int


class Redriver:
    """Sends the letters of `queue` through `put`, critical first, no faster than `pace` allows.

    Run either `run` or `redrive` at a time, in the event loop in which this object was created.
    """

    def __init__(self, queue: DeadLetterQueue, put: SpooledPut, pace: DeliveryPace) -> None:
        self._queue = queue
        self._put = put
        self._pace = pace
        self._mailbox = LoopMailbox()
        self._pending: deque[StoredLetter] = deque()
        # A number stays here until its outcome is on the disk, so that no letter is read and sent twice.
        self._in_flight: set[int] = set()
        self._delivered = self._failed = self._damaged = 0
        # True if the producer rejected or failed a letter since the page was read.
        self._put_failed = False
        self._wakeup = anyio.Event()

    async def run(self) -> None:
        """Redrive letters whenever they are due, until cancelled.

        A critical letter that becomes due goes before all others except the page already read. It goes before that page
        too if the producer rejects records at the moment.

        Raises:
            ProducerClosed: the producer accepts nothing any more.
            SpoolError: the spool is closed or broken.
        """
        self._queue.listen(lambda: self._mailbox.post(self._wake))
        while True:
            self._wakeup = anyio.Event()
            if self._put_failed:
                self._pending.clear()
                self._put_failed = False
            now = anyio.current_time()
            wait = self._pace.ready_at(0, now) - now
            # Read a page only when a letter may be sent: in a storm every commit of new letters wakes this task.
            if wait <= 0:
                next_due_in = 0.0 if self._pending else await self._read_due()
                wait = self._send()
                if not self._pending:
                    wait = min(wait, next_due_in)
            await self._sleep(wait)

    async def _read_due(self) -> float:
        """Read the next page; return the seconds until more letters are due."""
        # A snapshot: letters that finish while the page is read were still stored when it was read.
        in_flight = frozenset(self._in_flight)
        limit = len(in_flight) + PAGE_LETTERS
        due = await self._mailbox.wait_for(self._queue.due_nowait(limit))
        self._pending.extend(stored for stored in due.letters if stored.number not in in_flight)
        if len(due.letters) == limit:
            return 0.0
        return math.inf if due.next_due_in is None else due.next_due_in

    async def redrive(
        self, wanted: LetterFilter, *, on_progress: Callable[[RedriveProgress], None] | None = None
    ) -> RedriveProgress:
        """Send every letter that matches once, and return when all of them have a result.

        Letters that arrive meanwhile are left for the next call. `on_progress` is called at most once per result.

        Raises:
            ProducerClosed: the producer accepts nothing any more.
            SpoolError: the spool is closed or broken.
        """
        counts = await self._mailbox.wait_for(self._queue.count_nowait(wanted))
        newest = await self._mailbox.wait_for(self._queue.newest_nowait())
        total, reported = sum(counts.values()), -1
        self._delivered = self._failed = self._damaged = 0
        after, more = FIRST_LETTER, True
        while more or self._pending or self._in_flight:
            self._wakeup = anyio.Event()
            if more and not self._pending:
                page = await self._mailbox.wait_for(self._queue.select_nowait(wanted, PAGE_LETTERS, after=after))
                more = len(page) == PAGE_LETTERS
                after = (page[-1].tier_rank, page[-1].number) if page else after
                self._pending.extend(stored for stored in page if stored.number <= newest)
            wait = self._send()
            progress = RedriveProgress(total, self._delivered, self._failed, self._damaged)
            if on_progress is not None and sum(progress[1:]) != reported:
                reported = sum(progress[1:])
                on_progress(progress)
            if self._pending or (self._in_flight and not more):
                await self._sleep(wait)
        return RedriveProgress(total, self._delivered, self._failed, self._damaged)

    def _send(self) -> float:
        """Put the letters that may go; return the seconds until more may, `math.inf` if a result must come first."""
        now = anyio.current_time()
        while self._pending:
            stored = self._pending[0]
            if stored.letter is None:
                self._pending.popleft()
                self._damaged += 1
                # A damaged letter is never due again. Its bytes stay in the file for manual recovery.
                self._queue.try_later([stored])
                continue
            record = stored.letter.as_record()
            if not self._pace.try_send(record.size_bytes, now):
                return self._pace.ready_at(record.size_bytes, now) - now
            self._pending.popleft()
            self._in_flight.add(stored.number)
            self._put_one(stored, record, now)
        return math.inf

    def _put_one(self, stored: StoredLetter, record: SpooledRecord, now: float) -> None:
        try:
            self._put(record, partial(self._finished, stored, record.size_bytes))
        except InvalidUserRecord:
            self._pace.succeeded(record.size_bytes)
            self._failed += 1
            self._mark(stored, self._queue.try_later)
        except BufferFull:
            self._in_flight.discard(stored.number)
            self._pending.appendleft(stored)
            self._put_failed = True
            self._pace.failed(record.size_bytes, now)
        except BaseException:
            self._in_flight.discard(stored.number)
            self._pace.failed(record.size_bytes, now)
            raise

    def _finished(self, stored: StoredLetter, size_bytes: int, result: RecordResult) -> None:
        if result.successful:
            self._pace.succeeded(size_bytes)
            self._delivered += 1
            self._mark(stored, self._queue.remove)
        else:
            self._put_failed = True
            self._pace.failed(size_bytes, self._mailbox.clock())
            self._failed += 1
            self._mark(stored, self._queue.try_later)

    def _mark(self, stored: StoredLetter, mark: "Callable[[list[StoredLetter]], Future[None]]") -> None:
        try:
            marked = mark([stored])
        except SpoolError:
            # Closed or broken: the letter stays as it was. The caller is the producer, which cannot help.
            self._result_stored(stored.number)
        else:
            marked.add_done_callback(lambda _: self._mailbox.post(partial(self._result_stored, stored.number)))

    def _result_stored(self, number: int) -> None:
        self._in_flight.discard(number)
        self._wake()

    def _wake(self) -> None:
        self._wakeup.set()

    async def _sleep(self, seconds: float) -> None:
        with anyio.move_on_after(None if seconds == math.inf else seconds):
            await self._wakeup.wait()
