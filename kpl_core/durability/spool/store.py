"""The SQLite file: opened with care, changed in whole transactions, owned by one process. Has no thread and no clock.

One statement writes many rows. Python's sqlite3 releases the GIL around each step of a statement, and with a busy event
loop each step may wait 5 ms to get it back. One step for 512 rows instead of 512 steps made the slowest commit ten
times shorter (benchmarks/spool.py).
"""

import contextlib
import os
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import msgspec

from kpl_core.durability.spool.process_lock import ProcessLock
from kpl_core.durability.spool.spool_error import SpoolCorrupt, SpoolUnavailable, as_spool_error
from kpl_core.durability.spool.tables import (
    LetterRow,
    RecordRow,
    append_rows,
    highest_keys,
    migrate,
    read_owner,
    require_sqlite,
    stored_streams,
    transaction,
    write_owner,
)
from kpl_core.options.kinesis_limits import MIB
from kpl_core.options.reliability import SpoolOptions

# Rows of 1 KiB leave a quarter of a 4 KiB page empty; with 16 KiB pages writing took a third less time.
_PAGE_BYTES: Final = 16_384
_CHECKPOINT_PAGES: Final = 1_000
_WAL_LIMIT_BYTES: Final = 64 * 1024 * 1024
# Statements have a power of two of rows, up to this many, so that a few prepared statements serve all sizes. A library
# that allows fewer variables has fewer rows: SQLite before 3.32 allows 999, which three columns of 512 rows exceed.
_MAX_ROWS: Final = 512
# An almost empty file is shrunk if this many bytes are free in it.
_RECLAIM_BYTES: Final = 64 * MIB
# Each further one makes the pass over the file slower.
_MOST_FOUND_STREAMS: Final = 100


class Contents(NamedTuple):
    """How many rows the tables have, and the highest key of each (0 without rows)."""

    records: int
    last_id: int
    letters: int
    last_number: int


class SpoolTotals(NamedTuple):
    """The same, and the bytes of the envelopes."""

    records: int
    record_bytes: int
    last_id: int
    letters: int
    letter_bytes: int
    last_number: int

    @property
    def contents(self) -> Contents:
        """Return rows and keys."""
        return Contents(self.records, self.last_id, self.letters, self.last_number)


class Removed(NamedTuple):
    """How many dead letters a transaction removed, and the bytes of their envelopes."""

    letters: int
    envelope_bytes: int


class Changes(msgspec.Struct):
    """The changes of one transaction."""

    records: list[RecordRow] = []
    confirmed_ids: list[int] = []
    letters: list[LetterRow] = []
    removed_letters: list[int] = []
    # For each letter: when it is due again, how often it was redriven, its number.
    rescheduled: list[tuple[float | None, int, int]] = []


