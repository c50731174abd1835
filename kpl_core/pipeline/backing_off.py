"""Kinesis records between a failed attempt and the next one, by the instant each may go again."""

import math
from collections import Counter
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Final

from kpl_core.records.kinesis_record import KinesisRecord

__all__ = ["BackingOff"]

# User records: whose time ends at one instant may be all there is, and a loop that serves others must not stop for it.
DUE_AT_ONCE: Final = 500


class BackingOff:
    """A heap of instants, and how many records of each predicted shard are in it."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, KinesisRecord]] = []
        self._by_shard: Counter[str | None] = Counter()

    def __bool__(self) -> bool:
        return bool(self._heap)

    def __iter__(self) -> Iterator[KinesisRecord]:
        return (record for _, _, record in self._heap)

    def add(self, record: KinesisRecord, at: float) -> None:
        """Keep a record until `at`."""
        heappush(self._heap, (at, record.sequence, record))
        self._by_shard[record.predicted_shard] += 1

    def take_due(self, now: float) -> list[KinesisRecord]:
        """Remove and return records whose backoff is over; if there are more, `next_wakeup` says at once."""
        due: list[KinesisRecord] = []
        count = 0
        while self._heap and self._heap[0][0] <= now and count < DUE_AT_ONCE:
            record = heappop(self._heap)[2]
            self._by_shard[record.predicted_shard] -= 1
            due.append(record)
            count += len(record.arrivals)
        return due

    def take_except(self, shard_ids: set[str]) -> list[KinesisRecord]:
        """Remove and return the records of all other shards, and those without a prediction."""
        taken = [record for record in self if record.predicted_shard not in shard_ids]
        self._heap = [entry for entry in self._heap if entry[2].predicted_shard in shard_ids]
        heapify(self._heap)
        self._by_shard = Counter(record.predicted_shard for record in self)
        return taken

    def holds(self, shard_id: str | None) -> bool:
        """Say whether a record of this shard is in here."""
        # `get`: a counter's own look-up of what it does not have is ten times slower, and this is asked often.
        return self._by_shard.get(shard_id, 0) > 0

    def next_wakeup(self) -> float:
        """Return when the first backoff ends, `math.inf` if nothing is in here."""
        return self._heap[0][0] if self._heap else math.inf

    @property
    def user_record_count(self) -> int:
        """Return how many user records are in here."""
        return sum(len(record.arrivals) for record in self)
