"""The shared bucket: literal times, tiers, metrics, and its bounds under eight threads."""

import math
import threading
from itertools import count

import pytest
from hypothesis import given, strategies as st

from kpl_core.limits import METRIC_NAMES, MetricSample, TokenBucketLimiter, metric_samples
from kpl_core.records.user_record import TIERS, Tier

SECOND = 1_000_000_000


class Clock:
    """A clock in nanoseconds that a test moves."""

    def __init__(self) -> None:
        self.now = 5 * SECOND

    def __call__(self) -> int:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += round(seconds * SECOND)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_grant_states_the_remaining_tokens(clock):
    limiter = TokenBucketLimiter(3, 1, clock_ns=clock)

    assert [limiter.acquire() for _ in range(4)] == [(True, 2.0), (True, 1.0), (True, 0.0), (False, 0.0)]


def test_several_tokens_are_taken_together_or_not_at_all(clock):
    limiter = TokenBucketLimiter(5, 1, clock_ns=clock)

    assert limiter.acquire(3) == (True, 2.0)
    assert limiter.acquire(3) == (False, 2.0)
    assert limiter.acquire(2) == (True, 0.0)


def test_tokens_come_back_at_the_refill_rate_up_to_the_capacity(clock):
    limiter = TokenBucketLimiter(10, 4, clock_ns=clock)
    limiter.acquire(10)

    clock.advance(0.5)
    assert limiter.acquire(2) == (True, 0.0)
    clock.advance(3_600)
    assert limiter.get_metrics()["tokens_available"] == 10


def test_a_rejection_states_how_long_to_wait(clock):
    limiter = TokenBucketLimiter(10, 4, clock_ns=clock)
    assert limiter.wait_seconds(10) == 0.0
    limiter.acquire(10)

    assert limiter.wait_seconds(1) == 0.25
    clock.advance(0.25)
    assert limiter.wait_seconds(1) == 0.0
    assert limiter.acquire(1) == (True, 0.0)


def test_a_clock_that_steps_back_changes_no_tokens(clock):
    limiter = TokenBucketLimiter(10, 1, clock_ns=clock)
    limiter.acquire(4)
    clock.advance(2)
    assert limiter.get_metrics()["tokens_available"] == 8

    for step in (-3_600, 3_600) * 10:
        clock.advance(step)
        assert limiter.get_metrics()["tokens_available"] == 8
    clock.advance(-3_600)
    assert limiter.acquire(8) == (True, 0.0)


def test_a_part_of_the_capacity_is_reserved_for_critical_work(clock):
    limiter = TokenBucketLimiter(10, 1, critical_share=0.3, clock_ns=clock)

    assert [limiter.acquire(1, "bulk")[0] for _ in range(8)] == [True] * 7 + [False]
    assert limiter.acquire(1, "normal") == (False, 3.0)
    assert [limiter.acquire(1, "critical")[0] for _ in range(4)] == [True] * 3 + [False]
    clock.advance(3)
    assert limiter.acquire(1, "bulk") == (False, 3.0)
    assert limiter.acquire(1, "critical") == (True, 2.0)
    assert limiter.wait_seconds(1, "bulk") == 2.0


def test_metrics_have_the_keys_of_the_specification(clock):
    limiter = TokenBucketLimiter(2, 0.5, clock_ns=clock)
    limiter.acquire()
    limiter.acquire()
    limiter.acquire()
    clock.advance(1)
    limiter.acquire()

    assert limiter.get_metrics() == {
        "tokens_available": 0.5,
        "capacity": 2.0,
        "refill_rate_eps": 0.5,
        "total_rejections": 2,
        "total_refills": 1,
    }


def test_metrics_are_exported_by_the_names_of_the_specification(clock):
    limiter = TokenBucketLimiter(2, 0.5, clock_ns=clock)
    limiter.acquire()

    assert metric_samples(limiter) == (
        MetricSample("token_bucket_tokens_available", "gauge", 1.0),
        MetricSample("token_bucket_refill_events_total", "counter", 0),
        MetricSample("token_bucket_rejections_total", "counter", 0),
    )
    assert metric_samples(limiter, refused_share=0.25)[-1] == ("ticket_routing_api_429_rate", "gauge", 0.25)
    assert metric_samples(limiter, refused_share=0.0, refused_share_name="crm_429_rate")[-1].name == "crm_429_rate"
    assert {key for _, key in METRIC_NAMES.values()} < limiter.get_metrics().keys()


def test_a_new_rate_keeps_the_current_tokens(clock):
    limiter = TokenBucketLimiter(10, 2, clock_ns=clock)
    limiter.acquire(10)
    clock.advance(2)

    limiter.set_refill_rate(1)

    assert limiter.get_metrics()["tokens_available"] == 4
    clock.advance(2)
    assert limiter.get_metrics()["tokens_available"] == 6
    assert limiter.refill_rate == 1


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf, -math.inf, True])
def test_capacity_and_rate_must_be_finite_and_positive(bad):
    with pytest.raises(ValueError, match="capacity is"):
        TokenBucketLimiter(bad, 1)
    with pytest.raises(ValueError, match="refill_rate is"):
        TokenBucketLimiter(1, bad)
    with pytest.raises(ValueError, match="refill_rate is"):
        TokenBucketLimiter(1, 1).set_refill_rate(bad)


