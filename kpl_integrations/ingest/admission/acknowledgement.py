"""What an answer says of what was accepted: never more than happened.

queued: the records are in memory. spooled: the spool has committed them. delivered: Kinesis has answered for
each, and the answer says what, record by record and in the request's order.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from kpl_core import Delivery, NotSpooled, Producer, RecordResult
from kpl_core.records.record_result import BREAKER_OPEN, EXPIRED, NOT_SPOOLED, RATE_LIMITED, SHUTDOWN, UNKNOWN, Place
from kpl_integrations.ingest.admission.admission import Refusal, Refused
from kpl_integrations.ingest.decoding import RecordProblem
from kpl_integrations.ingest.tenants import Ack

__all__ = ["NOTHING_DELIVERED", "RecordAnswer", "RequestAnswer", "answer_delivered", "answer_queued", "answer_spooled"]

INVALID_RECORD: Final = "InvalidRecord"


class RecordAnswer(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What became of one record: a sequence number and its shard, or why it has none."""

    sequence_number: str | None = None
    shard_id: str | None = None
    error_code: str | None = None
    error_message: str | None = None
    # Not delivered, but safe: "spooled" (it will be delivered later) or "dead_lettered".
    kept: str | None = None


class RejectedRecord(msgspec.Struct, frozen=True, gc=False):
    """A record of a `partial` request that was not accepted."""

    index: int
    field: str
    detail: str


class RequestAnswer(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The body of a 200 or 202."""

    ack: Ack
    accepted: int
    delivered: int | None = None
    failed: int | None = None
    # How many of `failed` the gateway holds on to: whoever sends those again sends them twice.
    kept: int | None = None
    records: list[RecordAnswer] | None = None
    rejected: list[RejectedRecord] | None = None


class Acknowledged(NamedTuple):
    """Status and body of the answer."""

    status: int
    body: bytes


# If nothing at all was delivered or kept: the code that decides the answer, the first row that any record has.
NOTHING_DELIVERED: Final[tuple[tuple[str, Refusal], ...]] = (
    (SHUTDOWN, Refusal.DRAINING),
    # Sent, and not answered when the gateway ended: sent again, it may arrive twice, which is better than not at all.
    (UNKNOWN, Refusal.DRAINING),
    (BREAKER_OPEN, Refusal.BREAKER_OPEN),
    (NOT_SPOOLED, Refusal.NOT_SPOOLED),
    (RATE_LIMITED, Refusal.NO_ROOM),
    (EXPIRED, Refusal.EXPIRED),
)

_KEPT: Final[Mapping[Place, str]] = {
    "spooled": "not delivered yet, but in the spool: the gateway delivers it later, so do not send it again",
    "dead_lettered": "in the gateway's dead letters, from where its operator can send it: ask before you send it again",
}

_encode: Final = msgspec.json.Encoder().encode


def answer_queued(accepted: int, problems: Sequence[RecordProblem], ack: Ack = "queued") -> Acknowledged:
    """Say that the records were accepted."""
    if problems:
        return Acknowledged(202, _encode(RequestAnswer(ack=ack, accepted=accepted, rejected=_rejected(problems))))
    return _all_accepted(accepted, ack)


@lru_cache(maxsize=256)
def _all_accepted(accepted: int, ack: Ack) -> Acknowledged:
    return Acknowledged(202, _encode(RequestAnswer(ack=ack, accepted=accepted)))


async def answer_spooled(
    producer: Producer, deliveries: Sequence[Delivery], problems: Sequence[RecordProblem]
) -> Acknowledged:
    """Wait for the spool's commit.

    Raises:
        Refused: the spool did not take them.
    """
    try:
        await producer.acknowledged(deliveries)
    except NotSpooled as error:
        detail = f"the spool did not take all of the request: {error}; those it took are delivered all the same"
        raise Refused(Refusal.NOT_SPOOLED, detail) from error
    return answer_queued(len(deliveries), problems, "spooled")


async def answer_delivered(
    deliveries: Sequence[Delivery], problems: Sequence[RecordProblem], positions: Sequence[int]
) -> Acknowledged:
    """Wait until each record has its final result.

    Raises:
        Refused: none was delivered, none is kept.
    """
    results = [await delivery for delivery in deliveries]
    answers = [_record_answer(result) for result in results]
    delivered = sum(result.successful for result in results)
    if not delivered and all(result.kept is None for result in results):
        raise _nothing_delivered(results, answers)
    if problems:
        answers = _in_request_order(answers, positions, problems)
    body = RequestAnswer(
        ack="delivered",
        accepted=len(deliveries),
        delivered=delivered,
        failed=len(results) - delivered,
        kept=sum(result.kept is not None for result in results) or None,
        records=answers,
        rejected=_rejected(problems),
    )
    return Acknowledged(200, _encode(body))


def _record_answer(result: RecordResult) -> RecordAnswer:
    if result.successful:
        return RecordAnswer(result.sequence_number, result.shard_id)
    said = result.error_message
    if result.kept is not None:
        said = f"{said}; {_KEPT[result.kept]}" if said else _KEPT[result.kept]
    return RecordAnswer(None, result.shard_id, result.error_code or "Unknown", said, result.kept)


def _in_request_order(
    answers: Sequence[RecordAnswer], positions: Sequence[int], problems: Sequence[RecordProblem]
) -> list[RecordAnswer]:
    """Return an answer for every record of the request, those that were not accepted among them."""
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
