"""The breaker, row by row, in virtual time, and against every sequence Hypothesis can think of."""

import itertools
import math
from typing import get_args

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kpl_core.durability.circuit_breaker import (
    ADMISSIONS,
    TRANSITIONS,
    BreakerSignal,
    BreakerState,
    CircuitBreaker,
    Decision,
)
from kpl_core.errors import ConfigError
from kpl_core.options.reliability import BreakerPolicy
from kpl_core.records.user_record import TIERS, Tier

POLICY = BreakerPolicy(
    failure_share=0.5,
    window_seconds=1.0,
    minimum_records=10,
    open_seconds=1.0,
    max_open_seconds=5.0,
    probe_records=10,
    probe_timeout_seconds=3.0,
)


def closed_breaker() -> CircuitBreaker:
    return CircuitBreaker(POLICY)


def open_breaker() -> CircuitBreaker:
    """Opened at 100.0, so its break ends at 101.0."""
    breaker = closed_breaker()
    breaker.record_outcomes(succeeded=0, failed=10, now=100.0)
    return breaker


def half_open_breaker() -> CircuitBreaker:
    """Half-open since 101.0, no probe granted."""
    breaker = open_breaker()
    breaker.state(101.0)
    return breaker


BREAKER_IN = {
    BreakerState.CLOSED: closed_breaker,
    BreakerState.OPEN: open_breaker,
    BreakerState.HALF_OPEN: half_open_breaker,
}


def send_signal(breaker: CircuitBreaker, signal: BreakerSignal) -> BreakerState:
    """Do, from 101.0 at the earliest, what brings the signal about; return the state after it."""
    match signal:
        case BreakerSignal.FAILURE_SHARE_REACHED:
            return breaker.record_outcomes(succeeded=5, failed=5, now=101.0)
        case BreakerSignal.BREAK_OVER:
            return breaker.state(101.0)
        case BreakerSignal.PROBES_SUCCEEDED:
            breaker.allows("normal", 101.0, 10)
            return breaker.record_outcomes(succeeded=6, failed=4, now=101.1)
        case BreakerSignal.PROBES_FAILED:
            breaker.allows("normal", 101.0, 10)
            return breaker.record_outcomes(succeeded=0, failed=5, now=101.1)
        case BreakerSignal.PROBES_UNANSWERED:
            breaker.allows("normal", 101.0, 10)
            return breaker.state(104.0)


@pytest.mark.parametrize(("row", "target"), TRANSITIONS.items(), ids=str)
def test_each_row_of_the_transition_table_happens(
    row: tuple[BreakerState, BreakerSignal], target: BreakerState
) -> None:
    source, signal = row
    breaker = BREAKER_IN[source]()
    assert send_signal(breaker, signal) is target


def test_every_signal_has_a_row_and_every_state_a_way_out() -> None:
    assert {signal for _, signal in TRANSITIONS} == set(BreakerSignal)
    for state in BreakerState:
        assert any(source is state and target is not state for (source, _), target in TRANSITIONS.items())


@pytest.mark.parametrize(("row", "decision"), ADMISSIONS.items(), ids=str)
def test_each_row_of_the_admission_table_is_what_the_breaker_answers(
    row: tuple[BreakerState, Tier], decision: Decision
) -> None:
    state, tier = row
    breaker = BREAKER_IN[state]()
    now = 101.0 if state is BreakerState.HALF_OPEN else 100.5
    if state is BreakerState.HALF_OPEN:
        assert breaker.allows(tier, now, 10) is Decision.PROBE
    assert breaker.allows(tier, now) is decision


def test_the_admission_table_has_a_row_for_every_state_and_tier() -> None:
    assert set(ADMISSIONS) == set(itertools.product(BreakerState, get_args(Tier)))


def test_critical_records_are_never_refused_nor_kept_waiting() -> None:
    for (_, tier), decision in ADMISSIONS.items():
        if tier == "critical":
            assert decision in {Decision.SEND, Decision.RESERVED}


