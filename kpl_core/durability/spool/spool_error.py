"""The errors of a spool, and how SQLite's errors become them.

`SpoolFull` is backpressure, like `BufferFull`. All others mean that the file or its disk has a problem. Whichever is
raised, the records concerned were not acknowledged.
"""

import sqlite3
from pathlib import Path
from typing import Final

from kpl_core.errors import KplError


class SpoolError(KplError):
    """Base class of the errors that a spool raises."""


class SpoolFull(SpoolError):  # noqa: N818 - the name says what happened
    """The spool, or its dead-letter table, has reached its limit in bytes; nothing was stored."""


class SpoolLocked(SpoolError):  # noqa: N818
    """Another process, or another `Spool` of this process, owns the file."""


class SpoolUnavailable(SpoolError):  # noqa: N818
    """The disk rejected the write (full, read-only, failing); nothing was stored."""


class SpoolCorrupt(SpoolError):  # noqa: N818
    """The file is not a spool, or is damaged; it is neither read nor written any more."""


class SpoolClosed(SpoolError):  # noqa: N818
    """The spool is closed, was never opened, or was opened by another process before a fork."""


# SQLite's primary result code -> class, what happened, what to do.
_TROUBLES: Final = {
    sqlite3.SQLITE_FULL: (
        SpoolUnavailable,
        "the disk that holds it is full",
        "free space, or move the spool to a larger disk",
    ),
    sqlite3.SQLITE_READONLY: (
        SpoolUnavailable,
        "the file, its folder or its file system is read-only",
        "make all three writable for this process",
    ),
    sqlite3.SQLITE_PERM: (SpoolUnavailable, "access is denied", "make it writable for this process"),
    sqlite3.SQLITE_CANTOPEN: (
        SpoolUnavailable,
        "the file cannot be opened",
        "check that its folder exists and is writable for this process",
    ),
    sqlite3.SQLITE_IOERR: (
        SpoolUnavailable,
        "the disk reports an input/output error",
        "check the disk, then restart the process",
    ),
    sqlite3.SQLITE_BUSY: (
        SpoolLocked,
        "another program keeps the file locked",
        "end the program that has the file open (a sqlite3 shell?)",
    ),
    sqlite3.SQLITE_CORRUPT: (
        SpoolCorrupt,
        "the file is damaged",
        "move it away with its -wal file, recover its contents with `sqlite3 FILE .recover`, start with a new file",
    ),
    sqlite3.SQLITE_NOTADB: (
        SpoolCorrupt,
        "the file is not an SQLite database",
        "move it away, or give the spool another path",
    ),
}
# After these errors the same file may be writable again, once space is freed or its permissions are fixed.
_TEMPORARY: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY})


def as_spool_error(error: sqlite3.Error, path: Path) -> SpoolError:
    """Translate an SQLite error into a `SpoolError` that names the file, the cause and what to do."""
    trouble = _TROUBLES.get(_code_of(error))
    if trouble is None:
        return SpoolUnavailable(f"spool {path}: SQLite reports {error}; nothing was stored, restart the process")
    kind, what, remedy = trouble
    return kind(f"spool {path}: {what} (SQLite: {error}); nothing was stored, {remedy}")


def is_temporary(error: sqlite3.Error) -> bool:
    """Return True if a later transaction may succeed after this error.

    A failed write or fsync (`SQLITE_IOERR`) is final: the kernel may have dropped the unwritten pages and report
    success the next time.
    """
    return _code_of(error) in _TEMPORARY


def _code_of(error: sqlite3.Error) -> int:
    """Return SQLite's primary result code, `SQLITE_ERROR` if Python raised the error itself."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
