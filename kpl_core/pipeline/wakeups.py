"""A heap of wake-up times, with at most one live entry for each member.

Stages ask it which members are due instead of scanning all shards. An entry is a promise to look, not a fact: a member
that is due says what it really wants and schedules itself again. So a wake-up that moves later costs nothing, and only
one that moves earlier costs a push.
"""

import math
import sys
from heapq import heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")


class Wakeups(Generic[T]):
    """The times at which members want attention. Members are compared by hash and equality."""

    __slots__ = ("_at", "_heap", "_serial", "next_at")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._at: dict[T, float] = {}
        self._serial = 0
        # The earliest time that any member wants, `math.inf` for none. A field, because every poll reads it.
        self.next_at = math.inf

    def schedule(self, member: T, at: float) -> None:
        """Make `member` due at `at`, or at the earlier time that it has already asked for."""
        if at < self._at.get(member, math.inf):
            self._at[member] = at
            self._serial += 1
            heappush(self._heap, (at, self._serial, member))
            if at < self.next_at:
                self.next_at = at

    def take_due(self, now: float, most: int = sys.maxsize) -> list[T]:
        """Remove and return the members that are due, earliest first; at most `most` of them."""
        due: list[T] = []
        heap = self._heap
        while heap and heap[0][0] <= now and len(due) < most:
            at, _, member = heappop(heap)
            if self._at.get(member) == at:
                del self._at[member]
                due.append(member)
        # A member that moved to an earlier time left its old entry behind.
        while heap and self._at.get(heap[0][2]) != heap[0][0]:
            heappop(heap)
        self.next_at = heap[0][0] if heap else math.inf
        return due

    def clear(self) -> None:
        """Remove all members."""
        self._heap.clear()
        self._at.clear()
        self.next_at = math.inf

    def __len__(self) -> int:
        return len(self._at)
