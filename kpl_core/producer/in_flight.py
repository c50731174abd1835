"""Requests in flight: a bound for the producer, shared fairly between streams.

A place that becomes free goes at once to the stream whose turn it is: first the streams with no request in flight, then
in the order in which they asked. The place is reserved for that stream until it answers, so that no other stream
overtakes it. If it has nothing to send by then, the next stream gets its turn.
"""

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

Member = TypeVar("Member", bound=Hashable)


class InFlightRequests(Generic[Member]):
    """`limit` places for requests. Wake the member that a call returns: it may try again.

    Invariant: a place is free and reserved for no member only if no member waits.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken: dict[Member, int] = {}
        # How many requests are in flight.
        self.total = 0
        # Members in the order in which they asked.
        self.waiting: deque[Member] = deque()
        # Members whose turn it is, and that have not called `take` since.
        self.called: set[Member] = set()

    def free_for(self, member: Member) -> int:
        """Return how many requests of `member` may leave now, the place reserved for it included."""
        free = self._limit - self.total - len(self.called)
        return free + 1 if member in self.called else free

    def take(self, member: Member, count: int, *, wants_more: bool) -> Member | None:
        """Take `count` places, at most `free_for(member)`; return the member whose turn it is now, if there is one.

        With `wants_more` the member waits for its next turn. Without, it leaves the line, and a place that was
        reserved for it and is not taken goes to the next member.
        """
        if count:
            self._taken[member] = self._taken.get(member, 0) + count
            self.total += count
        was_called = member in self.called
        if was_called:
            self.called.remove(member)
        if wants_more:
            if member not in self.waiting:
                self.waiting.append(member)
        elif self.waiting and member in self.waiting:
            self.waiting.remove(member)
        return self._call_next() if was_called and not count else None

    def release(self, member: Member) -> Member | None:
        """Give a place back; return the member whose turn it is now, None if none waits."""
        self.total -= 1
        left = self._taken[member] - 1
        if left:
            self._taken[member] = left
        else:
            del self._taken[member]
        return self._call_next() if self.waiting else None

    def _call_next(self) -> Member | None:
        if not self.waiting or self.total + len(self.called) >= self._limit:
            return None
        member = next((waiting for waiting in self.waiting if not self._taken.get(waiting)), self.waiting[0])
        self.waiting.remove(member)
        self.called.add(member)
        return member
