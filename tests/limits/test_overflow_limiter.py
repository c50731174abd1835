"""Work that arrives at an empty bucket: every row of the table, order, bounds, overload, threads."""

import math
import threading
from typing import Any, get_args

import pytest
from hypothesis import given, strategies as st

from kpl_core.durability.circuit_breaker import CircuitBreaker
from kpl_core.errors import ConfigError
from kpl_core.limits import (
    Overflow,
    OverflowLimiter,
    RefusedWork,
    RejectionMonitor,
    TokenBucketLimiter,
    Verdict,
    Work,
)
from kpl_core.limits.overflow_limiter import OVERFLOW
from kpl_core.options.reliability import BreakerPolicy
from kpl_core.records.user_record import TIERS

SECOND = 1_000_000_000


class Storm:
    """A limiter with a controlled clock, and a list of the work that each callback received."""

    def __init__(self, *, capacity: float = 2, rate: float = 1, critical_share: float = 0.0, **options: Any) -> None:
        self.now = 0.0
        self.refused: list[RefusedWork] = []
        self.diverted: list[RefusedWork] = []
        self.bucket = TokenBucketLimiter(
            capacity, rate, critical_share=critical_share, clock_ns=lambda: round(self.now * SECOND)
        )
        if options.get("overflow") == "fallback":
            options["fallback"] = self.diverted.append
        self.limiter = OverflowLimiter(
            self.bucket, on_refused=self.refused.append, clock=lambda: self.now, **({"overflow": "queue"} | options)
        )

    def empty(self) -> None:
        while self.bucket.acquire(1, "critical")[0]:
            pass

    def released(self) -> list[Any]:
        return [work.payload for work in self.limiter.release()]


def work(payload: Any = "x", tier: Any = "normal", **fields: Any) -> Work:
    return Work(payload=payload, tier=tier, **fields)


@pytest.mark.parametrize("overflow", get_args(Overflow))
@pytest.mark.parametrize("tier", TIERS)
def test_work_is_admitted_while_there_are_tokens(overflow, tier):
    storm = Storm(overflow=overflow)

    assert storm.limiter.submit(work(tier=tier)) == "admitted"
    assert storm.limiter.statistics()["admitted"] == 1


@pytest.mark.parametrize(("choice", "outcome"), OVERFLOW.items())
def test_without_tokens_the_table_decides(choice, outcome):
    (overflow, tier), (verdict, waits_in) = choice, outcome
    storm = Storm(overflow=overflow)
    storm.empty()
    submitted = work(tier=tier, source_timestamp="2026-11-20T10:00:00Z", severity="major")

    assert storm.limiter.submit(submitted) == verdict
    assert storm.refused == ([RefusedWork(submitted)] if verdict == "refused" else [])
    assert storm.diverted == ([RefusedWork(submitted)] if verdict == "diverted" else [])
    storm.now += 1
    assert storm.limiter.release() == ([] if waits_in is None else [submitted])


def test_the_table_has_a_row_for_every_policy_and_tier():
    assert set(OVERFLOW) == {(overflow, tier) for overflow in get_args(Overflow) for tier in TIERS}


def test_rejected_work_keeps_its_own_time_and_severity():
    storm = Storm(overflow="downgrade")
    storm.empty()
    alarm = work("link down", "bulk", source_timestamp=1_763_632_800.25, severity=3)

    storm.limiter.submit(alarm)

    (refused,) = storm.refused
    assert refused.reason == "rate_limited"
    assert (refused.work.source_timestamp, refused.work.severity) == (1_763_632_800.25, 3)


def test_the_higher_tier_is_released_first():
    storm = Storm(capacity=1)
    storm.empty()
    for number, tier in enumerate(("bulk", "normal", "critical", "bulk", "critical")):
        storm.limiter.submit(work(number, tier))

    order = []
    while storm.limiter.statistics()["waiting"]:
        storm.now += storm.limiter.release_in()
        order += storm.released()

    assert order == [2, 4, 1, 0, 3]
    assert storm.now == 5.0
    assert storm.limiter.release_in() == math.inf


def test_new_work_does_not_overtake_waiting_work_of_its_tier_or_above():
    storm = Storm()
    storm.empty()
    storm.limiter.submit(work("first", "normal"))
    storm.now += 1

    assert storm.limiter.submit(work("late", "normal")) == "queued"
    assert storm.limiter.submit(work("late", "bulk")) == "queued"
    assert storm.limiter.submit(work("alarm", "critical")) == "admitted"


