"""The shards of one stream: hash key ranges, write capacity, stored records, and which shard replaced which.

The open shards always partition the hash keys 0 .. 2**128 - 1. A reshard closes shards and opens their children
in one step, and moves no stored record.

A sequence number has the layout of the service: 188 bits, 56 decimal digits. From the most significant bit: a
leading 2, the second the shard was created, the low digit of its index, a counter, a zero byte, the second of
the write, the shard's index and a trailing 2 (users of the service observed this layout, and the open emulators
produce it). The numbers of one shard rise with the counter. A child's numbers are all above its parents',
because it was created later.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from typing import Final, NamedTuple

from kpl_core.options.kinesis_limits import MAX_HASH_KEY
from kpl_core.records.hash_key import hash_key_to_digest
from kpl_core.testing.kinesis_api import ServiceLimits

LAST_COUNTER: Final = 0x7FFF_FFFF_FFFF_FFFF

_SHARD: Final = 4
_WRITTEN: Final = 36
_COUNTER: Final = 80
_COUNTER_ABOVE_WRITTEN: Final = _COUNTER - _WRITTEN
_DIGIT: Final = 144
_CREATED: Final = 148
_LEAD: Final = 184
_VERSION: Final = 2


class SequenceNumber(NamedTuple):
    """The fields of a sequence number. Instants are whole seconds since 1970."""

    shard_created_at: int
    counter: int
    written_at: int
    shard_index: int


def shard_bits(*, created_at: int, shard_index: int) -> int:
    """Return the bits that all sequence numbers of one shard share."""
    return (
        (_VERSION << _LEAD)
        | (created_at << _CREATED)
        | ((shard_index & 0xF) << _DIGIT)
        | (shard_index << _SHARD)
        | _VERSION
    )


def format_sequence_number(bits: int, counter: int, written_at: int) -> str:
    """Return the decimal sequence number of one record. `bits` come from `shard_bits`."""
    return str(bits + (((counter << _COUNTER_ABOVE_WRITTEN) + written_at) << _WRITTEN))


def parse_sequence_number(text: str) -> SequenceNumber | None:
    """Return the fields of a sequence number, or None if this service cannot have issued it."""
    if not (text.isascii() and text.isdigit()):
        return None
    number = int(text)
    shard_index = (number >> _SHARD) & 0xFFFF_FFFF
    fields = SequenceNumber(
        shard_created_at=(number >> _CREATED) & 0xF_FFFF_FFFF,
        counter=(number >> _COUNTER) & 0xFFFF_FFFF_FFFF_FFFF,
        written_at=(number >> _WRITTEN) & 0xF_FFFF_FFFF,
        shard_index=shard_index,
    )
    if number >> _LEAD != _VERSION or number & 0xF != _VERSION or (number >> _DIGIT) & 0xF != shard_index & 0xF:
        return None
    return fields


# Tokens are floats: when a record is due exactly now, the bucket may lack a billionth of a token.
_TOLERANCE: Final = 1e-6


class ShardCapacity:
    """One shard's write capacity: a bucket for records and a bucket for bytes, taken together or not at all.

    Both start full. Over any `t` seconds they admit at most `burst + rate * t` records, and as many bytes plus at
    most one record larger than the burst. A record above the burst passes when the byte bucket is full and leaves
    it in debt, so records up to 10 MiB move at the shard's average rate (AWS, "Large records").

    It shares no code with `kpl_core.pipeline.token_bucket`: the tests check the producer's bucket against this one.
    """

    def __init__(self, limits: ServiceLimits) -> None:
        self._record_rate = limits.records_per_second_per_shard
        self._byte_rate = limits.bytes_per_second_per_shard
        self._record_burst = limits.records_per_second_per_shard * limits.burst_seconds
        self._byte_burst = limits.bytes_per_second_per_shard * limits.burst_seconds
        self._records = self._record_burst
        self._bytes = self._byte_burst
        self._updated_at: float | None = None

    def take(self, size_bytes: int, now: float) -> bool:
        """Take one record of `size_bytes` (key and data) at `now` seconds. Return False if it is throttled."""
        updated_at = self._updated_at
        if updated_at is None:
            self._updated_at = now
        elif now > updated_at:
            elapsed = now - updated_at
            self._records = min(self._record_burst, self._records + elapsed * self._record_rate)
            self._bytes = min(self._byte_burst, self._bytes + elapsed * self._byte_rate)
            self._updated_at = now
        free_bytes = self._bytes + _TOLERANCE
        if self._records + _TOLERANCE < 1.0:
            return False
        if size_bytes > free_bytes and not size_bytes > self._byte_burst <= free_bytes:
            return False
        self._records -= 1.0
        self._bytes -= size_bytes
        return True


# Trimming moves all remaining records, so it waits until there are this many to trim.
_TRIM_AT_LEAST: Final = 1_024


class ShardLog:
    """The stored records of one shard, in columns: a record costs its key, its data and 16 bytes.

    A position is the ordinal of a record in its shard, counted from the first one ever written. It stays valid
    when old records are trimmed.
    """

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._data: list[bytes] = []
        self._counters = array("Q")
        self._arrivals_ms = array("q")
        # The position of the oldest record that is still stored.
        self.first = 0

    def append(self, partition_key: str, data: bytes, counter: int, arrived_ms: int) -> None:
        """Add one record. Its `counter` must be above, and its `arrived_ms` not below, those of the last record."""
        self._keys.append(partition_key)
        self._data.append(data)
        self._counters.append(counter)
        self._arrivals_ms.append(arrived_ms)

    @property
    def end(self) -> int:
        """Return the position after the newest record."""
        # The last column that `append` extends: a test may read in another thread.
        return self.first + len(self._arrivals_ms)

    def start(self, horizon_ms: int) -> int:
        """Return the position of the oldest record that arrived at or after `horizon_ms`."""
        return self.first + bisect_left(self._arrivals_ms, horizon_ms)

    def position_of(self, counter: int) -> int:
        """Return the position of the first record with at least this counter."""
        return self.first + bisect_left(self._counters, counter)

    def arrived_ms(self, position: int) -> int:
        """Return when the record at `position` arrived, in milliseconds since 1970."""
        return self._arrivals_ms[position - self.first]

    def record(self, position: int) -> tuple[str, bytes, int, int]:
        """Return partition key, data, counter and arrival (ms) of the record at `position`."""
        at = position - self.first
        return self._keys[at], self._data[at], self._counters[at], self._arrivals_ms[at]

    def trim(self, horizon_ms: int) -> None:
        """Delete the records that arrived before `horizon_ms`, once they are half of the log."""
        if not self._arrivals_ms or self._arrivals_ms[0] >= horizon_ms:
            return
        expired = bisect_left(self._arrivals_ms, horizon_ms)
        if expired < _TRIM_AT_LEAST or expired * 2 < len(self._keys):
            return
        for column in (self._keys, self._data, self._counters, self._arrivals_ms):
            del column[:expired]
        self.first += expired


def shard_id_of(index: int) -> str:
    """Return the id of a stream's shard number `index`, as the service writes it."""
    return f"shardId-{index:012d}"


