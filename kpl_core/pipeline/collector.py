"""Collect: pack admitted Kinesis records into PutRecords requests.

A request leaves when it is full (500 records, or its size in bytes) or when
the most urgent record in it has waited long enough. Like in the KPL, a record
may wait a little past its own deadline for records of other shards: 10 % of
the buffered time (KPL: 20 %), 50 ms at most. Open records join the request too,
so a longer wait hardly makes requests larger. (`kinesis_record.cc` and `collector.h`; AWS
PutRecords.)

Different from the KPL: 256 KiB for one shard make that shard's records leave
alone. There they flush the whole request, so one hot shard makes all
requests small.

A record that was admitted in time is sent even if it expires while its request
waits for more records. The shard's tokens are spent on it already, and on a
shard that is offered more than it takes, every record is admitted shortly
before it expires. A record expires here only if no request can leave for
longer than that wait.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Final

from kpl_core.options.kinesis_limits import KIB
from kpl_core.options.stage_rules import CollectionRules
from kpl_core.records.expiry import split_expired
from kpl_core.records.kinesis_record import KinesisRecord

SHARD_BYTES: Final = 256 * KIB


class Collector:
    """The request being packed, by predicted shard, and those that are full."""

    def __init__(self, rules: CollectionRules) -> None:
        self._count_limit = rules.count_limit
        self._size_limit = rules.size_limit
        self._extension_seconds = rules.extension_seconds
        self.full: deque[list[KinesisRecord]] = deque()
        # Never later than the first instant at which something here is too old; exact after `take_expired`.
        self.earliest_expiration = math.inf
        self._start()

    def _start(self) -> None:
        self._by_shard: dict[str | None, list[KinesisRecord]] = {}
        self._bytes_by_shard: dict[str | None, int] = {}
        self._count = 0
        self._size = 0
        self.deadline = math.inf

    def add(self, record: KinesisRecord, now: float) -> None:
        """Put an admitted record into the request being packed, closing what is full."""
        self.add_run((record,), now)

    def add_run(self, records: Sequence[KinesisRecord], now: float) -> None:
        """Put admitted records of one shard into the request being packed, in their order, closing what is full."""
        if len(records) == 1 or not self._add_together(records, now):
            self._add_each(records, now)

    def _add_together(self, records: Sequence[KinesisRecord], now: float) -> bool:
        """Add a run of one shard that fills nothing, in a few passes instead of many steps; say whether it did."""
        size = sum([record.size_bytes for record in records])
        shard = records[0].predicted_shard
        shard_bytes = self._bytes_by_shard.get(shard, 0) + size
        if (
            self._size + size > self._size_limit
            or self._count + len(records) >= self._count_limit
            or (shard_bytes >= SHARD_BYTES and shard is not None)
        ):
            return False
        together = self._by_shard.get(shard)
        if together is None:
            self._by_shard[shard] = list(records)
        else:
            together += records
        self._bytes_by_shard[shard] = shard_bytes
        self._size += size
        self._count += len(records)
        expires_at = min([record.expires_at for record in records])
        self.earliest_expiration = min(self.earliest_expiration, expires_at + self._extension_seconds)
        deadline = min([record.deadline for record in records])
        self.deadline = min(self.deadline, max(deadline, now + self._extension_seconds))
        return True

    def _add_each(self, records: Sequence[KinesisRecord], now: float) -> None:
        extension_seconds = self._extension_seconds
        extended = now + extension_seconds
        for record in records:
            size = record.size_bytes
            if self._size + size > self._size_limit and self._count:
                self._close_all()
            shard = record.predicted_shard
            together = self._by_shard.get(shard)
            if together is None:
                together = self._by_shard[shard] = []
                shard_bytes = size
            else:
                shard_bytes = self._bytes_by_shard[shard] + size
            together.append(record)
            self._bytes_by_shard[shard] = shard_bytes
            self._size += size
            expires_at = record.expires_at + extension_seconds
            if expires_at < self.earliest_expiration:
                self.earliest_expiration = expires_at
            deadline = extended
            if deadline < record.deadline:
                deadline = record.deadline
            if deadline < self.deadline:
                self.deadline = deadline
            self._count += 1
            if self._count >= self._count_limit:
                self._close_all()
            elif shard_bytes >= SHARD_BYTES and shard is not None:
                self._close_shard(shard)

    def _close_all(self) -> None:
        self.full.append([record for records in self._by_shard.values() for record in records])
        self._start()

    def _close_shard(self, shard: str) -> None:
        records = self._by_shard.pop(shard)
        self.full.append(records)
        self._count -= len(records)
        self._size -= self._bytes_by_shard.pop(shard)
        if not self._count:
            self.deadline = math.inf

    def next_records(self, now: float) -> list[KinesisRecord] | None:
        """Return the records of the next request that is full or due, None if there is none."""
        if not self.full and self.deadline <= now:
            self._close_all()
        if not self.full:
            return None
        records = self.full.popleft()
        if not self.full and not self._count:
            self.earliest_expiration = math.inf
        return records

    def take_expired(self, now: float) -> list[KinesisRecord]:
        """Remove and return the records that expired while no request could leave."""
        if self.earliest_expiration > now:
            return []
        # In place: packing the others again would restart their wait, without a bound if one expires each time.
        expired: list[KinesisRecord] = []
        extension = self._extension_seconds
        full: deque[list[KinesisRecord]] = deque()
        for records in self.full:
            too_old, left = split_expired(records, now, extension_seconds=extension)
            expired += too_old
            if left:
                full.append(left)
        self.full = full
        for shard, records in list(self._by_shard.items()):
            too_old, left = split_expired(records, now, extension_seconds=extension)
            if too_old:
                expired += too_old
                self._replace(shard, left)
        held = [record for records in (*self.full, *self._by_shard.values()) for record in records]
        first = min((record.expires_at for record in held), default=math.inf)
        self.earliest_expiration = first + extension
        return expired

    def _replace(self, shard: str | None, records: list[KinesisRecord]) -> None:
        before = self._by_shard.pop(shard)
        size = sum(record.size_bytes for record in records)
        self._count += len(records) - len(before)
        self._size += size - self._bytes_by_shard.pop(shard)
        if records:
            self._by_shard[shard] = records
            self._bytes_by_shard[shard] = size
        if not self._count:
            self.deadline = math.inf

    def flush(self) -> None:
        """Let everything packed so far leave without waiting for more."""
        if self._count:
            self._close_all()

    def take_all(self) -> list[KinesisRecord]:
        """Remove and return everything, because the shard map changed."""
        self.flush()
        records = [record for full in self.full for record in full]
        self.full.clear()
        self.earliest_expiration = math.inf
        return records

    def is_due(self, now: float) -> bool:
        """Return True if `next_records` would return a request."""
        return bool(self.full) or self.deadline <= now

    def free_places(self, now: float) -> int:
        """Return how many more records the next request has room for if it is due and not full; else 0."""
        if self.full or self.deadline > now:
            return 0
        return self._count_limit - self._count

    def next_wakeup(self, *, may_send: bool = True) -> float:
        """Return when the next request is due or a record expires: `-math.inf` for at once."""
        if not may_send:
            return self.earliest_expiration
        return -math.inf if self.full else min(self.deadline, self.earliest_expiration)

    @property
    def packing_count(self) -> int:
        """Return how many user records are in the request that is being packed."""
        return sum(len(record.arrivals) for records in self._by_shard.values() for record in records)

    @property
    def user_record_count(self) -> int:
        """Return how many user records are packed and not taken."""
        return self.packing_count + sum(len(record.arrivals) for full in self.full for record in full)