def test_downgraded_work_waits_behind_the_work_of_its_new_tier():
    storm = Storm(overflow="downgrade", capacity=4)
    storm.empty()
    assert storm.limiter.submit(work("note", "normal")) == "downgraded"
    assert storm.limiter.submit(work("alarm", "critical")) == "downgraded"
    storm.now += 2

    assert storm.released() == ["alarm", "note"]


def test_a_costly_head_is_not_starved_by_cheap_work_behind_it():
    storm = Storm(capacity=5)
    storm.empty()
    storm.limiter.submit(work("big", "normal", cost=4))
    storm.limiter.submit(work("small", "bulk", cost=1))
    storm.now += 3

    assert storm.released() == []
    storm.now += 1
    assert storm.released() == ["big"]


def test_reserved_capacity_lets_alarms_pass_while_counters_wait():
    storm = Storm(capacity=10, critical_share=0.3)
    counters = [storm.limiter.submit(work(number, "bulk")) for number in range(20)]
    alarms = [storm.limiter.submit(work(number, "critical")) for number in range(3)]

    assert counters == ["admitted"] * 7 + ["queued"] * 13
    assert alarms == ["admitted"] * 3


def test_a_full_queue_evicts_the_newest_of_the_lowest_tier():
    storm = Storm(max_waiting=3)
    storm.empty()
    for payload, tier in [("b0", "bulk"), ("b1", "bulk"), ("n0", "normal")]:
        assert storm.limiter.submit(work(payload, tier)) == "queued"

    assert storm.limiter.submit(work("c0", "critical")) == "queued"
    assert storm.limiter.submit(work("n1", "normal")) == "queued"
    assert storm.limiter.submit(work("n2", "normal")) == "refused"
    assert storm.limiter.submit(work("b2", "bulk")) == "refused"
    assert storm.limiter.submit(work("c1", "critical")) == "queued"
    assert [refused.work.payload for refused in storm.refused] == ["b1", "b0", "n2", "b2", "n1"]
    assert storm.limiter.statistics() == {
        "admitted": 0, "queued": 6, "downgraded": 0, "diverted": 0, "refused": 2, "evicted": 3, "waiting": 3,
    }  # fmt: skip


def test_normal_work_counts_as_bulk_in_a_long_overload():
    breaker = CircuitBreaker(BreakerPolicy(minimum_records=10))
    storm = Storm(overflow="downgrade", capacity=10, breaker=breaker)
    storm.empty()
    assert storm.limiter.submit(work(tier="normal")) == "downgraded"
    for _ in range(30):
        storm.limiter.submit(work(tier="bulk"))

    assert storm.limiter.submit(work(tier="normal")) == "refused"
    assert storm.limiter.submit(work(tier="critical")) == "downgraded"


def test_normal_work_is_normal_again_after_the_overload():
    policy = BreakerPolicy(minimum_records=10, open_seconds=1.0, probe_records=5)
    storm = Storm(overflow="downgrade", capacity=100, rate=100, breaker=CircuitBreaker(policy))
    storm.empty()
    for _ in range(20):
        storm.limiter.submit(work(tier="bulk"))
    assert storm.limiter.submit(work(tier="normal")) == "refused"

    storm.now += 2
    for _ in range(10):
        assert storm.limiter.submit(work(tier="critical")) == "admitted"
    storm.empty()
    assert storm.limiter.submit(work(tier="normal")) == "downgraded"


def test_the_monitor_is_called_for_every_new_work_and_may_call_the_gate():
    seen: list[int] = []
    storm = Storm(
        monitor=(
            monitor := RejectionMonitor(
                min_requests=1, on_change=lambda _: seen.append(storm.limiter.statistics()["queued"])
            )
        )
    )
    storm.empty()
    storm.limiter.submit(work())
    storm.now += 10
    storm.limiter.release()

    assert seen == [1]
    assert monitor.rejected_share(storm.now) == 1.0
    # Checking whether waiting work may leave is not a rejection.
    assert storm.bucket.get_metrics()["total_rejections"] == 2


