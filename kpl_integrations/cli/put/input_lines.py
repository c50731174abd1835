"""Lines from a file or from standard input, without blocking the loop and without reading ahead far.

A daemon thread reads with `os.read`: a terminal or a pipe may stay silent for ever, and then the
process must still be able to end.
"""

import asyncio
import os
import stat
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

from kpl_core.options.kinesis_limits import KIB, MIB
from kpl_integrations.cli.exit_code import ExitCode
from kpl_integrations.cli.failure import CommandFailure

__all__ = ["InputLines"]

_CHUNK_BYTES: Final = 256 * KIB
_CHUNKS_AHEAD: Final = 4
# Three times the largest record: a line may be its base64.
_LONGEST_LINE_BYTES: Final = 30 * MIB


class InputLines:
    """An open input. `size_bytes` is None where nobody knows it."""

    def __init__(self, name: str, descriptor: int) -> None:
        self.name = name
        self._descriptor = descriptor
        status = os.fstat(descriptor)
        self.size_bytes = status.st_size if stat.S_ISREG(status.st_mode) else None
        self.is_terminal = os.isatty(descriptor)

    @classmethod
    @contextmanager
    def opened(cls, path: Path) -> Iterator[Self]:
        """Open a file, or take standard input for `-`.

        Raises:
            CommandFailure: the file cannot be read.
        """
        if str(path) == "-":
            if sys.stdin is None:
                message = "standard input is closed; name a file, or pipe lines in"
                raise CommandFailure(message, exit_code=ExitCode.BAD_INPUT)
            yield cls("standard input", sys.stdin.fileno())
            return
        try:
            file = path.open("rb", buffering=0)  # which refuses a folder
        except OSError as error:
            raise _unreadable(str(path), error) from error
        with file:
            yield cls(str(path), file.fileno())

    async def blocks(self) -> AsyncGenerator[list[bytes]]:
        """Yield lines in blocks, each line with its end.

        Raises:
            CommandFailure: the input cannot be read, or has a line longer than any record.
        """
        # The pieces of a line without its end yet, joined once: a pipe gives a long line in hundreds of them.
        pieces: list[bytes] = []
        size = 0
        async for chunk in self._chunks():
            *lines, rest = chunk.split(b"\n")  # not splitlines: a lone \r ends no line
            if lines:
                lines[0] = b"".join([*pieces, lines[0]])
                pieces, size = [], 0
            pieces.append(rest)
            size += len(rest)
            if size > _LONGEST_LINE_BYTES:
                message = f"a line of {self.name} is longer than {_LONGEST_LINE_BYTES:,} bytes; no record holds it"
                raise CommandFailure(message, exit_code=ExitCode.BAD_INPUT)
            if lines:
                yield [line + b"\n" for line in lines]
        if size:
            yield [b"".join(pieces)]

    async def _chunks(self) -> AsyncGenerator[bytes]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[bytes | OSError] = asyncio.Queue()
        room = threading.Semaphore(_CHUNKS_AHEAD)
        stopped = threading.Event()

        def read() -> None:
            chunk: bytes | OSError = b" "
            while chunk and not isinstance(chunk, OSError):
                room.acquire()
                if stopped.is_set():
                    return
                try:
                    chunk = os.read(self._descriptor, _CHUNK_BYTES)
                except OSError as error:
                    chunk = error
                try:
                    loop.call_soon_threadsafe(arrived.put_nowait, chunk)
                except RuntimeError:  # the loop ended while this thread was asleep in the read
                    return

        threading.Thread(target=read, name="kpl-input", daemon=True).start()
        try:
            while chunk := await arrived.get():
                if isinstance(chunk, OSError):
                    raise _unreadable(self.name, chunk)
                room.release()
                yield chunk
        finally:
            stopped.set()
            room.release()


def _unreadable(name: str, error: OSError) -> CommandFailure:
    message = f"{name} cannot be read ({error.strerror}); check its path and permissions"
    return CommandFailure(message, exit_code=ExitCode.BAD_INPUT)
