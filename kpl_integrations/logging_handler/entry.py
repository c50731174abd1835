"""From a log record to what is queued for it: the formatted bytes, its partition key, and what is too large.

A record that no Kinesis record can hold is truncated, split into pieces, or kept whole as a dead letter.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import cycle
from typing import Final, Literal, NamedTuple

import msgspec

from kpl_core import ConfigError, Producer, RecordResult
from kpl_core.options.kinesis_limits import PARTITION_KEY_CHARACTERS
from kpl_core.records.user_record import Tier
from kpl_integrations.logging_handler.formatter import LargeLine, current_trace

# What CPython keeps beside the bytes of an entry: two object headers and a slot in the deque.
ENTRY_BYTES: Final = 96

KeyOf = Callable[[logging.LogRecord], str | None]
KeyChoice = str | KeyOf
Oversize = Literal["truncate", "split", "dlq"]

# Enough to reach some hundred shards evenly, and few enough that each is hashed once.
_RANDOM_KEYS: Final = 1_024
# Why a record that is too large did not arrive: the dead letters did not take it.
NOT_KEPT: Final = "NotKept"
_EXTRA: Final = "extra:"
# The longest JSON escape of one character: \u0000.
_LONGEST_ESCAPE: Final = 6


class LetterAndStub(msgspec.Struct, frozen=True, gc=False):
    """A record that is too large: the whole for the dead letters, its beginning for the stream.

    Both carry `mark`: the letter in its metadata, the stub in its field `dead_letter`.
    """

    mark: str
    whole: bytes
    stub: bytes


# The data of one log record, encoded. One that is too large becomes its pieces, or a letter and a stub.
Encoded = bytes | tuple[bytes, ...] | LetterAndStub
# The formatted record, with its partition key if one was chosen.
Entry = bytes | LargeLine | tuple[str | None, Encoded | LargeLine]


class LogPiece(NamedTuple):
    """One user record to put, and the functions that take its result, or the error code of a record never put."""

    key: str
    data: bytes
    tier: Tier
    finished: Callable[[RecordResult], object]
    failed: Callable[[str], object]


class SplitRecord:
    """A log record in several user records: it counts once, by the worst result of its pieces."""

    def __init__(self, count: Callable[..., None], pieces: int) -> None:
        self._count = count
        self._left = pieces
        self._error_code: str | None = None
        self._is_kept = False

    def finished(self, result: RecordResult) -> None:
        """Take the result of one piece."""
        self._is_kept = self._is_kept or result.kept is not None
        self._finish(None if result.successful or result.kept is not None else result.error_code or "")

    def failed(self, error_code: str) -> None:
        """Take the failure of a piece that was never put."""
        self._finish(error_code)

    def _finish(self, error_code: str | None) -> None:
        self._error_code = error_code if self._error_code is None else self._error_code
        self._left -= 1
        if not self._left:
            self._count(self._error_code, is_kept=self._is_kept)


class OversizeLetters:
    """The letters of records that are too large, on their way to the dead letters: counted under the sender's lock.

    `count` takes the error code of a log record whose letter was not kept.
    """

    def __init__(self, lock: "threading.RLock", count: Callable[[str], object]) -> None:
        self._lock = lock
        self._count = count
        self.kept = self.pending = 0

    def add(self, producer: Producer, stream: str, key: str, record: LetterAndStub, tier: Tier) -> None:
        """Add the letter; in the sender's thread."""
        from kpl_core.durability.spool import SpooledRecord, SpoolError  # noqa: PLC0415 - SQLite, imported by now

        letters = producer.dead_letters
        metadata = {"dead_letter": record.mark}
        spooled = SpooledRecord(stream, key, record.whole, time.time(), tier=tier, metadata=metadata)
        try:
            added = None if letters is None else letters.add_nowait([letters.letter(spooled, "oversize")])
        except SpoolError:
            added = None
        if added is None:
            self._count(NOT_KEPT)
            return
        with self._lock:
            self.pending += 1
        added.add_done_callback(self._finished)

    def _finished(self, added: "Future[None]") -> None:
        has_failed = added.cancelled() or added.exception() is not None
        with self._lock:
            self.pending -= 1
            self.kept += not has_failed
        if has_failed:
            self._count(NOT_KEPT)


def entry_size(entry: Entry) -> int:
    """Return how many bytes an entry takes of the queue."""
    if not isinstance(entry, tuple):
        return len(entry) + ENTRY_BYTES
    key, data = entry
    if isinstance(data, LetterAndStub):
        pieces: tuple[bytes | LargeLine, ...] = (data.whole, data.stub)
    else:
        pieces = data if isinstance(data, tuple) else (data,)
    return sum(len(piece) + ENTRY_BYTES for piece in pieces) + (0 if key is None else len(key))


