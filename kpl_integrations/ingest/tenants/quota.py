"""A tenant's rates: a token bucket of records and bytes, and its state for the RateLimit header fields.

Terms as in draft-ietf-httpapi-ratelimit-headers (2025): the quota `q` in a window `w`, the remaining quota `r`,
and `t`, the seconds until more is available. A bucket has no window; `burst_seconds` is used as the window.
"""

import math
from collections.abc import Callable
from typing import Final, NamedTuple

from kpl_core.pipeline.token_bucket import TokenBucket
from kpl_integrations.ingest.tenants.tenant import Tenant

_MOST_DEBT_SECONDS: Final = 60.0
_NEARLY_FULL: Final = 0.25
# Retry-After has whole seconds, so a client that waits for it comes back after a second at the earliest.
_KEPT_SECONDS: Final = 1.0


class QuotaState(NamedTuple):
    """One of a tenant's quotas, in the terms of the RateLimit header fields.

    `name` is "records" or "bytes" (unit content-bytes). `limit` is q, `window_seconds` w, `remaining` r.
    `ready_in` becomes t: the seconds after which the given request fits.
    """

    name: str
    limit: int
    window_seconds: int
    remaining: int
    ready_in: float


class TenantQuota:
    """Limit one tenant's rate. Pure: `now` is in seconds and monotonic. Without rates it accepts everything.

    A request larger than the whole burst passes when the quota is full and leaves it in debt. Otherwise it could
    never pass.

    If several processes share a tenant's rates, each gets a part of them by `set_rates`, and the same part of the
    burst. `offered` counts the records and bytes of all requests, accepted or not; the parts follow from it.
    `claimable_part` is the part that this process gets soon if it needs more: waits are planned with that, because
    until then its own part may be a thousandth.
    """

    __slots__ = ("_bucket", "_burst_seconds", "_keeps_all", "_kept_until", "_metered", "_planned", "_rates",
                 "_saved_seconds", "_window_seconds", "claimable_part", "offered", "slowdown", "woken")  # fmt: skip

    def __init__(self, tenant: Tenant) -> None:
        rates = (("records", tenant.records_per_second), ("bytes", tenant.bytes_per_second))
        self._metered = tuple((name, rate) for name, rate in rates if rate is not None)
        self._rates = tuple(rate for _, rate in self._metered)
        self._window_seconds = max(1, math.ceil(tenant.burst_seconds))
        # How many seconds of the rates the bucket saves: the burst, or more while clients wait for their retry time.
        self._burst_seconds = self._saved_seconds = tenant.burst_seconds
        self._kept_until = -math.inf
        self._keeps_all = True
        # The tenant's rate divided by the one that waits are planned with; and seconds at that rate for a second at the
        # rate in force.
        self.slowdown = self._planned = 1.0
        self.claimable_part = 0.0
        self.offered = (0.0, 0.0)
        # Called once before the next offer is counted.
        self.woken: Callable[[], object] | None = None
        self._bucket = (
            TokenBucket([(rate, _capacity(rate, self._saved_seconds)) for rate in self._rates], now=-math.inf)
            if self._metered
            else None
        )

    def set_rates(self, records_per_second: float, bytes_per_second: float, now: float) -> None:
        """Set this process's rates from now on; ignore a rate that the tenant has no limit for."""
        if self._bucket is None:
            return
        given = {"records": records_per_second, "bytes": bytes_per_second}
        rates = tuple(given[name] for name, _ in self._metered)
        for index, (rate, before) in enumerate(zip(rates, self._rates, strict=True)):
            if rate != before:
                self._bucket.set_rate(index, rate, now, capacity=_capacity(rate, self._saved_seconds))
        self._rates = rates
        self.plan_with(self.claimable_part)

    def plan_with(self, claimable_part: float) -> None:
        """Plan waits with this part of the tenant's rates from now on, if it is more than the part in force."""
        self.claimable_part = claimable_part
        # Of the larger one of both rates.
        in_force = max((most / rate for (_, most), rate in zip(self._metered, self._rates, strict=True)), default=1.0)
        self.slowdown = 1.0 / max(1.0 / in_force, claimable_part)
        self._planned = self.slowdown / in_force

    def keep_until(self, at: float, now: float, *, booked_seconds: float) -> None:
        """Save up to one second of the rates until then, for a client that waits for its retry time until `at`.

        With a shorter burst such a client would get the burst of each second that it waits, and the rest would be
        lost. The same holds for many clients: those that were refused together come back together.

        Clients that wait have booked the rate for `booked_seconds`. While that is more than a second, what is saved
        above the burst is free to any client, because clients that do not wait book more than they come for.
        """
        self._keeps_all = booked_seconds <= _KEPT_SECONDS
        self._kept_until = max(self._kept_until, at)
        self._save(max(self._burst_seconds, _KEPT_SECONDS), now)

    def _save(self, seconds: float, now: float) -> None:
        if seconds != self._saved_seconds and self._bucket is not None:
            self._saved_seconds = seconds
            for index, rate in enumerate(self._rates):
                self._bucket.set_rate(index, rate, now, capacity=_capacity(rate, self._saved_seconds))

    def offer(self, records: int, size_bytes: int) -> None:
        """Count a request's records and bytes before it is accepted or rejected."""
        if self.woken is not None:
            woken, self.woken = self.woken, None
            woken()
        first, second = self.offered
        self.offered = (first + records, second + size_bytes)

    def seconds_for(self, records: int, size_bytes: int) -> float:
        """Return how many seconds of the planned rates a request of this size costs."""
        costs = zip(self._costs(records, size_bytes), self._rates, strict=True)
        return self._planned * max((cost / rate for cost, rate in costs), default=0.0)

    def spare_seconds(self, records: int, size_bytes: int, now: float) -> float:
        """Return how many seconds of the planned rates a request of this size leaves; infinite without rates.

        A rate whose burst is saved up, but for this request or a quarter, does not count: its tokens would be lost, or
        leave in one burst.
        """
        self._drop_kept(now)
        seconds = self._saved_seconds if self._keeps_all else self._burst_seconds
        spare = math.inf
        tokens = () if self._bucket is None else self._bucket.tokens(now)
        for left, cost, rate in zip(tokens, self._costs(records, size_bytes), self._rates, strict=True):
            capacity = _capacity(rate, seconds)
            if left < capacity - min(cost, _NEARLY_FULL * capacity):
                spare = min(spare, self._planned * (left - cost) / rate)
        return spare

    def charge(self, size_bytes: int, now: float) -> None:
        """Take the bytes of a rejected request, also if that leaves debt; without a byte rate do nothing.

        One request costs a minute of the rate at most, so that a single mistake does not lock out a slow tenant.
        """
        if self._bucket is not None and self._metered[-1][0] == "bytes":
            most = math.ceil(self._rates[-1] * _MOST_DEBT_SECONDS)
            self._bucket.charge(self._costs(0, min(size_bytes, most)), now)

    def try_take(self, records: int, size_bytes: int, now: float) -> float | None:
        """Take a request's records and bytes, all or nothing. Return None, or the seconds until it fits."""
        bucket = self._bucket
        if bucket is None:
            return None
        self._drop_kept(now)
        costs = self._costs(records, size_bytes)
        if bucket.try_take(costs, now):
            return None
        return max(0.0, bucket.ready_at(costs, now) - now)

    def _drop_kept(self, now: float) -> None:
        if self._saved_seconds != self._burst_seconds and now > self._kept_until:
            self._save(self._burst_seconds, now)

    def give_back(self, records: int, size_bytes: int) -> None:
        """Return what `try_take` took for records that the gateway or Kinesis did not accept."""
        if self._bucket is not None:
            self._bucket.give_back(self._costs(records, size_bytes))

    def states(self, records: int, size_bytes: int, now: float) -> tuple[QuotaState, ...]:
        """Return the state of each quota; `ready_in` is for a request of the given size, at the planned rates."""
        bucket = self._bucket
        if bucket is None:
            return ()
        wait = self._planned * max(0.0, bucket.ready_at(self._costs(records, size_bytes), now) - now)
        return tuple(
            QuotaState(name, max(1, int(rate * self._window_seconds)), self._window_seconds, max(0, int(tokens)), wait)
            for (name, rate), tokens in zip(self._metered, bucket.tokens(now), strict=True)
        )

    def _costs(self, records: int, size_bytes: int) -> tuple[float, ...]:
        return tuple(records if name == "records" else size_bytes for name, _ in self._metered)


def _capacity(rate: float, seconds: float) -> float:
    # At least 1: with a capacity below the cost of the smallest request the bucket would always be in debt.
    return max(1.0, rate * seconds)