def test_a_shard_that_throttles_everything_opens_the_breaker_within_a_second() -> None:
    breaker = CircuitBreaker()
    for tick in range(300):
        assert breaker.record_outcomes(succeeded=10, failed=0, now=tick / 100) is BreakerState.CLOSED
    opened_at = math.inf
    for tick in range(300, 400):
        if breaker.record_outcomes(succeeded=0, failed=10, now=tick / 100) is BreakerState.OPEN:
            opened_at = min(opened_at, tick / 100)
            break
    assert opened_at - 3.0 <= 0.6


@pytest.mark.parametrize("healthy_at", [3.0, 7.3, 19.99, 60.0, 123.4])
def test_a_shard_that_is_healthy_again_closes_the_breaker_within_ten_seconds(healthy_at: float) -> None:
    breaker = CircuitBreaker()
    closed_at = math.inf
    for tick in itertools.count():
        now = tick / 50
        if now > healthy_at + 20:
            break
        decision = breaker.allows("normal", now)
        if decision in {Decision.SEND, Decision.PROBE}:
            healthy = now >= healthy_at
            breaker.record_outcomes(succeeded=int(healthy), failed=int(not healthy), now=now)
        if now > healthy_at and breaker.state(now) is BreakerState.CLOSED:
            closed_at = now
            break
    assert closed_at - healthy_at <= 10.0


def test_fewer_records_than_the_minimum_open_nothing() -> None:
    breaker = closed_breaker()
    assert breaker.record_outcomes(succeeded=0, failed=9, now=0.0) is BreakerState.CLOSED
    assert breaker.record_outcomes(succeeded=0, failed=1, now=0.1) is BreakerState.OPEN


def test_failures_that_left_the_window_do_not_count() -> None:
    breaker = closed_breaker()
    breaker.record_outcomes(succeeded=0, failed=9, now=0.0)
    assert breaker.record_outcomes(succeeded=0, failed=9, now=1.0) is BreakerState.CLOSED
    assert breaker.statistics(1.0).failed_records == 9


def test_a_failure_share_just_below_the_policy_keeps_it_closed() -> None:
    breaker = closed_breaker()
    assert breaker.record_outcomes(succeeded=51, failed=49, now=0.0) is BreakerState.CLOSED


def test_outcomes_that_arrive_while_it_is_open_change_nothing() -> None:
    breaker = open_breaker()
    assert breaker.record_outcomes(succeeded=1_000, failed=0, now=100.5) is BreakerState.OPEN
    assert breaker.record_outcomes(succeeded=0, failed=1_000, now=100.9) is BreakerState.OPEN
    assert breaker.next_probe_at(100.9) == 101.0


def test_an_answer_to_what_was_sent_before_the_break_ended_is_no_probe() -> None:
    breaker = half_open_breaker()
    assert breaker.record_outcomes(succeeded=0, failed=100, now=101.2, started_at=99.0) is BreakerState.HALF_OPEN
    assert breaker.record_outcomes(succeeded=0, failed=100, now=101.2, started_at=101.1) is BreakerState.OPEN


def test_a_large_answer_with_few_failures_closes_it() -> None:
    breaker = half_open_breaker()
    assert breaker.record_outcomes(succeeded=490, failed=10, now=101.2) is BreakerState.CLOSED


def test_each_break_after_failed_probes_is_twice_as_long_up_to_the_cap() -> None:
    breaker = open_breaker()
    now, breaks = 100.0, []
    for _ in range(5):
        probe_at = breaker.next_probe_at(now)
        breaks.append(probe_at - now)
        now = probe_at
        assert breaker.allows("normal", now, 10) is Decision.PROBE
        assert breaker.record_outcomes(succeeded=0, failed=10, now=now) is BreakerState.OPEN
    assert breaks == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_after_a_recovery_the_first_break_is_short_again() -> None:
    breaker = open_breaker()
    breaker.allows("normal", 101.0, 10)
    breaker.record_outcomes(succeeded=0, failed=10, now=101.0)
    breaker.allows("normal", 103.0, 10)
    assert breaker.record_outcomes(succeeded=10, failed=0, now=103.0) is BreakerState.CLOSED
    breaker.record_outcomes(succeeded=0, failed=10, now=104.0)
    assert breaker.next_probe_at(104.0) == 105.0


