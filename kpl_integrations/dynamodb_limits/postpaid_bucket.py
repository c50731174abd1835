"""A token bucket for costs that are known only afterwards: reserve a guess, wait for it, settle the difference; pure.

What a call costs stands in its answer (ConsumedCapacity), and a query may cost a hundred times what
was guessed. So the bucket goes into debt, and whoever comes next waits until the debt is paid.
"""

import math

from kpl_core.errors import ConfigError

__all__ = ["PostpaidBucket"]


class PostpaidBucket:
    """Starts full; `rate` tokens a second, at most `rate * burst_seconds` of them kept."""

    __slots__ = ("_burst_seconds", "_level", "_seen_at", "rate", "total")

    def __init__(self, rate: float, *, burst_seconds: float, now: float) -> None:
        self.rate = _positive("rate", rate)
        self._burst_seconds = _positive("burst_seconds", burst_seconds)
        self._level = rate * burst_seconds
        self._seen_at = now
        # All that was consumed, in tokens.
        self.total = 0.0

    def reserve(self, guess: float, now: float) -> float:
        """Take a guess and return the seconds to wait before the call; later callers wait behind it."""
        self._refill(now)
        # A guess above what the bucket holds needs a full one.
        wanted = min(guess, self.rate * self._burst_seconds)
        wait = max(0.0, (wanted - self._level) / self.rate)
        self._level -= guess
        return wait

    def settle(self, guess: float, actual: float, now: float) -> None:
        """Replace a guess by what the call cost."""
        self._refill(now)
        self._level += guess - actual
        self.total += actual

    def set_rate(self, rate: float, now: float) -> None:
        """Refill at another rate from now on; a debt stays.

        Raises:
            ConfigError: the rate is not finite and above 0.
        """
        self._refill(now)
        self.rate = _positive("rate", rate)
        self._level = min(self._level, rate * self._burst_seconds)

    def _refill(self, now: float) -> None:
        if now > self._seen_at:
            self._level = min(self.rate * self._burst_seconds, self._level + (now - self._seen_at) * self.rate)
            self._seen_at = now


def _positive(name: str, value: float) -> float:
    if not 0.0 < value < math.inf:
        message = f"{name} is {value!r}; it must be a finite number above 0"
        raise ConfigError(message)
    return value