class SpoolStore:
    """Owns the file and its lock from `open` to `close`. One thread at a time may call it."""

    def __init__(self, options: SpoolOptions) -> None:
        self._options = options
        # Absolute, because the process may change its working directory later, as daemons do.
        self.path = options.file.absolute()
        # SQLite resolves symbolic links, so the lock must too: two names of one file are one spool.
        file = os.path.realpath(self.path)
        self._log = Path(f"{file}-wal")
        self._lock = ProcessLock(Path(f"{file}.lock"))
        self._connection: sqlite3.Connection | None = None
        # What the names of the file and of its log led to when they were opened.
        self._identity: tuple[int, int] | None = None
        self._log_identity: tuple[int, int] | None = None
        # SQLite's `data_version` at the last look, and what the tables held after the last commit.
        self._version = 0
        self._contents = Contents(0, 0, 0, 0)
        self._token = b""
        # The streams of the records that `open` found, a hundred at most.
        self.found_streams: frozenset[str] = frozenset()

    def open(self) -> SpoolTotals:
        """Take the lock, open or create the file, check it, migrate its tables, count their rows, find their streams.

        Reads the whole file: about 1.4 s per GiB of records of 1 KiB.

        Raises:
            SpoolLocked: another process owns the file.
            SpoolCorrupt: the file is damaged, or is not a spool.
            SpoolUnavailable: the file cannot be opened or written, or the SQLite library is too old.
        """
        require_sqlite(name=str(self.path))
        if _is_not_a_file(self.path):
            message = f"spool {self.path}: the path is a folder or a device; give the path of a regular file"
            raise SpoolUnavailable(message)
        self._lock.acquire()
        try:
            require_main_file(self.path)
            self._connect()
            self._check()
            migrate(self.connection, name=str(self.path))
            self.reclaim()
            self._token = os.urandom(16)
            with transaction(self.connection):
                write_owner(self.connection, self._token)
            totals = self.totals()
            self._contents = totals.contents
            self.found_streams = frozenset(stored_streams(self.connection, _MOST_FOUND_STREAMS))
            self._identity, self._log_identity = _identity(self.path), _identity(self._log)
            self._version = self._data_version()
            return totals
        except sqlite3.Error as error:
            self.close()
            raise as_spool_error(error, self.path) from error
        except OSError as error:
            self.close()
            message = f"spool {self.path}: {error.strerror}; make its folder writable for this process"
            raise SpoolUnavailable(message) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Checkpoint, close the file and release the lock. May be called more than once."""
        connection, self._connection = self._connection, None
        try:
            if connection is not None:
                connection.close()
        finally:
            self._lock.release()

    @property
    def connection(self) -> sqlite3.Connection:
        """The open connection, in autocommit mode."""
        if self._connection is None:
            message = f"spool {self.path} is not open"
            raise sqlite3.ProgrammingError(message)
        return self._connection

    def totals(self) -> SpoolTotals:
        """Count the rows and bytes of the tables."""
        row = self.connection.execute(
            """
            SELECT * FROM
                (SELECT count(*), coalesce(sum(length(envelope)), 0), coalesce(max(id), 0) FROM spooled),
                (SELECT count(*), coalesce(sum(length(envelope)), 0), coalesce(max(number), 0) FROM dead_letters)
            """
        ).fetchone()
        return SpoolTotals(*row)

    def commit(self, changes: Changes) -> Removed:
        """Make all changes durable, or none; return which dead letters were removed (a number given twice counts once).

        Raises:
            sqlite3.Error: nothing was changed.
            SpoolUnavailable: a file of the spool was removed or replaced while in use, or another process has written
                to it. What is in the spool stays there for the next process; with these changes it is undecided.
        """
        connection = self.connection
        self._require_own_files()
        removed_records = removed_letters = removed_bytes = 0
        with transaction(connection):
            self._require_own_contents()
            _insert(connection, "spooled", changes.records)
            for ids in _portions(connection, changes.confirmed_ids):
                removed_records += connection.execute(_delete_statement("spooled", "id", len(ids)), ids).rowcount
            _insert(connection, "dead_letters", changes.letters)
            for numbers in _portions(connection, changes.removed_letters):
                count, size = connection.execute(_size_statement(len(numbers)), numbers).fetchone()
                connection.execute(_delete_statement("dead_letters", "number", len(numbers)), numbers)
                removed_letters += count
                removed_bytes += size
            connection.executemany(
                "UPDATE dead_letters SET due_at = ?, redrives = ? WHERE number = ?", changes.rescheduled
            )
            last_id, last_number = highest_keys(connection)
        records = self._contents.records + len(changes.records) - removed_records
        letters = self._contents.letters + len(changes.letters) - removed_letters
        self._contents = Contents(records, last_id, letters, last_number)
        # Again, because what was written to a removed log is gone when this process ends.
        self._require_own_files()
        return Removed(removed_letters, removed_bytes)

    def probe(self) -> None:
        """Write a page, to learn whether the disk takes records; raises as `commit`."""
        self._require_own_files()
        with transaction(self.connection):
            self._require_own_contents()
            write_owner(self.connection, self._token)

    def _require_own_files(self) -> None:
        """Check that the names of the files still lead to what this process writes, and that it has the lock.

        A lock file that was only removed is made again. If the log was removed, its contents are saved in the file.
        """
        if not self._lock.is_held():
            self._refuse("the lock file was replaced while in use", "stop the other process and restart")
        if _identity(self.path) != self._identity:
            self._refuse("the file was removed or replaced while in use", "restart the process")
        log_identity = _identity(self._log)
        if self._log_identity is None:
            self._log_identity = log_identity
        if log_identity != self._log_identity:
            if log_identity is None:
                # SQLite still has the log open.
                self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._refuse(f"the log {self._log} was removed or replaced while in use", "restart the process")

    def _require_own_contents(self) -> None:
        """Check, within a transaction, that the file has what this process wrote last.

        A change of `data_version` is only the reason to look. It also changes when another program commits and changes
        no row, and when a commit of this connection fails on a full disk after it exceeded the page cache.
        """
        version = self._data_version()
        if version == self._version:
            return
        if read_owner(self.connection) != self._token or self.totals().contents != self._contents:
            self._refuse("another process has written to the file", "stop that process and restart")
        self._version = version

    def _refuse(self, what: str, action: str) -> NoReturn:
        message = f"spool {self.path}: {what}; {action}"
        raise SpoolUnavailable(message)

    def _data_version(self) -> int:
        """Return a number that always changes when another connection commits (SQLite, PRAGMA data_version)."""
        (version,) = self.connection.execute("PRAGMA data_version").fetchone()
        return int(version)

    def records_by_id(self, ids: Sequence[int], max_bytes: int) -> tuple[list[RecordRow], Sequence[int]]:
        """Return the records with these ids that still exist, in order, and the ids that were not read.

        It stops after the record with which the envelopes exceed `max_bytes`.
        """
        rows: list[RecordRow] = []
        for portion in _portions(self.connection, sorted(ids)):
            marks = ",".join("?" * len(portion))
            statement = f"SELECT id, checksum, envelope FROM spooled WHERE id IN ({marks}) ORDER BY id"  # noqa: S608 - question marks only
            max_bytes = append_rows(rows, self.connection.execute(statement, portion), max_bytes)
            if max_bytes <= 0:
                return rows, [record_id for record_id in ids if record_id > rows[-1].id]
        return rows, ()

    def reclaim(self) -> None:
        """Return disk space that an outage used, if the file is almost empty."""
        (free_pages,) = self.connection.execute("PRAGMA freelist_count").fetchone()
        (pages,) = self.connection.execute("PRAGMA page_count").fetchone()
        if free_pages * _PAGE_BYTES >= _RECLAIM_BYTES and free_pages >= pages * 0.9:
            # VACUUM writes the remaining rows twice. Without room for that, the free pages are reused instead.
            with contextlib.suppress(sqlite3.OperationalError):
                self.connection.execute("VACUUM")

    def _connect(self) -> None:
        # Mode 0600, because envelopes hold customer data. SQLite copies the mode of the file to a new -wal and -shm.
        if not self.path.exists():
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        for suffix in ("", "-wal", "-shm"):
            _make_private(Path(f"{os.path.realpath(self.path)}{suffix}"))
        connection = sqlite3.connect(
            self.path,
            timeout=self._options.busy_timeout_ms / 1000,
            isolation_level=None,
            check_same_thread=False,
        )
        # Assigned before the next statement can fail, so that `close` always closes it.
        self._connection = connection
        for pragma in (
            f"page_size = {_PAGE_BYTES}",
            "journal_mode = WAL",
            f"synchronous = {self._options.synchronous}",
            "fullfsync = ON",  # macOS: its fsync alone does not reach the disk
            "checkpoint_fullfsync = ON",
            f"wal_autocheckpoint = {_CHECKPOINT_PAGES}",
            f"journal_size_limit = {_WAL_LIMIT_BYTES}",
            "secure_delete = FAST",  # Debian's default overwrites every freed page, a second write per record
        ):
            connection.execute(f"PRAGMA {pragma}")

    def _check(self) -> None:
        (verdict,) = self.connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            found = " ".join(verdict.split())
            message = (
                f"spool {self.path}: the file is damaged ({found}); move it away with its -wal file, recover "
                f"its contents with `sqlite3 FILE .recover`, and start with a new file"
            )
            raise SpoolCorrupt(message)


def require_main_file(path: Path) -> None:
    """Reject a write-ahead log without its main file: SQLite would delete the log and the acknowledged records in it.

    Raises:
        SpoolCorrupt: the main file was moved or emptied without its log.
    """
    log = Path(f"{os.path.realpath(path)}-wal")
    if _size_bytes(log) and not _size_bytes(path):
        message = (
            f"spool {path}: the file is missing or empty and its log {log} has records; "
            f"put back the file that the log belongs to, or move the log to where the file was moved"
        )
        raise SpoolCorrupt(message)


def _make_private(path: Path) -> None:
    """Set mode 0600 for an existing file that its group or other users may read or write.

    Raises:
        SpoolUnavailable: the file belongs to another user.
    """
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            path.chmod(0o600)
    except FileNotFoundError:
        return
    except PermissionError as error:
        message = (
            f"spool {path}: other users may read it (mode {stat.S_IMODE(path.stat().st_mode):04o}) and this process "
            f"does not own it; run `chmod 600` as its owner, or give this process another path"
        )
        raise SpoolUnavailable(message) from error


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _insert(connection: sqlite3.Connection, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
    for portion in _portions(connection, rows, columns=len(rows[0]) if rows else 1):
        connection.execute(_insert_statement(table, len(portion[0]), len(portion)), list(chain.from_iterable(portion)))


def _portions(connection: sqlite3.Connection, rows: Sequence[Any], *, columns: int = 1) -> Iterator[Sequence[Any]]:
    """Cut `rows` into portions for one statement each, whose lengths are powers of two, largest first."""
    most = min(_MAX_ROWS, connection.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER) // columns)
    start, left = 0, len(rows)
    while left:
        length = 1 << (min(most, left).bit_length() - 1)
        yield rows[start : start + length]
        start += length
        left -= length


# The statements contain only our own names and question marks.
@cache
def _insert_statement(table: str, columns: int, rows: int) -> str:
    row = f"({','.join('?' * columns)})"
    return f"INSERT INTO {table} VALUES {','.join([row] * rows)}"  # noqa: S608


@cache
def _delete_statement(table: str, key: str, rows: int) -> str:
    return f"DELETE FROM {table} WHERE {key} IN ({','.join('?' * rows)})"  # noqa: S608


@cache
def _size_statement(rows: int) -> str:
    marks = ",".join("?" * rows)
    return f"SELECT count(*), coalesce(sum(length(envelope)), 0) FROM dead_letters WHERE number IN ({marks})"  # noqa: S608


def _is_not_a_file(path: Path) -> bool:
    """Return True if the path exists and is not a file. An unreadable path fails later, when it is locked."""
    with contextlib.suppress(OSError):
        return path.exists() and not path.is_file()
    return False


def sync_folder(folder: Path) -> None:
    """Make the file names in `folder` durable: `fsync` of a file saves its bytes, `fsync` of its folder saves its name.

    (POSIX, `fsync`; Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014.)

    Raises:
        OSError: the disk fails.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
