"""Requests in flight: a bound for the producer, shared fairly between streams.

A place given back belongs at once to the stream whose turn it is: first those
with no request in flight, then in the order of asking. It is kept for that
stream until it answers, so that nobody overtakes it; if it has nothing to send
by then, the next one is called.
"""

from collections import deque
from collections.abc import Hashable

__all__ = ["InFlightRequests"]


class InFlightRequests:
    """`limit` places for requests. Whoever is returned by a call must be told that it may try again.

    Invariant: a place is free and kept for nobody only if nobody waits.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken: dict[Hashable, int] = {}
        self._total = 0
        self._waiting: deque[Hashable] = deque()
        # Told that it is their turn, and not heard of since.
        self._called: set[Hashable] = set()

    def try_take(self, member: Hashable) -> bool:
        """Take a place for a request of `member`, or let it wait for its turn."""
        if member in self._called:
            self._called.remove(member)
        elif not self._has_free_place():
            if member not in self._waiting:
                self._waiting.append(member)
            return False
        self._taken[member] = self._taken.get(member, 0) + 1
        self._total += 1
        return True

    def release(self, member: Hashable) -> Hashable | None:
        """Give a place back; return the member whose turn it is, None if nobody waits."""
        self._total -= 1
        left = self._taken[member] - 1
        if left:
            self._taken[member] = left
        else:
            del self._taken[member]
        return self._call_next()

    def give_up(self, member: Hashable) -> Hashable | None:
        """Let `member` wait no longer, because it has nothing to send; return whose turn it is instead."""
        if member in self._called:
            self._called.remove(member)
            return self._call_next()
        if member in self._waiting:
            self._waiting.remove(member)
        return None

    def _has_free_place(self) -> bool:
        return self._total + len(self._called) < self._limit

    def _call_next(self) -> Hashable | None:
        if not self._waiting or not self._has_free_place():
            return None
        member = next((waiting for waiting in self._waiting if not self._taken.get(waiting)), self._waiting[0])
        self._waiting.remove(member)
        self._called.add(member)
        return member

    @property
    def total(self) -> int:
        """Return how many requests are in flight."""
        return self._total
