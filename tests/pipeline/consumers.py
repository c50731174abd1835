"""Consumers of a `FakeKinesis` stream: one that takes everything, and one that drops what a KCL drops."""

from typing import NamedTuple

from kpl_core.records.aggregated_record import decode
from kpl_core.records.user_record import UserRecord
from kpl_core.testing import FakeKinesis
from tests.pipeline.material import hash_key

__all__ = ["Read", "read_as_kcl", "read_everything"]


class Read(NamedTuple):
    """One user record as a consumer got it; those of one aggregate share the sequence number."""

    shard_id: str
    sequence_number: str
    partition_key: str
    data: bytes


def read_everything(kinesis: FakeKinesis, stream: str) -> list[Read]:
    """What a Lambda function or Firehose gets: they do not look at ranges."""
    return [
        Read(stored.shard_id, stored.sequence_number, held.partition_key, held.data)
        for stored in kinesis.records(stream)
        for held in decode(stored.data) or [UserRecord(stored.partition_key, stored.data)]
    ]


def read_as_kcl(kinesis: FakeKinesis, stream: str, *, now: float) -> list[Read]:
    """What a KCL hands to its processor (AggregatorUtil.deaggregate).

    One user record outside the range of the shard it was read from, and the whole aggregate is gone.
    """
    ranges = {
        shard.shard_id: (shard.starting_hash_key, shard.ending_hash_key)
        for shard in kinesis.list_shards(stream, now=now).shards
    }
    read: list[Read] = []
    for stored in kinesis.records(stream):
        start, end = ranges[stored.shard_id]
        held = decode(stored.data)
        if held is not None and not all(start <= _hash_key(each) <= end for each in held):
            continue
        read += [
            Read(stored.shard_id, stored.sequence_number, each.partition_key, each.data)
            for each in held or [UserRecord(stored.partition_key, stored.data)]
        ]
    return read


def _hash_key(record: UserRecord) -> int:
    return hash_key(record.partition_key) if record.explicit_hash_key is None else int(record.explicit_hash_key)
