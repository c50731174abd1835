"""The seed's rules of thumb for a bucket in front of a limited downstream, as functions.

Seed: "Setting up token bucket rate limiters", parameter calibration: absorb a storm of 30
seconds at its peak, and refill at 1.5 times what the downstream calls safe.
"""

import math
import warnings

from kpl_core.errors import ConfigError

__all__ = ["HeadroomWarning", "capacity_for", "refill_for"]


class HeadroomWarning(UserWarning):
    """A refill rate exceeds what the downstream says it takes."""


def capacity_for(peak_rate: float, storm_seconds: float = 30) -> int:
    """Return the capacity that lets a storm of `peak_rate` per second pass for `storm_seconds`.

    Raises:
        ValueError: one of them is not finite and above 0.
    """
    _require_positive("peak_rate", peak_rate)
    _require_positive("storm_seconds", storm_seconds)
    return math.ceil(peak_rate * storm_seconds)


def refill_for(safe_rate: float, headroom: float = 1.5) -> float:
    """Return `safe_rate * headroom`, in tokens per second.

    The rule is the seed's. A headroom above 1 is a bet: once the bucket is empty, the downstream
    gets more than its stated limit for as long as the storm lasts, and will refuse the surplus.
    Take 1.0 where the limit is enforced, or let `AdaptiveRefill` take the rate down.

    Warns:
        HeadroomWarning: `headroom` is above 1.

    Raises:
        ValueError: one of them is not finite and above 0.
    """
    _require_positive("safe_rate", safe_rate)
    _require_positive("headroom", headroom)
    refill_rate = safe_rate * headroom
    if headroom > 1:
        warnings.warn(
            f"a refill of {refill_rate:g}/s exceeds the downstream's stated limit of {safe_rate:g}/s by "
            f"{headroom - 1:.0%}; pass headroom=1.0 where that limit is enforced",
            HeadroomWarning,
            stacklevel=2,
        )
    return refill_rate


def _require_positive(name: str, value: float) -> None:
    if not 0.0 < value < math.inf:
        message = f"{name} is {value!r}; it must be a finite number above 0"
        raise ConfigError(message)
