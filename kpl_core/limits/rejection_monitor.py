"""Signals backpressure when a rate limit rejects too large a share of the requests.

Seed: "Setting up token bucket rate limiters": more than 5 % rejections in 60 seconds are a signal to the upstream.
The window moves in steps of one sixtieth, so it covers 60 to 61 seconds in constant memory at any rate.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import Final

from kpl_core.errors import ConfigError
from kpl_core.options.validation import ABOVE_ZERO, Bound, require, require_number

_STEPS: Final = 60
# 30,000 years, so that the number of a step is exact.
_ANY_INSTANT: Final = Bound(-1e12, 1e12, "seconds")


class RejectionMonitor:
    """Raises backpressure above `raise_above` of rejections, and ends it below `clear_below`.

    Between the two nothing changes (hysteresis), so the signal does not flap at a share near the threshold.
    Reads no clock. Not thread-safe.

    Args:
        raise_above: the share of rejections that starts the signal, 0 up to 1.
        clear_below: the share at which the signal ends; half of `raise_above` by default.
        window_seconds: the length of the sliding window.
        min_requests: with fewer requests in the window there is no backpressure: one rejection of two says nothing.
        on_change: called with True when backpressure begins and False when it ends.

    Raises:
        ConfigError: the shares are not 0 <= clear_below <= raise_above < 1, the window is not a finite number above 0,
            or `min_requests` is below 1.
    """

    def __init__(
        self,
        *,
        raise_above: float = 0.05,
        clear_below: float | None = None,
        window_seconds: float = 60.0,
        min_requests: int = 20,
        on_change: Callable[[bool], object] = lambda _is_raised: None,
    ) -> None:
        lower = raise_above / 2 if clear_below is None else clear_below
        if not 0.0 <= lower <= raise_above < 1.0:
            message = (
                f"raise_above is {raise_above!r} and clear_below is {lower!r}; "
                f"it must be 0 <= clear_below <= raise_above < 1"
            )
            raise ConfigError(message)
        require_number("window_seconds", window_seconds, ABOVE_ZERO)
        require(min_requests >= 1, "min_requests", min_requests, "at least 1")
        self._min_requests = min_requests
        self._raise_above = raise_above
        self._clear_below = lower
        self._step_seconds = window_seconds / _STEPS
        self._on_change = on_change
        # [step number, decisions, rejections], oldest first; the sums of the window are below.
        self._steps: deque[list[int]] = deque()
        self._decisions = 0
        self._rejections = 0
        self._latest = -math.inf
        self._is_raised = False

    def record(self, granted: bool, now: float) -> bool:  # noqa: FBT001 - the result of `acquire`
        """Count one decision at `now`, in seconds. Return True if there is backpressure.

        Raises:
            ValueError: `now` is not a number between -1e12 and 1e12. Nothing is counted.
        """
        step = self._advance(now)
        if not self._steps or self._steps[-1][0] != step:
            self._steps.append([step, 0, 0])
        newest = self._steps[-1]
        newest[1] += 1
        self._decisions += 1
        if not granted:
            newest[2] += 1
            self._rejections += 1
        return self._judge()

    def has_backpressure(self, now: float) -> bool:
        """Return True if there is backpressure at `now`. It can end by time alone. Raises as `record`."""
        self._advance(now)
        return self._judge()

    def is_ready(self, now: float) -> bool:
        """Return True if a readiness probe should succeed: there is no backpressure."""
        return not self.has_backpressure(now)

    def rejected_share(self, now: float) -> float:
        """Return the share of rejections in the window, 0.0 without decisions."""
        self._advance(now)
        return self._rejections / self._decisions if self._decisions else 0.0

    def _advance(self, now: float) -> int:
        """Drop the steps that are too old. An instant before the latest counts as the latest."""
        require_number("now", now, _ANY_INSTANT, error=ValueError)
        self._latest = max(now, self._latest)
        step = math.floor(self._latest / self._step_seconds)
        while self._steps and self._steps[0][0] < step - _STEPS:
            _, decisions, rejections = self._steps.popleft()
            self._decisions -= decisions
            self._rejections -= rejections
        return step

    def _judge(self) -> bool:
        threshold = self._clear_below if self._is_raised else self._raise_above
        is_raised = self._decisions >= self._min_requests and self._rejections > threshold * self._decisions
        if is_raised != self._is_raised:
            self._is_raised = is_raised
            self._on_change(is_raised)
        return is_raised
