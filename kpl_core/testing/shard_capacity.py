"""One shard's write capacity as the service meters it.

Written apart from `kpl_core.pipeline.token_bucket` on purpose: the producer's bucket and the service's
judge one another in the tests, so they share no code. This one counts tokens; a record above
the burst passes when the byte bucket is full and leaves it in debt, so that records up to 10 MiB
move at the shard's average rate (AWS, "Large records").
"""

from typing import Final

from kpl_core.testing.service_limits import ServiceLimits

__all__ = ["ShardCapacity"]

# Tokens are floats: a record that is due exactly now may find a billionth too little.
_TOLERANCE: Final = 1e-6


class ShardCapacity:
    """Two buckets, records and bytes, taken together or not at all; they start full.

    Over any `t` seconds it admits at most `burst + rate * t` records, and as many bytes plus at
    most one record larger than the burst.
    """

    __slots__ = ("_byte_burst", "_byte_rate", "_bytes", "_record_burst", "_record_rate", "_records", "_updated_at")

    def __init__(self, limits: ServiceLimits) -> None:
        self._record_rate = limits.records_per_second_per_shard
        self._byte_rate = limits.bytes_per_second_per_shard
        self._record_burst = limits.records_per_second_per_shard * limits.burst_seconds
        self._byte_burst = limits.bytes_per_second_per_shard * limits.burst_seconds
        self._records = self._record_burst
        self._bytes = self._byte_burst
        self._updated_at: float | None = None

    def take(self, size_bytes: int, now: float) -> bool:
        """Take one record of `size_bytes` (key and data) at `now` seconds; False: throttled, nothing taken."""
        updated_at = self._updated_at
        if updated_at is None:
            self._updated_at = now
        elif now > updated_at:
            elapsed = now - updated_at
            self._records = min(self._record_burst, self._records + elapsed * self._record_rate)
            self._bytes = min(self._byte_burst, self._bytes + elapsed * self._byte_rate)
            self._updated_at = now
        free_bytes = self._bytes + _TOLERANCE
        if self._records + _TOLERANCE < 1.0:
            return False
        if size_bytes > free_bytes and not size_bytes > self._byte_burst <= free_bytes:
            return False
        self._records -= 1.0
        self._bytes -= size_bytes
        return True
