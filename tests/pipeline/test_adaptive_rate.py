import pytest
from hypothesis import given, strategies as st

from kpl_core.pipeline.shard_limiter import AdaptiveRate


def test_it_starts_at_the_whole_limit():
    assert AdaptiveRate(0.0).fraction == 1.0


def test_more_than_a_percent_throttled_lowers_the_rate():
    rate = AdaptiveRate(0.0)
    assert rate.answered(sent=100, throttled=2, now=0.1)
    assert rate.fraction == 0.85


def test_a_percent_throttled_is_tolerated():
    rate = AdaptiveRate(0.0)
    assert not rate.answered(sent=100, throttled=1, now=0.1)
    assert rate.fraction == 1.0


def test_it_is_lowered_at_most_once_a_second():
    rate = AdaptiveRate(0.0)
    fractions = []
    for tenth in range(1, 31):
        rate.answered(sent=10, throttled=10, now=tenth / 10)
        fractions.append(rate.fraction)
    assert fractions == [0.85] * 10 + [0.85**2] * 10 + [pytest.approx(0.85**3)] * 10


def test_it_never_falls_below_a_twentieth():
    rate = AdaptiveRate(0.0)
    for second in range(100):
        rate.answered(sent=10, throttled=10, now=float(second))
    assert rate.fraction == 0.05


def test_success_brings_it_back_within_five_seconds():
    rate = AdaptiveRate(0.0)
    for second in range(100):
        rate.answered(sent=10, throttled=10, now=float(second))
    # Sixteenths are exact, so the throttled answer of 99.0 leaves the window at 100.0 precisely.
    recovery: dict[float, float] = {}
    for step in range(1, 16 * 6):
        rate.answered(sent=10, throttled=0, now=99.0 + step / 16)
        recovery[99.0 + step / 16] = rate.fraction
    assert recovery[99.0 + 15 / 16] == 0.05
    assert recovery[102.0] == pytest.approx(0.05 + 0.2 * 2, abs=0.02)
    assert recovery[104.5] < 1.0 == recovery[105.0 - 1 / 16]


def test_throttling_of_more_than_a_second_ago_is_forgotten():
    rate = AdaptiveRate(0.0)
    rate.answered(sent=10, throttled=10, now=0.0)
    assert rate.answered(sent=10, throttled=0, now=1.0)
    assert rate.fraction > 0.85


def test_an_answer_without_a_success_raises_nothing():
    rate = AdaptiveRate(0.0)
    rate.answered(sent=10, throttled=10, now=0.0)
    rate.answered(sent=0, throttled=0, now=5.0)
    assert rate.fraction == 0.85


def test_two_producers_that_share_a_shard_converge_to_half_of_it_each():
    """Chiu and Jain: multiplicative decrease and additive increase lead to equal shares."""
    mine, theirs = AdaptiveRate(0.0), AdaptiveRate(0.0)
    mine.fraction, theirs.fraction = 1.0, 0.1
    for step in range(1, 2_000):
        now = step / 4
        offered = mine.fraction + theirs.fraction
        refused = max(0.0, 1.0 - 1.0 / offered)
        for rate in (mine, theirs):
            sent = 1_000 * rate.fraction / 4
            rate.answered(sent=round(sent), throttled=round(sent * refused), now=now)
    assert mine.fraction == pytest.approx(theirs.fraction, rel=0.25)
    assert 0.35 < mine.fraction < 0.65


answers = st.tuples(st.floats(0, 2), st.integers(0, 500), st.floats(0, 1))


@given(st.floats(0, 1e6), st.lists(answers, max_size=60))
def test_the_fraction_stays_between_a_twentieth_and_one_and_says_when_it_moves(start, steps):
    rate = AdaptiveRate(start)
    now = start
    lowered_at = -10.0
    for wait, sent, share in steps:
        now += wait
        before = rate.fraction
        throttled = int(sent * share)
        changed = rate.answered(sent=sent, throttled=throttled, now=now)
        assert changed == (rate.fraction != before)
        assert 0.05 <= rate.fraction <= 1.0
        if rate.fraction < before:
            assert rate.fraction >= before * 0.85 - 1e-12
            assert now - lowered_at >= 1.0
            lowered_at = now
