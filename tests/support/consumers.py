"""Consumers of a `FakeKinesis` stream: some take everything, some drop what a KCL drops, or single user records.

The KCL de-aggregates a record and drops the whole aggregate if any user record in it hashes
outside the shard it was read from (`AggregatorUtil.deaggregate`). Single records are always kept.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from kpl_core import UserRecord, decode
from kpl_core.options.config import Consumer
from kpl_core.testing import FakeKinesis, StoredRecord
from tests.support.material import hash_key

# Of a user record: its partition key and its data.
Identity = tuple[str, bytes]


class Read(NamedTuple):
    """One user record as a consumer got it; those of one aggregate share the sequence number."""

    shard_id: str
    sequence_number: str
    partition_key: str
    data: bytes


@dataclass
class Reading:
    """What a KCL found in a stream."""

    # How often each user record was returned.
    kept: Counter[Identity] = field(default_factory=Counter)
    # User records in dropped aggregated records.
    dropped: Counter[Identity] = field(default_factory=Counter)
    # For each aggregated record, the hash keys of its user records.
    aggregates: list[list[int]] = field(default_factory=list)

    @property
    def duplicates(self) -> int:
        return self.kept.total() - len(self.kept)


def user_records(kinesis: FakeKinesis, stream: str = "logs") -> list[UserRecord]:
    """Return all user records of a stream, also of closed shards."""
    return [record for stored in kinesis.records(stream) for record in _user_records_in(stored)]


def log_records(kinesis: FakeKinesis, stream: str = "logs") -> list[dict[str, Any]]:
    """Return the log records of a stream, parsed."""
    return [json.loads(record.data) for record in user_records(kinesis, stream)]


def read_everything(kinesis: FakeKinesis, stream: str) -> list[Read]:
    """Return what a Lambda function or Firehose gets: they do not look at ranges."""
    return [read for stored in kinesis.records(stream) for read in _reads_of(stored)]


def read_as_kcl(kinesis: FakeKinesis, stream: str, *, now: float) -> list[Read]:
    """Return what a KCL hands to its processor."""
    kept_by_kcl = (stored for stored, is_kept in _judged(kinesis, stream, now=now) if is_kept)
    return [read for stored in kept_by_kcl for read in _reads_of(stored)]


def read_as(consumer: Consumer, kinesis: FakeKinesis, stream: str, *, now: float) -> list[Read]:
    """Return what a consumer of a kind of `Config.consumer` hands to its processor."""
    if consumer == "kcl":
        return read_as_kcl(kinesis, stream, now=now)
    if consumer == "range_blind":
        return read_everything(kinesis, stream)
    ranges = _ranges(kinesis, stream, now=now)
    return [
        read
        for stored in kinesis.records(stream)
        for read, record in zip(_reads_of(stored), _user_records_in(stored), strict=True)
        if ranges[stored.shard_id][0] <= hash_key_of(record) <= ranges[stored.shard_id][1]
    ]


def read_stream(kinesis: FakeKinesis, stream: str, *, now: float) -> Reading:
    """Count what a KCL keeps, what it drops, and what each aggregated record holds."""
    reading = Reading()
    for stored, is_kept in _judged(kinesis, stream, now=now):
        found = reading.kept if is_kept else reading.dropped
        found.update((record.partition_key, bytes(record.data)) for record in _user_records_in(stored))
        if (inside := _decoded(stored.data)) is not None:
            reading.aggregates.append([hash_key_of(record) for record in inside])
    return reading


def hash_key_of(record: UserRecord) -> int:
    """Return the hash key of a user record, computed by another library than the one under test."""
    return hash_key(record.partition_key) if record.explicit_hash_key is None else int(record.explicit_hash_key)


def _judged(kinesis: FakeKinesis, stream: str, *, now: float) -> Iterator[tuple[StoredRecord, bool]]:
    """Yield each Kinesis record, and whether a KCL keeps it."""
    ranges = _ranges(kinesis, stream, now=now)
    for stored in kinesis.records(stream):
        first, last = ranges[stored.shard_id]
        yield stored, all(first <= hash_key_of(record) <= last for record in _decoded(stored.data) or ())


def _ranges(kinesis: FakeKinesis, stream: str, *, now: float) -> dict[str, tuple[int, int]]:
    """Return the first and the last hash key of each shard."""
    shards = kinesis.list_shards(stream, now=now).shards
    return {shard.shard_id: (shard.starting_hash_key, shard.ending_hash_key) for shard in shards}


# A consumer's answers about one stream decode its records several times.
_decoded = lru_cache(maxsize=1_024)(decode)


def _user_records_in(stored: StoredRecord) -> tuple[UserRecord, ...]:
    inside = _decoded(stored.data)
    return (UserRecord(stored.partition_key, stored.data),) if inside is None else tuple(inside)


def _reads_of(stored: StoredRecord) -> list[Read]:
    shard_id, number = stored.shard_id, stored.sequence_number
    return [Read(shard_id, number, record.partition_key, bytes(record.data)) for record in _user_records_in(stored)]
