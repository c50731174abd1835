"""Kinesis records that wait for a time: between two attempts, or for a circuit breaker."""

import math
from collections import Counter
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Final

from kpl_core.records.kinesis_record import KinesisRecord

# User records handed out by one call. More may be due at one instant, and other tasks of the loop must get their turn.
DUE_AT_ONCE: Final = 500


class BackoffQueue:
    """Kinesis records that wait for a time: a heap, and a count for each predicted shard."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, KinesisRecord]] = []
        self._by_shard: Counter[str | None] = Counter()
        # When the first wait ends, `math.inf` if the queue is empty.
        self.next_at = math.inf

    def __bool__(self) -> bool:
        return bool(self._heap)

    def __iter__(self) -> Iterator[KinesisRecord]:
        return (record for _, _, record in self._heap)

    def add(self, record: KinesisRecord, at: float) -> None:
        """Keep a record until `at`."""
        heappush(self._heap, (at, record.sequence, record))
        self._by_shard[record.predicted_shard] += 1
        self.next_at = self._heap[0][0]

    def take_due(self, now: float) -> list[KinesisRecord]:
        """Remove and return the records whose wait is over: 500 user records, or a few more, in one call."""
        due: list[KinesisRecord] = []
        count = 0
        while self._heap and self._heap[0][0] <= now and count < DUE_AT_ONCE:
            record = heappop(self._heap)[2]
            self._by_shard[record.predicted_shard] -= 1
            due.append(record)
            count += len(record.arrivals)
        self.next_at = self._heap[0][0] if self._heap else math.inf
        return due

    def take_except(self, shard_ids: set[str]) -> list[KinesisRecord]:
        """Remove and return the records of all other shards, and those without a prediction."""
        taken = [record for record in self if record.predicted_shard not in shard_ids]
        self._heap = [entry for entry in self._heap if entry[2].predicted_shard in shard_ids]
        heapify(self._heap)
        self._by_shard = Counter(record.predicted_shard for record in self)
        self.next_at = self._heap[0][0] if self._heap else math.inf
        return taken

    def has_shard(self, shard_id: str | None) -> bool:
        """Return True if a record of this shard is in the queue."""
        # `get`: a counter's own look-up of a missing key is ten times slower, and every put behind a gate asks.
        return self._by_shard.get(shard_id, 0) > 0

    @property
    def user_record_count(self) -> int:
        """Return how many user records are in the queue."""
        return sum(len(record.arrivals) for record in self)
