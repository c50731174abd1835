"""Leaving a stream alone while its requests fail as a whole, and coming back at once."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from kpl_core.backoff_formula import ExponentialBackoff
from kpl_core.pipeline.send_queue import FAILURES_IN_A_ROW, SendingPause

CAP_SECONDS = 5.0
BACKOFF = ExponentialBackoff(base_seconds=0.05, cap_seconds=CAP_SECONDS)
chances = st.floats(0.0, 1.0, exclude_max=True)


def doubling(probe: int) -> float:
    return min(8.0, 2.0 ** (probe - 1))


# What happens, and the instant from which the next request may leave.
TABLE: list[tuple[str, float, float]] = [
    ("failed", 10.0, -math.inf),
    ("answered", 11.0, -math.inf),
    ("failed", 12.0, -math.inf),
    ("sent", 12.5, -math.inf),
    # The second in a row.
    ("failed", 13.0, 14.0),
    # What was on its way when it began to fail is no news.
    ("failed", 13.5, 14.0),
    ("sent", 14.0, 16.0),
    ("failed", 14.1, 16.0),
    # Its answer is not waited for.
    ("sent", 16.0, 20.0),
    ("sent", 20.0, 28.0),
    ("failed", 21.0, 28.0),
    ("failed", 22.0, 28.0),
    ("sent", 28.0, 36.0),
    ("probe from", 30.0, 30.0),
    ("sent", 30.0, 38.0),
    ("answered", 30.1, -math.inf),
    ("sent", 30.2, -math.inf),
    ("failed", 30.3, -math.inf),
    # From the beginning again.
    ("failed", 30.4, 31.4),
    ("lift", 30.5, -math.inf),
    ("sent", 30.6, -math.inf),
    ("failed", 30.7, -math.inf),
]


def happen(pause: SendingPause, what: str, now: float) -> None:
    if what == "sent":
        pause.sent(now)
    elif what == "probe from":
        pause.probe_from(now)
    elif what == "lift":
        pause.lift()
    else:
        pause.ended(now, failed=what == "failed")


@pytest.mark.parametrize("row", range(len(TABLE)), ids=lambda row: f"{row}-{TABLE[row][0]}")
def test_each_row_of_the_table(row: int) -> None:
    pause = SendingPause(doubling)
    for what, now, _ in TABLE[: row + 1]:
        happen(pause, what, now)
    assert pause.ready_at == TABLE[row][2]


@given(st.lists(st.tuples(st.sampled_from(["sent", "failed", "answered", "probe from"]), st.floats(0.0, 3.0), chances)))
def test_no_pause_is_longer_than_the_cap_and_an_answer_ends_it_at_once(steps: list[tuple[str, float, float]]) -> None:
    now, chance = 0.0, 0.0
    pause = SendingPause(lambda n: BACKOFF.seconds(n, lambda: chance))
    failures = 0
    for what, seconds, chance in steps:  # noqa: B007 - read by the lambda
        now += seconds
        if what == "sent":
            now = max(now, pause.ready_at)
        happen(pause, what, now)
        failures = {"failed": failures + 1, "answered": 0}.get(what, failures)
        assert pause.is_failing == (failures >= FAILURES_IN_A_ROW)
        assert pause.ready_at < now + CAP_SECONDS
        if failures < FAILURES_IN_A_ROW:
            assert pause.ready_at == -math.inf


@given(st.integers(0, 30), st.lists(chances, min_size=100, max_size=100))
def test_an_outage_costs_a_bounded_number_of_probes(outage_seconds: int, drawn: list[float]) -> None:
    """A sender that sends as soon as it may sends no more than the backoffs drawn allow, and never stops probing."""
    left = iter(drawn * 1_000)
    waits: list[float] = []

    def backoff(probe: int) -> float:
        seconds = BACKOFF.seconds(probe, lambda: next(left))
        # A tenth at least, so that the test ends for every draw.
        waits.append(max(seconds, 0.005))
        return waits[-1]

    pause = SendingPause(backoff)
    for _ in range(FAILURES_IN_A_ROW):
        pause.ended(0.0, failed=True)
    sent = []
    while pause.ready_at < outage_seconds:
        now = pause.ready_at
        pause.sent(now)
        pause.ended(now + 0.001, failed=True)
        sent.append(now)
    assert len(sent) == len(waits) - 1
    assert all(later - earlier >= 0.005 - 1e-9 for earlier, later in pairwise(sent))
    assert sum(waits) >= outage_seconds


def test_with_average_luck_ten_seconds_of_failures_cost_nine_probes() -> None:
    pause = SendingPause(lambda n: BACKOFF.seconds(n, lambda: 0.5))
    for _ in range(FAILURES_IN_A_ROW):
        pause.ended(0.0, failed=True)
    probes = 0
    while pause.ready_at < 10.0:
        probes += 1
        pause.sent(pause.ready_at)
    assert probes == 9
