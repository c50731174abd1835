"""A tenant's own rate: a token bucket of records and bytes, and what the RateLimit header fields say of it.

Fields as in draft-ietf-httpapi-ratelimit-headers (2025): the policy's quota `q` in a window `w`, what
remains of it `r`, and `t`, after how many seconds it helps to ask again. A bucket has no window of its
own; `burst_seconds` is the window whose quota it holds.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from kpl_core.pipeline.token_bucket import TokenBucket
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

    Where several processes share a tenant's rates each has a part of them, `set_rates`, and the same part of the
    burst. `offered` are records and bytes that came, whether they were taken or not: by that the parts are found.
    """

    __slots__ = ("_bucket", "_burst_seconds", "_metered", "_rates", "_window_seconds", "offered", "woken")

    def __init__(self, tenant: Tenant) -> None:
        rates = (("records", tenant.records_per_second), ("bytes", tenant.bytes_per_second))
        self._metered = tuple((name, rate) for name, rate in rates if rate is not None)
        self._rates = tuple(rate for _, rate in self._metered)
        self._window_seconds = max(1, math.ceil(tenant.burst_seconds))
        self._burst_seconds = tenant.burst_seconds
        self.offered = (0.0, 0.0)
        # Called once, before the next offer counts, if anybody wants to know.
        self.woken: Callable[[], object] | None = None
        self._bucket = (
            TokenBucket([(rate, self._capacity(rate)) for rate in self._rates], now=-math.inf)
            if self._metered
            else None
        )

    def _capacity(self, rate: float) -> float:
        # At least one record: a capacity below the cost of the smallest request would be debt for ever.
        return max(1.0, rate * self._burst_seconds)

    def set_rates(self, records_per_second: float, bytes_per_second: float, now: float) -> None:
        """Let this process take so much a second from now on; a rate the tenant has no bound for is passed over."""
        if self._bucket is None:
            return
        given = {"records": records_per_second, "bytes": bytes_per_second}
        rates = tuple(given[name] for name, _ in self._metered)
        for index, (rate, before) in enumerate(zip(rates, self._rates, strict=True)):
            if rate != before:
                self._bucket.set_rate(index, rate, now, capacity=self._capacity(rate))
        self._rates = rates

    def offer(self, records: int, size_bytes: int) -> None:
        """Take note of what came, before it is decided on."""
        if self.woken is not None:
            woken, self.woken = self.woken, None
            woken()
        first, second = self.offered
        self.offered = (first + records, second + size_bytes)

    def seconds_for(self, records: int, size_bytes: int) -> float:
        """Return for how long so much uses up the rates."""
        return max(
            (cost / rate for cost, rate in zip(self._costs(records, size_bytes), self._rates, strict=True)), default=0.0
        )

    def seconds_left(self, now: float) -> float:
        """Return for how long what remains would last at the rates; nothing bounds it: for ever."""
        states = self.states(0, 0, now)
        return min((state.remaining / rate for state, rate in zip(states, self._rates, strict=True)), default=math.inf)

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
