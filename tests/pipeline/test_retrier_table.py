"""The retrier's table, row by row, against a second one written from the specification and seed 001 alone."""

import itertools
from typing import Any, NamedTuple

import pytest

from kpl_core.options.config import Config
from kpl_core.pipeline.classification import TABLE, Action, Case, Row, classify
from tests.pipeline.books import CURABLE, EVERY, INCURABLE, OURS, THROTTLED, Mode

MODES: dict[Mode, Config] = {
    "kcl": Config(),
    "per_user_record": Config(consumer="per_user_record"),
    "range_blind": Config(consumer="range_blind"),
    "kpl_compatible": Config.kpl_compatible(),
}
FAILING_MODES: dict[Mode, Config] = {
    "kcl": Config(fail_if_throttled=True),
    "per_user_record": Config(consumer="per_user_record", fail_if_throttled=True),
    "range_blind": Config(consumer="range_blind", fail_if_throttled=True),
    "kpl_compatible": Config.kpl_compatible(fail_if_throttled=True),
}


class Expected(NamedTuple):
    modes: tuple[Mode, ...]
    case: Case
    action: Action
    refresh: bool = False


def elsewhere(*, aggregated: bool, known: bool = True, inside: bool = True, waited: bool = False) -> Case:
    return Case(
        expected_shard=False, aggregated=aggregated, range_known=known, all_inside=known and inside, waited=waited
    )


# Written from spec/producer.md ("Retrier: the table") and seed 001, not from the code.
SPECIFIED = [
    # code in non_retryable_error_codes: fail at once; kpl_compatible retries all
    *(
        Expected(OURS, Case(error_code=code, repeated=True), Action.FAIL)
        for code in [*INCURABLE, "ValidationException"]
    ),
    *(
        Expected(OURS, Case(error_code=code, request_of_many=True, repeated=True), Action.FAIL)
        for code in INCURABLE
        if code != "InvalidArgumentException"
    ),
    *(
        Expected(OURS, Case(error_code=code), Action.FAIL)
        for code in [*INCURABLE, "ValidationException"]
        if code != "InvalidSignatureException"
    ),
    # the clock may have been set since the request was signed: sign again once
    *(
        Expected(EVERY, Case(error_code="InvalidSignatureException", request_of_many=many), Action.RETRY)
        for many in (False, True)
    ),
    # a ValidationException for a request of many records is bisected, and so is its sister of some endpoints
    *(
        Expected(OURS, Case(error_code=code, request_of_many=True), Action.BISECT)
        for code in ("ValidationException", "InvalidArgumentException")
    ),
    *(
        Expected(("kpl_compatible",), Case(error_code=code, request_of_many=many), Action.RETRY)
        for code in [*INCURABLE, "ValidationException"]
        for many in (False, True)
    ),
    # all other codes: retry until expired, throttling too
    *(
        Expected(EVERY, Case(error_code=code, request_of_many=many), Action.RETRY)
        for code in [*CURABLE, THROTTLED]
        for many in (False, True)
    ),
    # where predicted, or not predicted
    *(Expected(EVERY, Case(aggregated=aggregated), Action.FINISH) for aggregated in (False, True)),
    # single, on another shard
    Expected(("kcl", "range_blind"), elsewhere(aggregated=False), Action.FINISH, refresh=True),
    Expected(("kcl", "range_blind"), elsewhere(aggregated=False, inside=False), Action.FINISH, refresh=True),
    Expected(("kcl", "range_blind"), elsewhere(aggregated=False, known=False), Action.FINISH, refresh=True),
    # inside: finish + refresh; the seed: finish + ShardMap.invalidate
    *(Expected(EVERY, elsewhere(aggregated=each), Action.FINISH, refresh=True) for each in (False, True)),
    # the seed: outside (or unknown, which is outside): retry what is outside
    *(
        Expected(("per_user_record", "kpl_compatible"), case, Action.RETRY_OUTSIDE, refresh=True)
        for each in (False, True)
        for case in (
            elsewhere(aggregated=each, inside=False),
            elsewhere(aggregated=each, known=False),
            elsewhere(aggregated=each, known=False, waited=True),
        )
    ),
    # aggregated, some outside: a KCL drops the whole of it
    Expected(("kcl",), elsewhere(aggregated=True, inside=False), Action.RETRY, refresh=True),
    Expected(("range_blind",), elsewhere(aggregated=True, inside=False), Action.FINISH, refresh=True),
    # range not known yet: hold; no map in time: treat as outside
    Expected(("kcl",), elsewhere(aggregated=True, known=False), Action.AWAIT_MAP, refresh=True),
    Expected(("kcl",), elsewhere(aggregated=True, known=False, waited=True), Action.RETRY, refresh=True),
    Expected(("range_blind",), elsewhere(aggregated=True, known=False), Action.FINISH, refresh=True),
]


@pytest.mark.parametrize("expected", SPECIFIED, ids=lambda row: f"{row.case}"[5:-1])
def test_the_table_says_what_the_specification_says(expected):
    for mode in expected.modes:
        row = classify(expected.case, MODES[mode])
        assert (row.action, row.refresh) == (expected.action, expected.refresh), (mode, row.outcome)


@pytest.mark.parametrize("mode", EVERY)
@pytest.mark.parametrize("many", [False, True])
def test_a_caller_that_prefers_to_fail_fails_when_throttled_and_only_then(mode, many):
    config = FAILING_MODES[mode]
    assert classify(Case(error_code=THROTTLED, request_of_many=many), config).action is Action.FAIL
    for code in CURABLE:
        assert classify(Case(error_code=code, request_of_many=many), config).action is Action.RETRY


@pytest.mark.parametrize(
    ("consumer", "action"), [("per_user_record", Action.AWAIT_MAP), ("range_blind", Action.FINISH)]
)
def test_in_arrival_order_an_unknown_range_is_waited_for_where_ranges_count(consumer, action):
    row = classify(elsewhere(aggregated=True, known=False), Config(consumer=consumer, ordering="per_key"))
    assert (row.action, row.refresh) == (action, True)


def every_case() -> list[Case]:
    codes: list[Any] = [
        None, THROTTLED, "ValidationException", "AccessDeniedException", "InvalidSignatureException", "InternalFailure",
    ]  # fmt: skip
    flags = itertools.product(codes, *[[False, True]] * 7)
    return [
        Case(
            error_code=code,
            request_of_many=many,
            aggregated=aggregated,
            expected_shard=expected_shard,
            range_known=known,
            all_inside=inside,
            waited=waited,
            repeated=repeated,
        )
        for code, many, aggregated, expected_shard, known, inside, waited, repeated in flags
    ]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.outcome)
def test_every_row_decides_some_case(row: Row):
    configs = [*MODES.values(), *FAILING_MODES.values()]
    assert any(classify(case, config) is row for case in every_case() for config in configs)


@pytest.mark.parametrize("config", [*MODES.values(), *FAILING_MODES.values()])
def test_every_case_has_a_row_errors_never_finish_and_successes_never_fail(config):
    for case in every_case():
        action = classify(case, config).action
        if case.error_code is not None:
            assert action in {Action.FAIL, Action.RETRY, Action.BISECT}
        else:
            assert action in {Action.FINISH, Action.RETRY, Action.RETRY_OUTSIDE, Action.AWAIT_MAP}


@pytest.mark.parametrize("config", MODES.values())
def test_the_map_is_refreshed_for_surprises_and_for_nothing_else(config):
    for case in every_case():
        surprise = case.error_code is None and not case.expected_shard
        assert classify(case, config).refresh == surprise
