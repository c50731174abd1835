"""What a spool refuses, and what the disk under it can do to us.

`SpoolFull` is backpressure, like `BufferFull`. The others say that the store itself is in
trouble. Whichever is raised: what it concerns was not acknowledged.
"""

import sqlite3
from pathlib import Path
from types import MappingProxyType
from typing import Final

from kpl_core.errors import KplError

__all__ = [
    "SpoolClosed",
    "SpoolCorrupt",
    "SpoolError",
    "SpoolFull",
    "SpoolLocked",
    "SpoolUnavailable",
    "as_spool_error",
]


class SpoolError(KplError):
    """Root of what a spool raises."""


class SpoolFull(SpoolError):  # noqa: N818 - reads as a sentence where it is raised
    """The spool (or its dead-letter table) holds as many bytes as it is allowed to; nothing was stored."""

    def __init__(self, message: str, *, stored_bytes: int, max_bytes: int) -> None:
        super().__init__(message)
        self.stored_bytes = stored_bytes
        self.max_bytes = max_bytes


class SpoolLocked(SpoolError):  # noqa: N818
    """Another process, or another spool of this one, owns the file."""


class SpoolUnavailable(SpoolError):  # noqa: N818
    """The disk does not take it (full, read-only, failing); nothing was stored."""


class SpoolCorrupt(SpoolError):  # noqa: N818
    """The file is no spool, or is damaged; nothing is read from it or written to it any more."""


class SpoolClosed(SpoolError):  # noqa: N818
    """The spool is closed, was never opened, or belongs to the process this one was forked from."""


# SQLite's primary result code: class, what happened, what to do.
_TROUBLES: Final = MappingProxyType(
    {
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
            "end the program that has it open (a sqlite3 shell?)",
        ),
        sqlite3.SQLITE_CORRUPT: (
            SpoolCorrupt,
            "the file is damaged",
            "move it away with its -wal file, recover what is in it with `sqlite3 FILE .recover`, and start afresh",
        ),
        sqlite3.SQLITE_NOTADB: (
            SpoolCorrupt,
            "the file is no SQLite database",
            "move it away, or give the spool another path",
        ),
    }
)
# After these the same file may be written again once somebody made room or put right its rights.
_PASSING: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY})


def as_spool_error(error: sqlite3.Error, path: Path) -> SpoolError:
    """Translate an error of SQLite into one sentence with the file, the cause and what to do."""
    code = getattr(error, "sqlite_errorcode", None)
    trouble = None if code is None else _TROUBLES.get(code & 0xFF)
    if trouble is None:
        return SpoolUnavailable(f"spool {path}: SQLite says {error}; nothing was stored, restart the process")
    kind, what, remedy = trouble
    return kind(f"spool {path}: {what} (SQLite: {error}); nothing was stored, {remedy}")


def passes(error: sqlite3.Error) -> bool:
    """Say whether the next transaction may succeed after this error.

    A failed write or fsync (`SQLITE_IOERR`) does not pass: the kernel may have dropped what it
    could not write and report success the next time.
    """
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in _PASSING