def test_asked_again_at_next_probe_at_it_grants_a_probe() -> None:
    breaker = open_breaker()
    assert breaker.allows("bulk", 100.999) is Decision.REFUSE
    assert breaker.allows("bulk", breaker.next_probe_at(100.999)) is Decision.PROBE


def test_lost_probes_are_given_up_and_new_ones_granted() -> None:
    breaker = half_open_breaker()
    assert breaker.allows("normal", 101.0, 10) is Decision.PROBE
    assert breaker.allows("normal", 103.9) is Decision.WAIT
    assert breaker.next_probe_at(103.9) == 104.0
    assert breaker.allows("normal", 104.0) is Decision.PROBE


@pytest.mark.parametrize(("succeeded", "failed", "state"), [(0, 10, BreakerState.OPEN), (10, 0, BreakerState.CLOSED)])
def test_answers_that_take_longer_than_probes_wait_count_all_the_same(
    succeeded: int, failed: int, state: BreakerState
) -> None:
    """A request may take 6 s by default. While only quicker answers counted, it stayed half-open for good."""
    breaker = half_open_breaker()
    assert breaker.allows("normal", 101.0, 10) is Decision.PROBE
    assert breaker.allows("normal", 104.0, 10) is Decision.PROBE
    assert breaker.record_outcomes(succeeded=succeeded, failed=failed, now=107.0, started_at=101.0) is state


def test_a_trickle_closes_it_however_slow_it_is() -> None:
    breaker = half_open_breaker()
    for now in range(101, 701, 60):
        assert breaker.allows("normal", now) is Decision.PROBE
        breaker.record_outcomes(succeeded=1, failed=0, now=now + 0.1)
    assert breaker.state(641.1) is BreakerState.CLOSED


def test_answers_to_critical_records_count_beside_the_probes() -> None:
    breaker = half_open_breaker()
    breaker.allows("normal", 101.0, 2)
    breaker.record_outcomes(succeeded=4, failed=0, now=101.1)
    assert breaker.statistics(101.1).probes_outstanding == 0
    assert breaker.allows("normal", 101.2, 3) is Decision.PROBE
    assert breaker.statistics(101.2).probes_outstanding == 3


def test_it_recovers_from_the_first_success_of_a_probe_until_it_closes_or_opens() -> None:
    breaker = half_open_breaker()
    breaker.allows("normal", 101.0, 4)
    breaker.record_outcomes(succeeded=0, failed=1, now=101.1)
    assert not breaker.is_recovering
    breaker.record_outcomes(succeeded=1, failed=0, now=101.2)
    assert breaker.is_recovering
    breaker.record_outcomes(succeeded=0, failed=100, now=101.3)
    assert breaker.known_state is BreakerState.OPEN
    assert not breaker.is_recovering


def test_a_clock_that_steps_back_reopens_nothing() -> None:
    breaker = half_open_breaker()
    assert breaker.state(50.0) is BreakerState.HALF_OPEN
    assert breaker.next_probe_at(50.0) == 101.0


