"""The options of `Config` as rules for each stage of the pipeline, in seconds, bytes and counts.

A stage gets only the numbers that it needs, never the whole configuration.
"""

from typing import Final

import msgspec

from kpl_core.options.config import Config
from kpl_core.options.coordination_options import SHARED_BURST_SECONDS
from kpl_core.options.kinesis_limits import PARTITION_KEY_CHARACTERS

LONGEST_RUN_SECONDS: Final = 0.025
LONGEST_EXTENSION_SECONDS: Final = 0.05
EXTENSION_SHARE: Final = 0.1
RUN_SHARE: Final = 0.25
PATIENT_SHARE: Final = 0.5
COMPANY_SHARE: Final = 0.5


class AggregationRules(msgspec.Struct, frozen=True, kw_only=True):
    """When an aggregated record closes. Without a `count_limit` it takes as many user records as fit."""

    enabled: bool = True
    size_limit: int
    count_limit: int | None
    buffered_seconds: float
    ttl_seconds: float
    # The partition key of an aggregated record: the KPL's literal "a", or its first user record's.
    first_partition_key: bool = False
    # User records that are sent singly leave the stage in runs of this many, or after this time.
    run_count: int = 1
    run_seconds: float = 0.0
    # An open aggregated record with at most this much of its time left joins the next outgoing request.
    company_seconds: float = 0.0

    @property
    def any_count(self) -> bool:
        """Return True if an aggregated record takes as many user records as fit."""
        return self.enabled and self.count_limit is None


class ShardRules(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one shard. An idle shard accepts `burst_seconds` of its rates at once."""

    records_per_second: float
    bytes_per_second: float
    burst_seconds: float
    adaptive: bool = False
    # Keep the order of arrival: one Kinesis record in flight, and the next when its result is final.
    in_order: bool = False


class CollectionRules(msgspec.Struct, frozen=True, kw_only=True):
    """When a request is full. `buffered_seconds` is how long a user record may wait in the buffer."""

    count_limit: int
    size_limit: int
    buffered_seconds: float

    @property
    def extension_seconds(self) -> float:
        """Return how long a Kinesis record may wait past its deadline for others to share its request."""
        return min(LONGEST_EXTENSION_SECONDS, EXTENSION_SHARE * self.buffered_seconds)


def aggregation_rules(config: Config) -> AggregationRules:
    """Return when an aggregated record closes."""
    # Leave room for the longest partition key, at four bytes of UTF-8 for each character.
    room = config.known_max_record_size - 4 * PARTITION_KEY_CHARACTERS
    # A record that waits in the buffer until its TTL ends is never sent, so half of the TTL is left for sending.
    buffered_seconds = min(config.record_max_buffered_time_ms, config.record_ttl_ms * PATIENT_SHARE) / 1000
    # No runs if a record must wait for the result of the one before, or for the turn of its flow.
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
        # With ordering "per_key" a shard has only one Kinesis record in flight, so a large one is better.
        company_seconds=0.0 if config.ordering == "per_key" else COMPANY_SHARE * buffered_seconds,
    )


def shard_rules(config: Config) -> ShardRules:
    """Return one shard's limits. With coordination, they are the share to use before the first sync."""
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
