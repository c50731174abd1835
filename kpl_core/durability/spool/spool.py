"""The spool: records on disk before they are acknowledged, until Kinesis confirmed them.

Any thread appends; one thread of its own commits what gathered, in one transaction with one
fsync, and only then completes the futures of those who appended. `confirm` marks records as
delivered (their rows go with the next commit), `release` hands back what could not be
delivered, `claim_backlog_nowait` hands out what nobody has in hand.

Claims live in memory only: after a crash everything unmarked is backlog. A record is
delivered again then if it was in flight, or confirmed since the last commit (a
`commit_interval_ms` ago, while the disk keeps up), and none is missing.

A failed commit fails the futures of its appends. Marks in it are kept and tried again.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Final, NamedTuple, Self, TypeVar

from kpl_core.durability.spool.claims import Claimed, ClaimTable
from kpl_core.durability.spool.envelope import SpooledRecord, decode_record, encode_record
from kpl_core.durability.spool.spool_error import SpoolClosed
from kpl_core.durability.spool.spool_writer import CommitRequest, SpoolWriter, new_future
from kpl_core.durability.spool.store import Changes, Removed, SpoolStore
from kpl_core.durability.spool.tables import LetterRow, RecordRow
from kpl_core.options.kinesis_limits import MIB
from kpl_core.options.reliability import SpoolOptions

__all__ = ["Spool", "SpoolStatistics"]

_log: Final = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")


def _nothing(_: bool) -> None:  # noqa: FBT001 - the one thing that is told
    """Be told, and do nothing."""


class SpoolStatistics(NamedTuple):
    """A snapshot. `records` = claimed + backlog + confirmed but not yet deleted; bytes are those bounded."""

    records: int
    record_bytes: int
    claimed_records: int
    backlog_records: int
    letters: int
    letter_bytes: int
    # Since this process opened it.
    appended_records: int
    confirmed_records: int
    damaged_records: int
    commits: int
    last_commit_seconds: float


class Spool:
    """An open spool. Thread-safe; `x_nowait` returns a `concurrent.futures.Future` that cannot be cancelled.

    `with Spool(options) as spool:` opens and closes it; both touch the disk and block.
    """

    def __init__(self, options: SpoolOptions, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._store = SpoolStore(options)
        self._writer = SpoolWriter(self._store, options, clock=clock, on_commit=self._committed)
        self._lock = threading.Lock()
        self._ledger: ClaimTable | None = None
        self._process = 0
        self._appended = self._confirmed = self._damaged = self._commits = 0
        self._last_commit_seconds = 0.0
        self._listeners: list[Callable[[], None]] = []

    def open(self) -> Self:
        """Open or create the file and start the thread.

        Raises:
            SpoolLocked: another process owns it.
            SpoolCorrupt: it is damaged, or no spool.
            SpoolUnavailable: the disk is full, read-only or failing.
            SpoolClosed: it was open before.
        """
        options = self._options
        if self._ledger is not None:
            message = f"spool {options.path} was open before; make another Spool to open it again"
            raise SpoolClosed(message)
        self._ledger = ClaimTable(
            self._store.open(), max_bytes=options.max_bytes, max_letter_bytes=options.max_dead_letter_bytes
        )
        self._process = os.getpid()
        self._writer.start()
        return self

    def close(self, timeout: float | None = None) -> bool:
        """Commit what was submitted and close; False if the disk did not let it within `timeout` seconds."""
        if self._ledger is None or self._process != os.getpid():
            return True
        if not self._writer.close(timeout):
            return False
        self._store.close()
        return True

    def __enter__(self) -> Self:
        """Open it."""
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it, however long that takes."""
        self.close()

    def append_nowait(self, records: Sequence[SpooledRecord], *, claim: bool) -> "Future[range]":
        """Store `records`, all or none; the future gives their ids once they are durable.

        With `claim` they stay in the caller's hands, who sends them and then calls `confirm` or
        `release`. Without, they join the backlog. (While there is a backlog, records of a key that
        has some there can only keep their order by joining it.)

        Raises:
            SpoolFull: there is no room for them.
            SpoolError: the spool is closed or broken. The future raises `SpoolUnavailable` if the
                disk does not take them. Whichever is raised, none of them was stored.
        """
        sealed = [encode_record(record) for record in records]
        sizes = [len(envelope) for _, envelope in sealed]
        done: Future[range] = new_future()
        with self._lock:
            ledger = self._require_open()
            ids = ledger.reserve(sizes, claim=claim)
            rows = [
                RecordRow(record_id, checksum, envelope)
                for record_id, (checksum, envelope) in zip(ids, sealed, strict=True)
            ]
            work = CommitRequest(
                Changes(records=rows),
                done,
                lambda stored: self._append_ended(ids, sizes, stored=stored, claim=claim),
                ids,
                records=len(rows),
                size_bytes=sum(sizes),
            )
            try:
                self._writer.submit(work)
            except BaseException:
                ledger.never_stored(ids, sizes)
                raise
        return done

    def confirm(self, ids: Iterable[int]) -> "Future[None]":
        """Mark claimed records as delivered; the future completes when they are gone from the disk.

        Ids that are not claimed are ignored, so marking twice is harmless.
        """
        return self._leave(ids, (), _nothing)

    def bury_nowait(
        self,
        letters: Sequence[LetterRow],
        *,
        spooled_ids: Iterable[int] = (),
        settled: Callable[[bool], None] = _nothing,
    ) -> "Future[None]":
        """Store dead letters and drop the spooled records they come from, in one transaction.

        The letters' `number` is replaced by the next free one. `settled` is told on the
        spool's thread whether it was done, before the future completes.

        Raises:
            SpoolFull: there is no room for the letters.
            SpoolError: as for `append_nowait`.
        """
        return self._leave(spooled_ids, letters, settled)

    def release(self, ids: Iterable[int]) -> int:
        """Put claimed records back into the backlog, where `claim_backlog_nowait` finds them; return how many."""
        with self._lock:
            released = self._require_open().release(ids)
        if released:
            self._tell_listeners()
        return released

    def claim_backlog_nowait(self, limit: int, *, max_bytes: int = MIB) -> "Future[list[Claimed]]":
        """Claim up to `limit` records of the backlog, oldest first; none only if there are none.

        It stops at the record with which the envelopes pass `max_bytes`.

        A record whose bytes changed on the disk is not given out: it is logged, counted in
        `damaged_records`, and left where it is for whoever recovers the file.
        """
        return self.ask(lambda store: self._claim_backlog(store, limit, max_bytes))

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever the backlog grew, on whichever thread made it grow; be quick."""
        self._listeners.append(listener)

    def ask(self, question: Callable[[SpoolStore], _Answer]) -> "Future[_Answer]":
        """Let `question` read the store on the spool's thread, after all commits so far.

        Raises:
            SpoolError: the spool is closed or broken.
        """
        with self._lock:
            self._require_open()
        return self._writer.ask(question)

    def change_letters(
        self,
        *,
        removed: Sequence[int] = (),
        rescheduled: Sequence[tuple[float | None, int, int]] = (),
        settled: Callable[[bool], None] = _nothing,
    ) -> "Future[None]":
        """Remove dead letters by number, or set `(due_at, redrives, number)` of others.

        Tried again until the disk takes it; `settled` as for `bury_nowait`.
        """
        changes = Changes(removed_letters=list(removed), rescheduled=list(rescheduled))
        records = len(removed) + len(rescheduled)
        work = CommitRequest(changes, new_future(), settled, is_mark=True, records=records)
        with self._lock:
            self._require_open()
            self._writer.submit(work)
        return work.done

    def statistics(self) -> SpoolStatistics:
        """Return a snapshot; cheap."""
        with self._lock:
            ledger = self._ledger
            if ledger is None:
                return SpoolStatistics(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0)
            return SpoolStatistics(
                ledger.records,
                ledger.record_bytes,
                ledger.claimed,
                ledger.backlog,
                ledger.letters,
                ledger.letter_bytes,
                self._appended,
                self._confirmed,
                self._damaged,
                self._commits,
                self._last_commit_seconds,
            )

    def _require_open(self) -> ClaimTable:
        if self._ledger is None:
            message = f"spool {self._options.path} is not open; enter it with `with spool:` first"
            raise SpoolClosed(message)
        if self._process != os.getpid():
            message = (
                f"spool {self._options.path} was opened by process {self._process}; "
                f"open one in each process, after the fork, with a path of its own"
            )
            raise SpoolClosed(message)
        return self._ledger

    def _append_ended(self, ids: range, sizes: Sequence[int], *, stored: bool, claim: bool) -> None:
        with self._lock:
            if stored:
                self._appended += len(ids)
            else:
                self._require_open().never_stored(ids, sizes)
        if stored and not claim:
            self._tell_listeners()

    def _tell_listeners(self) -> None:
        for listener in self._listeners:
            listener()

    def _leave(
        self, ids: Iterable[int], letters: Sequence[LetterRow], settled: Callable[[bool], None]
    ) -> "Future[None]":
        done: Future[None] = new_future()
        sizes = [len(letter.envelope) for letter in letters]
        with self._lock:
            ledger = self._require_open()
            numbers = ledger.reserve_letters(sizes)
            leaving = ledger.confirm(ids)
            rows = [letter._replace(number=number) for letter, number in zip(letters, numbers, strict=True)]
            work = CommitRequest(
                Changes(confirmed_ids=leaving, letters=rows),
                done,
                lambda made: self._leave_ended(leaving, sizes, settled, made=made),
                is_mark=not letters,
                records=len(leaving) + len(rows),
                size_bytes=sum(sizes),
            )
            try:
                self._writer.submit(work)
            except BaseException:
                ledger.stayed(leaving)
                ledger.letters_left(len(sizes), sum(sizes))
                raise
        return done

    def _leave_ended(
        self, leaving: Sequence[int], sizes: Sequence[int], settled: Callable[[bool], None], *, made: bool
    ) -> None:
        with self._lock:
            ledger = self._require_open()
            if made:
                ledger.deleted(leaving)
                self._confirmed += len(leaving)
            else:
                ledger.stayed(leaving)
                ledger.letters_left(len(sizes), sum(sizes))
        settled(made)

    def _committed(self, removed: Removed, seconds: float) -> None:
        with self._lock:
            self._commits += 1
            self._last_commit_seconds = seconds
            self._require_open().letters_left(removed.letters, removed.envelope_bytes)

    def _claim_backlog(self, store: SpoolStore, limit: int, max_bytes: int) -> list[Claimed]:
        claimed: list[Claimed] = []
        # More than once only if the rows read were all claimed already.
        while not claimed:
            with self._lock:
                query = self._require_open().backlog_query(limit)
            try:
                rows, unread = store.records_by_id(query.released_ids, max_bytes)
                after = [] if rows else store.records_after(query.after_id, limit, max_bytes)
            except BaseException:
                with self._lock:
                    self._require_open().unread(query.released_ids)
                raise
            with self._lock:
                self._require_open().unread(unread)
                claimed = self._claim(rows + after, after)
            if not rows and not after:
                break
        return claimed

    def _claim(self, rows: Sequence[RecordRow], after: Sequence[RecordRow]) -> list[Claimed]:
        ledger = self._require_open()
        if after:
            ledger.move_cursor(after[-1].id)
        claimed = []
        for row in rows:
            if not ledger.claim(row.id, len(row.envelope)):
                continue
            record = decode_record(row.checksum, row.envelope)
            if record is None:
                self._damaged += 1
                _log.error(
                    "spool %s: record %d is damaged and stays in the file; recover it by hand", self._store.path, row.id
                )
                continue
            claimed.append(Claimed(row.id, record))
        return claimed

    def __repr__(self) -> str:
        """Show path and contents."""
        statistics = self.statistics()
        return f"Spool({str(self._options.path)!r}, records={statistics.records}, letters={statistics.letters})"
