"""Which shards may be read now: a child only after its parents, as any consumer that keeps the order of a key.

A parent that nobody read (its records are gone, or reading began after it) holds no child up.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Self

import msgspec

__all__ = ["ReadableShard", "ReadingOrder"]


class ReadableShard(msgspec.Struct, frozen=True):
    """A shard as its readers see it; both ends of its hash key range are inclusive."""

    shard_id: str
    parent_ids: tuple[str, ...]
    first_hash_key: int
    last_hash_key: int

    @classmethod
    def of_listed(cls, shard: Mapping[str, Any]) -> Self:
        """Return it from a Shard of ListShards."""
        parents = (shard.get("ParentShardId"), shard.get("AdjacentParentShardId"))
        return cls._of(shard, tuple(parent for parent in parents if parent))

    @classmethod
    def of_child(cls, child: Mapping[str, Any]) -> Self:
        """Return it from a ChildShard of GetRecords."""
        return cls._of(child, tuple(child["ParentShards"]))

    @classmethod
    def _of(cls, shard: Mapping[str, Any], parent_ids: tuple[str, ...]) -> Self:
        bounds = shard["HashKeyRange"]
        return cls(shard["ShardId"], parent_ids, int(bounds["StartingHashKey"]), int(bounds["EndingHashKey"]))


class ReadingOrder:
    """Hands out each shard once, when all its parents that are to be read have been read."""

    def __init__(self) -> None:
        self._waiting: dict[str, ReadableShard] = {}
        self._handed_out: set[str] = set()
        self._unfinished: set[str] = set()

    def discover(self, shards: Iterable[ReadableShard]) -> list[ReadableShard]:
        """Learn of shards, known or new; return those to read now."""
        for shard in shards:
            if shard.shard_id not in self._handed_out:
                self._waiting[shard.shard_id] = shard
        return self._take_ready()

    def finish(self, shard_id: str, children: Iterable[ReadableShard]) -> list[ReadableShard]:
        """Note that a shard was read to its end; return those to read now."""
        self._unfinished.discard(shard_id)
        return self.discover(children)

    def _take_ready(self) -> list[ReadableShard]:
        ready = [shard for shard in self._waiting.values() if not self._is_held_up(shard)]
        for shard in ready:
            del self._waiting[shard.shard_id]
            self._handed_out.add(shard.shard_id)
            self._unfinished.add(shard.shard_id)
        return ready

    def _is_held_up(self, shard: ReadableShard) -> bool:
        return any(parent in self._waiting or parent in self._unfinished for parent in shard.parent_ids)
