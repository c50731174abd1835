"""A Kinesis record as its consumers see it: the user records in it, or none if it is on the wrong shard.

The Kinesis Client Library drops a whole aggregated record if one of its user records hashes outside
the shard it was read from (`AggregatorUtil.deaggregate`): that user record's own shard would show it
a second time. What claims to be aggregated and cannot be read is passed on as it is.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from kpl_core import MalformedAggregatedRecord, UserRecord, decode
from kpl_core.records.hash_key import hash_key_of
from kpl_integrations.cli.tail.reading_order import ReadableShard

__all__ = ["ReadRecord", "user_records"]


class ReadRecord(NamedTuple):
    """A user record and where it was found. `subsequence` is its index in its aggregated record, None outside one."""

    shard_id: str
    sequence_number: str
    subsequence: int | None
    partition_key: str
    explicit_hash_key: str | None
    arrived_at: datetime
    data: bytes


def user_records(record: Mapping[str, Any], shard: ReadableShard) -> list[ReadRecord] | None:
    """Return the user records in a Record of GetRecords; None if a consumer drops it."""
    shard_id, sequence_number = shard.shard_id, record["SequenceNumber"]
    arrived_at = record["ApproximateArrivalTimestamp"]
    try:
        aggregated = decode(record["Data"])
    except MalformedAggregatedRecord:
        aggregated = None
    if aggregated is None:
        return [ReadRecord(shard_id, sequence_number, None, record["PartitionKey"], None, arrived_at, record["Data"])]
    if not all(shard.first_hash_key <= _hash_key(user_record) <= shard.last_hash_key for user_record in aggregated):
        return None
    return [
        ReadRecord(
            shard_id,
            sequence_number,
            index,
            user_record.partition_key,
            user_record.explicit_hash_key,
            arrived_at,
            user_record.data,
        )
        for index, user_record in enumerate(aggregated)
    ]


def _hash_key(record: UserRecord) -> int:
    if record.explicit_hash_key is None:
        return hash_key_of(record.partition_key)
    return int(record.explicit_hash_key)
