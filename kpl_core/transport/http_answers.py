"""An HTTP/1.1 answer: its head and the sizes of its chunks, as strictly as h11 reads them, and its coding.

A lenient reader takes other bytes for an answer than the proxy before it, and may report records as stored that are
not. So whatever RFC 9112 does not allow is a ValueError, and the connection is not used again.
"""

import re
import zlib
from collections.abc import Mapping
from typing import Final, NamedTuple

FIRST_FINAL_STATUS: Final = 200
_SWITCHING_PROTOCOLS: Final = 101
_STATUSES_WITHOUT_BODY: Final = (204, 304)
# Far above any answer of Kinesis.
MAX_BODY_BYTES: Final = 16 * 1024 * 1024
# How much of an invalid line an error quotes.
_SHOWN_BYTES: Final = 100

# RFC 9112, sections 4, 5 and 7.1. No expression repeats a repetition of blanks: that takes 30 s for 64 KiB of them.
_STATUS_LINE: Final = re.compile(rb"HTTP/(1\.[0-9]) ([1-9][0-9]{2})(?: [\t\x20-\x7e\x80-\xff]*)?")
_NAME: Final = re.compile(rb"[-!#$%&'*+.^_`|~0-9a-zA-Z]+")
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_LENGTH: Final = re.compile(r"[0-9]{1,20}")
_CHUNK_SIZE: Final = re.compile(rb"[0-9A-Fa-f]{1,20}")
_BLANKS: Final = b" \t"
_GZIP: Final = 16 + zlib.MAX_WBITS


class HttpAnswer(NamedTuple):
    """An answer. The names of its headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class AnswerHead(NamedTuple):
    """The head of an answer.

    Attributes:
        status: 100 to 999.
        headers: by name in lower case. The values of a repeated name are joined by commas.
        keeps: the connection may be used again.
        length: the bytes of the body, or None if it is `chunked` or ends with the connection.
        chunked: the body comes in chunks.
    """

    status: int
    headers: Mapping[str, str]
    keeps: bool
    length: int | None
    chunked: bool


def parsed_head(head: bytes) -> AnswerHead:
    r"""Return the head of an answer, whose bytes end with b"\r\n\r\n".

    Raises:
        ValueError: it is not one of HTTP/1, it switches the protocol, or the length of its body is not clear.
    """
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    match = _STATUS_LINE.fullmatch(first)
    if match is None:
        message = f"the answer begins with {first[:_SHOWN_BYTES]!r}, and not with HTTP/1.1 and a status"
        raise ValueError(message)
    status = int(match[2])
    if status == _SWITCHING_PROTOCOLS:
        message = "the answer switches to another protocol, which was not asked for"
        raise ValueError(message)
    headers = _headers(lines)
    keeps = match[1] == b"1.1" and "close" not in headers.get("connection", "").lower()
    coding, length = headers.get("transfer-encoding"), headers.get("content-length")
    if coding is not None and (length is not None or coding.lower() != "chunked"):
        message = (
            f"the answer has the Transfer-Encoding {coding[:_SHOWN_BYTES]!r} and the Content-Length "
            f"{length and length[:_SHOWN_BYTES]!r}; the one must be 'chunked', without the other"
        )
        raise ValueError(message)
    body_bytes = None if length is None else _content_length(length)
    if status in _STATUSES_WITHOUT_BODY or status < FIRST_FINAL_STATUS:
        return AnswerHead(status, headers, keeps, length=0, chunked=False)
    if coding is not None:
        return AnswerHead(status, headers, keeps, length=None, chunked=True)
    return AnswerHead(status, headers, keeps and body_bytes is not None, length=body_bytes, chunked=False)


def _headers(lines: list[bytes]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        raw_name, colon, raw_value = line.partition(b":")
        if not colon or _NAME.fullmatch(raw_name) is None or _CONTROL.search(raw_value):
            message = f"the answer has the line {line[:_SHOWN_BYTES]!r}, which is not a name, a colon and a value"
            raise ValueError(message)
        name, value = raw_name.decode("ascii").lower(), raw_value.strip(_BLANKS).decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _content_length(value: str) -> int:
    first, *others = [each.strip(" \t") for each in value.split(",")]
    if _LENGTH.fullmatch(first) is None or any(each != first for each in others):
        message = f"the answer has the Content-Length {value[:_SHOWN_BYTES]!r}; it must be one number of bytes"
        raise ValueError(message)
    return allowed_size(int(first))


def chunk_size(line: bytes) -> int:
    r"""Return the size in bytes that the line before a chunk gives, which ends with b"\r\n". 0 is the end of the body.

    Raises:
        ValueError: the line is invalid, or the size is not allowed.
    """
    size, _, extension = line.removesuffix(b"\r\n").partition(b";")
    size = size.rstrip(_BLANKS)
    if _CHUNK_SIZE.fullmatch(size) is None or _CONTROL.search(extension):
        message = f"a chunk of the answer begins with {line[:_SHOWN_BYTES]!r}, not with a hexadecimal size"
        raise ValueError(message)
    return allowed_size(int(size, 16))


def allowed_size(size: int) -> int:
    """Return the size of a body if it is allowed.

    Raises:
        ValueError: it is more than 16 MiB.
    """
    if size > MAX_BODY_BYTES:
        message = f"the answer's body has {size} bytes, and at most {MAX_BODY_BYTES} are allowed"
        raise ValueError(message)
    return size


def check_trailers(lines: bytes) -> None:
    r"""Check the header lines after the last chunk, which end with an empty line.

    Raises:
        ValueError: one is invalid.
    """
    if lines != b"\r\n":
        _headers(lines.removesuffix(b"\r\n\r\n").split(b"\r\n"))


def decoded(answer: HttpAnswer) -> HttpAnswer:
    """Return the answer without a gzip coding, which a proxy may add although no request asks for it.

    Its records may be stored. If the answer were not understood, they would be sent again.

    Raises:
        ValueError: it has another coding, is not gzip, or its body is larger than 16 MiB.
    """
    coding = answer.headers.get("content-encoding", "identity").lower()
    if coding == "identity":
        return answer
    if coding not in {"gzip", "x-gzip"}:
        message = f"the answer has the Content-Encoding {coding[:_SHOWN_BYTES]!r}, which was not asked for"
        raise ValueError(message)
    inflating = zlib.decompressobj(_GZIP)
    try:
        body = inflating.decompress(answer.body, MAX_BODY_BYTES + 1)
    except zlib.error as error:
        message = f"the answer is not the gzip that its Content-Encoding says: {error}"
        raise ValueError(message) from error
    allowed_size(len(body))
    if not inflating.eof or inflating.unused_data:
        message = "the answer is not exactly one complete gzip"
        raise ValueError(message)
    return answer._replace(body=body)