def test_evicted_work_is_returned_even_if_the_callback_of_the_monitor_raises():
    def raises(_is_raised: bool) -> None:
        raise ZeroDivisionError

    storm = Storm(max_waiting=1, monitor=RejectionMonitor(raise_above=0.6, min_requests=1, on_change=raises))
    storm.limiter.submit(work("granted"))
    storm.empty()
    assert storm.limiter.submit(work("evicted", "bulk")) == "queued"
    with pytest.raises(ZeroDivisionError):
        storm.limiter.submit(work("newest", "critical"))

    assert [refused.work.payload for refused in storm.refused] == ["evicted"]


def test_handlers_may_call_the_gate():
    storm = Storm(overflow="fallback")
    verdicts: list[Verdict] = []
    limiter = OverflowLimiter(
        storm.bucket,
        overflow="fallback",
        on_refused=storm.refused.append,
        fallback=lambda refused: verdicts.append(storm.limiter.submit(refused.work)),
    )
    storm.empty()

    assert limiter.submit(work()) == "diverted"
    assert verdicts == ["diverted"]


def test_work_that_can_never_be_granted_is_an_error_and_changes_nothing():
    storm = Storm(capacity=10, critical_share=0.5)

    for cost, tier in [(11, "critical"), (6, "bulk"), (0, "normal"), (math.nan, "normal"), (1, "urgent")]:
        with pytest.raises(ValueError, match=r"n is|tier is"):
            storm.limiter.submit(work(tier=tier, cost=cost))
    assert set(storm.limiter.statistics().values()) == {0}


def test_critical_work_too_large_for_a_lower_tier_is_rejected_and_not_kept_without_end():
    storm = Storm(overflow="downgrade", capacity=10, critical_share=0.5)
    storm.empty()

    assert storm.limiter.submit(work("big alarm", "critical", cost=8)) == "refused"
    assert storm.limiter.statistics()["waiting"] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"overflow": "drop"}, "overflow is 'drop'; it must be one of 'queue', 'downgrade', 'fallback'"),
        ({"overflow": "fallback"}, "no fallback is given"),
        ({"overflow": "queue", "fallback": print}, "a fallback is given"),
        ({"overflow": "queue", "max_waiting": 0}, "max_waiting is 0"),
    ],
)
def test_invalid_options_of_a_gate_are_rejected(options, words):
    with pytest.raises(ConfigError, match=words):
        OverflowLimiter(TokenBucketLimiter(1, 1), on_refused=print, **options)


steps = st.lists(st.tuples(st.sampled_from(TIERS), st.integers(1, 4), st.floats(0, 2), st.booleans()), max_size=60)


@given(steps, st.sampled_from(get_args(Overflow)), st.integers(1, 5))
def test_each_work_is_accounted_for_exactly_once(steps, overflow, max_waiting):
    storm = Storm(overflow=overflow, capacity=8, rate=2, critical_share=0.25, max_waiting=max_waiting)
    admitted: list[int] = []
    for number, (tier, cost, wait, releases) in enumerate(steps):
        storm.now += wait
        if storm.limiter.submit(work(number, tier, cost=cost)) == "admitted":
            admitted.append(number)
        if releases:
            admitted += storm.released()
        statistics = storm.limiter.statistics()
        assert statistics["waiting"] <= max_waiting
        elsewhere = [refused.work.payload for refused in storm.refused + storm.diverted]
        assert len(admitted) + len(elsewhere) + statistics["waiting"] == number + 1
        assert len({*admitted, *elsewhere}) == len(admitted) + len(elsewhere)
        assert len(storm.refused) == statistics["refused"] + statistics["evicted"]
    assert sum(steps[number][1] for number in admitted) <= 8 + 2 * storm.now + 1e-6


def test_many_threads_lose_no_work():
    refused: list[RefusedWork] = []
    limiter = OverflowLimiter(
        TokenBucketLimiter(100, 1_000), overflow="queue", on_refused=refused.append, max_waiting=300
    )
    done: list[Any] = []

    def submit(first: int) -> None:
        for number in range(first, first + 500):
            if limiter.submit(work(number, TIERS[number % 3])) == "admitted":
                done.append(number)
            done.extend(released.payload for released in limiter.release())

    threads = [threading.Thread(target=submit, args=(first,)) for first in range(0, 4_000, 500)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    everything = [*done, *(each.work.payload for each in refused)]
    assert len(everything) + limiter.statistics()["waiting"] == 4_000
    assert len(set(everything)) == len(everything)
