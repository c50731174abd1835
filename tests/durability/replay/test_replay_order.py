"""Records are replayed in key order despite failures."""

import random
from collections import Counter, deque

from hypothesis import given, settings, strategies as st

from kpl_core.durability.replay.replay_order import ReplayOrder
from kpl_core.durability.spool.claims import Claimed
from tests.support.durability_scene import spooled


def offered(keys: str, *, in_flight_per_key: int = 1, may_share: bool = False) -> ReplayOrder:
    """Return an order that holds one record for each letter, with ids from 1."""
    order = ReplayOrder(in_flight_per_key=in_flight_per_key, may_share=may_share)
    for record_id, key in enumerate(keys, start=1):
        order.offer(Claimed(record_id, spooled(record_id, key=key)))
    return order


def take_all(order: ReplayOrder) -> list[int]:
    taken = []
    while order.peek() is not None:
        taken.append(order.take().id)
    return taken


def test_records_are_sent_oldest_first_one_per_key() -> None:
    order = offered("abacb")
    assert take_all(order) == [1, 2, 4]
    assert order.waiting == 2


def test_the_next_record_of_a_key_waits_for_the_one_before() -> None:
    order = offered("aab")
    assert take_all(order) == [1, 3]
    order.succeeded(1)
    assert take_all(order) == [2]


def test_a_failed_record_is_sent_before_younger_ones_of_its_key() -> None:
    order = offered("aab")
    take_all(order)
    order.failed(1)
    assert take_all(order) == [1]


def test_after_a_failure_a_key_waits_for_all_its_results() -> None:
    order = offered("aaaab", in_flight_per_key=3)
    assert take_all(order) == [1, 2, 3, 5]
    order.failed(1)
    order.succeeded(3)
    assert take_all(order) == []
    order.failed(2)
    assert take_all(order) == [1, 2, 4]


def test_a_record_that_shares_the_fate_of_the_one_before_is_sent_with_it() -> None:
    order = offered("aaab", may_share=True)
    assert order.take().id == 1
    following = order.peek()
    assert following is not None
    assert (following.id, order.must_join(following)) == (2, 1)
    assert order.take().id == 2
    order.cannot_join()
    assert [claimed.id for claimed in (order.peek(), order.take()) if claimed] == [4, 4]
    assert order.peek() is None
    order.succeeded(1)
    assert order.peek() is None
    order.succeeded(2)
    alone = order.peek()
    assert alone is not None
    assert (alone.id, order.must_join(alone)) == (3, None)


def test_no_record_joins_a_group_with_a_failure() -> None:
    order = offered("aaa", may_share=True)
    assert (order.take().id, order.take().id) == (1, 2)
    order.failed(1)
    assert order.peek() is None
    order.failed(2)
    assert order.take().id == 1


def test_streams_do_not_share_keys() -> None:
    order = ReplayOrder(in_flight_per_key=1)
    order.offer(Claimed(1, spooled(key="a", stream="orders")))
    order.offer(Claimed(2, spooled(key="a", stream="payments")))
    assert take_all(order) == [1, 2]


def test_an_older_record_offered_later_is_sent_first() -> None:
    order = ReplayOrder(in_flight_per_key=1)
    order.offer(Claimed(7, spooled(key="a")))
    order.offer(Claimed(3, spooled(key="a")))
    assert take_all(order) == [3]


def test_waiting_records_can_be_taken_back_while_others_are_in_flight() -> None:
    order = offered("aab")
    order.take()
    assert sorted(order.take_waiting()) == [2, 3]
    assert (order.waiting, order.waiting_bytes) == (0, 0)
    order.succeeded(1)
    assert order.peek() is None


@given(keys=st.text("abcd", min_size=1, max_size=40), in_flight_per_key=st.integers(1, 4), seed=st.integers())
@settings(max_examples=150)
def test_every_record_is_delivered_once_and_in_key_order(keys: str, in_flight_per_key: int, seed: int) -> None:
    chance = random.Random(seed)
    order = ReplayOrder(in_flight_per_key=in_flight_per_key)
    coming = deque(enumerate(keys, start=1))
    in_flight: list[int] = []
    delivered: list[int] = []
    while len(delivered) < len(keys):
        step = chance.random()
        if coming and step < 0.3:
            record_id, key = coming.popleft()
            order.offer(Claimed(record_id, spooled(record_id, key=key)))
        elif order.peek() is not None and step < 0.7:
            in_flight.append(order.take().id)
        elif in_flight:
            record_id = in_flight.pop(chance.randrange(len(in_flight)))
            if chance.random() < 0.3:
                order.failed(record_id)
            else:
                order.succeeded(record_id)
                delivered.append(record_id)
        flying = Counter(keys[record_id - 1] for record_id in in_flight)
        assert all(count <= in_flight_per_key for count in flying.values())
    assert sorted(delivered) == list(range(1, len(keys) + 1))
    if in_flight_per_key == 1:
        for key in set(keys):
            ids = [record_id for record_id in delivered if keys[record_id - 1] == key]
            assert ids == sorted(ids)


@given(keys=st.text("abc", min_size=1, max_size=40), seed=st.integers())
@settings(max_examples=150)
def test_groups_that_share_a_fate_keep_key_order(keys: str, seed: int) -> None:
    """Groups as aggregated records: all records of a group are delivered or fail together, at any later time."""
    chance = random.Random(seed)
    order = offered(keys, may_share=True)
    group_of: dict[int, int] = {}
    groups: dict[int, list[int]] = {}
    opened = 0
    delivered: list[int] = []
    while len(delivered) < len(keys):
        claimed = order.peek()
        if claimed is not None and chance.random() < 0.7:
            joined = order.must_join(claimed)
            if joined is not None and group_of[joined] != opened:
                order.cannot_join()
                continue
            order.take()
            group_of[claimed.id] = opened
            groups.setdefault(opened, []).append(claimed.id)
        elif groups:
            # No record joins a group that was sent.
            sent = groups.pop(chance.choice(list(groups)))
            opened += 1
            if chance.random() < 0.3:
                for record_id in sent:
                    order.failed(record_id)
            else:
                for record_id in sent:
                    order.succeeded(record_id)
                delivered += sent
        if chance.random() < 0.3:
            opened += 1
    for key in set(keys):
        ids = [record_id for record_id in delivered if keys[record_id - 1] == key]
        assert ids == sorted(ids)


def test_a_key_that_travels_apart_waits_even_for_an_older_record_that_comes_late() -> None:
    order = offered("aa", may_share=True)
    order.take()
    order.cannot_join()
    order.offer(Claimed(0, spooled(0, key="a")))
    assert order.peek() is None
    order.succeeded(1)
    assert take_all(order) == [0, 2]
