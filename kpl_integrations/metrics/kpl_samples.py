"""From facts to values of the KPL's metrics; pure.

A fact speaks of a Kinesis record or a request, so what the KPL notes for each user record is noted here for all
of them at once: sums and counts are the same, minimum and maximum are those of the records' means. `BufferingTime`
is the wait of a request's oldest user record, one sample for each request.
"""

from typing import Final, Protocol

from kpl_core.hooks import Fact, RecordsFinished, RequestCompleted
from kpl_core.records.record_result import EXPIRED

__all__ = ["AddKplSample", "add_kpl_samples"]

_MILLISECONDS: Final = 1_000


class AddKplSample(Protocol):
    """Who sums up."""

    def __call__(self, name: str, stream: str, shard: str, total: float, number: int = 1, code: str = "") -> None:
        """Add `number` values that sum to `total`, of a stream's metric; shard and code are "" where there is none."""


def add_kpl_samples(fact: Fact, add: AddKplSample) -> None:
    """Add what a fact says."""
    match fact:
        case RecordsFinished(outcome="delivered" | "failed"):
            _records(fact, add)
        case RequestCompleted():
            _request(fact, add)
        case _:
            # What is kept comes back; maps, rates and breakers are no metrics of the KPL's.
            return


def _request(fact: RequestCompleted, add: AddKplSample) -> None:
    stream = fact.stream
    add("RequestTime", stream, "", (fact.ended_at - fact.started_at) * _MILLISECONDS)
    add("BufferingTime", stream, "", fact.queue_wait * _MILLISECONDS)
    add("KinesisRecordsPerPutRecordsRequest", stream, "", fact.kinesis_records)
    add("UserRecordsPerPutRecordsRequest", stream, "", fact.user_records)
    for (shard, code), count in fact.errors_by_shard.items():
        add("KinesisRecordsPut", stream, shard, 0, count)
        add("AllErrors", stream, shard, count, count)
        add("ErrorsByCode", stream, shard, count, count, code)


def _records(fact: RecordsFinished, add: AddKplSample) -> None:
    stream, shard, count = fact.stream, fact.shard_id or "", fact.user_records
    is_delivered = fact.outcome == "delivered"
    add("UserRecordsPut", stream, shard, count if is_delivered else 0, count)
    add("RetriesPerRecord", stream, shard, max(0, fact.attempts - 1) * count, count)
    if fact.reason == EXPIRED:
        add("UserRecordExpired", stream, shard, count, count)
    if is_delivered:
        add("UserRecordsDataPut", stream, shard, fact.user_bytes, count)
        if fact.kinesis_bytes:
            add("KinesisRecordsPut", stream, shard, 1)
            add("KinesisRecordsDataPut", stream, shard, fact.kinesis_bytes)
            add("AllErrors", stream, shard, 0)
            add("UserRecordsPerKinesisRecord", stream, shard, count)
