"""Answers as bytes: the starts of all of them, what follows the start, and those that no application makes."""

from collections.abc import Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import Final, NamedTuple

from kpl_integrations.asgi.protocol import Header
from kpl_integrations.ingest.admission.acknowledgement import JSON, Answer

_CLOSE: Final = (b"connection", b"close")
# Answers up to this size say how many records were accepted, or where one was stored. Many requests share them.
_SHORT_BYTES: Final = 256
_PHRASES: Final = {status.value: status.phrase for status in HTTPStatus}


def _status_line(status: int) -> bytes:
    return f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n".encode()


class AnswerStarts:
    """The status line and the server's own header fields of answers. The server replaces the fields once a second."""

    __slots__ = ("_by_status", "_fields")

    def __init__(self) -> None:
        self._fields: list[tuple[bytes, bytes]] = []
        self._by_status: dict[int, bytes] = {}

    def of(self, status: int, fields: list[tuple[bytes, bytes]]) -> bytes:
        """Return the start of an answer."""
        if fields is not self._fields:
            self._fields = fields
            self._by_status = {}
        start = self._by_status.get(status)
        if start is None:
            lines = [b"%b: %b\r\n" % field for field in fields]
            start = self._by_status[status] = b"".join((_status_line(status), *lines))
        return start


class EncodedAnswer(NamedTuple):
    """`content` follows the server's own header fields. `closes`: the connection is closed after this answer."""

    status: int
    content: bytes
    closes: bool = False


def encoded(answer: Answer) -> EncodedAnswer:
    """Return an answer as the bytes for the socket."""
    if answer.fields is JSON and len(answer.body) <= _SHORT_BYTES:
        return _short(answer.status, answer.body)
    return _encoded(answer.status, answer.headers(), answer.body)


@lru_cache(maxsize=256)
def _short(status: int, body: bytes) -> EncodedAnswer:
    return _encoded(status, Answer(status, body).headers(), body)


def _encoded(status: int, headers: Sequence[Header], body: bytes) -> EncodedAnswer:
    fields = b"".join([b"%b: %b\r\n" % field for field in headers])
    return EncodedAnswer(status, b"%b\r\n%b" % (fields, body), _CLOSE in headers)


# The answer of an application that failed.
FAILED_TEXT: Final = b"Internal Server Error"
FAILED_FIELDS: Final = (
    (b"content-type", b"text/plain; charset=utf-8"),
    (b"content-length", b"%d" % len(FAILED_TEXT)),
    _CLOSE,
)
FAILED: Final = _encoded(500, FAILED_FIELDS, FAILED_TEXT)


def _refusal(status: int, reason: str) -> bytes:
    fields = f"content-type: text/plain\r\ncontent-length: {len(reason)}\r\nconnection: close"
    return _status_line(status) + f"{fields}\r\n\r\n{reason}".encode()


# By status: what a connection is told before it is closed.
REFUSALS: Final = {
    status: _refusal(status, reason)
    for status, reason in {
        400: "this is not a valid HTTP request",
        408: "the header fields did not arrive in time",
        431: "the header fields are too large",
        501: "the only transfer coding here is chunked",
        503: "the gateway has too many requests; send this one again later",
        505: "this server speaks HTTP 1.1 and 1.0",
    }.items()
}
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

# The first bytes of a client that speaks HTTP/2 without asking (RFC 9113, section 3.4).
HTTP_2_PREFACE: Final = b"PRI * HTTP/2.0\r\n"
_HTTP_1_1_REQUIRED: Final = 0xD
_USE_HTTP_1: Final = (
    b"this gateway speaks HTTP/1.1; configure the client for it (AWS SDK for JavaScript: NodeHttpHandler)"
)


def _frame(kind: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, 0, 0, 0, 0, 0]) + payload


def goaway(last_stream: int, code: int, reason: bytes = b"") -> bytes:
    """Return the frame that ends an HTTP/2 connection: the last stream that is answered, a code, a text for logs."""
    return _frame(7, last_stream.to_bytes(4, "big") + code.to_bytes(4, "big") + reason)


# What a client of HTTP/2 is told where it is off. It understands only frames, the first of which are SETTINGS.
NO_HTTP_2: Final = _frame(4, b"") + goaway(0, _HTTP_1_1_REQUIRED, _USE_HTTP_1)
