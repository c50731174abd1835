"""The history of the dashboard: 15 minutes, bounded, whatever comes."""

from itertools import pairwise

from hypothesis import given, strategies as st

from kpl_integrations.ingest.dashboard.history import KEPT_SECONDS, STEP_SECONDS, ChartHistory

DOCUMENT = {"now": {"accepted": 1.0, "delivered": 2.0, "other": 3}, "late": {"p50": None, "p99": 0.5, "queue": 0.0}}


@given(st.lists(st.floats(0.0, 60.0), max_size=400))
def test_points_are_apart_and_not_old_and_few(gaps: list[float]) -> None:
    history, now = ChartHistory(), 0.0
    for gap in gaps:
        now += gap
        history.add(DOCUMENT, now)
        ages = [point["ago"] for point in history.shown(now)]
        assert all(older - newer >= STEP_SECONDS - 1e-6 for older, newer in pairwise(ages))
        assert not ages or ages[0] <= KEPT_SECONDS
        assert len(ages) <= KEPT_SECONDS / STEP_SECONDS + 1


def test_a_point_has_what_the_charts_show() -> None:
    history = ChartHistory()
    assert history.latest_at is None
    history.add(DOCUMENT, 10.0)
    assert history.shown(12.0) == [
        {"ago": 2.0, "accepted": 1.0, "delivered": 2.0, "p50": None, "p99": 0.5, "queue": 0.0}
    ]
