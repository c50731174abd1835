"""The records of one shard, in columns: what a record costs is its key, its data and 16 bytes.

A position is the ordinal of a record in its shard, counted from the first one ever written, so
it stays valid while old records are trimmed.
"""

from array import array
from bisect import bisect_left
from typing import Final

__all__ = ["ShardLog"]

# Trimming moves what remains, so it waits until that is worth it.
_TRIM_AT_LEAST: Final = 1_024


class ShardLog:
    """An append-only log with an end of retention."""

    __slots__ = ("_arrivals_ms", "_counters", "_data", "_keys", "_trimmed")

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._data: list[bytes] = []
        self._counters = array("Q")
        self._arrivals_ms = array("q")
        self._trimmed = 0

    def append(self, partition_key: str, data: bytes, counter: int, arrived_ms: int) -> None:
        """Add one record; `counter` must be above, `arrived_ms` not below those before it."""
        self._keys.append(partition_key)
        self._data.append(data)
        self._counters.append(counter)
        self._arrivals_ms.append(arrived_ms)

    @property
    def first(self) -> int:
        """Return the position of the oldest record still held."""
        return self._trimmed

    @property
    def end(self) -> int:
        """Return the position after the newest record."""
        return self._trimmed + len(self._keys)

    def start(self, horizon_ms: int) -> int:
        """Return the position of the oldest record that arrived at or after `horizon_ms`."""
        return self._trimmed + bisect_left(self._arrivals_ms, horizon_ms)

    def position_of(self, counter: int) -> int:
        """Return the position of the first record with at least this counter."""
        return self._trimmed + bisect_left(self._counters, counter)

    def position_at(self, instant_ms: int) -> int:
        """Return the position of the first record that arrived at or after `instant_ms`."""
        return self.start(instant_ms)

    def arrived_ms(self, position: int) -> int:
        """Return when the record at `position` arrived, in milliseconds since 1970."""
        return self._arrivals_ms[position - self._trimmed]

    def record(self, position: int) -> tuple[str, bytes, int, int]:
        """Return partition key, data, counter and arrival (ms) of the record at `position`."""
        at = position - self._trimmed
        return self._keys[at], self._data[at], self._counters[at], self._arrivals_ms[at]

    def trim(self, horizon_ms: int) -> None:
        """Forget records that arrived before `horizon_ms`, once they are half of the log."""
        if not self._arrivals_ms or self._arrivals_ms[0] >= horizon_ms:
            return
        expired = bisect_left(self._arrivals_ms, horizon_ms)
        if expired < _TRIM_AT_LEAST or expired * 2 < len(self._keys):
            return
        for column in (self._keys, self._data, self._counters, self._arrivals_ms):
            del column[:expired]
        self._trimmed += expired
