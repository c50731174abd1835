"""From a partition key to where its user record is aggregated.

Hashing and searching cost more than the rest of a put, so the answer is
remembered per partition key, in two generations: when the young one is full it
becomes the old one and the previous old one is dropped, so at most
2 x `generation_keys` keys are held and a busy key stays. A stream of unique
keys gains nothing from it and would pay for the upkeep: while most look-ups
miss, nothing is remembered.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

from kpl_core.pipeline.open_record import OpenRecord
from kpl_core.pipeline.shard_map import ShardMap
from kpl_core.records.aggregated_record import explicit_hash_key_entry
from kpl_core.records.hash_key import hash_key_to_digest, md5, parse_explicit_hash_key
from kpl_core.records.user_record import encode_partition_key


class Destination(Protocol):
    """What routes lead to."""

    @property
    def open_record(self) -> OpenRecord | None:
        """Where a user record is appended at once, if anywhere."""

    def entry(self, key: bytes, digest: bytes | None) -> bytes:
        """Return what adding a user record with this key needs each time; the digest where one was made."""


L = TypeVar("L", bound=Destination)

GENERATION_KEYS: Final = 16_384
# For how many generations of misses nothing is remembered after one in which most look-ups missed. With the kernels few
# puts miss here meanwhile, because they hash such keys themselves, so then it lasts.
PAUSE_GENERATIONS: Final = 8
WORTHWHILE_HIT_SHARE: Final = 0.3

# Where the user record goes, what that place needs of its key, the key's bytes, and the place's open record.
Route = tuple[L, bytes, int, OpenRecord | None]
# Where user records with an explicit hash key go, and the entry of the explicit hash key in the place's table.
ExplicitRoute = tuple[L, bytes]


class Router(Generic[L]):
    """Routes of one stream. `lane_of` gives the lane of a predicted shard (None: unpredicted)."""

    def __init__(
        self,
        shard_map: ShardMap,
        lane_of: Callable[[str | None], L],
        lookups: Callable[[], int],
        *,
        generation_keys: int = GENERATION_KEYS,
    ) -> None:
        self._generation_keys = generation_keys
        self._shard_map = shard_map
        self._lane_of = lane_of
        # How many user records were routed so far; read once a generation, to know the share of hits.
        self._lookups = lookups
        # Read by the pipeline directly, one dict look-up per user record. Never replaced.
        self.routes: dict[str, Route[L]] = {}
        self.explicit_routes: dict[str, ExplicitRoute[L]] = {}
        self._old: dict[str, Route[L]] = {}
        # By position among the shards, where they leave no gap: the lanes, and what the version of `append_pairs` in C
        # needs instead of the routes.
        self._lanes: dict[int, L] = {}
        self.table: tuple[bytes, list[OpenRecord | None]] | None = None
        self._lookups_at_start = 0
        # False while most look-ups miss; and for how many misses.
        self.remembers = True
        self._pause = 0

    def find(self, partition_key: str) -> Route[L]:
        """Return the route of a partition key that `routes` does not hold, and remember it.

        Raises:
            TypeError, InvalidUserRecord: the partition key is not valid.
        """
        route = self._old.get(partition_key)
        if route is None:
            key = encode_partition_key(partition_key)
            ends = self._shard_map.gapless_ends
            # One open shard takes every hash key, so none needs hashing.
            digest = None if len(ends) == 1 else md5(key).digest()
            position = 0 if digest is None else bisect_left(ends, digest)
            lane = self._lanes.get(position) if ends else None
            if lane is None:
                lane = self._new_lane(position, md5(key).digest())
            route = (lane, lane.entry(key, digest), len(key), lane.open_record)
        if self._pause:
            self._pause -= 1
            if not self._pause:
                self.remembers = True
                self._lookups_at_start = self._lookups()
            return route
        self.routes[partition_key] = route
        if len(self.routes) >= self._generation_keys:
            self._turn_generation()
        return route

    def find_explicit(self, explicit_hash_key: str) -> ExplicitRoute[L]:
        """Return the route of an explicit hash key that `explicit_routes` does not hold, and remember it.

        Raises:
            TypeError, InvalidUserRecord: the explicit hash key is not valid.
        """
        digest = hash_key_to_digest(parse_explicit_hash_key(explicit_hash_key))
        ends = self._shard_map.gapless_ends
        position = bisect_left(ends, digest)
        lane = self._lanes.get(position) if ends else None
        if lane is None:
            lane = self._new_lane(position, digest)
        if len(self.explicit_routes) >= self._generation_keys:
            self.explicit_routes.clear()
        route = self.explicit_routes[explicit_hash_key] = (lane, explicit_hash_key_entry(explicit_hash_key))
        return route

    def _new_lane(self, position: int, digest: bytes) -> L:
        lane = self._lane_of(self._shard_map.predict(digest))
        if ends := self._shard_map.gapless_ends:
            self._lanes[position] = lane
            if self.table is None:
                self.table = (b"".join(ends), [None] * len(ends))
            self.table[1][position] = lane.open_record
        return lane

    def _turn_generation(self) -> None:
        lookups = self._lookups()
        seen = lookups - self._lookups_at_start
        self._lookups_at_start = lookups
        if seen - self._generation_keys < WORTHWHILE_HIT_SHARE * seen:
            self.remembers = False
            self._pause = PAUSE_GENERATIONS * self._generation_keys
            self._old = {}
        else:
            self._old = self.routes.copy()
        self.routes.clear()

    def forget(self) -> None:
        """Forget all routes, because the shard map changed."""
        self.routes.clear()
        self.explicit_routes.clear()
        self._lanes.clear()
        self.table = None
        self._old = {}
        self._lookups_at_start = self._lookups()
