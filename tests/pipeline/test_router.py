import pytest
from hypothesis import given, settings, strategies as st

from kpl_core.errors import InvalidUserRecord
from kpl_core.options.kinesis_limits import MAX_HASH_KEY
from kpl_core.pipeline.router import GENERATION_KEYS, Router
from kpl_core.pipeline.shard_map import ShardMap
from kpl_core.records.aggregated_record import explicit_hash_key_entry
from tests.support.material import even_shards, hash_key, keys_in, shard_of


class NamedLane:
    """A lane that is only its name."""

    open_record = None

    def __init__(self, shard_id: str | None) -> None:
        self.shard_id = shard_id

    def entry(self, key: bytes, digest: bytes | None) -> bytes:
        return b"entry of " + key


class Routing:
    """A router, the map it asks and a count of how often it had to make a lane."""

    def __init__(self, shard_count: int = 4, *, generation_keys: int = GENERATION_KEYS) -> None:
        self.shards = even_shards(shard_count)
        self.shard_map = ShardMap()
        if shard_count:
            self.shard_map.update(self.shards, 0.0)
        self.lookups = 0
        self.misses = 0
        self.lanes: dict[str | None, NamedLane] = {}
        self.router: Router[NamedLane] = Router(
            self.shard_map, self.lane, lambda: self.lookups, generation_keys=generation_keys
        )

    def lane(self, shard_id: str | None) -> NamedLane:
        return self.lanes.setdefault(shard_id, NamedLane(shard_id))

    def route(self, partition_key: str) -> str | None:
        """Look up as the pipeline does."""
        self.lookups += 1
        found = self.router.routes.get(partition_key)
        if found is None:
            self.misses += 1
            found = self.router.find(partition_key)
        return found[0].shard_id


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=256), st.integers(1, 9))
def test_a_key_is_routed_where_the_service_stores_it(partition_key, shard_count):
    routing = Routing(shard_count)
    expected = shard_of(routing.shards, hash_key(partition_key))
    assert [routing.route(partition_key) for _ in range(2)] == [expected] * 2
    _, entry, size, _ = routing.router.find(partition_key)
    assert entry == b"entry of " + partition_key.encode()
    assert size == len(partition_key.encode())


@given(st.integers(0, MAX_HASH_KEY), st.integers(1, 9))
def test_an_explicit_hash_key_is_routed_where_the_service_stores_it(number, shard_count):
    routing = Routing(shard_count, generation_keys=2)
    lane, entry = routing.router.find_explicit(str(number))
    assert lane.shard_id == shard_of(routing.shards, number)
    assert entry == explicit_hash_key_entry(str(number))
    assert routing.router.explicit_routes == {str(number): (lane, entry)}
    for other in range(9):
        routing.router.find_explicit(str(other))
        assert len(routing.router.explicit_routes) <= 2
    routing.router.forget()
    assert routing.router.explicit_routes == {}


def test_without_a_map_every_key_is_unpredicted():
    assert Routing(0).route("k") is None


def test_a_known_key_is_neither_hashed_nor_searched_again():
    routing = Routing()
    for _ in range(5):
        routing.route("k")
    assert routing.misses == 1


def test_a_new_map_forgets_all_routes_but_keeps_the_dict_the_pipeline_reads():
    routing = Routing(1)
    routes = routing.router.routes
    assert routing.route("k") == even_shards(1)[0].shard_id
    routing.shard_map.update(even_shards(2, first=1), 1.0)
    routing.router.forget()
    assert routing.route("k") == shard_of(even_shards(2, first=1), hash_key("k"))
    assert routing.router.routes is routes


@pytest.mark.parametrize("partition_key", ["", "x" * 257, "\ud800"])
def test_a_bad_key_is_refused_every_time(partition_key):
    routing = Routing()
    for _ in range(2):
        with pytest.raises(InvalidUserRecord, match="partition_key"):
            routing.route(partition_key)


@pytest.mark.parametrize("partition_key", [None, 5, b"k", 1.5])
def test_a_key_of_another_type_is_a_type_error(partition_key):
    with pytest.raises(TypeError, match="partition_key must be a str"):
        Routing().route(partition_key)


def test_a_busy_key_survives_the_change_of_generations():
    routing = Routing(generation_keys=8)
    for number in range(1_000):
        for _ in range(3):
            routing.route("busy")
        routing.route(f"rare {number // 2}")
    # 500 rare keys are missed once; a generation has room for six of them, beside the busy key and the one
    # it ended with, and these two are missed once more.
    assert routing.misses <= 500 + 2 * 500 / 6 + 2


def test_the_memory_is_bounded():
    routing = Routing(generation_keys=8)
    for number in range(2_000):
        routing.route(f"k{number % 23}")
        assert len(routing.router.routes) <= 8


def test_unique_keys_switch_the_memory_off_and_busy_ones_on_again():
    routing = Routing(generation_keys=8)
    for number in range(40):
        routing.route(f"unique {number}")
    assert routing.router.routes == {}
    # 8 keys to notice, 64 misses of rest, 8 to look again: remembered now and then, not each time.
    remembered = 0
    for number in range(720):
        routing.route(f"more {number}")
        remembered += f"more {number}" in routing.router.routes
    assert 50 <= remembered <= 120
    for _ in range(200):
        routing.route("busy")
    before = routing.misses
    for _ in range(100):
        routing.route("busy")
    assert routing.misses == before


def test_the_real_generations_hold_32_768_keys_at_most():
    assert 2 * GENERATION_KEYS <= 32_768


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=200))
def test_a_remembered_route_is_always_the_answer_of_the_shard_map(steps):
    routing = Routing(3, generation_keys=4)
    count = 3
    for number, reshard in steps:
        if reshard:
            count = count % 5 + 1
            routing.shards = even_shards(count, first=100 * number)
            routing.shard_map.update(routing.shards, 0.0)
            routing.router.forget()
        assert routing.route(f"k{number}") == shard_of(routing.shards, hash_key(f"k{number}"))


def test_keys_can_be_found_for_a_shard():
    shards = even_shards(3)
    for shard in shards:
        assert {shard_of(shards, hash_key(key)) for key in keys_in(shard, 5)} == {shard.shard_id}
