"""How much of each shard's service limit is used, from what was delivered to it; pure."""

from collections import deque
from typing import Final

from kpl_core.options.kinesis_limits import BYTES_PER_SECOND_PER_SHARD, RECORDS_PER_SECOND_PER_SHARD

__all__ = ["ShardUtilisation"]

WINDOW_SECONDS: Final = 10


class ShardUtilisation:
    """Counts what a shard took, as the service does, in slots of a second; forgets those older than the window."""

    __slots__ = ("_bytes", "_records", "_slots")

    def __init__(self) -> None:
        # [second, Kinesis records, bytes], oldest first, beside their sums.
        self._slots: deque[list[int]] = deque()
        self._records = 0
        self._bytes = 0

    def delivered(self, size_bytes: int, now: float, *, records: int = 1) -> None:
        """Note so many Kinesis records of `size_bytes` together; 0: some bytes of one."""
        second = int(now)
        if not self._slots or self._slots[-1][0] != second:
            self._forget(second)
            self._slots.append([second, 0, 0])
        newest = self._slots[-1]
        newest[1] += records
        newest[2] += size_bytes
        self._records += records
        self._bytes += size_bytes

    def share(self, now: float) -> float:
        """Return the larger of the shares of the two limits, records and bytes; 1 is the limit."""
        self._forget(int(now))
        return max(
            self._records / (RECORDS_PER_SECOND_PER_SHARD * WINDOW_SECONDS),
            self._bytes / (BYTES_PER_SECOND_PER_SHARD * WINDOW_SECONDS),
        )

    def _forget(self, second: int) -> None:
        while self._slots and self._slots[0][0] <= second - WINDOW_SECONDS:
            _, records, size_bytes = self._slots.popleft()
            self._records -= records
            self._bytes -= size_bytes
