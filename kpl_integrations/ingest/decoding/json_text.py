"""Checks of JSON text that msgspec does not make, and msgspec's errors as messages for clients."""

import codecs
import re
import sys
from collections.abc import Generator, Iterator
from functools import lru_cache
from itertools import accumulate, product
from operator import add
from typing import Final

import msgspec

from kpl_integrations.ingest.decoding.decoded import DecodeRefusal

# The blanks of JSON. `bytes.strip` and `\s` of `re` would take VT and FF too.
BLANKS: Final = b" \t\r\n"
STRING: Final = msgspec.json.Decoder(str)
# The exceptions of the decoder for text that is not JSON or has the wrong shape.
MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

# Bytes scanned at a time, which bounds the memory for decoded and split text.
_PIECE_BYTES: Final = 65_536
# `is_deeper_than` counts so many brackets in one step: as a number of 8 bytes.
_BLOCK: Final = 8
# By block, how much deeper the text is after its brackets, and at the deepest place in it.
_RISES: Final = {
    int.from_bytes(block, sys.byteorder): list(accumulate([1 if bracket == ord("[") else -1 for bracket in block]))
    for block in product(b"[]", repeat=_BLOCK)
}
_NET: Final = {block: rises[-1] for block, rises in _RISES.items()}
_PEAK: Final = {block: max(rises) for block, rises in _RISES.items()}
_BRACES_AS_BRACKETS: Final = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b'[]{}"'))
# Decoded objects take up to 56 bytes each, and two bytes of JSON are enough for one. Larger bodies may have more.
_MOST_OBJECTS: Final = 1 << 20
_BYTES_PER_OBJECT: Final = 16
# The longest escape of a string, and the start of the second one of a surrogate pair.
_ESCAPE_BYTES: Final = 6
_LOW_SURROGATE: Final = re.compile(rb"\\u[dD][c-fC-F]")
# The first two bits of a byte of UTF-8, and their value in all bytes of a character but the first.
_UTF8_BITS, _UTF8_NOT_FIRST = 0xC0, 0x80
_MANY_ELEMENTS: Final = 1 << 18
_AT: Final = " - at `"
_FIELD_NAMED: Final = "field `"
_UNKNOWN: Final = "Object contains unknown field"
_LEAVE_IT_OUT: Final = "; leave it out, or spell it as /openapi.json does"
_MOST_SAID: Final = 200


def printable(text: str) -> str:
    """Return text from a client in a form that is safe in a log line: short, without control characters."""
    short = text[:_MOST_SAID]
    if short.isprintable():
        return short
    return "".join([c if c.isprintable() else c.encode("unicode_escape").decode() for c in short])


# An absent member that would be raw JSON. One object serves all.
ABSENT: Final = msgspec.Raw()


def json_pattern(pattern: bytes) -> "re.Pattern[bytes]":
    """Return a compiled pattern of JSON text. A space in it stands for any blanks, the four of RFC 8259, section 2."""
    return re.compile(pattern.replace(b" ", b"[%b]*" % BLANKS))


class SkippedObject(msgspec.Struct, gc=False):
    """Any object. A list of them counts the elements of an array and keeps nothing of them."""


def require_text(body: bytes) -> None:
    """Check what the decoder does not: the number of objects, and that values that stay raw JSON are UTF-8.

    Braces in texts count as objects too.

    Raises:
        DecodeRefusal: a byte is not UTF-8, or there are more than 1,048,576 objects and more than one in 16 bytes.
    """
    most = max(_MOST_OBJECTS, len(body) // _BYTES_PER_OBJECT)
    if len(body) > 2 * most and body.count(b"{") > most:
        detail = f"the body has more than {most:,} JSON objects; send fewer records in a request"
        raise DecodeRefusal(413, "too-many-records", detail)
    if body.isascii():
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(body), _PIECE_BYTES):
        stop = start + _PIECE_BYTES
        unfinished = len(decoder.getstate()[0])
        try:
            decoder.decode(body[start:stop], final=stop >= len(body))
        except UnicodeDecodeError as error:
            detail = f"byte {start - unfinished + error.start} of the body is not UTF-8; encode JSON as UTF-8"
            raise DecodeRefusal(400, "encoding", detail) from None


def require_content(body: bytes, expected: str) -> None:
    """Check that a body has more than blanks. `expected` says what it should have.

    Raises:
        DecodeRefusal: it has not.
    """
    if not body.strip(BLANKS):
        raise DecodeRefusal(400, "truncated", f"the body is empty; send {expected}", field="$")


def has_many_elements(text: bytes) -> bool:
    """Return True if arrays of the text may have more than 262,144 elements. Then count them before decoding them."""
    return text.count(b",") > _MANY_ELEMENTS


def is_deeper_than(depth: int, text: bytes) -> bool:
    """Return True if objects and arrays of a valid JSON text are nested more than `depth` deep."""
    return any(_are_pieces_deeper(depth, text))