def test_a_closed_breaker_never_makes_a_record_wait() -> None:
    breaker = closed_breaker()
    assert breaker.next_probe_at(7.0) == 7.0
    assert breaker.known_state is BreakerState.CLOSED
    assert "closed" in repr(breaker)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("failure_share", 0.0),
        ("failure_share", 1.1),
        ("failure_share", math.nan),
        ("window_seconds", 0.0),
        ("window_seconds", math.inf),
        ("open_seconds", -1.0),
        ("max_open_seconds", 0.5),
        ("max_open_seconds", math.inf),
        ("probe_timeout_seconds", 0.0),
        ("minimum_records", 0),
        ("probe_records", 0),
    ],
)
def test_a_policy_out_of_bounds_is_refused_with_its_name_and_value(option: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{option} is {value}"):
        BreakerPolicy(**{option: value})  # type: ignore[arg-type]


class AnySequence(RuleBasedStateMachine):
    """The breaker beside the plainest possible account of what it may do."""

    @initialize(probes=st.integers(1, 20), share=st.sampled_from([0.1, 0.5, 1.0]), minimum=st.integers(1, 30))
    def start(self, probes: int, share: float, minimum: int) -> None:
        self.policy = BreakerPolicy(probe_records=probes, failure_share=share, minimum_records=minimum)
        self.breaker = CircuitBreaker(self.policy)
        self.now = 0.0
        self.history: list[tuple[float, int, int]] = []

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0, 3.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        before = self.breaker.state(self.now)
        self.now += seconds
        after = self.breaker.state(self.now)
        # Time alone opens and closes nothing.
        assert after is before or (before is BreakerState.OPEN and after is BreakerState.HALF_OPEN)

    @rule(tier=st.sampled_from(TIERS), records=st.integers(1, 3))
    def ask(self, tier: Tier, records: int) -> None:
        state = self.breaker.state(self.now)
        decision = self.breaker.allows(tier, self.now, records)
        if decision is Decision.PROBE:
            assert state is BreakerState.HALF_OPEN
            assert self.breaker.statistics(self.now).probes_outstanding <= self.policy.probe_records + records - 1
        else:
            assert decision is ADMISSIONS[state, tier]

    @rule(succeeded=st.integers(0, 40), failed=st.integers(0, 40))
    def report(self, succeeded: int, failed: int) -> None:
        before = self.breaker.state(self.now)
        after = self.breaker.record_outcomes(succeeded=succeeded, failed=failed, now=self.now)
        if before is BreakerState.CLOSED:
            self.history.append((self.now, succeeded, failed))
            assert after in {BreakerState.CLOSED, BreakerState.OPEN}
            if after is BreakerState.OPEN:
                assert self.opening_is_justified()
        elif before is BreakerState.OPEN:
            assert after is BreakerState.OPEN
        elif after is BreakerState.CLOSED:
            assert succeeded > 0
            self.history.clear()

    def opening_is_justified(self) -> bool:
        """Count again, from the whole history, over every window of 0.9 to 1.0 seconds."""
        for start, (at, _, _) in enumerate(self.history):
            failed = sum(f for _, _, f in self.history[start:])
            total = sum(s + f for _, s, f in self.history[start:])
            if (
                self.now - at <= 1.0 + 1e-9
                and total >= self.policy.minimum_records
                and failed >= self.policy.failure_share * total
            ):
                return True
        return False

    @rule(tier=st.sampled_from(TIERS))
    def waiting_until_next_probe_at_is_enough(self, tier: Tier) -> None:
        self.now = max(self.now, self.breaker.next_probe_at(self.now))
        assert self.breaker.allows(tier, self.now) in {Decision.SEND, Decision.PROBE}

    @invariant()
    def every_wait_is_bounded_and_no_count_negative(self) -> None:
        assert self.breaker.next_probe_at(self.now) <= self.now + self.policy.max_open_seconds
        statistics = self.breaker.statistics(self.now)
        assert min(statistics.succeeded_records, statistics.failed_records, statistics.probes_outstanding) >= 0


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(
    outcomes=st.lists(st.tuples(st.floats(0.0, 0.5), st.integers(0, 20), st.integers(0, 20)), max_size=60),
)
@settings(max_examples=100, deadline=None)
def test_the_window_holds_what_arrived_in_it_to_a_tenth_of_its_length(
    outcomes: list[tuple[float, int, int]],
) -> None:
    policy = BreakerPolicy(minimum_records=1_000_000)
    breaker = CircuitBreaker(policy)
    now, seen = 0.0, []
    for wait, succeeded, failed in outcomes:
        now += wait
        breaker.record_outcomes(succeeded=succeeded, failed=failed, now=now)
        seen.append((now, succeeded + failed))
        statistics = breaker.statistics(now)
        counted = statistics.succeeded_records + statistics.failed_records
        slack = 1e-9
        assert counted >= sum(n for at, n in seen if at > now - 0.9 + slack)
        assert counted <= sum(n for at, n in seen if at > now - 1.0 - slack)
