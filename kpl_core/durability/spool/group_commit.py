"""When to commit: several appends share one fsync.

The first append of a group waits at most `interval` for company; a group that is large
enough goes at once. (Group commit: DeWitt et al., "Implementation techniques for main
memory database systems", 1984.)
"""

import math

__all__ = ["GroupCommit"]


class GroupCommit:
    """Collects no work, only its size; pure. `interval` is in seconds."""

    __slots__ = ("_interval", "_max_bytes", "_max_records", "_oldest_at", "_records", "_size_bytes")

    def __init__(self, *, interval: float, max_records: int, max_bytes: int) -> None:
        self._interval = interval
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._records = 0
        self._size_bytes = 0
        self._oldest_at = math.inf

    def add(self, *, records: int, size_bytes: int, now: float) -> None:
        """Note work that came in at `now`, or that must not be tried before."""
        self._records += records
        self._size_bytes += size_bytes
        if now < self._oldest_at:
            self._oldest_at = now

    def due_at(self) -> float:
        """Return when to commit: `math.inf` without work, `-math.inf` if the group is large enough."""
        if self._records >= self._max_records or self._size_bytes >= self._max_bytes:
            return -math.inf
        return self._oldest_at + self._interval

    def committed(self) -> None:
        """Start the next group, with nothing in it."""
        self._records = 0
        self._size_bytes = 0
        self._oldest_at = math.inf