def require_depth(depth: int, text: bytes, refusal: DecodeRefusal) -> Generator[None, None, None]:
    """Check in steps that objects and arrays of a JSON text are nested at most `depth` deep.

    Raises:
        DecodeRefusal: they are deeper; this is `refusal`.
    """
    for is_too_deep in _are_pieces_deeper(depth, text):
        if is_too_deep:
            raise refusal
        yield


def too_deep(what: str, most: int) -> DecodeRefusal:
    """Return the refusal of JSON that is nested too deep."""
    return DecodeRefusal(400, "too-deep", f"{what} is nested more than {most} deep; flatten it")


def _are_pieces_deeper(depth: int, text: bytes) -> Iterator[bool]:
    if text.count(b"[") + text.count(b"{") <= depth:
        return
    at = level = in_string = 0
    opening = b""
    while at < len(text):
        stop = at + _PIECE_BYTES
        piece = text[at:stop]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            # With the character that the last backslash escapes.
            piece += text[stop : stop + 1]
        at += len(piece)
        # Once escaped quotation marks are removed, every second one ends a string. Two that are adjacent cancel out.
        unescaped = piece.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in piece else piece
        parts = unescaped.translate(_BRACES_AS_BRACKETS, _NO_BRACKETS).replace(b'""', b"").split(b'"')
        left = opening + b"".join(parts[in_string::2])
        in_string = (in_string + len(parts) - 1) % 2
        if depth:
            # Most objects and arrays contain no other. The end of the last one may be in the next piece.
            opening = b"[" if left.endswith(b"[") and at < len(text) else b""
            left = left.removesuffix(opening).replace(b"[]", b"")
        padding = -len(left) % _BLOCK
        blocks = memoryview(left + b"]" * padding).cast("Q").tolist()
        before = list(accumulate(map(_NET.__getitem__, blocks), initial=level))
        yield max(map(add, before, map(_PEAK.__getitem__, blocks)), default=0) > max(0, depth - 1)
        level = before[-1] + padding


def string_in_steps(text: bytes) -> Generator[None, None, bytes]:
    """Return the UTF-8 bytes of a valid JSON string. Its escapes are decoded in steps."""
    if b"\\" not in text:
        return text[1:-1]
    parts: list[bytes] = []
    at, end = 1, len(text) - 1
    while at < end:
        stop = at + _PIECE_BYTES
        stop = end if stop >= end else _end_of_characters(text, at, stop)
        parts.append(STRING.decode(b'"%b"' % text[at:stop]).encode())
        at = stop
        yield
    return b"".join(parts)


def _end_of_characters(text: bytes, at: int, stop: int) -> int:
    """Return a place near `stop` where a character of a string ends. The characters begin at `at`."""
    escape = text.rfind(b"\\", stop - _ESCAPE_BYTES, stop)
    if escape < 0:
        while text[stop] & _UTF8_BITS == _UTF8_NOT_FIRST:
            stop -= 1
        return stop
    before = text[at:escape]
    if (len(before) - len(before.rstrip(b"\\"))) % 2:
        # It is escaped itself.
        return escape + 1
    return escape - _ESCAPE_BYTES if _LOW_SURROGATE.match(text, escape) else escape


def malformed(error: Exception, *, index: int | None = None) -> DecodeRefusal:
    """Return the refusal for one of `MALFORMED` that is not a mismatch of shape."""
    if isinstance(error, RecursionError):
        return DecodeRefusal(400, "too-deep", "the JSON is nested too deep; flatten it", index=index, field="$")
    if isinstance(error, UnicodeDecodeError):
        detail = f"the JSON contains bytes that are not UTF-8: {error.reason}"
        return DecodeRefusal(400, "encoding", detail, index=index, field="$")
    said = str(error)
    if "truncated" in said:
        # msgspec also says so of half a pair in the last bytes.
        detail = "the JSON ends too early, or has half of a surrogate pair at its end; send all of it"
        return DecodeRefusal(400, "truncated", detail, index=index, field="$")
    detail = f"this is not JSON: {printable(said.removeprefix('JSON is malformed: '))}"
    if detail.endswith("invalid character (byte 0)"):
        detail += ", perhaps a byte order mark"
    return DecodeRefusal(400, "malformed", detail, index=index, field="$")


def mismatch(error: msgspec.ValidationError) -> tuple[str, str]:
    """Return the field that has the wrong shape ("$" for the whole), and what is wrong with it."""
    said = str(error)
    # Thousands of bad records mostly have the same problem.
    return _mismatch(said) if len(said) <= _MOST_SAID else _mismatch.__wrapped__(said)


@lru_cache(maxsize=256)
def _mismatch(said: str) -> tuple[str, str]:
    # Not by a regular expression: names in it may be long, and 10,000 records of a request may be wrong.
    before, at, path = said.partition(_AT)
    if at and path.endswith("`"):
        said, path = before, path[:-1].removeprefix("$").removeprefix(".")
    else:
        path = ""
    name, is_closed, _ = said.partition(_FIELD_NAMED)[2].partition("`")
    if is_closed:
        path = f"{path}.{name}" if path else name
    advice = _LEAVE_IT_OUT if said.startswith(_UNKNOWN) else ""
    return printable(path) or "$", printable(said) + advice
