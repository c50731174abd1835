"""Exponential backoff with jitter: the one formula for every wait between two attempts.

After the n-th failure in a row the longest wait is `min(cap, base * factor ** (n - 1))`. Jitter then draws the actual
wait at random, so that clients that failed together do not retry together. Source: Marc Brooker, "Exponential Backoff
and Jitter", AWS Architecture Blog, 2015. From there come both jitter modes:

- "full": between 0 and the longest wait. Spreads a thundering herd best; an attempt may follow at once.
- "equal": between half of the longest wait and all of it. Never retries at once; for slow background calls.

Where we differ: `factor` is a parameter (the KPL multiplies by 1.5 for ListShards, `shard_map.h`), and the first
failure waits for `base`, not for `base * factor`.

A formula only. Each caller counts its failures and waits: `pipeline/retrier.py` for a throttled or failed record,
`durability/circuit_breaker.py` for an open breaker, `dead_letters/dead_letter_queue.py` for a redrive.

This module draws no random number itself. The caller passes `chance`, which returns a number in [0, 1).
"""

from collections.abc import Callable
from typing import Final, Literal

import msgspec

Jitter = Literal["full", "equal"]

# The share of the longest wait that is never drawn at random.
_FIXED_SHARE: Final[dict[Jitter, float]] = {"full": 0.0, "equal": 0.5}


class ExponentialBackoff(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of one backoff. It has no state: the caller counts the failures in a row.

    Args:
        base_seconds: the longest wait after the first failure.
        cap_seconds: the longest wait of all.
        factor: how much longer the wait becomes with each further failure; at least 1.
        jitter: "full" or "equal", see the module.
    """

    base_seconds: float
    cap_seconds: float
    factor: float = 2.0
    jitter: Jitter = "full"

    def longest_seconds(self, failures: int) -> float:
        """Return the longest wait after so many failures in a row (at least 1), before jitter."""
        try:
            return min(self.cap_seconds, self.base_seconds * self.factor ** (failures - 1))
        except OverflowError:
            return self.cap_seconds

    def seconds(self, failures: int, chance: Callable[[], float]) -> float:
        """Draw the wait after so many failures in a row (at least 1)."""
        fixed = _FIXED_SHARE[self.jitter]
        return self.longest_seconds(failures) * (fixed + (1.0 - fixed) * chance())
