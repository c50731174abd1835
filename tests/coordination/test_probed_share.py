"""The share without a store: it rises while the shard accepts, and falls when the shard throttles."""

import pytest

from kpl_core.coordination.probed_share import ProbedShare

LIMIT = (1_000.0, 1_000_000.0)
ALL = (5_000.0, 5e6)


def rise(share: ProbedShare, start: float, seconds: int) -> float:
    for second in range(1, seconds + 1):
        share.probe(ALL, LIMIT, start + second, sent=100.0, throttled=0.0)
    return start + seconds


def test_it_doubles_each_second_up_to_the_limit():
    share = ProbedShare((10.0, 10_000.0), 0.0)
    rise(share, 0.0, 3)
    assert share.share == (80.0, 80_000.0)
    rise(share, 3.0, 10)
    assert share.share == LIMIT


def test_it_halves_at_the_first_throttle_and_then_rises_slowly():
    share = ProbedShare((10.0, 10_000.0), 0.0)
    at = rise(share, 0.0, 5)
    assert share.probe(ALL, LIMIT, at + 1.0, sent=100.0, throttled=5.0)
    assert share.share == (160.0, 160_000.0)
    rise(share, at + 1.0, 10)
    assert share.share[0] == pytest.approx(160.0 * 1.01**10)


@pytest.mark.parametrize(
    ("seconds", "demand", "sent", "raised"),
    [
        (0.5, ALL, 100.0, 100.0),  # too early
        (1.0, (50.0, 5e4), 100.0, 100.0),  # not used
        (1.0, ALL, 0.0, 100.0),  # no answer yet
        (1.0, ALL, 100.0, 200.0),
    ],
)
def test_it_rises_only_if_it_is_used_and_answers_have_come(seconds, demand, sent, raised):
    share = ProbedShare((100.0, 100_000.0), 0.0)
    share.probe(demand, LIMIT, seconds, sent=sent, throttled=0.0)
    assert share.share[0] == raised


def test_a_share_that_is_too_small_for_a_record_rises_without_an_answer():
    share = ProbedShare((0.3, 300.0), 0.0)
    share.probe(ALL, LIMIT, 1.0, sent=0.0, throttled=0.0)
    assert share.share[0] == 0.6


def test_a_minute_of_foreign_throttling_leaves_it_the_share_that_it_started_with():
    share = ProbedShare((10.0, 10_000.0), 0.0)
    at = rise(share, 0.0, 5)
    for second in range(1, 61):
        share.probe(ALL, LIMIT, at + second, sent=100.0, throttled=100.0)
    assert share.share == (10.0, 10_000.0)
