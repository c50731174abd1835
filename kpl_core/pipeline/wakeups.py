"""Who wants attention when: a heap of instants with at most one live entry for each.

Stages ask it for what is due instead of scanning all shards. An entry is a
promise to look, not a fact: whoever is found due says what it really wants and
schedules itself again. So something that became later costs nothing, and only
what becomes earlier costs a push.
"""

import math
import sys
from heapq import heappop, heappush
from typing import Generic, TypeVar

__all__ = ["Wakeups"]

T = TypeVar("T")


class Wakeups(Generic[T]):
    """Instants at which members (compared by identity of hash and equality) want attention."""

    __slots__ = ("_at", "_heap", "_serial")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._at: dict[T, float] = {}
        self._serial = 0

    def schedule(self, member: T, at: float) -> None:
        """See to it that `member` is due at `at`, or at the earlier instant it already asked for."""
        if at < self._at.get(member, math.inf):
            self._at[member] = at
            self._serial += 1
            heappush(self._heap, (at, self._serial, member))

    def take_due(self, now: float, most: int = sys.maxsize) -> list[T]:
        """Remove and return the members that are due, earliest first; `most` of them, if there are more."""
        due: list[T] = []
        heap = self._heap
        while heap and heap[0][0] <= now and len(due) < most:
            at, _, member = heappop(heap)
            if self._at.get(member) == at:
                del self._at[member]
                due.append(member)
        return due

    def earliest(self) -> float:
        """Return the earliest instant anybody wants, `math.inf` if nobody does."""
        heap = self._heap
        while heap and self._at.get(heap[0][2]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else math.inf

    def clear(self) -> None:
        """Forget everybody."""
        self._heap.clear()
        self._at.clear()

    def __len__(self) -> int:
        return len(self._at)
