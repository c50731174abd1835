"""How much the fake service takes, and how long its changes of a stream last."""

from dataclasses import dataclass, replace
from typing import Self

from kpl_core.options.kinesis_limits import (
    BYTES_PER_SECOND_PER_SHARD,
    DEFAULT_MAX_RECORD_BYTES,
    MAX_RECORD_BYTES,
    RECORDS_PER_REQUEST,
    RECORDS_PER_SECOND_PER_SHARD,
    REQUEST_BYTES,
)

__all__ = ["ServiceDurations", "ServiceLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """The quotas the fake service enforces; the defaults are those of the service (AWS, "Quotas and limits").

    A shard's bucket holds `burst_seconds` of its rates and starts full. Records older than
    `retention_seconds` are trimmed, which also bounds the memory of a long run.
    """

    records_per_second_per_shard: float = RECORDS_PER_SECOND_PER_SHARD
    bytes_per_second_per_shard: float = BYTES_PER_SECOND_PER_SHARD
    burst_seconds: float = 1.0
    records_per_request: int = RECORDS_PER_REQUEST
    request_bytes: int = REQUEST_BYTES
    default_max_record_bytes: int = DEFAULT_MAX_RECORD_BYTES
    max_record_bytes: int = MAX_RECORD_BYTES
    shards_per_account: int = 20_000
    retention_seconds: float = 86_400.0

    def scaled(self, factor: float) -> Self:
        """Return the same limits with the per-shard rates multiplied by `factor`."""
        return replace(
            self,
            records_per_second_per_shard=self.records_per_second_per_shard * factor,
            bytes_per_second_per_shard=self.bytes_per_second_per_shard * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceDurations:
    """Seconds a stream stays CREATING, UPDATING (a reshard takes effect at its end) or DELETING."""

    creating_seconds: float = 0.0
    updating_seconds: float = 0.0
    deleting_seconds: float = 0.0
