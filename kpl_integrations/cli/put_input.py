"""The input of `kpl put`: reads lines, decodes each into a user record, and follows which lines are delivered."""

import asyncio
import os
import stat
import sys
import threading
from base64 import b64decode
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import msgspec

from kpl_core import Delivery, InvalidUserRecord, RecordResult, UserRecord
from kpl_core.options.kinesis_limits import KIB, MIB
from kpl_integrations.cli.exit_code import CommandFailure, ExitCode
from kpl_integrations.cli.options import InputFormat

_CHUNK_BYTES: Final = 256 * KIB
_CHUNKS_AHEAD: Final = 4
# Three times the largest record, because a line may contain it in base64.
_MAX_LINE_BYTES: Final = 30 * MIB

# (line without its end, line number from 1) -> the user record of that line.
# Raises InvalidUserRecord; the message has no line number.
ReadLine = Callable[[bytes, int], UserRecord]


class InputLines:
    """An open input; `size_bytes` is None if it is not a regular file.

    It reads without blocking the event loop and at most 1 MiB ahead. A daemon thread reads with `os.read`: a terminal
    or a pipe may never send more, and the process must still be able to end.
    """

    def __init__(self, name: str, descriptor: int) -> None:
        self.name = name
        self._descriptor = descriptor
        status = os.fstat(descriptor)
        self.size_bytes = status.st_size if stat.S_ISREG(status.st_mode) else None
        self.is_terminal = os.isatty(descriptor)

    @classmethod
    @contextmanager
    def opened(cls, path: Path) -> Iterator[Self]:
        """Open a file, or standard input for `-`.

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
            file = path.open("rb", buffering=0)  # raises for a folder
        except OSError as error:
            raise _unreadable(str(path), error) from error
        with file:
            yield cls(str(path), file.fileno())

    async def blocks(self) -> AsyncGenerator[list[bytes]]:
        """Yield lines in blocks, each line with its end.

        Raises:
            CommandFailure: the input cannot be read, or a line is longer than any record.
        """
        # The pieces of an incomplete line, joined once: a long line arrives from a pipe in hundreds of pieces.
        pieces: list[bytes] = []
        size = 0
        async for chunk in self._chunks():
            *lines, rest = chunk.split(b"\n")  # not splitlines: a single \r does not end a line
            if lines:
                lines[0] = b"".join([*pieces, lines[0]])
                pieces, size = [], 0
            pieces.append(rest)
            size += len(rest)
            if size > _MAX_LINE_BYTES:
                message = f"a line of {self.name} is longer than {_MAX_LINE_BYTES:,} bytes; no record can hold it"
                raise CommandFailure(message, exit_code=ExitCode.BAD_INPUT)
            if lines:
                yield [line + b"\n" for line in lines]
        if size:
            yield [b"".join(pieces)]

    async def _chunks(self) -> AsyncGenerator[bytes]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[bytes | OSError] = asyncio.Queue()
        free_slots = threading.Semaphore(_CHUNKS_AHEAD)
        stopped = threading.Event()

        def read() -> None:
            chunk: bytes | OSError = b" "
            while chunk and not isinstance(chunk, OSError):
                free_slots.acquire()
                if stopped.is_set():
                    return
                try:
                    chunk = os.read(self._descriptor, _CHUNK_BYTES)
                except OSError as error:
                    chunk = error
                try:
                    loop.call_soon_threadsafe(arrived.put_nowait, chunk)
                except RuntimeError:  # the loop ended while this thread was blocked in the read
                    return

        threading.Thread(target=read, name="kpl-input", daemon=True).start()
        try:
            while chunk := await arrived.get():
                if isinstance(chunk, OSError):
                    raise _unreadable(self.name, chunk)
                free_slots.release()
                yield chunk
        finally:
            stopped.set()
            free_slots.release()


def _unreadable(name: str, error: OSError) -> CommandFailure:
    message = f"{name} cannot be read ({error.strerror}); check its path and permissions"
    return CommandFailure(message, exit_code=ExitCode.BAD_INPUT)


class _Envelope(msgspec.Struct):
    """A line with partition key and data; other fields, such as those of `kpl tail --json`, are ignored."""

    partition_key: str
    data: str | None = None
    data_base64: str | None = None
    explicit_hash_key: str | None = None
    # Only dead letters written by `kpl dlq export` have these; their `data` is base64.
    reason: Any = None
    first_seen: Any = None
    producer_version: Any = None


_envelope = msgspec.json.Decoder(_Envelope)
_object = msgspec.json.Decoder(dict[str, Any])


def reader_of(input_format: InputFormat, *, key: str | None, key_field: str | None) -> ReadLine:
    """Return the function that decodes a line. `key` is the partition key of all lines, `key_field` its field."""
    if key_field is not None:
        return lambda line, _: UserRecord(_key_in(line, key_field), line)
    if input_format is InputFormat.NDJSON:
        return _from_envelope if key is None else lambda line, _: _valid_object(line, key)
    if key is not None:
        return lambda line, _: UserRecord(key, line)
    return lambda line, number: UserRecord(str(number), line)


def _key_in(line: bytes, key_field: str) -> str:
    fields = _decoded(_object, line)
    key = fields.get(key_field)
    if isinstance(key, bool) or not isinstance(key, str | int):
        found = "is missing" if key_field not in fields else f"is {str(key)[:40]!r}"
        message = f"field {key_field!r} {found}; the partition key must be a string or a whole number"
        raise InvalidUserRecord(message)
    return str(key)


def _valid_object(line: bytes, key: str) -> UserRecord:
    _decoded(_object, line)
    return UserRecord(key, line)


def _from_envelope(line: bytes, _: int) -> UserRecord:
    envelope: _Envelope = _decoded(_envelope, line)
    if None not in (envelope.reason, envelope.first_seen, envelope.producer_version):
        envelope.data, envelope.data_base64 = envelope.data_base64, envelope.data
    if (envelope.data is None) == (envelope.data_base64 is None):
        message = "it must have either data (text) or data_base64; --key-field NAME sends the line as it is"
        raise InvalidUserRecord(message)
    if envelope.data is not None:
        data = envelope.data.encode()
    else:
        try:
            data = b64decode(envelope.data_base64 or "", validate=True)
        except ValueError as error:
            message = f"data_base64 is not base64: {error}"
            raise InvalidUserRecord(message) from error
    return UserRecord(envelope.partition_key, data, envelope.explicit_hash_key)


def _decoded(decoder: msgspec.json.Decoder[Any], line: bytes) -> Any:  # noqa: ANN401 - of the decoder's type
    try:
        return decoder.decode(line)
    except msgspec.ValidationError as error:
        message = (
            f'{error}; a line is an object like {{"partition_key": "42", "data": "text"}}, or use --key-field NAME'
        )
        raise InvalidUserRecord(message) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"it is not JSON ({error}); correct it, or send text with --format lines"
        raise InvalidUserRecord(message) from error


class _Line(NamedTuple):
    """A line that was put; `begins_at` is its offset in bytes."""

    number: int
    begins_at: int
    delivery: Delivery


class ConfirmedLines:
    """Counts the delivered lines from the beginning of the input without a gap.

    Results arrive in any order; a later run may skip only lines before the first one that is not delivered. Line
    numbers begin with 1; `begins_at` is an offset in bytes.
    """

    def __init__(self) -> None:
        self._last_number = 0
        self._last_end = 0
        self._unconfirmed: deque[_Line] = deque()
        self.first_failure: tuple[int, RecordResult] | None = None

    def put(self, number: int, begins_at: int, size_bytes: int, delivery: Delivery) -> None:
        """Add a line and its delivery."""
        self._unconfirmed.append(_Line(number, begins_at, delivery))
        self.skip(number, begins_at, size_bytes)

    def skip(self, number: int, begins_at: int, size_bytes: int) -> None:
        """Add a line without a record: it is blank, or an earlier run confirmed it."""
        self._last_number = number
        self._last_end = begins_at + size_bytes

    @property
    def line_count(self) -> int:
        """Return how many lines a later run may skip."""
        return self._unconfirmed[0].number - 1 if self._unconfirmed else self._last_number

    @property
    def byte_count(self) -> int:
        """Return the size of those lines in bytes, with their line ends."""
        return self._unconfirmed[0].begins_at if self._unconfirmed else self._last_end

    def advance(self) -> None:
        """Process new results up to the first line without a result or with a failure."""
        while self._unconfirmed and self.first_failure is None:
            line = self._unconfirmed[0]
            if not line.delivery.done:
                return
            result = line.delivery.result()
            if result.successful:
                self._unconfirmed.popleft()
            else:
                self.first_failure = line.number, result
