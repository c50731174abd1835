"""A consumer with the rule of the KCL, and what it reads of a stream.

The KCL de-aggregates a record and drops the whole aggregate if any user record in it hashes
outside the shard it was read from (`AggregatorUtil.deaggregate`). Single records are always kept.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import md5

from kpl_core import UserRecord, decode
from kpl_core.testing import FakeKinesis

# Of a user record: its partition key and its data.
Identity = tuple[str, bytes]


@dataclass
class Reading:
    """What a consumer found in a stream."""

    # How often each user record was returned.
    kept: Counter[Identity] = field(default_factory=Counter)
    # User records in dropped aggregated records.
    dropped: Counter[Identity] = field(default_factory=Counter)
    # For each aggregated record, the hash keys of its user records.
    aggregates: list[list[int]] = field(default_factory=list)

    @property
    def duplicates(self) -> int:
        return self.kept.total() - len(self.kept)


def read_stream(fake: FakeKinesis, stream: str, *, now: float) -> Reading:
    """Read everything, including closed shards."""
    ranges = {
        shard.shard_id: (shard.starting_hash_key, shard.ending_hash_key)
        for shard in fake.list_shards(stream, now=now).shards
    }
    reading = Reading()
    for stored in fake.records(stream):
        user_records = decode(stored.data)
        if user_records is None:
            reading.kept[stored.partition_key, stored.data] += 1
            continue
        hash_keys = [hash_key_of(record) for record in user_records]
        reading.aggregates.append(hash_keys)
        first, last = ranges[stored.shard_id]
        found = reading.kept if all(first <= hash_key <= last for hash_key in hash_keys) else reading.dropped
        found.update(_identities(user_records))
    return reading


def hash_key_of(record: UserRecord) -> int:
    """Return the hash key of a user record, computed by another library than the one under test."""
    if record.explicit_hash_key is not None:
        return int(record.explicit_hash_key)
    return int(md5(record.partition_key.encode(), usedforsecurity=False).hexdigest(), 16)


def _identities(user_records: tuple[UserRecord, ...]) -> Iterator[Identity]:
    for record in user_records:
        yield record.partition_key, bytes(record.data)
