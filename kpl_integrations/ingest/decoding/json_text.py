"""Checks of JSON text that msgspec does not make, and msgspec's errors as messages for clients."""

import re
from itertools import accumulate
from typing import Final

import msgspec

from kpl_integrations.ingest.decoding.decoded import DecodeRefusal

# The exceptions of the decoder for text that is not JSON or has the wrong shape.
MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

# Bytes scanned at a time, which bounds the memory of the split below.
_PIECE_BYTES: Final = 65_536
# The change of the nesting level at each bracket.
_STEPS: Final = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS: Final = bytes(set(range(256)) - set(_STEPS))
_AT: Final = re.compile(r" - at `(.*)`$", re.DOTALL)
_FIELD_NAMED: Final = re.compile(r"field `(.*?)`", re.DOTALL)
_UNKNOWN: Final = "Object contains unknown field"
_LEAVE_IT_OUT: Final = "; leave it out, or spell it as /openapi.json does"
_MOST_SAID: Final = 200


def printable(text: str) -> str:
    """Return text from a client in a form that is safe in a log line: short, without control characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:_MOST_SAID])


def require_utf8(body: bytes) -> None:
    """Check that the body is UTF-8. The decoder does not check values that it keeps as raw JSON.

    Raises:
        DecodeRefusal: a byte is not UTF-8.
    """
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as error:
            detail = f"byte {error.start} of the body is not UTF-8; encode JSON as UTF-8"
            raise DecodeRefusal(400, "encoding", detail) from None


def is_deeper_than(depth: int, text: bytes) -> bool:
    """Return True if objects and arrays of a valid JSON text are nested more than `depth` deep."""
    if text.count(b"[") + text.count(b"{") <= depth:
        return False
    # Once escaped quotation marks are removed, every second one ends a string.
    unescaped = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    level = in_string = 0
    for start in range(0, len(unescaped), _PIECE_BYTES):
        parts = unescaped[start : start + _PIECE_BYTES].split(b'"')
        brackets = b"".join(parts[in_string::2]).translate(None, _NO_BRACKETS)
        in_string = (in_string + len(parts) - 1) % 2
        levels = list(accumulate(map(_STEPS.__getitem__, brackets), initial=level))
        if max(levels) > depth:
            return True
        level = levels[-1]
    return False


def malformed(error: Exception, *, index: int | None = None) -> DecodeRefusal:
    """Return the refusal for one of `MALFORMED` that is not a mismatch of shape."""
    if isinstance(error, RecursionError):
        return DecodeRefusal(400, "too-deep", "the JSON is nested too deep; flatten it", index=index, field="$")
    if isinstance(error, UnicodeDecodeError):
        detail = f"the JSON contains bytes that are not UTF-8: {error.reason}"
        return DecodeRefusal(400, "encoding", detail, index=index, field="$")
    said = str(error)
    if "truncated" in said:
        return DecodeRefusal(400, "truncated", "the JSON ends too early; send all of it", index=index, field="$")
    detail = f"this is not JSON: {printable(said.removeprefix('JSON is malformed: '))}"
    return DecodeRefusal(400, "malformed", detail, index=index, field="$")


def mismatch(error: msgspec.ValidationError) -> tuple[str, str]:
    """Return the field that has the wrong shape ("$" for the whole), and what is wrong with it."""
    said = str(error)
    at = _AT.search(said)
    path = at.group(1).removeprefix("$").removeprefix(".") if at else ""
    said = _AT.sub("", said)
    named = _FIELD_NAMED.search(said)
    if named is not None:
        path = f"{path}.{named.group(1)}" if path else named.group(1)
    advice = _LEAVE_IT_OUT if said.startswith(_UNKNOWN) else ""
    return printable(path) or "$", printable(said) + advice
