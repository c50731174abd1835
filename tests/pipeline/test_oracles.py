"""The judges, judged: each oracle against cases worked out by hand and against its own definition."""

from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from tests.support.oracles import ExactTokenBucket, PaperFairQueue, max_min_shares


def test_the_exact_bucket_counts_to_the_last_third():
    bucket = ExactTokenBucket(3.0, 1)

    assert bucket.try_take(1, 0.0)
    assert bucket.ready_at(1, 0.0) == Fraction(1, 3)
    assert not bucket.try_take(1, 0.25)
    assert bucket.tokens(0.25) == Fraction(3, 4)
    assert bucket.try_take(1, 0.5)
    assert bucket.tokens(10.0) == 1


def test_the_exact_bucket_goes_into_debt():
    bucket = ExactTokenBucket(1.0, 1)

    assert bucket.try_take(4, 0.0)
    assert bucket.tokens(0.0) == -3
    assert bucket.ready_at(1, 0.0) == 4


def test_a_window_gives_the_capacity_and_what_grows():
    assert ExactTokenBucket.most_in_window(10.0, 5, 2.0, 4.5) == 30


def test_the_papers_queue_interleaves_by_start_tags():
    queue = PaperFairQueue({"heavy": 3, "light": 1})
    for number in range(4):
        queue.push(f"heavy{number}", "heavy", 1)
    for number in range(2):
        queue.push(f"light{number}", "light", 1)

    assert [queue.pop() for _ in range(6)] == ["heavy0", "light0", "heavy1", "heavy2", "heavy3", "light1"]


def test_the_papers_queue_starts_a_busy_period_without_memory():
    queue = PaperFairQueue({"a": 1, "b": 1})
    queue.push("a0", "a", 10)
    assert queue.pop() == "a0"
    queue.push("a1", "a", 1)
    queue.push("b0", "b", 1)

    assert queue.pop() == "a1"


@pytest.mark.parametrize(
    ("demands", "weights", "capacity", "shares"),
    [
        ({"a": 10, "b": 10}, {"a": 1, "b": 1}, 10, {"a": 5, "b": 5}),
        ({"a": 2, "b": 10}, {"a": 1, "b": 1}, 10, {"a": 2, "b": 8}),
        ({"a": 10, "b": 10}, {"a": 3, "b": 1}, 8, {"a": 6, "b": 2}),
        ({"a": 1, "b": 2, "c": 100}, {"a": 1, "b": 1, "c": 1}, 30, {"a": 1, "b": 2, "c": 27}),
        ({"a": 4, "b": 10, "c": 10}, {"a": 2, "b": 1, "c": 1}, 12, {"a": 4, "b": 4, "c": 4}),
        ({"a": 1, "b": 1}, {"a": 1, "b": 1}, 10, {"a": 1, "b": 1}),
        ({"a": 5}, {"a": 1}, 0, {"a": 0}),
        ({}, {}, 10, {}),
    ],
)
def test_shares_worked_out_by_hand(demands, weights, capacity, shares):
    assert max_min_shares(demands, weights, capacity) == shares


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 20)), min_size=1, max_size=8),
    st.integers(0, 5000),
)
def test_shares_meet_the_definition_of_max_min(flows, capacity):
    demands = {f"{number}": demand for number, (demand, _) in enumerate(flows)}
    weights = {f"{number}": weight for number, (_, weight) in enumerate(flows)}

    shares = max_min_shares(demands, weights, capacity)

    assert sum(shares.values()) == min(capacity, sum(demands.values()))
    for flow, share in shares.items():
        assert 0 <= share <= demands[flow]
        if share < demands[flow]:
            # Unsatisfied: then no flow has more for its weight, or taking from it would help.
            assert all(other / weights[name] <= share / weights[flow] for name, other in shares.items())
