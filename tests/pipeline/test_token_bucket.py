"""The token bucket: literal times first, then properties against an exact oracle."""

import math
from itertools import pairwise

import pytest
from hypothesis import assume, given, strategies as st

from kpl_core.errors import ConfigError
from kpl_core.pipeline.token_bucket import TokenBucket
from tests.support.oracles import ExactTokenBucket

SHARD = [(1_000.0, 1_000.0), (1_048_576.0, 1_048_576.0)]


def test_a_bucket_starts_full():
    assert TokenBucket(SHARD).tokens(now=0.0) == (1_000.0, 1_048_576.0)


def test_a_full_bucket_gives_its_capacity_at_once_and_then_nothing():
    bucket = TokenBucket([(10.0, 5.0)])

    assert [bucket.try_take([1], now=0.0) for _ in range(6)] == [True] * 5 + [False]


def test_tokens_grow_on_query():
    bucket = TokenBucket([(10.0, 5.0)], now=0.0)
    bucket.try_take([5], now=0.0)

    assert bucket.tokens(now=0.25) == (2.5,)
    assert not bucket.try_take([3], now=0.25)
    assert bucket.try_take([2], now=0.25)
    assert bucket.tokens(now=0.25) == (0.5,)


@given(
    st.lists(st.tuples(st.integers(0, 80), st.integers(0, 64)), max_size=30),
    st.integers(0, 80),
    st.integers(0, 64),
)
def test_a_cost_that_is_given_back_at_once_leaves_no_trace(before, cost, wait):
    """Where floats are exact: a rate of 8 and quarters of a second."""
    one, other = (TokenBucket([(8, 64), (8, 32)], now=0.0) for _ in range(2))
    now = 0.0
    for taken, pause in before:
        now += pause / 4
        assert one.try_take((taken, taken), now) == other.try_take((taken, taken), now)
    now += wait / 4
    if one.try_take((cost, 1), now):
        one.give_back((cost, 1))
    assert one.tokens(now) == other.tokens(now)
    assert one.ready_at((64, 32), now) == other.ready_at((64, 32), now)


def test_what_is_given_back_late_never_exceeds_the_capacity():
    bucket = TokenBucket([(1, 10)], now=0.0)
    assert bucket.try_take((10,), 0.0)
    bucket.give_back((10,))
    bucket.give_back((10,))
    assert bucket.tokens(0.0) == (10,)
    assert bucket.try_take((10,), 5.0)
    assert not bucket.try_take((1,), 5.0)


def test_growth_saturates_at_the_capacity():
    bucket = TokenBucket([(10.0, 5.0)], now=0.0)
    bucket.try_take([5], now=0.0)

    assert bucket.tokens(now=1e9) == (5.0,)
    assert bucket.try_take([5], now=1e9)
    assert not bucket.try_take([1], now=1e9)


def test_a_charge_is_taken_although_it_leaves_debt():
    bucket = TokenBucket([(10, 100), (1, 1)], now=0.0)
    bucket.charge((250, 0), 0.0)
    assert bucket.tokens(0.0) == (-150, 1)
    assert not bucket.try_take((0, 0), 14.9)
    assert bucket.ready_at((50, 1), 0.0) == 20.0
    with pytest.raises(ValueError, match="cost is -1"):
        bucket.charge((-1, 0), 0.0)


def test_the_bucket_says_when():
    bucket = TokenBucket([(1_000.0, 1_000.0)], now=0.0)
    bucket.try_take([1_000], now=0.0)

    assert bucket.ready_at([250], now=0.0) == 0.25
    assert bucket.ready_at([250], now=0.1) == 0.25
    assert bucket.ready_at([250], now=0.5) == 0.5


def test_asking_when_takes_nothing():
    bucket = TokenBucket([(10.0, 5.0)], now=0.0)

    assert bucket.ready_at([5], now=0.0) == 0.0
    assert bucket.tokens(now=0.0) == (5.0,)


def test_one_stream_short_means_no_stream_is_debited():
    bucket = TokenBucket([(10.0, 10.0), (100.0, 100.0)], now=0.0)

    assert bucket.try_take([1, 60], now=0.0)
    assert not bucket.try_take([1, 60], now=0.0)
    assert bucket.tokens(now=0.0) == (9.0, 40.0)
    assert not bucket.try_take([10, 1], now=0.0)
    assert bucket.tokens(now=0.0) == (9.0, 40.0)


