"""Reads a spool file without its lock, so that it works beside a running producer and after one that was killed.

For `kpl spool` and `kpl dlq`. A producer reads its own records back with `Spool.claim_backlog_nowait`.
"""

import errno
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Concatenate, Final, NamedTuple, ParamSpec, Self, TypeVar
from urllib.parse import quote

from kpl_core.durability.spool.envelope import SpooledRecord, decode_record
from kpl_core.durability.spool.spool_error import SpoolUnavailable, as_spool_error
from kpl_core.durability.spool.store import require_main_file, sync_folder
from kpl_core.durability.spool.tables import records_after, require_readable, require_sqlite

_PAGE_RECORDS: Final = 500
_PAGE_BYTES: Final = 1 << 20
_Answer = TypeVar("_Answer")
_Arguments = ParamSpec("_Arguments")


class ExportReport(NamedTuple):
    """The outcome of an export. `damaged` rows changed on the disk and were left out."""

    written: int
    damaged: int


class NumberedRecord(NamedTuple):
    """A record of the spool and its number; `record` is None if its bytes changed on the disk."""

    number: int
    record: SpooledRecord | None


class ReadOnlySpool:
    """An open spool file, read only: `with ReadOnlySpool(path) as spool:`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection: sqlite3.Connection | None = None

    def __enter__(self) -> Self:
        """Open the file for reading.

        Raises:
            SpoolUnavailable: the file does not exist or cannot be read, or the SQLite library is too old.
            SpoolCorrupt: the file is not a spool, has a later version, or was emptied without its log.
        """
        require_sqlite(name=str(self.path))
        if not self.path.is_file():
            message = f"spool {self.path}: there is no such file; give the path of the producer's spool"
            raise SpoolUnavailable(message)
        require_main_file(self.path)
        try:
            self._connection = sqlite3.connect(f"file:{quote(str(self.path))}?mode=ro", uri=True, isolation_level=None)
            require_readable(self._connection, name=str(self.path))
        except sqlite3.Error as error:
            self._close()
            raise as_spool_error(error, self.path) from error
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self._close()

    def records(self) -> Iterator[list[NumberedRecord]]:
        """Yield the spooled records in the order in which they were stored, in pages."""
        after = 0
        while rows := self._ask(records_after, after, _PAGE_RECORDS, _PAGE_BYTES):
            yield [NumberedRecord(row.id, decode_record(row.checksum, row.envelope)) for row in rows]
            after = rows[-1].id

    def count_records(self) -> int:
        """Return the number of spooled records."""
        return self._ask(lambda connection: int(connection.execute("SELECT count(*) FROM spooled").fetchone()[0]))

    def write_lines(
        self,
        destination: Path,
        pages: Iterable[Sequence[bytes | None]],
        *,
        on_progress: Callable[[int], None] | None = None,
    ) -> ExportReport:
        """Write lines to a file; None is a damaged row. `on_progress` receives the number written so far.

        The destination appears complete or not at all: an interrupted export leaves the old file unchanged.

        Raises:
            OSError: the destination cannot be written, or must not be replaced (the spool itself, a folder, a pipe).
        """
        if destination.exists() and (not destination.is_file() or destination.samefile(self.path)):
            # Renaming onto it would delete the spool, or replace a device by a file.
            raise FileExistsError(errno.EEXIST, "only a regular file may be replaced", str(destination))
        partial = destination.with_name(f"{destination.name}.{os.getpid()}.partial")
        written = damaged = 0
        try:
            with open(partial, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                for page in pages:
                    lines = [line + b"\n" for line in page if line is not None]
                    file.writelines(lines)
                    written += len(lines)
                    damaged += len(page) - len(lines)
                    if on_progress is not None:
                        on_progress(written)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(destination)
            # After an export and a purge, a power failure must not lose the exported file.
            sync_folder(destination.parent)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        return ExportReport(written, damaged)

    def _ask(
        self,
        question: Callable[Concatenate[sqlite3.Connection, _Arguments], _Answer],
        *arguments: _Arguments.args,
        **options: _Arguments.kwargs,
    ) -> _Answer:
        if self._connection is None:
            message = f"spool {self.path} is not open; enter it with `with` first"
            raise SpoolUnavailable(message)
        try:
            return question(self._connection, *arguments, **options)
        except sqlite3.Error as error:
            raise as_spool_error(error, self.path) from error

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
