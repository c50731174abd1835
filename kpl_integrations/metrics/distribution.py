"""A histogram of our own: an observation costs a bisection and two additions, and no lock."""

from bisect import bisect_left
from itertools import accumulate

__all__ = ["Distribution"]


class Distribution:
    """Counts observations by the least of `bounds` (ascending upper bounds, inclusive) that holds them.

    Written by one thread, read by any.
    """

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        # The last is of what is above all bounds.
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Take note of one observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def cumulative(self) -> list[tuple[float, int]]:
        """Return for each bound, and for infinity, how many observations do not pass it."""
        return list(zip((*self._bounds, float("inf")), accumulate(self._counts.copy()), strict=True))

    @property
    def total(self) -> float:
        """Return the sum of all observations."""
        return self._total
