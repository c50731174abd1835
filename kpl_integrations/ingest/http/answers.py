"""Answers to requests: JSON, problem documents (RFC 9457), and their counts. Slow readers time out."""

from collections import Counter
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated, Final

import anyio
import msgspec

from kpl_integrations.asgi.protocol import ASGIApp, Header, Receive, Scope, Send
from kpl_integrations.ingest.admission.acknowledgement import Answer, RecordAnswer, RejectedRecord
from kpl_integrations.ingest.admission.refusals import (
    QUEUE_SHARE,
    REFUSALS,
    Refusal,
    Refused,
    refusal_headers,
)
from kpl_integrations.ingest.http.correlation import request_id_of_scope

PROBLEM_JSON: Final = b"application/problem+json"
REGISTERED_TYPES: Final = frozenset({"quota-exceeded", "temporary-reduced-capacity"})
_LARGE_ANSWER_BYTES: Final = 32_768
_REGISTRY: Final = "https://iana.org/assignments/http-problem-types#"
# A client that reads a large answer more slowly than this gets only what the server has buffered by then.
_SEND_SECONDS: Final = 30.0

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
        fields.append((b"connection", b"close"))
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


def plain_answer(status: int, text: bytes, *fields: Header) -> ASGIApp:
    """Return an application that answers this text to each request."""
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(text)), *fields]

    async def answer(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send_answer(send, status, headers, text)

    return answer


async def send_refusal(scope: Scope, send: Send, refused: Refused, tally: Tally) -> None:
    """Count a rejected request and send its answer."""
    answer = problem_of(refused, request_id_of_scope(scope))
    tally.refusals[refused.refusal] += 1
    tally.answers[answer.status] += 1
    await send_answer(send, answer.status, answer.headers(), answer.body)
