"""Dead letters as lines of JSON appended to a file: readable with any tool, importable anywhere."""

import errno
import fcntl
import os
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

import anyio
import anyio.to_thread

from kpl_core.durability.dead_letters.dead_letter_sink import Refusal, SinkReport
from kpl_core.durability.spool.envelope import DeadLetter, letter_to_json
from kpl_core.durability.spool.folder import sync_folder

__all__ = ["JsonLinesSink"]


class JsonLinesSink:
    """Appends to `path` (mode 0600), and waits for the disk (`fsync`) before it reports. Processes may share a file."""

    def __init__(self, path: Path) -> None:
        # Where it is now, whatever folder the process goes to later.
        self._path = path.absolute()
        self._writing = anyio.Lock()

    async def send(self, letters: Sequence[DeadLetter]) -> SinkReport:
        """Append one line per letter; a disk that takes not all of them is left as it was, all are refused."""
        lines = b"".join(letter_to_json(letter) + b"\n" for letter in letters)
        # Two at a time would cut each other's lines.
        async with self._writing:
            why = await anyio.to_thread.run_sync(self._append, lines)
        if why is None:
            return SinkReport(len(letters), ())
        return SinkReport(0, tuple(Refusal(letter, why) for letter in letters))

    def _append(self, lines: bytes) -> str | None:
        """Return why the lines were not appended, None if they were."""
        try:
            with open(self._path, "ab+", buffering=0, opener=_opened_for_its_owner) as file:
                # Other processes may append to the file as well, and what is taken back must be ours.
                fcntl.flock(file, fcntl.LOCK_EX)
                self._write(file, lines)
        except OSError as error:
            return f"dead-letter file {self._path}: {error.strerror}; free space or make it writable for this process"
        return None

    def _write(self, file: FileIO, lines: bytes) -> None:
        before = file.seek(0, os.SEEK_END)
        if before:
            file.seek(before - 1)
            # Else the first of ours would be lost with the half line that a power cut left behind.
            lines = lines if file.read(1) == b"\n" else b"\n" + lines
        try:
            _write_whole(file, lines)
            os.fsync(file)
            if not before:
                sync_folder(self._path.parent)
        except OSError:
            # Half a line would spoil the next one.
            file.truncate(before)
            raise


def _write_whole(file: FileIO, lines: bytes) -> None:
    if os.write(file.fileno(), lines) != len(lines):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _opened_for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
