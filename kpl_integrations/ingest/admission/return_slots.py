"""When to come back: refused clients one after another, not all at the instant there is room for one.

Two small machines. `DrainRate` knows how fast a queue empties. `ReturnSlots` hands out times: each refused
request is told the time at which those told before it will have been served, so that most who obey are taken
at their first return. Told all the same time, the first to return would be taken and the others refused again.
"""

import math
from bisect import insort
from collections.abc import Callable
from typing import Final

__all__ = ["DrainRate", "ReturnSlots"]

# How far ahead slots are kept; whoever is later is told this, more or less, and has no slot.
LONGEST_SECONDS: Final = 60.0
# How long a slot waits for whoever was told it: a client's clock, its network, and its own jitter.
GRACE_SECONDS: Final = 2.0
MOST_SLOTS: Final = 1_024
# Waits are whole seconds, so that some are due together; a little more room for each than it costs lets all of them in.
SLACK: Final = 1.1
# A sample says nothing over a shorter time, and forgets with this time constant.
_SHORTEST_SAMPLE_SECONDS: Final = 0.2
_MEMORY_SECONDS: Final = 3.0


class DrainRate:
    """How many user records a second leave a queue, lately; `finished` is a count that only grows."""

    __slots__ = ("_at", "_finished", "_per_second")

    def __init__(self, now: float) -> None:
        self._at = now
        self._finished = 0
        self._per_second = 0.0

    def observe(self, finished: int, now: float) -> None:
        """Take note of the count."""
        elapsed = now - self._at
        if elapsed < _SHORTEST_SAMPLE_SECONDS:
            return
        share = 1.0 - math.exp(-elapsed / _MEMORY_SECONDS)
        self._per_second += share * ((finished - self._finished) / elapsed - self._per_second)
        self._at, self._finished = now, finished

    def per_second(self, finished: int, now: float) -> float:
        """Return the rate, with what came since the last sample if that is more; 0.0 when nothing came for long."""
        elapsed = now - self._at
        since = (finished - self._finished) / max(elapsed, _SHORTEST_SAMPLE_SECONDS)
        return max(self._per_second * math.exp(-elapsed / _MEMORY_SECONDS), since) if elapsed < LONGEST_SECONDS else 0.0

    def wants_sample(self, now: float) -> bool:
        """Say whether enough time has passed since the last one."""
        return now - self._at >= _SHORTEST_SAMPLE_SECONDS

    def seconds_for(self, records: int) -> float:
        """Return how long it takes until so many have left; `LONGEST_SECONDS` where nothing leaves."""
        if self._per_second * LONGEST_SECONDS <= records:
            return LONGEST_SECONDS
        return records / self._per_second


class ReturnSlots:
    """The times that were told and are not over. Costs are seconds of service.

    What there will be is theirs who were told to return for it: a request that arrives now takes the earliest slot
    that is due, whoever it was told; if none is, it must leave enough for those to come.
    """

    __slots__ = ("_chance", "_due", "_end")

    def __init__(self, chance: Callable[[], float]) -> None:
        self._chance = chance
        # Sorted: whoever is refused later may well be told to come earlier, by the second that waits are rounded to.
        self._due: list[tuple[float, float]] = []
        self._end = -math.inf

    def keeps_out(self, now: float, *, spare_seconds: float = 0.0) -> bool:
        """Say whether a request that arrives now is too early, with `spare_seconds` of service left beside its own."""
        due = self._due
        while due and due[0][0] < now - GRACE_SECONDS:
            del due[0]
        if not due:
            return False
        if due[0][0] <= now:
            del due[0]
            return False
        promised = 0.0
        for at, cost in due:
            promised += cost
            if promised - (at - now) > spare_seconds:
                return True
        return spare_seconds <= 0.0

    def next_slot(self, cost_seconds: float, *, ready_in: float, now: float) -> int:
        """Return after how many whole seconds, 1 or more, a refused request should come back."""
        end = max(now + ready_in, self._end + SLACK * cost_seconds)
        if end - now > LONGEST_SECONDS or len(self._due) >= MOST_SLOTS:
            # What takes longer by itself is not to be asked for before.
            return math.ceil(max(ready_in, LONGEST_SECONDS) * (1.0 + 0.25 * self._chance()))
        self._end = end
        # Upwards only: nobody is asked to come before there is anything for him.
        wait = max(1, math.ceil(end - now + 0.5 * self._chance()))
        insort(self._due, (now + wait, cost_seconds))
        return wait

    def __len__(self) -> int:
        return len(self._due)
