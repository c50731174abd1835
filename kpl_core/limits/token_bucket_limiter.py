"""A token bucket for many threads, with a reserve for critical work, its sizing rules and its metrics.

Seed: "Setting up token bucket rate limiters" (event storms). We differ in one point: callers do not add tokens.
The bucket stores what was spent since it was last full and derives its level, so rounding errors do not add up
while it is busy. (`pipeline/token_bucket.py` does the same for one thread, in seconds; this one counts the
nanoseconds of a monotonic clock.)
"""

import math
import time
import warnings
from collections.abc import Callable
from threading import Lock
from typing import Final, Literal, NamedTuple

from kpl_core.options.validation import ABOVE_ZERO, require, require_number
from kpl_core.records.user_record import Tier, rank_of


class TokenBucketLimiter:
    """Grants at most `capacity + refill_rate * t` tokens in any `t` seconds, to all threads together.

    The level is never below zero and never above the capacity. The bucket starts full. One lock is held for a few
    additions and one reading of the clock.

    Args:
        capacity: the most tokens in the bucket.
        refill_rate: tokens per second.
        critical_share: the share of the capacity, 0 up to 1, that only the tier "critical" may use. Other tiers
            are rejected while no more than this is left.
        clock_ns: returns nanoseconds. A step backwards neither adds nor removes tokens.

    Raises:
        ConfigError: capacity or refill rate is not a finite number above 0, or the share is not between 0 and 1.
    """

    def __init__(
        self,
        capacity: float,
        refill_rate: float,
        *,
        critical_share: float = 0.0,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        require_number("capacity", capacity, ABOVE_ZERO)
        require_number("refill_rate", refill_rate, ABOVE_ZERO)
        self._capacity = float(capacity)
        require(0.0 <= critical_share < 1.0, "critical_share", critical_share, "0 or more and below 1")
        # The most that may be missing after a grant to a tier other than critical.
        self._common = self._capacity * (1.0 - critical_share)
        self._refill_rate = refill_rate
        self._rate_per_ns = refill_rate / 1e9
        self._clock_ns = clock_ns
        self._lock = Lock()
        # The bucket was full at `_since`; `_spent` tokens were taken from then on.
        self._since = self._latest = clock_ns()
        self._spent = 0.0
        self._rejections = 0
        self._refills = 0

    def acquire(self, n: float = 1.0, tier: Tier = "normal") -> tuple[bool, float]:
        """Take `n` tokens or none. Return whether they were granted, and how many remain.

        Raises:
            ValueError: `n` is not a number above 0, or can never be granted, because it is above the capacity without
                the reserve for "critical".
        """
        # Every line costs every caller, so this is written for floats and for the most frequent case.
        room = self._common if tier == "normal" else self._room_of(tier)
        try:
            is_above_zero = n > 0.0
        except TypeError:
            is_above_zero = False
        if not is_above_zero:
            raise _never(n, tier, room)
        with self._lock:
            now = self._clock_ns()
            spent = self._spent
            if now > self._latest:
                self._latest = now
                if spent:
                    self._refills += 1
            else:
                now = self._latest
            missing = spent - (now - self._since) * self._rate_per_ns
            if missing <= 0.0:
                self._since = now
                self._spent = missing = spent = 0.0
            if missing + n <= room:
                self._spent = spent + n
                return True, self._capacity - missing - n
            if n <= room:
                self._rejections += 1
                remaining = self._capacity - missing
                return False, remaining if remaining > 0.0 else 0.0
        raise _never(n, tier, room)

    def wait_seconds(self, n: float = 1, tier: Tier = "normal") -> float:
        """Return the seconds until `n` tokens are available if no other thread takes any. Takes nothing.

        Raises:
            ValueError: as `acquire`.
        """
        self.require_grantable(n, tier)
        room = self._room_of(tier)
        with self._lock:
            return max(0.0, (self._missing() + n - room) / self._refill_rate)

    def require_grantable(self, n: float = 1, tier: Tier = "normal") -> None:
        """Check that a tier can ever be granted `n` tokens.

        Raises:
            ValueError: `n` is not above 0, or above what its tier can be granted, or the tier is unknown.
        """
        room = self._room_of(tier)
        if not _is_above_zero(n) or n > room:
            raise _never(n, tier, room)

    def _room_of(self, tier: Tier) -> float:
        return self._common if rank_of(tier) else self._capacity

    def set_refill_rate(self, refill_rate: float) -> None:
        """Set the refill rate from now on. The tokens in the bucket stay.

        Raises:
            ConfigError: the rate is not a finite number above 0.
        """
        require_number("refill_rate", refill_rate, ABOVE_ZERO)
        with self._lock:
            self._spent = self._missing()
            self._since = self._latest
            self._refill_rate = refill_rate
            self._rate_per_ns = refill_rate / 1e9

    @property
    def capacity(self) -> float:
        """The most tokens in the bucket."""
        return self._capacity

    @property
    def refill_rate(self) -> float:
        """The present rate, in tokens per second."""
        return self._refill_rate

    def get_metrics(self) -> dict[str, float]:
        """Return one consistent snapshot. `metric_samples` returns it under the names of the exporters.

        Keys: `tokens_available`, `capacity`, `refill_rate_eps` (tokens per second), and the totals
        `total_rejections` and `total_refills` (how often a caller found a higher level).
        """
        with self._lock:
            return {
                "tokens_available": self._capacity - min(self._missing(), self._capacity),
                "capacity": self._capacity,
                "refill_rate_eps": self._refill_rate,
                "total_rejections": self._rejections,
                "total_refills": self._refills,
            }

    def __repr__(self) -> str:
        return f"TokenBucketLimiter(capacity={self._capacity:g}, refill_rate={self._refill_rate:g})"

    def _missing(self) -> float:
        """Return how many tokens are missing from a full bucket. The caller holds the lock."""
        self._latest = max(self._latest, self._clock_ns())
        return max(0.0, self._spent - (self._latest - self._since) * self._rate_per_ns)


def _is_above_zero(n: float) -> bool:
    try:
        return n > 0
    except TypeError:
        return False


def _never(n: float, tier: Tier, room: float) -> ValueError:
    if not _is_above_zero(n):
        return ValueError(f"n is {n!r}; it must be a number of tokens above 0")
    return ValueError(f"n is {n!r}; {tier} work can never be granted more than {room:g} tokens at once; split it")


class HeadroomWarning(UserWarning):
    """A refill rate exceeds the limit that the downstream states."""


def capacity_for(peak_rate: float, storm_seconds: float = 30) -> int:
    """Return the capacity that absorbs `peak_rate` requests a second for `storm_seconds`.

    Seed: "Setting up token bucket rate limiters", parameter calibration: 30 seconds at the peak.

    Raises:
        ConfigError: one of them is not a finite number above 0.
    """
    require_number("peak_rate", peak_rate, ABOVE_ZERO)
    require_number("storm_seconds", storm_seconds, ABOVE_ZERO)
    return math.ceil(peak_rate * storm_seconds)


def refill_for(safe_rate: float, headroom: float = 1.5) -> float:
    """Return `safe_rate * headroom`, in tokens per second.

    The rule is the seed's: 1.5 times the rate that the downstream calls safe. A headroom above 1 is a risk: once the
    bucket is empty, the downstream gets more than its stated limit for as long as the storm lasts, and rejects the
    surplus. Use 1.0 where the limit is enforced, or let `AdaptiveRefill` reduce the rate.

    Warns:
        HeadroomWarning: `headroom` is above 1.

    Raises:
        ConfigError: one of them is not a finite number above 0.
    """
    require_number("safe_rate", safe_rate, ABOVE_ZERO)
    require_number("headroom", headroom, ABOVE_ZERO)
    refill_rate = safe_rate * headroom
    if headroom > 1:
        warnings.warn(
            f"a refill of {refill_rate:g}/s exceeds the downstream's stated limit of {safe_rate:g}/s by "
            f"{headroom - 1:.0%}; pass headroom=1.0 where that limit is enforced",
            HeadroomWarning,
            stacklevel=2,
        )
    return refill_rate


MetricKind = Literal["gauge", "counter"]

# The names that dashboards know: (kind, key of `get_metrics`). Exporters translate them.
METRIC_NAMES: Final[dict[str, tuple[MetricKind, str]]] = {
    "token_bucket_tokens_available": ("gauge", "tokens_available"),
    "token_bucket_refill_events_total": ("counter", "total_refills"),
    "token_bucket_rejections_total": ("counter", "total_rejections"),
}


class MetricSample(NamedTuple):
    """The present value of one metric."""

    name: str
    kind: MetricKind
    value: float


def metric_samples(
    limiter: TokenBucketLimiter,
    *,
    refused_share: float | None = None,
    refused_share_name: str = "ticket_routing_api_429_rate",
) -> tuple[MetricSample, ...]:
    """Return a limiter's samples and, if given, the share of requests that its downstream refuses, 0 to 1.

    `AdaptiveRefill.refused_share` is that share; `refused_share_name` names its metric.
    """
    metrics = limiter.get_metrics()
    samples = [MetricSample(name, kind, metrics[key]) for name, (kind, key) in METRIC_NAMES.items()]
    if refused_share is not None:
        samples.append(MetricSample(refused_share_name, "gauge", refused_share))
    return tuple(samples)
