"""From facts to values of the KPL's metrics; pure.

A fact speaks of a Kinesis record or a request, so what the KPL notes for each user record is noted here for all
of them at once: sums and counts are the same, minimum and maximum are those of the records' means. `BufferingTime`
is the wait of a request's oldest user record, one sample for each request.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kpl_core.hooks import Fact, RecordsFinished, RequestCompleted
from kpl_core.record_result import EXPIRED

__all__ = ["KplSample", "kpl_samples"]

_MILLISECONDS = 1_000


class KplSample(NamedTuple):
    """`number` values that sum to `total`, of a metric of a stream, a shard ("": of none), and a code ("": none)."""

    name: str
    stream: str
    shard: str
    total: float
    number: int = 1
    code: str = ""


def kpl_samples(fact: Fact) -> Iterator[KplSample]:
    """Yield what a fact adds."""
    match fact:
        case RequestCompleted():
            yield from _request(fact)
        case RecordsFinished(outcome="delivered" | "failed"):
            yield from _records(fact)
        case _:
            # What is kept comes back; maps, rates and breakers are no metrics of the KPL's.
            return


def _request(fact: RequestCompleted) -> Iterator[KplSample]:
    stream = fact.stream
    yield KplSample("RequestTime", stream, "", (fact.ended_at - fact.started_at) * _MILLISECONDS)
    yield KplSample("BufferingTime", stream, "", fact.queue_wait * _MILLISECONDS)
    yield KplSample("KinesisRecordsPerPutRecordsRequest", stream, "", fact.kinesis_records)
    yield KplSample("UserRecordsPerPutRecordsRequest", stream, "", fact.user_records)
    for (shard, code), count in fact.errors_by_shard.items():
        yield KplSample("KinesisRecordsPut", stream, shard, 0, count)
        yield KplSample("AllErrors", stream, shard, count, count)
        yield KplSample("ErrorsByCode", stream, shard, count, count, code)


def _records(fact: RecordsFinished) -> Iterator[KplSample]:
    stream, shard, count = fact.stream, fact.shard_id or "", fact.user_records
    is_delivered = fact.outcome == "delivered"
    yield KplSample("UserRecordsPut", stream, shard, count if is_delivered else 0, count)
    yield KplSample("RetriesPerRecord", stream, shard, max(0, fact.attempts - 1) * count, count)
    if fact.reason == EXPIRED:
        yield KplSample("UserRecordExpired", stream, shard, count, count)
    if is_delivered:
        yield KplSample("UserRecordsDataPut", stream, shard, fact.user_bytes, count)
        if fact.kinesis_bytes:
            yield KplSample("KinesisRecordsPut", stream, shard, 1)
            yield KplSample("KinesisRecordsDataPut", stream, shard, fact.kinesis_bytes)
            yield KplSample("AllErrors", stream, shard, 0)
            yield KplSample("UserRecordsPerKinesisRecord", stream, shard, count)
