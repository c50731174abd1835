"""Where dead letters go besides the spool's own table: the protocol of a sink, and the sinks without dependencies.

A sink stores letters, or reports for each letter why it did not. It raises no exception because of one letter among
many, and drops no letter silently. The caller keeps the letters that were refused.

To add a sink: write one file with a class that has `send`, and export it in `__init__.py`.
"""

import errno
import fcntl
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import anyio
import anyio.to_thread

from kpl_core.durability.dead_letters.dead_letter_queue import DeadLetterQueue
from kpl_core.durability.spool.async_spool import LoopMailbox
from kpl_core.durability.spool.envelope import DeadLetter, letter_to_json
from kpl_core.durability.spool.spool_error import SpoolError
from kpl_core.durability.spool.store import sync_folder

_log: Final = logging.getLogger(__name__)


class RefusedLetter(NamedTuple):
    """A letter that was not stored, and one sentence that says why and what to do."""

    letter: DeadLetter
    why: str


class SinkReport(NamedTuple):
    """The outcome of one `send`: stored + refused = all letters."""

    stored: int
    refused: tuple[RefusedLetter, ...]

    @classmethod
    def of_all(cls, letters: Sequence[DeadLetter], why_not: str | None) -> "SinkReport":
        """Return the report of a `send` that stored all letters (`why_not` is None) or none of them."""
        if why_not is None:
            return cls(len(letters), ())
        return cls(0, tuple(RefusedLetter(letter, why_not) for letter in letters))


class DeadLetterSink(Protocol):
    """A destination for dead letters."""

    async def send(self, letters: Sequence[DeadLetter]) -> SinkReport:
        """Store `letters` as durably as this destination can, and report."""


class CallableSink:
    """Calls a function or coroutine function for each letter. A letter for which it raises is refused."""

    def __init__(self, take: Callable[[DeadLetter], Awaitable[object] | object]) -> None:
        self._take = take

    async def send(self, letters: Sequence[DeadLetter]) -> SinkReport:
        """Call the function for each letter in turn; exceptions are logged."""
        refused: list[RefusedLetter] = []
        for letter in letters:
            try:
                taken = self._take(letter)
                if isinstance(taken, Awaitable):
                    await taken
            except Exception as error:  # noqa: BLE001 - user code; the other letters must not be lost
                _log.exception("a function that takes dead letters failed for %s", letter.id)
                refused.append(
                    RefusedLetter(letter, f"the function that takes dead letters raised {type(error).__name__}")
                )
        return SinkReport(len(letters) - len(refused), tuple(refused))


class QueueSink:
    """The spool's own table as a sink: all letters of one `send` in one transaction."""

    def __init__(self, queue: DeadLetterQueue) -> None:
        self._queue = queue
        self._mailbox = LoopMailbox()

    async def send(self, letters: Sequence[DeadLetter]) -> SinkReport:
        """Store the letters; all are refused if the queue is full or the disk fails."""
        try:
            await self._mailbox.wait_for(self._queue.add_nowait(letters))
        except SpoolError as error:
            return SinkReport.of_all(letters, str(error))
        return SinkReport.of_all(letters, None)


class JsonLinesSink:
    """Appends one line of JSON per letter to the file `path` (mode 0600), and waits for `fsync` before it reports.

    Several processes may append to the same file.
    """

    def __init__(self, path: Path) -> None:
        # Absolute, because the process may change its working directory later.
        self._path = path.absolute()
        self._writing = anyio.Lock()

    async def send(self, letters: Sequence[DeadLetter]) -> SinkReport:
        """Append one line per letter; if the disk cannot take all, the file stays unchanged and all are refused."""
        lines = b"".join(letter_to_json(letter) + b"\n" for letter in letters)
        # Concurrent writes would interleave their lines.
        async with self._writing:
            return SinkReport.of_all(letters, await anyio.to_thread.run_sync(self._append, lines))

    def _append(self, lines: bytes) -> str | None:
        """Return why the lines were not appended, None if they were."""
        try:
            with open(
                self._path, "ab+", buffering=0, opener=lambda path, flags: os.open(path, flags | os.O_CLOEXEC, 0o600)
            ) as file:
                # Other processes may append too, and `truncate` below must only remove our own lines.
                fcntl.flock(file, fcntl.LOCK_EX)
                self._write(file, lines)
        except OSError as error:
            return f"dead-letter file {self._path}: {error.strerror}; free space or make it writable for this process"
        return None

    def _write(self, file: FileIO, lines: bytes) -> None:
        before = file.seek(0, os.SEEK_END)
        if before:
            file.seek(before - 1)
            # Otherwise our first line would be lost behind half a line that a power failure left.
            lines = lines if file.read(1) == b"\n" else b"\n" + lines
        try:
            _write_whole(file, lines)
            os.fsync(file)
            if not before:
                sync_folder(self._path.parent)
        except OSError:
            # Half a line would corrupt the next one.
            file.truncate(before)
            raise


def _write_whole(file: FileIO, lines: bytes) -> None:
    if os.write(file.fileno(), lines) != len(lines):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
