"""What an operator does with dead letters: list, show, count, export, purge (redrive: see `Redriver`).

Reading takes no lock, so it works beside the process that owns the spool. Purging changes the
file, so it needs the spool itself.
"""

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Concatenate, Final, NamedTuple, ParamSpec, Self, TypeVar
from urllib.parse import quote

from kpl_core.durability.dead_letters.dead_letter_queue import DeadLetterQueue
from kpl_core.durability.spool.dead_letter_table import (
    LetterFilter,
    StoredLetter,
    count_letters,
    find_letter,
    letters_matching,
)
from kpl_core.durability.spool.envelope import Reason, letter_to_json
from kpl_core.durability.spool.folder import sync_folder
from kpl_core.durability.spool.schema import require_readable
from kpl_core.durability.spool.spool_error import SpoolUnavailable, as_spool_error
from kpl_core.durability.spool.store import require_its_file

__all__ = ["Exported", "LetterReader", "purge"]

_PAGE: Final = 500
_FIRST: Final = (-1, 0)
_Answer = TypeVar("_Answer")
_Arguments = ParamSpec("_Arguments")


class Exported(NamedTuple):
    """What became of the letters of an export; those `damaged` changed on the disk, and were left out."""

    written: int
    damaged: int


class LetterReader:
    """Reads the dead letters of a spool file, whoever owns it: `with LetterReader(path) as letters:`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None

    def __enter__(self) -> Self:
        """Open the file for reading.

        Raises:
            SpoolUnavailable: there is no such file, or it cannot be read.
            SpoolCorrupt: it is no spool, of a later version, or was emptied beside its log.
        """
        if not self._path.is_file():
            message = f"spool {self._path}: there is no such file; give the path that the producer's spool has"
            raise SpoolUnavailable(message)
        require_its_file(self._path)
        try:
            self._connection = sqlite3.connect(f"file:{quote(str(self._path))}?mode=ro", uri=True, isolation_level=None)
            require_readable(self._connection, name=str(self._path))
        except sqlite3.Error as error:
            self._close()
            raise as_spool_error(error, self._path) from error
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the file."""
        self._close()

    def pages(self, wanted: LetterFilter, *, limit: int | None = None) -> Iterator[list[StoredLetter]]:
        """Yield the letters that match, at most `limit`, in pages: critical first, then in the order of arrival."""
        after, left = _FIRST, limit
        while left is None or left > 0:
            page = self._ask(letters_matching, wanted, _PAGE if left is None else min(left, _PAGE), after=after)
            if not page:
                return
            yield page
            after = page[-1].tier_rank, page[-1].number
            left = None if left is None else left - len(page)

    def find(self, letter_id: str) -> StoredLetter | None:
        """Return the letter with this id, None if there is none."""
        return self._ask(find_letter, letter_id)

    def count(self, wanted: LetterFilter) -> dict[Reason, int]:
        """Return how many letters match, by reason."""
        return self._ask(count_letters, wanted)

    def export(
        self, wanted: LetterFilter, destination: Path, *, on_progress: Callable[[int], None] | None = None
    ) -> Exported:
        """Write the letters that match as JSON lines. `on_progress` is told how many are written so far.

        The destination appears complete or not at all: an interrupted export leaves what was there.

        Raises:
            OSError: the destination cannot be written, or must not be replaced: the spool, a folder, a pipe.
        """
        if destination.exists() and (not destination.is_file() or destination.samefile(self._path)):
            # Renaming onto them would delete the spool, or put a file where others expect the device.
            raise FileExistsError(errno.EEXIST, "only a file of its own may be replaced", str(destination))
        partial = destination.with_name(f"{destination.name}.{os.getpid()}.partial")
        written = damaged = 0
        try:
            with open(partial, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                for page in self.pages(wanted):
                    for stored in page:
                        if stored.letter is None:
                            damaged += 1
                            continue
                        file.write(letter_to_json(stored.letter) + b"\n")
                        written += 1
                    if on_progress is not None:
                        on_progress(written)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(destination)
            # Whoever purges what was exported must find it here after a power cut.
            sync_folder(destination.parent)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        return Exported(written, damaged)

    def _ask(
        self,
        question: Callable[Concatenate[sqlite3.Connection, _Arguments], _Answer],
        *arguments: _Arguments.args,
        **options: _Arguments.kwargs,
    ) -> _Answer:
        if self._connection is None:
            message = f"spool {self._path} is not open; use `with LetterReader(path) as letters:`"
            raise SpoolUnavailable(message)
        try:
            return question(self._connection, *arguments, **options)
        except sqlite3.Error as error:
            raise as_spool_error(error, self._path) from error

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def purge(queue: DeadLetterQueue, wanted: LetterFilter, *, on_progress: Callable[[int], None] | None = None) -> int:
    """Delete the letters that match, for good; return how many. Blocks. Safe to interrupt and run again.

    Raises:
        SpoolError: the spool is closed or broken.
    """
    purged = 0
    while page := queue.select_nowait(wanted, _PAGE).result():
        queue.remove(page).result()
        purged += len(page)
        if on_progress is not None:
            on_progress(purged)
    return purged
