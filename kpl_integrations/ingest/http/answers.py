"""Answers to requests: acknowledgements and problem documents (RFC 9457), as ASGI messages or as bytes, and counts.

An answer never claims more than what happened. queued: the records are in memory. spooled: the spool has committed
them. delivered: Kinesis has answered each record, and the answer has one result per record in request order.
"""

import random
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal, NamedTuple

import anyio
import msgspec

from kpl_core import Deliveries, RecordResult
from kpl_core.records.record_result import BREAKER_OPEN, EXPIRED, NOT_SPOOLED, RATE_LIMITED, SHUTDOWN, UNKNOWN, Place
from kpl_integrations.asgi.protocol import ASGIApp, Header, Receive, Scope, Send
from kpl_integrations.ingest.admission.refusals import (
    QUEUE_SHARE,
    REFUSALS,
    SERVER_REFUSALS,
    Refusal,
    Refused,
    refusal_headers,
    spread_retry_after,
)
from kpl_integrations.ingest.decoding import RecordProblem
from kpl_integrations.ingest.http.correlation import identify, request_id_of_scope

JSON: Final[tuple[Header, ...]] = ((b"content-type", b"application/json"),)
"""The header fields of a JSON answer."""
INVALID_RECORD: Final = "InvalidRecord"
_RESULTS_PER_STEP: Final = 250
PROBLEM_JSON: Final = b"application/problem+json"
REGISTERED_TYPES: Final = frozenset({"quota-exceeded", "temporary-reduced-capacity"})
_LARGE_ANSWER_BYTES: Final = 32_768
_REGISTRY: Final = "https://iana.org/assignments/http-problem-types#"
# A client that reads a large answer more slowly than this gets only what the server has buffered by then.
_SEND_SECONDS: Final = 30.0
_CLOSE: Final = (b"connection", b"close")
_ENDED: Final = "the gateway has shut down before this request was complete and answered; send it again"
# Answers up to this size say how many records were accepted, or where one was stored. Many requests share them.
_SHORT_BYTES: Final = 256
_PHRASES: Final = {status.value: status.phrase for status in HTTPStatus}

Headers = list[Header]
_encode: Final = msgspec.json.Encoder().encode


@dataclass
class Tally:
    """Count answers (by HTTP status) and refusals of all routes, from the construction of a gateway on."""

    answers: Counter[int] = field(default_factory=Counter)
    refusals: Counter[Refusal] = field(default_factory=Counter)


