"""The states of the parts follow the rows of `RULES`."""

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from kpl_integrations.ingest.readiness.parts import OK_DETAILS, RULES, Part, PartRule, Parts, PartState, Symptom

ALL = frozenset(Part)
WEIGHT = {PartState.OK: 0, PartState.DEGRADED: 1, PartState.FAILED: 2}


def names(rule: PartRule) -> str:
    return rule.symptom.value


@pytest.mark.parametrize("rule", RULES, ids=names)
def test_a_symptom_alone_decides_the_state_of_its_part_and_of_no_other(rule: PartRule) -> None:
    parts = Parts(ALL, now=100.0)
    if rule.after_seconds:
        assert parts.observe({rule.symptom: "x{0}"}, now=110.0) == []
        assert parts.accepts
    (changed,) = parts.observe({rule.symptom: "x{0}"}, now=110.0 + rule.after_seconds)
    assert (changed.part, changed.state, changed.accepts) == (rule.part, rule.state, rule.accepts)
    assert changed.since == 110.0
    assert changed.detail == rule.detail.replace("{}", "x{0}")
    assert changed.action == rule.action
    assert parts.accepts is rule.accepts
    assert parts.observe({rule.symptom: "y"}, now=200.0) == []
    assert next(each for each in parts.statuses if each.part is rule.part).since == 110.0
    (over,) = parts.observe({}, now=210.0)
    assert (over.state, over.accepts, over.since, over.detail) == (PartState.OK, True, 210.0, OK_DETAILS[rule.part])


@pytest.mark.parametrize("rule", RULES, ids=names)
def test_a_symptom_of_a_part_that_is_not_configured_changes_nothing(rule: PartRule) -> None:
    parts = Parts(ALL - {rule.part}, now=0.0)
    parts.observe({rule.symptom: ""}, now=1.0)
    assert parts.observe({rule.symptom: ""}, now=100.0) == []
    assert parts.accepts
    status = next(each for each in parts.statuses if each.part is rule.part)
    assert (status.state, status.detail) == (PartState.NOT_CONFIGURED, "not configured")


def test_the_table_has_a_row_for_each_symptom_and_the_worst_row_of_a_part_comes_first() -> None:
    assert sorted(rule.symptom for rule in RULES) == sorted(Symptom)
    for one, other in pairwise(RULES):
        if one.part is other.part:
            assert (not one.accepts, WEIGHT[one.state]) >= (not other.accepts, WEIGHT[other.state]) or (
                WEIGHT[one.state] > WEIGHT[other.state]
            )
    assert {rule.part for rule in RULES} == set(OK_DETAILS) == set(Part)
    assert all(rule.action for rule in RULES)


def test_an_interruption_shorter_than_the_rule_asks_for_is_no_change() -> None:
    parts = Parts(ALL, now=0.0)
    for second in range(20):
        # Two seconds of failures, one without.
        symptoms = {Symptom.REQUESTS_FAIL: "s"} if second % 3 else {}
        assert parts.observe(symptoms, float(second)) == []


def test_another_row_of_the_same_state_keeps_the_instant_of_the_change() -> None:
    parts = Parts(ALL, now=0.0)
    parts.observe({Symptom.STREAMS_REFUSED: "s", Symptom.STREAM_BREAKER_OPEN: "s"}, now=5.0)
    assert not parts.accepts
    assert parts.observe({Symptom.STREAM_BREAKER_OPEN: "s"}, now=9.0) == []
    kinesis = next(each for each in parts.statuses if each.part is Part.KINESIS)
    assert (kinesis.state, kinesis.since, parts.accepts) == (PartState.FAILED, 5.0, True)


@given(
    st.lists(st.tuples(st.sets(st.sampled_from(Symptom)), st.floats(0.1, 10.0)), max_size=30),
    st.sets(st.sampled_from(Part)),
)
def test_whatever_was_seen_each_part_is_as_bad_as_its_worst_lasting_symptom_and_ends_with_it(
    steps: list[tuple[set[Symptom], float]], configured: set[Part]
) -> None:
    parts, now = Parts(configured, now=0.0), 0.0
    lasts: dict[Symptom, float] = {}
    states = {each.part: each.state for each in parts.statuses}
    for symptoms, seconds in steps:
        now += seconds
        lasts = {symptom: lasts.get(symptom, now) for symptom in symptoms}
        for change in parts.observe(dict.fromkeys(symptoms, ""), now):
            assert change.state is not states[change.part]
            states[change.part] = change.state
        for status in parts.statuses:
            assert states[status.part] is status.state
            assert 0.0 <= status.since <= now
        counting = [
            rule
            for rule in RULES
            if rule.symptom in lasts and now - lasts[rule.symptom] >= rule.after_seconds and rule.part in configured
        ]
        for status in parts.statuses:
            worst = max((WEIGHT[rule.state] for rule in counting if rule.part is status.part), default=0)
            assert WEIGHT.get(status.state, 0) == worst
        assert parts.accepts is all(rule.accepts for rule in counting)
    parts.observe({}, now)
    assert parts.accepts
    assert {each.state for each in parts.statuses} <= {PartState.OK, PartState.NOT_CONFIGURED}