@pytest.mark.parametrize("share", [-0.1, 1.0, math.nan])
def test_the_critical_share_must_be_below_one_for_the_limiter(share):
    with pytest.raises(ValueError, match="critical_share is"):
        TokenBucketLimiter(1, 1, critical_share=share)


@pytest.mark.parametrize(
    ("n", "tier", "words"),
    [
        (0, "normal", "n is 0; it must be a number of tokens above 0"),
        (-1, "normal", "n is -1"),
        (math.nan, "critical", "n is nan"),
        ("1", "normal", "n is '1'; it must be a number of tokens above 0"),
        ("1", "critical", "n is '1'"),
        (None, "bulk", "n is None"),
        (11, "critical", "critical work can never be granted more than 10 tokens at once; split it"),
        (math.inf, "critical", "n is inf"),
        (8, "bulk", "bulk work can never be granted more than 7 tokens at once"),
        (1, "urgent", "tier is 'urgent'; it must be one of critical, normal, bulk"),
    ],
)
def test_a_request_that_can_never_be_granted_is_an_error_and_not_a_rejection(n, tier, words, clock):
    limiter = TokenBucketLimiter(10, 1, critical_share=0.3, clock_ns=clock)
    for ask in (limiter.acquire, limiter.wait_seconds, limiter.require_grantable):
        with pytest.raises(ValueError, match=words):
            ask(n, tier)

    assert limiter.get_metrics() == TokenBucketLimiter(10, 1, clock_ns=clock).get_metrics()


def test_the_repr_shows_the_options():
    assert repr(TokenBucketLimiter(10, 2.5)) == "TokenBucketLimiter(capacity=10, refill_rate=2.5)"


tries = st.lists(
    st.tuples(st.integers(0, 3 * SECOND), st.integers(1, 20), st.sampled_from(TIERS), st.none() | st.floats(0.1, 100)),
    max_size=80,
)


@given(tries, st.integers(20, 50), st.floats(0.1, 50), st.sampled_from([0.0, 0.25, 0.5]))
def test_the_level_stays_within_its_bounds_and_each_window_grants_at_most_its_limit(tries, capacity, rate, share):
    clock = Clock()
    limiter = TokenBucketLimiter(capacity, rate, critical_share=share, clock_ns=clock)
    level, last = float(capacity), clock.now
    for wait_ns, n, tier, new_rate in tries:
        clock.now += wait_ns
        level = min(capacity, level + rate * (clock.now - last) / SECOND)
        last = clock.now
        reserve = 0 if tier == "critical" else capacity * share
        if n > capacity - reserve:
            continue
        granted, remaining = limiter.acquire(n, tier)
        assert 0.0 <= remaining <= capacity
        if abs(level - reserve - n) > 1e-6:
            assert granted == (level - reserve >= n)
        level -= n * granted
        assert remaining == pytest.approx(level, abs=1e-6)
        if not granted:
            assert limiter.wait_seconds(n, tier) == pytest.approx((n + reserve - level) / rate, abs=1e-6)
        if new_rate is not None:
            limiter.set_refill_rate(rate := new_rate)


def test_the_bounds_hold_under_eight_threads_for_five_seconds():
    # Five seconds of a clock that moves 10 us each time a thread reads it.
    ticks = count()
    horizon = 5 * SECOND

    def clock_ns() -> int:
        return next(ticks) * 10_000

    capacity, rate = 100.0, 20_000.0
    limiter = TokenBucketLimiter(capacity, rate, critical_share=0.2, clock_ns=clock_ns)
    started_at = clock_ns()
    totals: list[tuple[int, int, float, float]] = []

    def worker(tier: Tier) -> None:
        granted = rejected = 0
        lowest, highest = math.inf, -math.inf
        while clock_ns() < horizon:
            was_granted, remaining = limiter.acquire(1, tier)
            granted += was_granted
            rejected += not was_granted
            lowest, highest = min(lowest, remaining), max(highest, remaining)
        totals.append((granted, rejected, lowest, highest))

    threads = [threading.Thread(target=worker, args=(tier,)) for tier in (*TIERS, *TIERS, "normal", "bulk")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    ended_at = clock_ns()
    assert len(totals) == 8
    assert min(lowest for _, _, lowest, _ in totals) >= 0.0
    assert max(highest for _, _, _, highest in totals) <= capacity
    granted = sum(total[0] for total in totals)
    assert granted <= capacity + rate * (ended_at - started_at) / SECOND
    # No token is lost: tokens that were not granted in time are still in the bucket.
    assert granted >= rate * (ended_at - started_at) / SECOND - capacity
    assert limiter.get_metrics()["total_rejections"] == sum(total[1] for total in totals)