class RecordAnswer(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """The result of one record: a sequence number and its shard, or an error."""

    sequence_number: str | None = None
    shard_id: str | None = None
    error_code: str | None = None
    error_message: str | None = None
    # Not delivered, but safe: in the spool, which delivers it later, or in the dead letters.
    kept: Literal["spooled", "dead_lettered"] | None = None


class RejectedRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A record of the request that was not accepted."""

    index: int
    field: str
    detail: str


class Accepted(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """The body of a 202."""

    ack: Literal["queued", "spooled"]
    accepted: int
    rejected: list[RejectedRecord] | None = None


class Delivered(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """The body of a 200."""

    ack: Literal["delivered"]
    accepted: int
    delivered: int
    failed: int
    kept: Annotated[int, msgspec.Meta(description="how many of `failed` must not be sent again")] | None = None
    records: list[RecordAnswer]
    rejected: list[RejectedRecord] | None = None


class Answer(NamedTuple):
    """A complete answer. `is_unread`: the client may still send the rest of its body."""

    status: int
    body: bytes
    # Without Content-Length.
    fields: Sequence[Header] = JSON
    is_unread: bool = False
    # The id of its request, if that is known. It is not among `fields`, because many requests share an answer.
    request_id: bytes = b""

    def headers(self) -> list[Header]:
        """Return all header fields."""
        return [*self.fields, (b"content-length", b"%d" % len(self.body))]


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
        Annotated[
            list[RecordAnswer],
            msgspec.Meta(description="if no record is known to be delivered: the result of each record"),
        ]
        | None
    ) = None
    violated_policies: (
        Annotated[
            list[Annotated[str, msgspec.Meta(extra_json_schema={"enum": ["records", "bytes", QUEUE_SHARE]})]],
            msgspec.Meta(description="of quota-exceeded: the exhausted rates of the tenant, or its share of the queue"),
        ]
        | None
    ) = None


# Of accepted requests

# The answer if no record is known to be delivered, and none is kept: that of the first row whose code any record has.
NOTHING_DELIVERED: Final[tuple[tuple[str, Refusal], ...]] = (
    (SHUTDOWN, Refusal.DRAINING),
    # Sent, but not answered before the gateway ended. A retry may duplicate it, which is better than losing it.
    (UNKNOWN, Refusal.DRAINING),
    (BREAKER_OPEN, Refusal.BREAKER_OPEN),
    (NOT_SPOOLED, Refusal.NOT_SPOOLED),
    (RATE_LIMITED, Refusal.NO_ROOM),
    (EXPIRED, Refusal.EXPIRED),
)

_KEPT: Final[Mapping[Place, str]] = {
    "spooled": "not delivered yet, but in the spool: the gateway delivers it later, so do not send it again",
    "dead_lettered": "in the gateway's dead letters; its operator can redrive it, so ask before you send it again",
}


def answer_queued(
    accepted: int, problems: Sequence[RecordProblem], ack: Literal["queued", "spooled"] = "queued"
) -> Answer:
    """Return the answer for accepted records."""
    if problems:
        return Answer(202, _encode(Accepted(ack, accepted, _rejected(problems))))
    return _all_accepted(accepted, ack)


@lru_cache(maxsize=256)
def _all_accepted(accepted: int, ack: Literal["queued", "spooled"]) -> Answer:
    return Answer(202, _encode(Accepted(ack, accepted)))


@lru_cache(maxsize=256)
def one_delivered(sequence_number: str, shard_id: str) -> Answer:
    """Return the answer to a request of one record that was delivered; the requests of a Kinesis record share it."""
    answers = [RecordAnswer(sequence_number, shard_id)]
    return Answer(200, _encode(Delivered(ack="delivered", accepted=1, delivered=1, failed=0, records=answers)))


def all_delivered(deliveries: Deliveries) -> Answer | None:
    """Return the answer if every record was delivered, else None.

    The records of one Kinesis record share their text.
    """
    texts: list[msgspec.Raw] = []
    count = len(deliveries)
    for outcome in deliveries.outcomes:
        sequence_number, shard_id = outcome.sequence_number, outcome.shard_id
        if sequence_number is None or shard_id is None or outcome.moved is not None:
            return None
        if count == 1:
            return one_delivered(sequence_number, shard_id)
        texts.append(msgspec.Raw(_encode(RecordAnswer(sequence_number, shard_id))))
    records: Any = [texts[number] for number in deliveries.places[::2]]
    body = Delivered(ack="delivered", accepted=count, delivered=count, failed=0, records=records)
    return Answer(200, _encode(body))


def record_answers(results: Sequence[RecordResult]) -> list[RecordAnswer]:
    """Return the answer to each record. The records of one Kinesis record share their result."""
    shared = {id(result): result for result in results}
    made = {number: _record_answer(result) for number, result in shared.items()}
    return [made[id(result)] for result in results]


def record_answers_in_steps(results: Sequence[RecordResult]) -> Generator[None, None, list[RecordAnswer]]:
    """Do the same in steps, for many results."""
    answers: list[RecordAnswer] = []
    for start in range(0, len(results), _RESULTS_PER_STEP):
        answers += record_answers(results[start : start + _RESULTS_PER_STEP])
        yield
    return answers


def delivered_answer(
    results: Sequence[RecordResult],
    answers: list[RecordAnswer],
    problems: Sequence[RecordProblem],
    positions: Sequence[int],
) -> Answer:
    """Return the answer for these results.

    Raises:
        Refused: no record is known to be delivered, and none is kept.
    """
    delivered = sum([result.successful for result in results])
    kept = 0 if delivered == len(results) else sum(result.kept is not None for result in results)
    if not (delivered or kept):
        raise _nothing_delivered(results, answers)
    if problems:
        answers = _in_request_order(answers, positions, problems)
    body = Delivered(
        ack="delivered",
        accepted=len(results),
        delivered=delivered,
        failed=len(results) - delivered,
        kept=kept or None,
        records=answers,
        rejected=_rejected(problems),
    )
    return Answer(200, _encode(body))


def _record_answer(result: RecordResult) -> RecordAnswer:
    if result.successful:
        return RecordAnswer(result.sequence_number, result.shard_id)
    message = result.error_message
    if result.kept is not None:
        message = f"{message}; {_KEPT[result.kept]}" if message else _KEPT[result.kept]
    return RecordAnswer(None, result.shard_id, result.error_code or "Unknown", message, result.kept)


def _in_request_order(
    answers: Sequence[RecordAnswer], positions: Sequence[int], problems: Sequence[RecordProblem]
) -> list[RecordAnswer]:
    """Return an answer for every record of the request, including the rejected ones."""
    placed = dict(zip(positions, answers, strict=True))
    for problem in problems:
        placed.setdefault(problem.index, RecordAnswer(None, None, INVALID_RECORD, f"{problem.field}: {problem.detail}"))
    return [placed[index] for index in sorted(placed)]


def _nothing_delivered(results: Sequence[RecordResult], answers: list[RecordAnswer]) -> Refused:
    codes = {result.error_code for result in results}
    refusal = next((refusal for code, refusal in NOTHING_DELIVERED if code in codes), Refusal.NOT_DELIVERED)
    first = next(result for result in results if not result.successful)
    # Kinesis may have stored records of an attempt whose answer did not arrive.
    detail = f"none of the {len(results)} records is known to be delivered; the first ended with {first.error_code}"
    return Refused(refusal, detail, extensions={"records": answers})


def _rejected(problems: Sequence[RecordProblem]) -> list[RejectedRecord] | None:
    return [RejectedRecord(each.index, each.field, each.detail) for each in problems] or None


# Of refused requests


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


class ServerRefusals:
    """What the server refuses by itself: the answers, which are counted. `chance` spreads the retries of clients."""

    def __init__(self, tally: Tally, chance: Callable[[], float] = random.random) -> None:
        self._tally = tally
        self._chance = chance

    def _refused(self, refusal: Refusal) -> Refused:
        detail = SERVER_REFUSALS.get(refusal, _ENDED)
        return Refused(refusal, detail, retry_after=spread_retry_after(self._chance))

    def answer(self, refusal: Refusal, request_id: bytes) -> Answer:
        """Return the answer to a request with this id. `DRAINING`: the server ends before it has an answer."""
        answer = problem_of(self._refused(refusal), request_id)
        self._tally.refusals[refusal] += 1
        self._tally.answers[answer.status] += 1
        return answer

    def application(self, refusal: Refusal) -> ASGIApp:
        """Return an application that refuses a request."""

        async def refuse(scope: Scope, _receive: Receive, send: Send) -> None:
            await send_refusal(scope, identify(scope, send), self._refused(refusal), self._tally)

        return refuse


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


def encoded(answer: Answer, *, has_body: bool = True) -> EncodedAnswer:
    """Return an answer as the bytes for the socket. The answer to HEAD has no body."""
    if answer.fields is JSON and len(answer.body) <= _SHORT_BYTES:
        return _short(answer.status, answer.body)
    return _encoded(answer.status, answer.headers(), answer.body if has_body else b"")


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