# Partition keys


def key_chooser(choice: KeyChoice | None) -> KeyOf | None:
    """Return the function that chooses a record's partition key, None if the sender takes a random one.

    Raises:
        ConfigError: the choice is an unknown word, or None, as from a configuration file without a value.
    """
    if callable(choice):
        return choice
    if choice == "random":
        return None
    if choice == "logger":
        return lambda record: record.name
    if choice == "trace_id":
        return _trace_id
    if choice is not None and choice.startswith(_EXTRA) and len(choice) > len(_EXTRA):
        field = choice.removeprefix(_EXTRA)
        return lambda record: _text(_extra_field(record, field))
    message = (
        f"partition_key is {choice!r}; it must be 'random', 'logger', 'trace_id', 'extra:<field>' or a function "
        f"of the log record"
    )
    raise ConfigError(message)


def key_of(choose: KeyOf, record: logging.LogRecord) -> str | None:
    """Return the record's partition key within Kinesis' limits, None if it has none."""
    key = choose(record)
    if not key:
        return None
    return key[:PARTITION_KEY_CHARACTERS].encode(errors="replace").decode()


def random_keys() -> Iterator[str]:
    """Return an endless cycle of random keys."""
    return cycle([secrets.token_hex(8) for _ in range(_RANDOM_KEYS)])


def _trace_id(_record: logging.LogRecord) -> str | None:
    trace = current_trace()
    return None if trace is None else trace[0]


def _extra_field(record: logging.LogRecord, name: str) -> object:
    """Return an extra field of a record; loguru has its bound fields in the attribute `extra`."""
    fields = vars(record)
    bound = fields.get("extra")
    return bound[name] if name not in fields and isinstance(bound, dict) and name in bound else fields.get(name)


def _text(value: object) -> str | None:
    return None if value is None else str(value)


# Oversize records


def encode_large(line: LargeLine, *, rule: Oversize, max_bytes: int) -> Encoded:
    """Encode a line; treat one of more than `max_bytes` by the option `oversize`.

    "truncate" gives JSON with the beginning of its message, `"truncated": true` and `"original_bytes"`. "dlq" gives the
    same as a stub beside the whole. "split" gives JSON objects whose messages together are the message.
    """
    whole = line.encode()
    if len(whole) <= max_bytes:
        return whole
    if rule == "split":
        return _split(line, max_bytes)
    marks: dict[str, object] = {"truncated": True, "original_bytes": len(whole)}
    if rule == "truncate":
        return _truncated(line, marks, max_bytes)
    mark = secrets.token_hex(8)
    return LetterAndStub(mark, whole, _truncated(line, {**marks, "dead_letter": mark}, max_bytes))


def _truncated(line: LargeLine, marks: dict[str, object], max_bytes: int) -> bytes:
    shell = len(line.encode_part("", marks))
    is_bare = shell + _LONGEST_ESCAPE > max_bytes
    if is_bare:
        shell = len(line.encode_part("", marks, bare=True))
    return line.encode_part(_fitting(line.message, max_bytes - shell), marks, bare=is_bare)


def _split(line: LargeLine, max_bytes: int) -> tuple[bytes, ...]:
    split_id, text = secrets.token_hex(8), line.message
    # As long as the longest mark can be.
    shell = len(line.encode_part("", {"split": {"id": split_id, "index": 10**9, "count": 10**9}}, bare=True))
    pieces: list[str] = []
    start = 0
    while start < len(text) or not pieces:
        piece = _fitting(text[start : start + max_bytes], max_bytes - shell)
        pieces.append(piece)
        start += len(piece)
    return tuple(
        line.encode_part(piece, {"split": {"id": split_id, "index": index, "count": len(pieces)}}, bare=True)
        for index, piece in enumerate(pieces)
    )


def _fitting(text: str, max_bytes: int) -> str:
    """Return the longest beginning of `text` that fits `max_bytes` of JSON; at least one character."""
    encoded = msgspec.json.encode(text[: max(1, max_bytes)])[1:-1]
    if len(encoded) > max_bytes:
        encoded = encoded[: max(0, max_bytes)]
        start = encoded.rfind(b"\\", max(0, len(encoded) - _LONGEST_ESCAPE + 1))
        run = 0 if start < 0 else start + 1 - len(encoded[: start + 1].rstrip(b"\\"))
        # The last of an odd number of backslashes begins an escape, of two bytes or of six. It must be complete.
        if run % 2 and len(encoded) - start < (_LONGEST_ESCAPE if encoded[start + 1 : start + 2] == b"u" else 2):
            encoded = encoded[:start]
    # A character that was cut is left out.
    fitting: str = msgspec.json.decode(f'"{encoded.decode(errors="ignore")}"')
    return fitting or text[:1]
