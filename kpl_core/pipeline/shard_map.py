"""Which shard a hash key goes to, and which shards are remembered.

The open shards' hash ranges partition 0 .. 2**128 - 1, so a shard is found by
the first end that is not below the hash key. Kept from the KPL (`shard_map.cc`):
a refresh is asked for only by a result newer than the last update, and asking
twice is asking once. Different: the old map stays in use while a new one is
fetched (the KPL has no map meanwhile, and does not aggregate or limit), the
ranges of closed shards are kept for a minute, to judge late results, and a map
is used for a minute: a stream that is deleted and made again has shards with
the ids of the old ones, and answers do not show that their ranges differ.
"""

from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

import msgspec

from kpl_core.options.kinesis_limits import MAX_HASH_KEY
from kpl_core.records.hash_key import hash_key_to_digest

CLOSED_RANGE_SECONDS: Final = 60.0
MOST_AGE_SECONDS: Final = 60.0


class Shard(msgspec.Struct, frozen=True):
    """An open shard: its id and its inclusive range of hash keys."""

    shard_id: str
    starting_hash_key: int
    ending_hash_key: int

    @property
    def digests(self) -> tuple[bytes, bytes]:
        """Return the range as digests."""
        return hash_key_to_digest(self.starting_hash_key), hash_key_to_digest(self.ending_hash_key)


class ShardMap:
    """The open shards of one stream, as of the last update.

    Hash keys are 16-byte digests here: big-endian bytes sort like the integers.
    """

    def __init__(self) -> None:
        self._starts: list[bytes] = []
        self._ends: list[bytes] = []
        self._shard_ids: list[str] = []
        self._ranges: dict[str, tuple[bytes, bytes]] = {}
        self._closed_at: dict[str, float] = {}
        self._updated_at: float | None = None
        # True if a newer map should be fetched.
        self.refresh_wanted = True
        # The ends of the open shards, where they leave no gap: enough to say which shard holds any digest.
        self.gapless_ends: list[bytes] = []

    @property
    def known(self) -> bool:
        """Return True if a map was ever given."""
        return self._updated_at is not None

    @property
    def open_shards(self) -> tuple[str, ...]:
        """Return the ids of the open shards in order of their ranges."""
        return tuple(self._shard_ids)

    def open_ranges(self) -> dict[str, tuple[bytes, bytes]]:
        """Return the inclusive range of each open shard."""
        return {shard_id: self._ranges[shard_id] for shard_id in self._shard_ids}

    def predict(self, digest: bytes) -> str | None:
        """Return the open shard of a hash key, None if no shard is known to hold it."""
        position = bisect_left(self._ends, digest)
        if position == len(self._ends) or digest < self._starts[position]:
            return None
        return self._shard_ids[position]

    def knows(self, shard_id: str) -> bool:
        """Return True if the range of `shard_id` is known: the shard is open, or closed in the last minute."""
        return shard_id in self._ranges

    def is_inside(self, digest: bytes, shard_id: str) -> bool:
        """Return True if a hash key lies in the range of `shard_id`; False if the range is unknown."""
        bounds = self._ranges.get(shard_id)
        return bounds is not None and bounds[0] <= digest <= bounds[1]

    def update(self, shards: Iterable[Shard], now: float) -> bool:
        """Use these open shards from now on; return True if that changed a prediction."""
        ordered = sorted(shards, key=lambda shard: shard.ending_hash_key)
        shard_ids = [shard.shard_id for shard in ordered]
        ends = [hash_key_to_digest(shard.ending_hash_key) for shard in ordered]
        changed = not self.known or shard_ids != self._shard_ids or ends != self._ends
        for shard_id in self._shard_ids:
            self._closed_at[shard_id] = now
        self._shard_ids = shard_ids
        self._starts = [hash_key_to_digest(shard.starting_hash_key) for shard in ordered]
        self._ends = ends
        for shard_id, start, end in zip(shard_ids, self._starts, ends, strict=True):
            self._ranges[shard_id] = (start, end)
            self._closed_at.pop(shard_id, None)
        for shard_id in [id_ for id_, at in self._closed_at.items() if now - at > CLOSED_RANGE_SECONDS]:
            del self._closed_at[shard_id], self._ranges[shard_id]
        self._updated_at = now
        # Of an active stream some shard is always open.
        self.refresh_wanted = not shard_ids
        next_starts = [0, *(shard.ending_hash_key + 1 for shard in ordered)]
        starts = [*(shard.starting_hash_key for shard in ordered), MAX_HASH_KEY + 1]
        self.gapless_ends = ends if next_starts == starts else []
        return changed

    def invalidate(self, *, seen_at: float) -> None:
        """Ask for a refresh, because a request started at `seen_at` met another map.

        A request that began before the last update is no evidence about the present map.
        """
        if self._updated_at is None or seen_at > self._updated_at:
            self.refresh_wanted = True

    def answered(self, now: float) -> None:
        """Ask for a refresh if the map is old, because records were stored with its help."""
        if self._updated_at is not None and now - self._updated_at > MOST_AGE_SECONDS:
            self.refresh_wanted = True

    def __repr__(self) -> str:
        return f"<ShardMap {len(self._shard_ids)} open shards{', refresh wanted' if self.refresh_wanted else ''}>"
