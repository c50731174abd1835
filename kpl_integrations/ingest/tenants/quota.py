"""A tenant's own rate: a token bucket of records and bytes, and what the RateLimit header fields say of it.

Fields as in draft-ietf-httpapi-ratelimit-headers (2025): the policy's quota `q` in a window `w`, what
remains of it `r`, and `t`, after how many seconds it helps to ask again. A bucket has no window of its
own; `burst_seconds` is the window whose quota it holds.
"""

import math
from typing import NamedTuple

from kpl_core.token_bucket import TokenBucket
from kpl_integrations.ingest.tenants.tenant import Tenant

__all__ = ["QuotaState", "TenantQuota"]


class QuotaState(NamedTuple):
    """One of a tenant's quotas, in the words of the RateLimit header fields.

    `name` is "records" or "bytes" (whose unit is content-bytes); `limit` is q, `window_seconds` w,
    `remaining` r and `reset_seconds` t: whole seconds after which the request asked about fits.
    """

    name: str
    limit: int
    window_seconds: int
    remaining: int
    reset_seconds: int


class TenantQuota:
    """Meters one tenant. Pure: seconds come in as `now`, and never go back. Without rates it takes all.

    A request larger than the whole burst passes when the quota is full, and leaves it in debt: else it
    could never pass at all.
    """

    __slots__ = ("_bucket", "_metered", "_window_seconds")

    def __init__(self, tenant: Tenant) -> None:
        rates = (("records", tenant.records_per_second), ("bytes", tenant.bytes_per_second))
        self._metered = tuple((name, rate) for name, rate in rates if rate is not None)
        self._window_seconds = max(1, math.ceil(tenant.burst_seconds))
        burst = tenant.burst_seconds
        # At least one record: a capacity below the cost of the smallest request would be debt for ever.
        self._bucket = (
            TokenBucket([(rate, max(1.0, rate * burst)) for _, rate in self._metered], now=-math.inf)
            if self._metered
            else None
        )

    def try_take(self, records: int, size_bytes: int, now: float) -> float | None:
        """Take a request's records and bytes, all or nothing; return None, or the seconds until it fits."""
        bucket = self._bucket
        if bucket is None:
            return None
        costs = self._costs(records, size_bytes)
        if bucket.try_take(costs, now):
            return None
        return max(0.0, bucket.ready_at(costs, now) - now)

    def states(self, records: int, size_bytes: int, now: float) -> tuple[QuotaState, ...]:
        """Return each quota as it stands, `reset_seconds` being for a request of such a size."""
        bucket = self._bucket
        if bucket is None:
            return ()
        ready_at = bucket.ready_at(self._costs(records, size_bytes), now)
        wait = max(0, math.ceil(ready_at - now))
        return tuple(
            QuotaState(name, max(1, int(rate * self._window_seconds)), self._window_seconds, max(0, int(tokens)), wait)
            for (name, rate), tokens in zip(self._metered, bucket.tokens(now), strict=True)
        )

    def _costs(self, records: int, size_bytes: int) -> tuple[float, ...]:
        return tuple(records if name == "records" else size_bytes for name, _ in self._metered)
