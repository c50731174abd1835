"""Answers to requests: problem documents (RFC 9457), what is sent as ASGI messages or as bytes, and their counts.

Slow readers time out.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from typing import Annotated, Final, NamedTuple

import anyio
import msgspec

from kpl_integrations.asgi.protocol import ASGIApp, Header, Receive, Scope, Send
from kpl_integrations.ingest.admission.acknowledgement import JSON, Answer, RecordAnswer, RejectedRecord
from kpl_integrations.ingest.admission.refusals import (
    QUEUE_SHARE,
    REFUSALS,
    SERVER_REFUSALS,
    Refusal,
    Refused,
    refusal_headers,
)
from kpl_integrations.ingest.http.correlation import identify, request_id_of_scope

PROBLEM_JSON: Final = b"application/problem+json"
REGISTERED_TYPES: Final = frozenset({"quota-exceeded", "temporary-reduced-capacity"})
_LARGE_ANSWER_BYTES: Final = 32_768
_REGISTRY: Final = "https://iana.org/assignments/http-problem-types#"
# A client that reads a large answer more slowly than this gets only what the server has buffered by then.
_SEND_SECONDS: Final = 30.0
_CLOSE: Final = (b"connection", b"close")
# Answers up to this size say how many records were accepted, or where one was stored. Many requests share them.
_SHORT_BYTES: Final = 256
_PHRASES: Final = {status.value: status.phrase for status in HTTPStatus}

Headers = list[Header]


@dataclass
class Tally:
    """Count answers (by HTTP status) and refusals of all routes, from the construction of a gateway on."""

    answers: Counter[int] = field(default_factory=Counter)
    refusals: Counter[Refusal] = field(default_factory=Counter)


class Problem(
    msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, rename={"violated_policies": "violated-policies"}
):
    """The body of a rejection (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    request_id: Annotated[str, msgspec.Meta(description="the value of X-Request-Id in the answer")]
    field: Annotated[str, msgspec.Meta(description="the parameter or member in question")] | None = None
    index: Annotated[int, msgspec.Meta(description="the index of the record in question, from 0")] | None = None
    errors: (
        Annotated[list[RejectedRecord], msgspec.Meta(description="of bad-records: the first hundred problems")] | None
    ) = None
    error_count: Annotated[int, msgspec.Meta(description="the number of all problems")] | None = None
    records: (
        Annotated[list[RecordAnswer], msgspec.Meta(description="if no record was delivered: the result of each record")]
        | None
    ) = None
    violated_policies: (
        Annotated[
            list[Annotated[str, msgspec.Meta(extra_json_schema={"enum": ["records", "bytes", QUEUE_SHARE]})]],
            msgspec.Meta(description="of quota-exceeded: the exhausted rates of the tenant, or its share of the queue"),
        ]
        | None
    ) = None


_encode: Final = msgspec.json.Encoder().encode


def problem_of(refused: Refused, request_id: bytes) -> Answer:
    """Return the answer to a rejected request with this id."""
    answer = REFUSALS[refused.refusal]
    is_registered = answer.code in REGISTERED_TYPES
    body = _encode(
        Problem(
            type=_REGISTRY + answer.code if is_registered else "about:blank",
            title=answer.title if is_registered else HTTPStatus(answer.status).phrase,
            status=answer.status,
            detail=refused.detail,
            code=refused.code or answer.code,
            request_id=request_id.decode(),
            **(refused.extensions or {}),
        )
    )
    fields = [(b"content-type", PROBLEM_JSON), *refusal_headers(refused)]
    if answer.status == HTTPStatus.UNAUTHORIZED:
        fields.append((b"www-authenticate", b'Bearer realm="kpl-ingest"'))
    if answer.closes:
        fields.append(_CLOSE)
    return Answer(answer.status, body, fields, refused.is_unread)


async def send_answer(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Send one answer; `headers` includes its length."""
    start = {"type": "http.response.start", "status": status, "headers": headers}
    if len(body) < _LARGE_ANSWER_BYTES:
        await send(start)
        await send({"type": "http.response.body", "body": body})
        return
    with anyio.move_on_after(_SEND_SECONDS):
        await send(start)
        await send({"type": "http.response.body", "body": body})


async def send_refusal(scope: Scope, send: Send, refused: Refused, tally: Tally) -> None:
    """Count a rejected request and send its answer."""
    answer = problem_of(refused, request_id_of_scope(scope))
    tally.refusals[refused.refusal] += 1
    tally.answers[answer.status] += 1
    await send_answer(send, answer.status, answer.headers(), answer.body)


def server_refusal(refusal: Refusal) -> Refused:
    """Return what the server refuses by itself, with the detail of the table."""
    return Refused(refusal, SERVER_REFUSALS[refusal])


def refused_as_bytes(refusal: Refusal, request_id: bytes, tally: Tally) -> "EncodedAnswer":
    """Count what the server refuses by itself, and return the answer."""
    answer = problem_of(server_refusal(refusal), request_id)
    tally.refusals[refusal] += 1
    tally.answers[answer.status] += 1
    return encoded(answer)


def refusing(refused: Refused, tally: Tally) -> ASGIApp:
    """Return an application that refuses each request."""

    async def answer(scope: Scope, _receive: Receive, send: Send) -> None:
        await send_refusal(scope, identify(scope, send), refused, tally)

    return answer


# Answers as bytes


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
