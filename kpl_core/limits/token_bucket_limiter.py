"""A token bucket that many threads share, with a part of it kept for what is critical.

Seed: "Setting up token bucket rate limiters" (event storms). Differences: tokens are not topped
up by each caller. The bucket keeps what was spent since it was last full and derives the level
from it, so no rounding gathers while it is busy (as token_bucket.py does, for one thread and in
seconds; this one counts nanoseconds of a monotonic clock).
"""

import math
import time
from collections.abc import Callable
from threading import Lock

from kpl_core.errors import ConfigError
from kpl_core.records.user_record import TIERS, Tier

__all__ = ["TokenBucketLimiter"]


class TokenBucketLimiter:
    """At most `capacity + refill_rate * t` tokens in any `t` seconds, whoever asks.

    Never below zero, never above the capacity. Starts full. One lock, held for a few
    additions; it is never held while anything is called but the clock.

    Args:
        capacity: the most tokens held.
        refill_rate: tokens per second.
        critical_share: the part of the capacity, 0 up to 1, that only the tier "critical" can
            take: the others are refused while no more than that is left.
        clock_ns: returns nanoseconds; one that steps back gives and takes nothing.

    Raises:
        ValueError: capacity or refill rate not finite and above 0, or a share not 0 or more and below 1.
    """

    __slots__ = (
        "_capacity",
        "_clock_ns",
        "_common",
        "_latest",
        "_lock",
        "_rate_per_ns",
        "_refill_rate",
        "_refills",
        "_rejections",
        "_since",
        "_spent",
    )

    def __init__(
        self,
        capacity: float,
        refill_rate: float,
        *,
        critical_share: float = 0.0,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._capacity = float(_require_positive("capacity", capacity))
        if not 0.0 <= critical_share < 1.0:
            message = f"critical_share is {critical_share!r}; it must be 0 or more and below 1"
            raise ConfigError(message)
        # How much may be missing after a grant to another tier than critical.
        self._common = self._capacity * (1.0 - critical_share)
        self._refill_rate = _require_positive("refill_rate", refill_rate)
        self._rate_per_ns = refill_rate / 1e9
        self._clock_ns = clock_ns
        self._lock = Lock()
        # Full at `_since`; from then on `_spent` tokens left it.
        self._since = self._latest = clock_ns()
        self._spent = 0.0
        self._rejections = 0
        self._refills = 0

    def acquire(self, n: float = 1.0, tier: Tier = "normal") -> tuple[bool, float]:
        """Take `n` tokens or none; return whether they were granted, and how many remain.

        Raises:
            ValueError: `n` is not above 0, or can never be granted: above the capacity, less
                the part kept for "critical".
        """
        # Written for floats all through, and for what happens most: each line below costs every caller.
        room = self._common if tier == "normal" else self._room_of(tier)
        if not n > 0.0:
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
        """Return how long until `n` tokens are there if nobody else takes any; takes nothing.

        Raises:
            ValueError: as `acquire`.
        """
        self.require_grantable(n, tier)
        room = self._room_of(tier)
        with self._lock:
            return max(0.0, (self._missing() + n - room) / self._refill_rate)

    def require_grantable(self, n: float = 1, tier: Tier = "normal") -> None:
        """Check that `n` tokens can be granted to work of a tier at all.

        Raises:
            ValueError: `n` is not above 0, or more than its tier can ever be granted, or there is no such tier.
        """
        room = self._room_of(tier)
        if not 0 < n <= room:
            raise _never(n, tier, room)

    def _room_of(self, tier: Tier) -> float:
        if tier not in TIERS:
            message = f"tier is {tier!r}; it must be one of {', '.join(TIERS)}"
            raise ValueError(message)
        return self._capacity if tier == "critical" else self._common

    def set_refill_rate(self, refill_rate: float) -> None:
        """Refill at another rate from now on; the tokens held stay.

        Raises:
            ValueError: not finite and above 0.
        """
        _require_positive("refill_rate", refill_rate)
        with self._lock:
            self._spent = self._missing()
            self._since = self._latest
            self._refill_rate = refill_rate
            self._rate_per_ns = refill_rate / 1e9

    @property
    def capacity(self) -> float:
        """The most tokens held."""
        return self._capacity

    @property
    def refill_rate(self) -> float:
        """Tokens per second, as of now."""
        return self._refill_rate

    def get_metrics(self) -> dict[str, float]:
        """Return one consistent snapshot; `metric_samples` gives it exporters' names.

        Keys: `tokens_available`, `capacity`, `refill_rate_eps` (tokens per second), and the totals
        `total_rejections` and `total_refills` (how often a caller found the level risen).
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
        """Return what the bucket lacks to be full. The lock is held."""
        self._latest = max(self._latest, self._clock_ns())
        return max(0.0, self._spent - (self._latest - self._since) * self._rate_per_ns)


def _require_positive(name: str, value: float) -> float:
    if isinstance(value, bool) or not 0.0 < value < math.inf:
        message = f"{name} is {value!r}; it must be a finite number above 0"
        raise ConfigError(message)
    return value


def _never(n: float, tier: Tier, room: float) -> ValueError:
    if not n > 0:
        return ValueError(f"n is {n!r}; it must be a number of tokens above 0")
    return ValueError(f"n is {n!r}; {tier} work can never be granted more than {room:g} tokens at once, so split it")
