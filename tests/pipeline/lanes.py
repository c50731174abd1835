"""An aggregator and ways to put into it, as the pipeline does."""

from kpl_core.options.stage_rules import AggregationRules
from kpl_core.pipeline.aggregator import Aggregator
from kpl_core.pipeline.ledger import Generations
from kpl_core.records.kinesis_record import DetachedUserRecord, KinesisRecord
from kpl_core.records.outcome import Outcome, ResultHandle
from kpl_core.records.user_record import UserRecord
from tests.support.material import FIRST_SHARD, digest, hash_key


def aggregator(**rules) -> Aggregator:
    defaults = {"size_limit": 51_200, "count_limit": None, "buffered_seconds": 0.1, "ttl_seconds": 30.0}
    return Aggregator(AggregationRules(**{**defaults, **rules}), Generations())


def put(stage: Aggregator, record: UserRecord, *, now: float = 0.0, shard: str | None = FIRST_SHARD) -> ResultHandle:
    lane = stage.lane(shard, record.tier)
    key = record.partition_key.encode()
    explicit = record.explicit_hash_key
    value = hash_key(record.partition_key) if explicit is None else int(explicit)
    entry, user_bytes = lane.entry(key, digest(value)), len(key) + len(record.data)
    if explicit is None:
        return lane.add(record.partition_key, entry, record.data, user_bytes, now)
    return lane.add_any(record.partition_key, entry, record.data, user_bytes, now, explicit_hash_key=explicit)


def move(
    stage: Aggregator, record: UserRecord, *, arrived_at: float, deadline: float, generation: int = 0
) -> ResultHandle:
    detached = DetachedUserRecord(record, arrived_at, generation, record.tier, Outcome(), 0, None)
    lane = stage.lane(FIRST_SHARD, record.tier)
    key = record.partition_key.encode()
    return lane.add_any(
        record.partition_key,
        lane.entry(key, digest(hash_key(record.partition_key))),
        record.data,
        len(key) + len(record.data),
        arrived_at,
        explicit_hash_key=record.explicit_hash_key,
        detached=detached,
        deadline=deadline,
    )


def contents(record: KinesisRecord) -> list[UserRecord]:
    return list(record.user_records())


def plain(size: int, key: str = "k") -> UserRecord:
    return UserRecord(key, bytes(size))
