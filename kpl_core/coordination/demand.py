"""The demand of a worker for a resource, computed from its offered load; pure.

Demand is what was offered, not what was consumed: a worker limited to its share consumes that share, however much more
it has. Waiting units count as if they left within one interval. While units wait, demand is at least 2.5 times the
consumption, because callers that wait for room offer no more than that. A burst between two reports is visible too: the
rate is the higher one of the last observation and the mean of an interval. The last observation may be short: of n
units in it, n less the square root of n count, the error of a count. Otherwise chance alone would raise the demand.
"""

import math
from collections import deque
from typing import Final

import msgspec

from kpl_core.coordination.store_objects import Pair


class Usage(msgspec.Struct, frozen=True, gc=False):
    """What a worker measured of one resource. The counts only grow.

    Args:
        limit: the configured limit of the resource, units a second.
        offered: units that have arrived for it since the worker started.
        waiting: units that wait for its tokens now.
        sent: Kinesis records, or calls, sent since the worker started.
        throttled: how many of those were throttled.
    """

    limit: Pair
    offered: Pair
    waiting: Pair = (0.0, 0.0)
    sent: float = 0.0
    throttled: float = 0.0


# While units wait, demand is at least this many times the consumption.
SATURATED: Final = 2.5


class DemandMeter:
    """Measures the demand for one resource over the last `interval_seconds`."""

    def __init__(self, interval_seconds: float, usage: Usage, now: float) -> None:
        self._interval = interval_seconds
        # What left before counts for nothing; what waits counts as if it arrived now.
        left = usage.offered[0] - usage.waiting[0], usage.offered[1] - usage.waiting[1]
        self._samples: deque[tuple[float, Pair]] = deque([(now, left)])
        self.usage = usage
        self.demand: Pair = usage.waiting
        self.idle_since = now
        self.reported_sent = 0.0
        self.reported_throttled = 0.0

    def measure(self, usage: Usage, now: float) -> None:
        """Record the counts at `now`."""
        samples = self._samples
        latest_at, latest = samples[-1]
        if now <= latest_at:
            return
        while len(samples) > 1 and samples[1][0] <= now - self._interval:
            samples.popleft()
        oldest_at, oldest = samples[0]
        offered, waiting, before = usage.offered, usage.waiting, self.usage
        samples.append((now, offered))
        whole, last = now - oldest_at, now - latest_at
        # Units that expired while waiting were counted as offered before, and are not any more.
        certain = _certain_part(offered[0] - latest[0]) / last
        first = max((offered[0] - oldest[0]) / whole, certain * (offered[0] - latest[0]), 0.0)
        second = max((offered[1] - oldest[1]) / whole, certain * (offered[1] - latest[1]), 0.0)
        if waiting != (0, 0):
            first, second = first + waiting[0] / self._interval, second + waiting[1] / self._interval
        if waiting[0] > 0.0:
            left = offered[0] - waiting[0], offered[1] - waiting[1]
            left_before = before.offered[0] - before.waiting[0], before.offered[1] - before.waiting[1]
            certain = _certain_part(left[0] - left_before[0]) / last
            consumed = max((left[0] - oldest[0]) / whole, certain * (left[0] - left_before[0]))
            first = max(first, SATURATED * consumed)
            consumed = max((left[1] - oldest[1]) / whole, certain * (left[1] - left_before[1]))
            second = max(second, SATURATED * consumed)
        self.demand = (first, second)
        self.usage = usage
        if first > 0.0 or second > 0.0:
            self.idle_since = now

    def counts(self) -> tuple[float, float]:
        """Return what was sent and throttled since the last usage that `counted` was called with."""
        return self.usage.sent - self.reported_sent, self.usage.throttled - self.reported_throttled

    def counted(self, usage: Usage) -> None:
        """Note that the counts up to this usage have been used."""
        self.reported_sent, self.reported_throttled = usage.sent, usage.throttled


def _certain_part(units: float) -> float:
    """Return the share of a count that exceeds its random variation."""
    return 1.0 - 1.0 / math.sqrt(units) if units > 1.0 else 0.0
