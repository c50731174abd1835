"""A log record that no Kinesis record holds: shortened, in pieces, or whole among the dead letters; marked as such."""

import logging
import secrets
from typing import Final, Literal

from kpl_integrations.logging_handler.entry import WholeAndStub
from kpl_integrations.logging_handler.formatter import JsonFormatter

__all__ = ["Oversize", "split", "truncate", "whole_and_stub"]

Oversize = Literal["truncate", "split", "dlq"]

# What JSON may make of one character: \u0000.
_LONGEST_ESCAPE: Final = 6


def truncate(
    record: logging.LogRecord, text: str, formatter: JsonFormatter, *, original_bytes: int, max_bytes: int
) -> bytes:
    """Return JSON within `max_bytes` with the beginning of `text`, `"truncated": true` and `"original_bytes"`."""
    return _shortened(record, text, formatter, {"original_bytes": original_bytes}, max_bytes)


def whole_and_stub(
    record: logging.LogRecord, text: str, formatter: JsonFormatter, *, whole: bytes, max_bytes: int
) -> WholeAndStub:
    """Return the whole for the dead letters, and for the stream what `truncate` returns, with the letter's mark."""
    mark = secrets.token_hex(8)
    marks = {"original_bytes": len(whole), "dead_letter": mark}
    return WholeAndStub(mark, whole, _shortened(record, text, formatter, marks, max_bytes))


def _shortened(
    record: logging.LogRecord, text: str, formatter: JsonFormatter, marks: dict[str, object], max_bytes: int
) -> bytes:
    text = _speakable(text)
    marks = {"truncated": True, **marks}
    shell = len(formatter.encode_message(record, "", marks))
    if shell + _LONGEST_ESCAPE <= max_bytes:
        return formatter.encode_message(record, _fitting(text, max_bytes - shell), marks)
    shell = len(formatter.encode_bare(record, "", marks))
    return formatter.encode_bare(record, _fitting(text, max_bytes - shell), marks)


def split(record: logging.LogRecord, text: str, formatter: JsonFormatter, *, max_bytes: int) -> tuple[bytes, ...]:
    """Return JSON objects within `max_bytes` each, whose messages together are `text`, marked with `"split"`."""
    text = _speakable(text)
    split_id = secrets.token_hex(8)
    # As long as any real mark will be.
    shell = len(formatter.encode_bare(record, "", {"split": {"id": split_id, "index": 10**9, "count": 10**9}}))
    pieces: list[str] = []
    start = 0
    while start < len(text):
        piece = _fitting(text[start : start + max_bytes], max_bytes - shell)
        pieces.append(piece)
        start += len(piece)
    return tuple(
        formatter.encode_bare(record, piece, {"split": {"id": split_id, "index": index, "count": len(pieces)}})
        for index, piece in enumerate(pieces)
    )


def _speakable(text: str) -> str:
    """Return `text` without lone surrogates, whose escapes would lengthen it later."""
    return text.encode(errors="backslashreplace").decode()


def _fitting(text: str, max_bytes: int) -> str:
    """Return the longest beginning of `text` that surely fits `max_bytes` of JSON; at least one character."""
    low, high = 1, min(len(text), max(1, max_bytes))
    while low < high:
        middle = (low + high + 1) // 2
        if _json_bytes(text[:middle]) <= max_bytes:
            low = middle
        else:
            high = middle - 1
    return text[:low]


def _json_bytes(text: str) -> int:
    escaped = sum(text.count(character) for character in '"\\')
    control = sum(character < " " for character in text) if not text.isprintable() else 0
    return len(text.encode()) + escaped + (_LONGEST_ESCAPE - 1) * control
