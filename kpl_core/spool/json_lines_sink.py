"""Dead letters as lines of JSON appended to a file: readable with any tool, importable anywhere."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.to_thread

from kpl_core.spool.dead_letter_sink import Refusal, SinkReport
from kpl_core.spool.envelope import DeadLetter, letter_to_json

__all__ = ["JsonLinesSink"]


class JsonLinesSink:
    """Appends to `path` (mode 0600), and waits for the disk (`fsync`) before it reports."""

    def __init__(self, path: Path) -> None:
        self._path = path
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
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            return self._refusal(error)
        try:
            before = os.fstat(descriptor).st_size
            trouble = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            try:
                if os.write(descriptor, lines) == len(lines):
                    os.fsync(descriptor)
                    return None
            except OSError as error:
                trouble = error
            # Half a line would spoil the next one.
            os.ftruncate(descriptor, before)
            return self._refusal(trouble)
        finally:
            os.close(descriptor)

    def _refusal(self, error: OSError) -> str:
        return f"dead-letter file {self._path}: {error.strerror}; free space or make it writable for this process"
