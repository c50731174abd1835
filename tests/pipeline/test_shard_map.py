import pytest
from hypothesis import given, strategies as st

from kpl_core.pipeline.shard_map import MOST_AGE_SECONDS, Shard, ShardMap
from tests.support.material import HASH_KEYS, digest, even_shards, shard_id, shard_of, split


def shard_map(shards: list[Shard], now: float = 0.0) -> ShardMap:
    known = ShardMap()
    known.update(shards, now)
    return known


def test_an_unknown_map_predicts_nothing_and_wants_to_be_fetched():
    unknown = ShardMap()
    assert not unknown.known
    assert unknown.refresh_wanted
    assert unknown.predict(digest(0)) is None
    assert unknown.gapless_ends == []
    assert unknown.open_shards == ()


def test_boundary_keys_belong_to_the_shard_that_names_them():
    shards = even_shards(3)
    known = shard_map(shards)
    for shard in shards:
        assert known.predict(digest(shard.starting_hash_key)) == shard.shard_id
        assert known.predict(digest(shard.ending_hash_key)) == shard.shard_id
    assert known.predict(digest(0)) == shard_id(0)
    assert known.predict(digest(shards[0].ending_hash_key + 1)) == shard_id(1)
    assert known.predict(digest(HASH_KEYS - 1)) == shard_id(2)


@given(st.integers(1, 50), st.integers(0, HASH_KEYS - 1), st.randoms(use_true_random=False))
def test_a_hash_key_is_predicted_where_the_service_stores_it(count, hash_key, chance):
    shards = even_shards(count)
    listed = shards.copy()
    chance.shuffle(listed)
    known = shard_map(listed)
    assert known.predict(digest(hash_key)) == shard_of(shards, hash_key)
    assert known.open_shards == tuple(shard.shard_id for shard in shards)
    assert known.open_ranges() == {
        shard.shard_id: (digest(shard.starting_hash_key), digest(shard.ending_hash_key)) for shard in shards
    }


def test_a_gap_in_the_shard_map_is_unpredicted():
    low, _, high = even_shards(3)
    known = shard_map([low, high])
    assert known.predict(digest(low.ending_hash_key)) == low.shard_id
    assert known.predict(digest(low.ending_hash_key + 1)) is None
    assert known.predict(digest(high.starting_hash_key - 1)) is None
    assert shard_map([low]).predict(digest(high.ending_hash_key)) is None


def test_shards_that_leave_no_gap_are_known_by_their_ends():
    known = shard_map(even_shards(3))
    assert known.gapless_ends == [digest(shard.ending_hash_key) for shard in even_shards(3)]
    known.update(even_shards(1, first=2), 1.0)
    assert known.gapless_ends == [digest(HASH_KEYS - 1)]


def test_shards_that_leave_a_gap_anywhere_are_not():
    low, middle, high = even_shards(3)
    for gappy in ([low, high], [low, middle], [middle, high], [middle]):
        assert shard_map(gappy).gapless_ends == []


def test_an_empty_map_predicts_nothing_and_wants_to_be_fetched():
    empty = shard_map([])
    assert empty.known
    assert empty.refresh_wanted
    assert empty.predict(digest(0)) is None


def test_an_answer_asks_for_a_newer_map_once_it_is_a_minute_old():
    known = shard_map(even_shards(2), now=10.0)
    known.answered(10.0 + MOST_AGE_SECONDS)
    assert not known.refresh_wanted
    known.answered(10.1 + MOST_AGE_SECONDS)
    assert known.refresh_wanted
    unknown = ShardMap()
    unknown.answered(1_000.0)
    assert not unknown.known


@pytest.mark.parametrize("count", [1, 2, 5, 1_001])
def test_ranges_are_inclusive(count):
    shards = even_shards(count)
    known = shard_map(shards)
    shard = shards[-1]
    assert known.is_inside(digest(shard.starting_hash_key), shard.shard_id)
    assert known.is_inside(digest(HASH_KEYS - 1), shard.shard_id)
    assert count == 1 or not known.is_inside(digest(shard.starting_hash_key - 1), shard.shard_id)
    assert not known.is_inside(digest(0), shard_id(9_999))


def test_an_update_says_whether_any_prediction_changed():
    known = ShardMap()
    assert known.update(even_shards(2), 0.0)
    assert not known.update(even_shards(2), 1.0)
    assert known.update(split(even_shards(2), shard_id(1)), 2.0)
    # A stream deleted and created again with another count: the same ids, other ranges.
    assert shard_map(even_shards(2)).update([*even_shards(4)[:2]], 1.0)


def test_the_range_of_a_closed_shard_is_remembered_for_a_minute():
    known = shard_map(even_shards(1))
    children = split(even_shards(1), shard_id(0))
    known.update(children, 10.0)
    assert known.knows(shard_id(0))
    assert known.is_inside(digest(5), shard_id(0))
    assert known.predict(digest(5)) == shard_id(1)
    known.update(children, 70.0)
    assert known.knows(shard_id(0))
    known.update(children, 70.5)
    assert not known.knows(shard_id(0))
    assert not known.is_inside(digest(5), shard_id(0))
    assert known.knows(shard_id(1))


def test_a_shard_that_comes_back_is_not_forgotten():
    known = shard_map(even_shards(1))
    known.update(even_shards(2, first=1), 1.0)
    known.update(even_shards(1), 2.0)
    known.update(even_shards(1), 100.0)
    assert known.knows(shard_id(0))
    assert known.predict(digest(0)) == shard_id(0)


def test_a_request_sent_before_the_last_update_is_no_evidence_about_the_map():
    known = shard_map(even_shards(1), now=5.0)
    known.invalidate(seen_at=4.9)
    known.invalidate(seen_at=5.0)
    assert not known.refresh_wanted


def test_asking_twice_is_asking_once_and_an_update_answers_it():
    known = shard_map(even_shards(1), now=5.0)
    known.invalidate(seen_at=5.1)
    known.invalidate(seen_at=5.2)
    assert known.refresh_wanted
    known.update(even_shards(1), 6.0)
    assert not known.refresh_wanted
    known.invalidate(seen_at=5.3)
    assert not known.refresh_wanted


def test_the_old_map_stays_in_use_while_a_refresh_is_wanted():
    known = shard_map(even_shards(2))
    known.invalidate(seen_at=1.0)
    assert known.predict(digest(0)) == shard_id(0)
    assert known.known


def test_it_shows_how_many_shards_it_knows():
    assert repr(ShardMap()) == "<ShardMap 0 open shards, refresh wanted>"
    assert repr(shard_map(even_shards(3))) == "<ShardMap 3 open shards>"
