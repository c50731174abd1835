"""The algorithm of AWS's example, number by number."""

import pytest

from kpl_integrations.dynamodb_limits.proportional import initial_limit, scaled_limit


@pytest.mark.parametrize(
    ("limit", "aggregate_current", "then"),
    [
        (100.0, 0.0, 100.0),  # nothing is consumed: scale 1
        (100.0, 1000.0, 100.0),
        (100.0, 2000.0, 80.0),  # 0.6 * 100 + 0.4 * 50
        (100.0, 500.0, 140.0),  # 0.6 * 100 + 0.4 * 200
        (100.0, 1.0, 660.0),  # the target is the worker's own maximum, 1500
    ],
)
def test_a_limit_moves_40_percent_of_the_way(limit, aggregate_current, then):
    scaled = scaled_limit(limit, aggregate_max=1000.0, aggregate_current=aggregate_current, worker_max=1500.0)
    assert scaled == pytest.approx(then, rel=1e-12)


def test_the_numbers_of_the_article_are_reproduced():
    scale = 10_000 / 11_000
    assert scaled_limit(500.0, aggregate_max=10_000, aggregate_current=11_000, worker_max=500) == pytest.approx(
        0.6 * 500 + 0.4 * scale * 500
    )


def test_the_initial_limit_is_a_tenth_and_at_most_the_workers_maximum():
    assert initial_limit(aggregate_max=100_000, worker_max=1_500) == 1_500
    assert initial_limit(aggregate_max=1_000, worker_max=750) == 100
