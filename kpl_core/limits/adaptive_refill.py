"""A refill rate that follows the pressure on the downstream, within 20 %.

Seed: "Setting up token bucket rate limiters", dynamic adjustment. There are three signs of pressure. Each is
smoothed by an exponential moving average, so that one slow answer changes little and a step does not cause
oscillation. Each is a ratio that is 1 at its reference:

    pressure = max(latency / target, refused share / allowed share, dead letters / their capacity)
    rate     = base * clamp(1 + 0.2 * (1 - pressure), 0.8, 1.2)

Reports are collected for a window, and each window gives one update of the averages: a refusal counts as a share of
the window's answers. Every sign is independent and the rate keeps no state of its own, so a step of a sign gives a
step of the rate that is approached from one side, without overshoot. (If one sign rises while another falls, the
pressure can dip to half on the way.) We differ from the seed in one point: an average stops at twice its reference,
where the rate is lowest. Otherwise one window with answers of a minute would hold the rate down for the next dozens.
"""

import math
from typing import Final

from kpl_core.limits.token_bucket_limiter import TokenBucketLimiter
from kpl_core.options.validation import ABOVE_ZERO, require_number

SMOOTHING: Final = 0.2
BAND: Final = 0.2
# A higher pressure has no further effect.
MOST_PRESSURE: Final = 2.0


class AdaptiveRefill:
    """Scales a limiter's refill rate within 20 % of its rate at construction.

    Reads no clock. Not thread-safe: one task or thread reports. The first window sets the averages.

    Args:
        limiter: the limiter to adjust.
        target_latency_seconds: how long an answer of the downstream should take.
        allowed_refused_share: the share of requests that the downstream may refuse (HTTP 429), above 0.
        dead_letter_capacity: the depth of the dead-letter queue that counts as full pressure.
        window_seconds: how long reports are collected before the rate changes.

    Raises:
        ConfigError: one of the four is not a finite number above 0.
    """

    def __init__(
        self,
        limiter: TokenBucketLimiter,
        *,
        target_latency_seconds: float,
        allowed_refused_share: float = 0.01,
        dead_letter_capacity: float = 10_000,
        window_seconds: float = 10.0,
    ) -> None:
        references = {
            "target_latency_seconds": target_latency_seconds,
            "allowed_refused_share": allowed_refused_share,
            "dead_letter_capacity": dead_letter_capacity,
        }
        for name, value in (references | {"window_seconds": window_seconds}).items():
            require_number(name, value, ABOVE_ZERO)
        self._window_seconds = window_seconds
        # The sums of this window's reports, by sign, and their number; and when it ends.
        self._sums: tuple[float, ...] = (0.0, 0.0, 0.0)
        self._reports = 0
        self._ends_at: float | None = None
        self._limiter = limiter
        self._base = limiter.refill_rate
        self._references = tuple(references.values())
        # The smoothed ratios, in the order of the references; empty before the first report.
        self._ratios: tuple[float, ...] = ()
        self._refused_share: float | None = None

    def update(self, latency_seconds: float, refused: float, dead_letter_depth: float, now: float) -> float:
        """Report one answer, or the mean of several, at `now`, in seconds. Returns the refill rate.

        The first report after the end of a window ends that window, and changes the rate.

        Args:
            latency_seconds: how long the answer took.
            refused: whether it was a refusal, or the share of refusals, 0 to 1.
            dead_letter_depth: how many dead letters there are now.
            now: the time of the report.

        Raises:
            ValueError: a value is negative or not finite, or the share is above 1. Nothing changes.
        """
        report = (latency_seconds, float(refused), dead_letter_depth)
        if not all(0.0 <= value < math.inf for value in report) or refused > 1:
            message = (
                f"latency_seconds, refused and dead_letter_depth are {latency_seconds!r}, {refused!r} and "
                f"{dead_letter_depth!r}; they must be finite, 0 or more, and refused at most 1"
            )
            raise ValueError(message)
        self._sums = tuple(total + value for total, value in zip(self._sums, report, strict=True))
        self._reports += 1
        if self._ends_at is None:
            self._ends_at = now + self._window_seconds
        elif now >= self._ends_at:
            self._ends_at = now + self._window_seconds
            self._end_window()
        return self._limiter.refill_rate

    def _end_window(self) -> None:
        means = [total / self._reports for total in self._sums]
        self._sums, self._reports = (0.0, 0.0, 0.0), 0
        ratios = tuple(value / reference for value, reference in zip(means, self._references, strict=True))
        before = self._ratios or ratios
        self._ratios = tuple(
            min(_smoothed(average, ratio), MOST_PRESSURE) for average, ratio in zip(before, ratios, strict=True)
        )
        refused_before = means[1] if self._refused_share is None else self._refused_share
        self._refused_share = _smoothed(refused_before, means[1])
        scale = 1.0 + BAND * (1.0 - self.pressure)
        self._limiter.set_refill_rate(self._base * min(max(scale, 1.0 - BAND), 1.0 + BAND))

    @property
    def pressure(self) -> float:
        """The largest of the three ratios, 0 to 2; 1 is the reference, and the value in the first window."""
        return max(self._ratios, default=1.0)

    @property
    def refused_share(self) -> float:
        """The smoothed share of refused requests, 0 to 1: the downstream's 429 rate."""
        return 0.0 if self._refused_share is None else self._refused_share


def _smoothed(average: float, value: float) -> float:
    return average + SMOOTHING * (value - average)
