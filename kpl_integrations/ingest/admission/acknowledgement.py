"""The answers to accepted requests. An answer never claims more than what happened.

queued: the records are in memory. spooled: the spool has committed them. delivered: Kinesis has answered each
record, and the answer has one result per record in request order.
"""

from collections.abc import Generator, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from kpl_core import Deliveries, RecordResult
from kpl_core.records.record_result import BREAKER_OPEN, EXPIRED, NOT_SPOOLED, RATE_LIMITED, SHUTDOWN, UNKNOWN, Place
from kpl_integrations.asgi.protocol import Header
from kpl_integrations.ingest.admission.refusals import Refusal, Refused
from kpl_integrations.ingest.decoding import RecordProblem

JSON: Final[tuple[Header, ...]] = ((b"content-type", b"application/json"),)
"""The header fields of a JSON answer."""
INVALID_RECORD: Final = "InvalidRecord"
_RESULTS_PER_STEP: Final = 250


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


# The answer if no record was delivered or kept: that of the first row whose code any record has.
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

_encode: Final = msgspec.json.Encoder().encode


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
    # By outcome: that of a Kinesis record belongs to all of its records.
    texts: dict[Any, msgspec.Raw] = {}
    count = len(deliveries)
    for outcome in dict.fromkeys(deliveries.outcomes):
        sequence_number, shard_id = outcome.sequence_number, outcome.shard_id
        if sequence_number is None or shard_id is None or outcome.moved is not None:
            return None
        if count == 1:
            return one_delivered(sequence_number, shard_id)
        texts[outcome] = msgspec.Raw(_encode(RecordAnswer(sequence_number, shard_id)))
    records: Any = [texts[outcome] for outcome in deliveries.outcomes]
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
        Refused: no record was delivered, and none is kept.
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
    detail = f"none of the {len(results)} records was delivered; the first ended with {first.error_code}"
    return Refused(refusal, detail, extensions={"records": answers})


def _rejected(problems: Sequence[RecordProblem]) -> list[RejectedRecord] | None:
    return [RejectedRecord(each.index, each.field, each.detail) for each in problems] or None
