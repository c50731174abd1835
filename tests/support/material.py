"""What the tests of the core are made of: shard maps, Kinesis records, keys that hash where they should."""

from collections.abc import Sequence
from hashlib import md5
from typing import Any

from hypothesis import strategies as st

from kpl_core.pipeline.shard_map import Shard
from kpl_core.records.aggregated_record import encode
from kpl_core.records.kinesis_record import KinesisRecord
from kpl_core.records.outcome import Outcome, ResultHandle
from kpl_core.records.user_record import UserRecord

HASH_KEYS = 1 << 128
FIRST_SHARD = "shardId-000000000000"

# Every character UTF-8 can carry, one to four bytes wide.
partition_keys = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=256)
explicit_hash_keys = st.integers(0, HASH_KEYS - 1).map(str)
user_records = st.builds(
    UserRecord,
    partition_key=partition_keys | st.sampled_from(["a", "b", "key"]),
    data=st.binary(max_size=300) | st.sampled_from([b"", bytes(1279), bytes(1280), bytes(20_000)]),
    explicit_hash_key=st.none() | explicit_hash_keys | st.sampled_from(["0", "1"]),
)


def shard_id(number: int) -> str:
    return f"shardId-{number:012d}"


def even_shards(count: int, *, first: int = 0) -> list[Shard]:
    """`count` shards that share the hash keys evenly, numbered from `first`."""
    ends = [HASH_KEYS * (position + 1) // count - 1 for position in range(count)]
    starts = [0, *(end + 1 for end in ends)]
    return [
        Shard(shard_id(first + position), starts[position], end_hash_key) for position, end_hash_key in enumerate(ends)
    ]


def split(shards: Sequence[Shard], shard: str) -> list[Shard]:
    """`shards` with one of them replaced by its halves, which have the next two numbers."""
    number = 1 + max(int(each.shard_id.partition("-")[2]) for each in shards)
    (parent,) = (each for each in shards if each.shard_id == shard)
    middle = (parent.starting_hash_key + parent.ending_hash_key) // 2
    return [
        *(each for each in shards if each is not parent),
        Shard(shard_id(number), parent.starting_hash_key, middle),
        Shard(shard_id(number + 1), middle + 1, parent.ending_hash_key),
    ]


def hash_key(partition_key: str) -> int:
    """Kinesis' rule, spelled by another library than the one under test."""
    return int(md5(partition_key.encode(), usedforsecurity=False).hexdigest(), 16)


def digest(hash_key: int) -> bytes:
    return hash_key.to_bytes(16, "big")


def shard_of(shards: Sequence[Shard], hash_key: int) -> str:
    """Where the service stores: asked of each shard in turn."""
    (found,) = (shard.shard_id for shard in shards if shard.starting_hash_key <= hash_key <= shard.ending_hash_key)
    return found


def keys_in(shard: Shard, count: int) -> list[str]:
    """The first `count` of the keys "k0", "k1", ... that hash into a shard."""
    found: list[str] = []
    number = 0
    while len(found) < count:
        if shard.starting_hash_key <= hash_key(f"k{number}") <= shard.ending_hash_key:
            found.append(f"k{number}")
        number += 1
    return found


def kinesis_record(
    *user_records: UserRecord, shard: str | None = FIRST_SHARD, arrivals: Sequence[float] = (), **fields: Any
) -> KinesisRecord:
    """A closed Kinesis record of these user records; by default one of a byte, put at 0.0 and expiring at 30.0."""
    held = user_records or (UserRecord("k", b"x"),)
    first = held[0]
    aggregated = len(held) > 1
    data = encode(held) if aggregated else first.data
    key = "a" if aggregated else first.partition_key
    arrived = tuple(arrivals) or (0.0,) * len(held)
    defaults: dict[str, Any] = {
        "data": data,
        "partition_key": key,
        "explicit_hash_key": first.explicit_hash_key or str(hash_key(first.partition_key)),
        "size_bytes": len(data) + len(key.encode()),
        "aggregated": aggregated,
        "arrivals": arrived,
        "user_bytes": sum(len(record.partition_key.encode()) + len(record.data) for record in held),
        "outcome": Outcome(),
        "predicted_shard": shard,
        "user_explicit_hash_key": None if aggregated else first.explicit_hash_key,
        "deadline": min(arrived) + 0.1,
        "expires_at": min(arrived) + 30.0,
    }
    return KinesisRecord(**{**defaults, **fields})


def sized_record(size_bytes: int, **fields: Any) -> KinesisRecord:
    """A Kinesis record of exactly so many bytes, key included."""
    return kinesis_record(UserRecord("k", bytes(size_bytes - 1)), **fields)


def deliveries_of(record: KinesisRecord) -> list[ResultHandle]:
    return [ResultHandle(record.outcome, index) for index in range(len(record.arrivals))]