def test_the_slowest_stream_decides_when():
    bucket = TokenBucket([(10.0, 10.0), (100.0, 100.0)], now=0.0)
    bucket.try_take([10, 100], now=0.0)

    assert bucket.ready_at([1, 50], now=0.0) == 0.5
    assert bucket.ready_at([8, 50], now=0.0) == 0.8


@pytest.mark.parametrize("streams", [1, 2, 3, 5])
def test_any_number_of_streams_is_taken_together(streams):
    bucket = TokenBucket([(10.0, 10.0)] * streams, now=0.0)
    costs = [4.0] * streams

    assert bucket.try_take(costs, now=0.0)
    assert bucket.tokens(now=0.0) == (6.0,) * streams
    short = [*costs[:-1], 7.0]
    assert not bucket.try_take(short, now=0.0)
    assert bucket.tokens(now=0.0) == (6.0,) * streams
    assert bucket.ready_at(short, now=0.0) == 0.1


def test_a_cost_above_the_capacity_passes_on_a_full_bucket_and_leaves_it_in_debt():
    bucket = TokenBucket([(1.0, 1.0)], now=0.0)

    assert bucket.try_take([3], now=0.0)
    assert bucket.tokens(now=0.0) == (-2.0,)
    assert bucket.ready_at([1], now=0.0) == 3.0
    assert not bucket.try_take([1], now=2.5)
    assert bucket.try_take([1], now=3.0)


def test_a_cost_above_the_capacity_waits_for_a_full_bucket():
    bucket = TokenBucket([(1.0, 2.0)], now=0.0)
    bucket.try_take([1], now=0.0)

    assert bucket.ready_at([1_000], now=0.0) == 1.0
    assert not bucket.try_take([1_000], now=0.5)
    assert bucket.try_take([1_000], now=1.0)


def test_a_stream_in_debt_admits_nothing_not_even_a_cost_of_zero():
    bucket = TokenBucket([(1.0, 1.0)], now=0.0)
    bucket.try_take([3], now=0.0)

    assert not bucket.try_take([0], now=1.0)
    assert bucket.try_take([0], now=2.0)


def test_a_clock_that_steps_back_removes_no_tokens():
    bucket = TokenBucket([(1.0, 10.0)], now=100.0)

    assert bucket.tokens(now=0.0) == (10.0,)
    bucket.try_take([4], now=100.0)
    assert bucket.tokens(now=102.0) == (8.0,)
    assert bucket.tokens(now=50.0) == (8.0,)
    assert bucket.ready_at([8], now=50.0) == 50.0
    assert bucket.try_take([8], now=50.0)


def test_a_clock_that_swings_earns_nothing():
    bucket = TokenBucket([(1.0, 10.0)], now=0.0)
    bucket.try_take([10], now=100.0)

    for now in (0.0, 100.0) * 50:
        assert bucket.tokens(now=now) == (0.0,)


def test_two_queries_at_one_instant_of_a_coarse_clock_both_count():
    # One token is a nanosecond; at 1e8 seconds a float resolves fifteen.
    bucket = TokenBucket([(1e9, 10.0)], now=1e8)

    admitted = sum(bucket.try_take([1], now=1e8) for _ in range(1_000))

    assert admitted <= 10 + 1e9 * math.ulp(1e8)


def test_a_whole_day_of_saturation_gives_exactly_the_rate():
    bucket = TokenBucket([(1_000.0, 1_000.0)], now=0.0)
    bucket.try_take([1_000], now=0.0)

    now = 0.0
    for _ in range(86_400):
        now = bucket.ready_at([1_000], now)
        assert bucket.try_take([1_000], now)

    assert now == 86_400.0


def test_without_now_the_clock_is_read():
    instants = iter([1.0, 1.0, 1.5, 2.0])
    bucket = TokenBucket([(1.0, 1.0)], clock=lambda: next(instants))

    assert bucket.try_take([1])
    assert bucket.ready_at([1]) == 2.0
    assert not bucket.try_take([1])
    assert bucket.try_take([1])


def test_a_new_rate_keeps_the_tokens_held():
    bucket = TokenBucket([(10.0, 10.0), (100.0, 100.0)], now=0.0)
    bucket.try_take([10, 100], now=0.0)

    bucket.set_rate(0, 5.0, now=0.5)

    assert bucket.tokens(now=0.5) == (5.0, 50.0)
    assert bucket.tokens(now=0.7) == (6.0, 70.0)
    assert bucket.rates == (5.0, 100.0)
    assert bucket.capacities == (10.0, 100.0)