class FakeShard:
    """A shard, which is open until it is split or merged. Both ends of its hash key range are inclusive.

    Instants are milliseconds since 1970.
    """

    def __init__(
        self,
        index: int,
        *,
        starting_hash_key: int,
        ending_hash_key: int,
        opened_ms: int,
        parents: "tuple[FakeShard, ...]" = (),
        limits: ServiceLimits,
    ) -> None:
        self.index = index
        self.shard_id = shard_id_of(index)
        self.starting_hash_key = starting_hash_key
        self.ending_hash_key = ending_hash_key
        self.end_digest = hash_key_to_digest(ending_hash_key)
        self.opened_ms = opened_ms
        self.closed_ms: int | None = None
        self.parent_shard_id = parents[0].shard_id if parents else None
        self.adjacent_parent_shard_id = parents[1].shard_id if len(parents) > 1 else None
        # Later than its parents, even within one second: its first number must be above their last number.
        self.created_seconds: int = max([opened_ms // 1000, *(parent.created_seconds + 1 for parent in parents)])
        self.capacity = ShardCapacity(limits)
        self.log = ShardLog()
        self._bits = shard_bits(created_at=self.created_seconds, shard_index=index)

    def __repr__(self) -> str:
        state = "open" if self.closed_ms is None else "closed"
        return f"<FakeShard {self.shard_id} {state} {self.starting_hash_key}..{self.ending_hash_key}>"

    def append(self, partition_key: str, data: bytes, counter: int, arrived_ms: int) -> str:
        """Store one record and return its sequence number."""
        self.log.append(partition_key, data, counter, arrived_ms)
        return self.sequence_number(counter, arrived_ms)

    def sequence_number(self, counter: int, arrived_ms: int) -> str:
        """Return the sequence number of the record with this counter and arrival time."""
        return format_sequence_number(self._bits, counter, arrived_ms // 1000)

    @property
    def starting_sequence_number(self) -> str:
        """Return the number below the numbers of all its records."""
        return format_sequence_number(self._bits, 0, self.created_seconds)

    @property
    def ending_sequence_number(self) -> str | None:
        """Return the number above the numbers of all its records, or None while the shard is open."""
        if self.closed_ms is None:
            return None
        return format_sequence_number(self._bits, LAST_COUNTER, self.closed_ms // 1000)

    def close(self, now_ms: int) -> None:
        """Accept no more records. The stored records stay readable."""
        self.closed_ms = now_ms


def uniform_starts(count: int) -> tuple[int, ...]:
    """Return the first hash key of each of `count` shards that divide the key space evenly."""
    return tuple((MAX_HASH_KEY + 1) // count * position for position in range(count))


class ShardFamily:
    """All shards that a stream ever had, and an index over the open ones."""

    def __init__(self, count: int, *, now_ms: int, limits: ServiceLimits) -> None:
        self._limits = limits
        self.all: list[FakeShard] = []
        self.open: list[FakeShard] = []
        self.end_digests: list[bytes] = []
        starts = uniform_starts(count)
        for start, next_start in zip(starts, (*starts[1:], MAX_HASH_KEY + 1), strict=True):
            self._add(start, next_start - 1, (), now_ms)
        self._index()

    def route(self, digest: bytes) -> FakeShard:
        """Return the open shard whose range contains a hash key, given as 16 bytes."""
        return self.open[bisect_left(self.end_digests, digest)]

    def has_position(self, index: int, position: int) -> bool:
        """Return True if shard number `index` exists and `position` is within its log."""
        return 0 <= index < len(self.all) and 0 <= position <= self.all[index].log.end

    def children(self, shard: FakeShard) -> list[FakeShard]:
        """Return the children of `shard`. An open shard has none."""
        return [
            child for child in self.all if shard.shard_id in {child.parent_shard_id, child.adjacent_parent_shard_id}
        ]

    def split(self, shard: FakeShard, new_starting_hash_key: int, now_ms: int) -> tuple[FakeShard, FakeShard]:
        """Replace an open shard by two. The second one starts at `new_starting_hash_key`."""
        shard.close(now_ms)
        left = self._add(shard.starting_hash_key, new_starting_hash_key - 1, (shard,), now_ms)
        right = self._add(new_starting_hash_key, shard.ending_hash_key, (shard,), now_ms)
        self._index()
        return left, right

    def merge(self, shard: FakeShard, right_neighbour: FakeShard, now_ms: int) -> FakeShard:
        """Replace two open neighbours by one shard."""
        shard.close(now_ms)
        right_neighbour.close(now_ms)
        parents = (shard, right_neighbour)
        child = self._add(shard.starting_hash_key, right_neighbour.ending_hash_key, parents, now_ms)
        self._index()
        return child

    def rescale(self, count: int, now_ms: int) -> None:
        """Split at the new borders, then merge between them, until there are `count` even shards."""
        starts = uniform_starts(count)
        for start in starts[1:]:
            shard = self._holding(start)
            if shard.starting_hash_key != start:
                self.split(shard, start, now_ms)
        ends = (*(start - 1 for start in starts[1:]), MAX_HASH_KEY)
        for start, end in zip(starts, ends, strict=True):
            shard = self._holding(start)
            while shard.ending_hash_key != end:
                shard = self.merge(shard, self._holding(shard.ending_hash_key + 1), now_ms)

    def widest(self) -> FakeShard:
        """Return the open shard with the widest range, the first one if several are equally wide."""
        return max(self.open, key=lambda shard: shard.ending_hash_key - shard.starting_hash_key)

    def neighbour(self, shard: FakeShard) -> FakeShard | None:
        """Return the open shard whose range follows that of `shard`, or None if it is the last."""
        return next((other for other in self.open if other.starting_hash_key == shard.ending_hash_key + 1), None)

    def listed(self, horizon_ms: int) -> Iterable[FakeShard]:
        """Return the shards that may still have records: the open ones, and those closed since `horizon_ms`."""
        return (shard for shard in self.all if shard.closed_ms is None or shard.closed_ms >= horizon_ms)

    def _holding(self, hash_key: int) -> FakeShard:
        return next(shard for shard in self.open if shard.starting_hash_key <= hash_key <= shard.ending_hash_key)

    def _add(self, start: int, end: int, parents: tuple[FakeShard, ...], now_ms: int) -> FakeShard:
        shard = FakeShard(
            len(self.all),
            starting_hash_key=start,
            ending_hash_key=end,
            opened_ms=now_ms,
            parents=parents,
            limits=self._limits,
        )
        self.all.append(shard)
        return shard

    def _index(self) -> None:
        still_open = [shard for shard in self.all if shard.closed_ms is None]
        self.open = sorted(still_open, key=lambda shard: shard.starting_hash_key)
        self.end_digests = [shard.end_digest for shard in self.open]
