"""The spool: records are on disk before they are acknowledged, and stay there until Kinesis has confirmed them.

Any thread may append. One writer thread commits all records that have gathered, in one transaction with one fsync, and
only then completes the futures of the callers. `confirm` marks records as delivered; the next commit deletes their
rows. `release` returns records that could not be delivered to the backlog. `claim_backlog_nowait` reads records of
the backlog back and claims them.

Claims exist only in memory, so after a crash every record that is not confirmed is backlog. A record is delivered a
second time if it was in flight at the crash, or confirmed after the last commit (at most `commit_interval_ms` ago while
the disk keeps up). No record is lost.

If a commit fails, the futures of its appends fail. Its confirmations are kept and committed later.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final, NamedTuple, Self, TypeVar

from kpl_core.durability.spool.claims import Claimed, ClaimTable
from kpl_core.durability.spool.envelope import SpooledRecord, decode_record, encode
from kpl_core.durability.spool.group_commit import CommitRequest, SpoolWriter, new_future
from kpl_core.durability.spool.spool_error import SpoolClosed
from kpl_core.durability.spool.store import Changes, Removed, SpoolStore
from kpl_core.durability.spool.tables import LetterRow, RecordRow, records_after
from kpl_core.options.kinesis_limits import MIB
from kpl_core.options.reliability import SpoolOptions

_log: Final = logging.getLogger(__name__)
_KEYS_PAGE_RECORDS: Final = 500
_Answer = TypeVar("_Answer")


def _nothing(_: bool) -> None:  # noqa: FBT001 - a callback's only argument
    """Ignore the outcome."""


class SpoolStatistics(NamedTuple):
    """A snapshot. `records` = claimed + backlog + confirmed but not yet deleted. Byte counts include row overhead."""

    records: int
    record_bytes: int
    claimed_records: int
    backlog_records: int
    letters: int
    letter_bytes: int
    # Since this process opened the spool.
    appended_records: int
    confirmed_records: int
    damaged_records: int
    commits: int


class Spool:
    """An open spool. Thread-safe; `x_nowait` returns a `concurrent.futures.Future` that cannot be cancelled.

    `with Spool(options) as spool:` opens and closes it. Both access the disk and block.
    """

    def __init__(self, options: SpoolOptions) -> None:
        self._options = options
        self._store = SpoolStore(options)
        self._writer = SpoolWriter(self._store, options, on_commit=self._committed)
        self._lock = threading.Lock()
        self._claims: ClaimTable | None = None
        self._process = 0
        # Damaged rows could not be decoded.
        self._appended = self._confirmed = self._damaged = self._commits = 0
        self._listeners: list[Callable[[], None]] = []

    def open(self) -> Self:
        """Open or create the file and start the writer thread.

        Raises:
            SpoolLocked: another process owns the file.
            SpoolCorrupt: the file is damaged, or is not a spool.
            SpoolUnavailable: the disk is full, read-only or failing.
            SpoolClosed: this object was opened before.
        """
        options = self._options
        if self._claims is not None:
            message = f"spool {options.path} was opened before; create another Spool to open it again"
            raise SpoolClosed(message)
        self._claims = ClaimTable(
            self._store.open(), max_bytes=options.max_bytes, max_letter_bytes=options.max_dead_letter_bytes
        )
        self._process = os.getpid()
        self._writer.start()
        return self

    def close(self, timeout: float | None = None) -> bool:
        """Commit what was submitted and close; return False if the disk did not allow that within `timeout` seconds."""
        if self._claims is None or self._process != os.getpid():
            return True
        if not self._writer.close(timeout):
            return False
        self._store.close()
        return True

    def __enter__(self) -> Self:
        """Open the spool."""
        return self.open()

    def __exit__(self, *_: object) -> None:
        """Close the spool, however long that takes."""
        self.close()

    def append_nowait(self, records: Sequence[SpooledRecord], *, claim: bool) -> "Future[range]":
        """Store all of `records` or none; the future returns their ids once they are durable.

        With `claim` the caller keeps the records: it sends them, then calls `confirm` or `release`. Without `claim`
        they join the backlog. While a partition key has records in the backlog, further records of that key keep their
        order only if they join it too.

        Raises:
            SpoolFull: the spool has no room for them.
            SpoolError: the spool is closed or broken. The future raises `SpoolUnavailable` if the disk rejects the
                write. In each of these cases none of the records was stored.
        """
        sealed = [encode(record) for record in records]
        sizes = [len(envelope) for _, envelope in sealed]
        done: Future[range] = new_future()
        with self._lock:
            claims = self._require_open()
            ids = claims.reserve(sizes, claim=claim)
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
                claims.cancel_reservation(ids, sizes)
                raise
        return done

    def confirm(self, ids: Iterable[int]) -> "Future[None]":
        """Mark claimed records as delivered; the future completes when their rows are deleted.

        Ids that are not claimed are ignored, so confirming an id twice is harmless.
        """
        return self._remove(ids, (), _nothing)

    def add_letters_nowait(
        self,
        letters: Sequence[LetterRow],
        *,
        spooled_ids: Iterable[int] = (),
        settled: Callable[[bool], None] = _nothing,
    ) -> "Future[None]":
        """Store dead letters and delete the spooled records they come from, in one transaction.

        Each letter's `number` is replaced by the next free one. `settled` is called on the writer thread with True if
        the commit succeeded, else False, before the future completes.

        Raises:
            SpoolFull: there is no room for the letters.
            SpoolError: as for `append_nowait`.
        """
        return self._remove(spooled_ids, letters, settled)

    def release(self, ids: Iterable[int]) -> int:
        """Return claimed records to the backlog, where `claim_backlog_nowait` finds them; return how many."""
        with self._lock:
            released = self._require_open().release(ids)
        if released:
            self._notify_listeners()
        return released

    def claim_backlog_nowait(self, limit: int, *, max_bytes: int = MIB) -> "Future[list[Claimed]]":
        """Read back and claim up to `limit` records of the backlog, oldest first. The result is empty only if it is.

        It stops after the record with which the envelopes exceed `max_bytes`.

        A record whose bytes changed on the disk is not handed out. It is logged, counted in `damaged_records`, and
        stays in the file for manual recovery.
        """
        return self.ask(lambda store: self._claim(store, limit, max_bytes))

    def _claim(self, store: SpoolStore, limit: int, max_bytes: int) -> list[Claimed]:
        """Read rows without the lock, and claim them under it; on the writer's thread."""
        claimed: list[Claimed] = []
        # Repeats only if every row it read was already claimed.
        while not claimed:
            with self._lock:
                query = self._require_open().backlog_query(limit)
            try:
                rows, unread = store.records_by_id(query.released_ids, max_bytes)
                after = [] if rows else records_after(store.connection, query.after_id, limit, max_bytes)
            except BaseException:
                with self._lock:
                    self._require_open().unread(query.released_ids)
                raise
            with self._lock:
                claims = self._require_open()
                claims.unread(unread)
                if after:
                    claims.move_cursor(after[-1].id)
                claimed = self._decoded(claims, rows or after, store.path)
            if not rows and not after:
                break
        return claimed

    def _decoded(self, claims: ClaimTable, rows: Sequence[RecordRow], path: Path) -> list[Claimed]:
        claimed = []
        for row in rows:
            if not claims.claim(row.id, len(row.envelope)):
                continue
            record = decode_record(row.checksum, row.envelope)
            if record is None:
                self._damaged += 1
                _log.error("spool %s: record %d is damaged and stays in the file; recover it by hand", path, row.id)
                continue
            claimed.append(Claimed(row.id, record))
        return claimed

    @property
    def found_streams(self) -> frozenset[str]:
        """The streams of the records that were in the file when it was opened, a hundred at most."""
        return self._store.found_streams

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever the backlog grew, on the thread that made it grow. It must return quickly."""
        self._listeners.append(listener)

    def ask(self, question: Callable[[SpoolStore], _Answer]) -> "Future[_Answer]":
        """Run `question` on the writer thread, after all commits so far.

        Raises:
            SpoolError: the spool is closed or broken.
        """
        with self._lock:
            self._require_open()
        return self._writer.ask(question)

    def probe_nowait(self) -> "Future[None]":
        """Write a page, to learn whether the spool can store records.

        Raises:
            SpoolFull: it has used up `max_bytes`, almost.
            SpoolError: the spool is closed or broken. The future raises `SpoolUnavailable` if the disk rejects it.
        """
        with self._lock:
            self._require_open().require_room()
        return self.ask(SpoolStore.probe)

    def keys_after_nowait(self, last_id: int) -> "Future[tuple[set[tuple[str, str]], int]]":
        """Return streams and partition keys of the next records after `last_id`, and the last id that was read.

        Records that are delivered do not count. At the end of the file the last id is the given one.
        """

        def read(store: SpoolStore) -> tuple[set[tuple[str, str]], int]:
            rows = records_after(store.connection, last_id, _KEYS_PAGE_RECORDS, MIB)
            with self._lock:
                claims = self._require_open()
                stored = [row for row in rows if not claims.is_delivered(row.id)]
            records = [decode_record(row.checksum, row.envelope) for row in stored]
            found = {(record.stream, record.partition_key) for record in records if record is not None}
            return found, rows[-1].id if rows else last_id

        return self.ask(read)

    def change_letters(
        self,
        *,
        removed: Sequence[int] = (),
        rescheduled: Sequence[tuple[float | None, int, int]] = (),
        settled: Callable[[bool], None] = _nothing,
    ) -> "Future[None]":
        """Remove dead letters by number, or set `(due_at, redrives, number)` of others.

        The change is retried until the disk accepts it. `settled` is as for `add_letters_nowait`.
        """
        changes = Changes(removed_letters=list(removed), rescheduled=list(rescheduled))
        records = len(removed) + len(rescheduled)
        work = CommitRequest(changes, new_future(), settled, is_confirmation=True, records=records)
        with self._lock:
            self._require_open()
            self._writer.submit(work)
        return work.done

    def statistics(self) -> SpoolStatistics:
        """Return a snapshot; cheap."""
        with self._lock:
            claims = self._claims
            if claims is None:
                return SpoolStatistics(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
            return SpoolStatistics(
                claims.records,
                claims.record_bytes,
                claims.claimed,
                claims.backlog,
                claims.letters,
                claims.letter_bytes,
                self._appended,
                self._confirmed,
                self._damaged,
                self._commits,
            )

    def _require_open(self) -> ClaimTable:
        if self._claims is None:
            message = f"spool {self._options.path} is not open; enter it with `with spool:` first"
            raise SpoolClosed(message)
        if self._process != os.getpid():
            message = (
                f"spool {self._options.path} was opened by process {self._process}; "
                f"open one in each process, after the fork, with a path of its own"
            )
            raise SpoolClosed(message)
        return self._claims

    def _append_ended(self, ids: range, sizes: Sequence[int], *, stored: bool, claim: bool) -> None:
        with self._lock:
            if stored:
                self._appended += len(ids)
            else:
                self._require_open().cancel_reservation(ids, sizes)
        if stored and not claim:
            self._notify_listeners()

    def _notify_listeners(self) -> None:
        for listener in self._listeners:
            listener()

    def _remove(
        self, ids: Iterable[int], letters: Sequence[LetterRow], settled: Callable[[bool], None]
    ) -> "Future[None]":
        done: Future[None] = new_future()
        sizes = [len(letter.envelope) for letter in letters]
        with self._lock:
            claims = self._require_open()
            numbers = claims.reserve_letters(sizes)
            confirmed = claims.confirm(ids)
            rows = [letter._replace(number=number) for letter, number in zip(letters, numbers, strict=True)]
            work = CommitRequest(
                Changes(confirmed_ids=confirmed, letters=rows),
                done,
                lambda committed: self._removal_ended(confirmed, sizes, settled, committed=committed),
                is_confirmation=not letters,
                records=len(confirmed) + len(rows),
                size_bytes=sum(sizes),
            )
            try:
                self._writer.submit(work)
            except BaseException:
                claims.restore_claims(confirmed)
                claims.letters_removed(len(sizes), sum(sizes))
                raise
        return done

    def _removal_ended(
        self, confirmed: Sequence[int], sizes: Sequence[int], settled: Callable[[bool], None], *, committed: bool
    ) -> None:
        with self._lock:
            claims = self._require_open()
            if committed:
                claims.deleted(confirmed)
                self._confirmed += len(confirmed)
            else:
                claims.restore_claims(confirmed)
                claims.letters_removed(len(sizes), sum(sizes))
        settled(committed)

    def _committed(self, removed: Removed) -> None:
        with self._lock:
            self._commits += 1
            self._require_open().letters_removed(removed.letters, removed.envelope_bytes)

    def __repr__(self) -> str:
        """Show the path and the counts."""
        statistics = self.statistics()
        return f"Spool({str(self._options.path)!r}, records={statistics.records}, letters={statistics.letters})"