def test_a_new_rate_keeps_a_debt():
    bucket = TokenBucket([(1.0, 1.0)], now=0.0)
    bucket.try_take([5], now=0.0)

    bucket.set_rate(0, 2.0, now=1.0)

    assert bucket.tokens(now=1.0) == (-3.0,)
    assert bucket.ready_at([1], now=1.0) == 3.0


def test_a_smaller_capacity_keeps_no_more_than_it_holds():
    bucket = TokenBucket([(10.0, 10.0)], now=0.0)

    bucket.set_rate(0, 1.0, now=0.0, capacity=2.0)

    assert bucket.tokens(now=0.0) == (2.0,)


def test_a_larger_capacity_gives_no_tokens():
    bucket = TokenBucket([(10.0, 10.0)], now=0.0)
    bucket.try_take([4], now=0.0)

    bucket.set_rate(0, 10.0, now=0.0, capacity=20.0)

    assert bucket.tokens(now=0.0) == (6.0,)


@pytest.mark.parametrize("bad", [0, 0.0, -1.0, math.nan, math.inf, -math.inf])
def test_rates_and_capacities_must_be_finite_and_positive(bad):
    with pytest.raises(ConfigError, match="rate is"):
        TokenBucket([(bad, 1.0)])
    with pytest.raises(ConfigError, match="capacity is"):
        TokenBucket([(1.0, bad)])
    bucket = TokenBucket([(1.0, 1.0)])
    with pytest.raises(ConfigError, match="rate is"):
        bucket.set_rate(0, bad, now=0.0)
    with pytest.raises(ConfigError, match="capacity is"):
        bucket.set_rate(0, 1.0, now=0.0, capacity=bad)
    assert bucket.rates == (1.0,)
    assert bucket.capacities == (1.0,)


def test_a_bucket_without_streams_is_refused():
    with pytest.raises(ConfigError, match="at least one"):
        TokenBucket([])


