"""How much a worker would use of a resource, from what it was offered; pure.

Offered, not consumed: a worker held to its share consumes that share, however much more it
has. What waits counts too, as if it were to leave within one interval; and while something
waits, at least twice what was consumed, because callers who wait for room offer no more than
that. A burst between two reports shows in the latest look as well as in the mean of an
interval, whichever is higher.
"""

from collections import deque
from typing import Final

import msgspec

from kpl_core.coordination.store_objects import Pair

__all__ = ["DemandMeter", "Usage"]


class Usage(msgspec.Struct, frozen=True, gc=False):
    """What a worker knows of one resource at one moment; the counts only grow.

    Args:
        limit: units a second that the resource takes, as configured.
        offered: units that arrived for it since the worker began.
        waiting: units that wait for its tokens now.
        sent: Kinesis records, or calls, sent since the worker began.
        throttled: as many of them were refused for throughput.
    """

    limit: Pair
    offered: Pair
    waiting: Pair = (0.0, 0.0)
    sent: float = 0.0
    throttled: float = 0.0


# Of what was consumed, at least, while anything waits.
SATURATED: Final = 2.0


class DemandMeter:
    """Looks at one resource every so often. `interval_seconds` is the length of its memory."""

    __slots__ = ("_interval", "_looks", "demand", "idle_since", "reported_sent", "reported_throttled", "usage")

    def __init__(self, interval_seconds: float, usage: Usage, now: float) -> None:
        self._interval = interval_seconds
        self._looks: deque[tuple[float, Pair]] = deque([(now, (0.0, 0.0))])
        self.usage = usage
        self.demand: Pair = usage.waiting
        self.idle_since = now
        self.reported_sent = 0.0
        self.reported_throttled = 0.0

    def look(self, usage: Usage, now: float) -> None:
        """Take note of the counts at `now`."""
        looks = self._looks
        latest_at, latest = looks[-1]
        if now <= latest_at:
            return
        while len(looks) > 1 and looks[1][0] <= now - self._interval:
            looks.popleft()
        oldest_at, oldest = looks[0]
        looks.append((now, usage.offered))
        first, second = (
            max(
                (usage.offered[dimension] - oldest[dimension]) / (now - oldest_at),
                (usage.offered[dimension] - latest[dimension]) / (now - latest_at),
                # What expired while it waited was offered, and is not counted any more.
                0.0,
            )
            + usage.waiting[dimension] / self._interval
            for dimension in (0, 1)
        )
        if usage.waiting[0] > 0.0:
            first = max(first, SATURATED * (usage.offered[0] - usage.waiting[0] - oldest[0]) / (now - oldest_at))
            second = max(second, SATURATED * (usage.offered[1] - usage.waiting[1] - oldest[1]) / (now - oldest_at))
        self.demand = (first, second)
        self.usage = usage
        if first > 0.0 or second > 0.0:
            self.idle_since = now

    def take_counts(self) -> tuple[float, float]:
        """Return what was sent and throttled since the last time this was asked."""
        sent = self.usage.sent - self.reported_sent
        throttled = self.usage.throttled - self.reported_throttled
        self.reported_sent, self.reported_throttled = self.usage.sent, self.usage.throttled
        return sent, throttled
