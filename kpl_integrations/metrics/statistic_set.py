"""CloudWatch's summary of many values: their number, sum, minimum and maximum."""

import math

import msgspec

__all__ = ["StatisticSet"]


class StatisticSet(msgspec.Struct):
    """Values summed up; empty at first."""

    total: float = 0.0
    count: int = 0
    minimum: float = math.inf
    maximum: float = -math.inf

    def add(self, total: float, count: int) -> None:
        """Add `count` (>= 1) values that sum to `total`; of their extremes only the mean is known."""
        mean = total / count
        self.total += total
        self.count += count
        if mean < self.minimum:
            self.minimum = mean
        if mean > self.maximum:
            self.maximum = mean

    def merged(self, other: "StatisticSet") -> "StatisticSet":
        """Return the summary of the values of both."""
        return StatisticSet(
            total=self.total + other.total,
            count=self.count + other.count,
            minimum=min(self.minimum, other.minimum),
            maximum=max(self.maximum, other.maximum),
        )
