"""The shards of one stream: who is open, who descends from whom, and how the key space is cut.

The open shards always partition the hash keys 0 .. 2**128 - 1. A reshard closes shards and opens
their children in one step; nothing stored moves.
"""

from bisect import bisect_left
from collections.abc import Iterable

from kpl_core.options.kinesis_limits import MAX_HASH_KEY
from kpl_core.testing.fake_shard import FakeShard
from kpl_core.testing.service_limits import ServiceLimits

__all__ = ["ShardFamily", "uniform_starts"]


def uniform_starts(count: int) -> tuple[int, ...]:
    """Return the first hash key of each of `count` shards that share the key space evenly."""
    return tuple((MAX_HASH_KEY + 1) // count * position for position in range(count))


class ShardFamily:
    """All shards a stream ever had, and an index over the open ones."""

    __slots__ = ("_limits", "all", "end_digests", "open")

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
        """Return the open shard whose range holds a hash key given as 16 bytes."""
        return self.open[bisect_left(self.end_digests, digest)]

    def has_position(self, index: int, position: int) -> bool:
        """Say whether there is a shard number `index`, and a reader of it can stand at `position`."""
        return 0 <= index < len(self.all) and 0 <= position <= self.all[index].log.end

    def children(self, shard: FakeShard) -> list[FakeShard]:
        """Return the shards that were made from `shard`, none while it is open."""
        return [
            child for child in self.all if shard.shard_id in {child.parent_shard_id, child.adjacent_parent_shard_id}
        ]

    def split(self, shard: FakeShard, new_starting_hash_key: int, now_ms: int) -> tuple[FakeShard, FakeShard]:
        """Replace an open shard by two; the second starts at `new_starting_hash_key`."""
        shard.close(now_ms)
        left = self._add(shard.starting_hash_key, new_starting_hash_key - 1, (shard,), now_ms)
        right = self._add(new_starting_hash_key, shard.ending_hash_key, (shard,), now_ms)
        self._index()
        return left, right

    def merge(self, shard: FakeShard, right_neighbour: FakeShard, now_ms: int) -> FakeShard:
        """Replace two open neighbours by one."""
        shard.close(now_ms)
        right_neighbour.close(now_ms)
        parents = (shard, right_neighbour)
        child = self._add(shard.starting_hash_key, right_neighbour.ending_hash_key, parents, now_ms)
        self._index()
        return child

    def rescale(self, count: int, now_ms: int) -> None:
        """Reach `count` even shards by splits at the new borders, then merges within them."""
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
        """Return the first of the open shards with the widest range."""
        return max(self.open, key=lambda shard: shard.ending_hash_key - shard.starting_hash_key)

    def neighbour(self, shard: FakeShard) -> FakeShard | None:
        """Return the open shard whose range follows that of `shard`."""
        return next((other for other in self.open if other.starting_hash_key == shard.ending_hash_key + 1), None)

    def listed(self, horizon_ms: int) -> Iterable[FakeShard]:
        """Return the shards that may still hold records: the open ones, and those closed since `horizon_ms`."""
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
