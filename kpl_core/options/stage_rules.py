"""What `Config` means for each stage, in the stage's own terms: seconds, bytes, counts.

A stage gets the numbers it needs, never the configuration.
"""

from typing import Final

import msgspec

from kpl_core.options.config import Config
from kpl_core.options.coordination_options import SHARED_BURST_SECONDS
from kpl_core.options.kinesis_limits import PARTITION_KEY_CHARACTERS

__all__ = [
    "AggregationRules",
    "CollectionRules",
    "ShardRules",
    "aggregation_rules",
    "collection_rules",
    "shard_rules",
]

LONGEST_RUN_SECONDS: Final = 0.025
LONGEST_EXTENSION_SECONDS: Final = 0.05
EXTENSION_SHARE: Final = 0.2
RUN_SHARE: Final = 0.25
PATIENT_SHARE: Final = 0.5
COMPANY_SHARE: Final = 0.5


class AggregationRules(msgspec.Struct, frozen=True, kw_only=True):
    """When an aggregated record closes; times are seconds. No `count_limit`: as many as fit."""

    enabled: bool = True
    size_limit: int
    count_limit: int | None
    buffered_seconds: float
    ttl_seconds: float
    # The partition key of an aggregated record: the KPL's literal "a", or its first user record's.
    first_partition_key: bool = False
    # Single user records go on so many together, or after so long.
    run_count: int = 1
    run_seconds: float = 0.0
    # With so much of its time left, or less, an open aggregated record goes along with a request that leaves anyway.
    company_seconds: float = 0.0


class ShardRules(msgspec.Struct, frozen=True, kw_only=True):
    """One shard's limits. A rested shard may take `burst_seconds` of its rates at once."""

    records_per_second: float
    bytes_per_second: float
    burst_seconds: float
    adaptive: bool = False
    # Arrival order: one Kinesis record in flight, the next when its result is final.
    in_order: bool = False


class CollectionRules(msgspec.Struct, frozen=True, kw_only=True):
    """When a request is full; `buffered_seconds` is the user records' own patience."""

    count_limit: int
    size_limit: int
    buffered_seconds: float

    @property
    def extension_seconds(self) -> float:
        """Return how long a Kinesis record may wait for company past its deadline."""
        return min(LONGEST_EXTENSION_SECONDS, EXTENSION_SHARE * self.buffered_seconds)


def aggregation_rules(config: Config) -> AggregationRules:
    """Return when an aggregated record closes."""
    # The longest partition key must fit beside the aggregated record, in UTF-8 at its widest.
    room = config.known_max_record_size - 4 * PARTITION_KEY_CHARACTERS
    # Who waits for company until his time to live is over is never sent: half of it is for the way.
    buffered_seconds = min(config.record_max_buffered_time_ms, config.record_ttl_ms * PATIENT_SHARE) / 1000
    # One by one where the next may only go when the last is through, or when it is its flow's turn.
    one_by_one = config.ordering == "per_key" or config.fairness is not None
    return AggregationRules(
        enabled=config.aggregation_enabled and config.aggregation_max_count != 1,
        size_limit=min(config.aggregation_max_size, room),
        count_limit=config.aggregation_max_count,
        buffered_seconds=buffered_seconds,
        ttl_seconds=config.record_ttl_ms / 1000,
        first_partition_key=config.aggregate_partition_key == "first",
        run_count=1 if one_by_one else config.collection_max_count,
        run_seconds=min(LONGEST_RUN_SECONDS, RUN_SHARE * buffered_seconds),
        # In arrival order only one Kinesis record of a shard travels at a time, so it had better be a large one.
        company_seconds=0.0 if config.ordering == "per_key" else COMPANY_SHARE * buffered_seconds,
    )


def shard_rules(config: Config) -> ShardRules:
    """Return one shard's limits; where others share them, what may be used before the first word from them."""
    shared = config.coordination
    part, burst_seconds = 1.0, config.burst_seconds
    if shared is not None and not shared.shadow:
        part, burst_seconds = shared.first_share, min(burst_seconds, SHARED_BURST_SECONDS)
    return ShardRules(
        records_per_second=config.rate_limit_records_per_sec_per_shard * part,
        bytes_per_second=config.rate_limit_bytes_per_sec_per_shard * part,
        burst_seconds=burst_seconds,
        adaptive=config.adaptive_rate,
        in_order=config.ordering == "per_key",
    )


def collection_rules(config: Config) -> CollectionRules:
    """Return when a request is full."""
    return CollectionRules(
        count_limit=config.collection_max_count,
        size_limit=config.collection_max_size,
        buffered_seconds=config.record_max_buffered_time_ms / 1000,
    )