@pytest.mark.parametrize("bad", [-1, -0.5, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("streams", [2, 3])
def test_a_bad_cost_is_refused_and_nothing_is_taken(bad, position, streams):
    bucket = TokenBucket([(1.0, 1.0)] * streams, now=0.0)
    costs = [1.0] * streams
    costs[position] = bad

    with pytest.raises(ValueError, match="cost is"):
        bucket.try_take(costs, now=0.0)
    with pytest.raises(ValueError, match="cost is"):
        bucket.ready_at(costs, now=0.0)
    assert bucket.tokens(now=0.0) == (1.0,) * streams


@pytest.mark.parametrize("costs", [[], [1], [1, 1, 1]])
def test_one_cost_per_stream_is_required(costs):
    bucket = TokenBucket(SHARD, now=0.0)

    with pytest.raises(ValueError, match="one cost per stream"):
        bucket.try_take(costs, now=0.0)
    with pytest.raises(ValueError, match="one cost per stream"):
        bucket.ready_at(costs, now=0.0)


def test_the_repr_reads_no_clock():
    def clock() -> float:
        raise AssertionError

    assert repr(TokenBucket([(1.0, 2.0)], clock=clock)) == "TokenBucket([(1.0, 2.0)])"


rates = st.floats(1e-3, 1e9)
capacities = st.floats(1e-3, 1e9)
costs = st.one_of(st.integers(0, 10**7), st.floats(0, 1e7))
waits = st.floats(0, 1e6)


@given(st.lists(st.tuples(rates, capacities), min_size=1, max_size=3), st.floats(0, 1e9), st.data())
def test_waiting_until_ready_at_is_enough(streams, start, data):
    bucket = TokenBucket(streams, now=start)
    now = start
    for vector in data.draw(st.lists(st.lists(costs, min_size=len(streams), max_size=len(streams)), max_size=20)):
        ready_at = bucket.ready_at(vector, now)
        assert ready_at >= now
        if ready_at > now:
            assert not bucket.try_take(vector, math.nextafter(ready_at, -math.inf))
        assert bucket.ready_at(vector, ready_at) == ready_at
        assert bucket.try_take(vector, ready_at)
        now = ready_at


@given(rates, st.integers(1, 10**6), st.lists(st.tuples(st.integers(0, 10**6), waits), max_size=40))
def test_no_window_gives_more_than_capacity_plus_rate_times_time(rate, capacity, offered):
    bucket = TokenBucket([(rate, capacity)], now=0.0)
    taken: list[tuple[float, int]] = []
    now = 0.0
    for cost, wait in offered:
        assume(cost <= capacity)
        now += wait
        if bucket.try_take([cost], now):
            taken.append((now, cost))

    for first in range(len(taken)):
        given_out = 0
        for instant, cost in taken[first:]:
            given_out += cost
            # What a float clock cannot resolve at `instant` is all the slack there is: it does not add up.
            slack = rate * 2 * math.ulp(instant)
            assert ExactTokenBucket.most_in_window(rate, capacity, taken[first][0], instant) + slack >= given_out


@given(st.integers(1, 12), st.integers(1, 64), st.lists(st.tuples(st.integers(0, 80), st.integers(0, 64)), max_size=60))
def test_where_floats_are_exact_every_answer_is_the_oracles(log_rate, capacity, offered):
    # Rates that are powers of two and times in 1/64 seconds: no float operation rounds.
    rate = float(2**log_rate)
    bucket = TokenBucket([(rate, capacity)], now=0.0)
    oracle = ExactTokenBucket(rate, capacity)
    now = 0.0
    for cost, sixty_fourths in offered:
        now += sixty_fourths / 64
        assert bucket.ready_at([cost], now) == oracle.ready_at(cost, now)
        assert bucket.try_take([cost], now) == oracle.try_take(cost, now)
        assert bucket.tokens(now) == (oracle.tokens(now),)


@given(
    st.lists(st.tuples(rates, capacities), min_size=2, max_size=2),
    st.lists(st.tuples(costs, costs, st.floats(-1e3, 1e3)), max_size=30),
)
def test_the_written_out_pair_is_the_general_loop(streams, calls):
    pair = TokenBucket(streams, now=0.0)
    # A third stream that never decides sends the same costs through the general loop.
    triple = TokenBucket([*streams, (1.0, 1.0)], now=0.0)
    now = 0.0
    for cost0, cost1, step in calls:
        now += step
        assert pair.try_take([cost0, cost1], now) == triple.try_take([cost0, cost1, 0], now)
        assert pair.tokens(now) == triple.tokens(now)[:2]


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 20), st.none() | rates), max_size=40))
def test_tokens_stay_between_debt_and_capacity_and_only_a_take_lowers_them(steps):
    bucket = TokenBucket([(5.0, 20.0)], now=0.0)
    now, before = 0.0, 20.0
    for wait, cost, new_rate in steps:
        now += wait
        (held,) = bucket.tokens(now)
        assert before - 1e-6 <= held <= 20.0
        if new_rate is not None:
            bucket.set_rate(0, new_rate, now)
            assert bucket.tokens(now) == pytest.approx((held,), abs=1e-6)
        bucket.try_take([cost], now)
        (before,) = bucket.tokens(now)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=20))
def test_tokens_never_shrink_while_nothing_is_taken(instants):
    bucket = TokenBucket([(3.0, 100.0)], now=0.0)
    bucket.try_take([100], now=0.0)

    held = [bucket.tokens(now)[0] for now in instants]

    assert all(earlier <= later for earlier, later in pairwise(held))


@given(
    st.lists(st.tuples(rates, st.integers(1, 10_000)), min_size=2, max_size=2),
    st.lists(st.tuples(st.lists(st.integers(0, 2_000), min_size=1, max_size=12), waits), max_size=12),
)
def test_costs_that_fit_together_may_be_taken_as_one(streams, runs):
    together, in_turn = (TokenBucket(streams, now=0.0) for _ in range(2))
    now = 0.0
    for sizes, wait in runs:
        cost = (len(sizes), sum(sizes))
        if all(amount <= capacity for amount, capacity in zip(cost, together.capacities, strict=True)):
            before = in_turn.tokens(now)
            as_one = together.try_take(cost, now)
            each = [in_turn.try_take((1, size), now) for size in sizes]
            assert as_one == all(each)
            if not as_one:
                # What was taken in turn is what the one cost left there.
                for size in sizes[: each.index(False)]:
                    assert together.try_take((1, size), now)
                for size, taken in list(zip(sizes, each, strict=True))[each.index(False) :]:
                    assert together.try_take((1, size), now) == taken
            assert together.tokens(now) == in_turn.tokens(now)
            assert before >= in_turn.tokens(now)
        now += wait
