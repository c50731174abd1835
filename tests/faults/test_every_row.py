"""Each fault found in other producers has its test: the table, and the proof that it is whole.

Every case was reproduced in some producer for Python before this one was written.
"""

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent


class Row(NamedTuple):
    """A fault, what is wanted instead, and the tests that show it: file.function."""

    fault: str
    wanted: str
    tests: tuple[str, ...]


ROWS = (
    Row(
        "records put just before leaving `async with Producer`, nothing awaited",
        "all delivered, every delivery resolved, then exit",
        ("leaving.records_put_just_before_leaving_are_delivered_without_anything_awaited",),
    ),
    Row(
        "leaving while one record in five is throttled once, or one request answered 500",
        "retried to the end, then exit",
        ("leaving.leaving_in_the_middle_of_trouble_retries_to_the_end",),
    ),
    Row(
        "a put that closes an aggregated record is cancelled at any point",
        "the other records in it are delivered; nothing stays reserved",
        (
            "leaving.a_cancelled_put_harms_no_other_record",
            "cancelled_anywhere.a_task_that_shares_a_producer_can_be_cancelled_at_any_checkpoint",
        ),
    ),
    Row(
        "the task that owns `async with Producer` is cancelled with records in flight",
        "prompt exit, every delivery resolved, the report accounts for all",
        (
            "leaving.the_owner_is_cancelled_with_records_in_flight_and_leaves_promptly",
            "cancelled_anywhere.the_owner_can_be_cancelled_at_any_checkpoint",
            "cancelled_anywhere.the_owner_can_be_cancelled_by_asyncio_itself_at_any_checkpoint",
        ),
    ),
    Row(
        "ListShards denied or slow for one stream",
        "that stream degrades with one clear warning; other streams are untouched",
        ("service_faults.a_stream_whose_shards_cannot_be_listed_degrades_alone_and_says_so_once",),
    ),
    Row(
        "the first put runs in another task than the one that entered the producer",
        "works in web handlers, gather, wait_for",
        (
            "any_task.the_first_put_may_come_from_any_task",
            "any_task.a_producer_may_be_entered_and_left_by_hand_in_one_task_and_used_in_others",
        ),
    ),
    Row(
        "one record with a 300-character key, or explicit hash key '007', among good ones",
        "refused alone, at put",
        (
            "one_bad_record.a_bad_key_is_refused_alone_and_at_put",
            "one_bad_record.a_bad_record_among_many_is_named_by_its_index_and_none_of_them_is_put",
        ),
    ),
    Row(
        "one record over the stream's limit, then small ones for the same shard",
        "refused at put; neighbours not delayed",
        ("one_bad_record.a_record_over_the_streams_limit_is_refused_at_put_and_delays_no_neighbour",),
    ),
    Row(
        "data is a str",
        "TypeError at put; the producer lives on",
        ("one_bad_record.data_of_a_wrong_type_is_an_error_of_the_caller_and_the_producer_lives_on",),
    ),
    Row(
        "two producers share a stream, each offered twice what it can get",
        "goodput near capacity, few wasted requests, memory bounded, failures honest",
        ("service_faults.two_producers_offered_twice_what_they_can_get_share_a_stream_and_fail_honestly",),
    ),
    Row(
        "everything answers 500, then refuses connections, for some seconds",
        "backoff, full recovery, nothing lost, close bounded even while the service is down",
        (
            "service_faults.an_outage_that_first_answers_500_and_then_refuses_costs_nothing_but_time",
            "service_faults.a_close_is_bounded_while_the_service_is_down",
            "outage.an_outage_of_15_seconds_loses_nothing_and_asks_little_meanwhile",
        ),
    ),
    Row(
        "connections reset before or after the records were stored",
        "nothing lost; duplicates only in the second case",
        (
            "service_faults.a_connection_reset_loses_nothing_and_duplicates_only_what_was_stored",
            "network_faults.requests_reset_on_their_way_are_sent_again_and_stored_once",
            "network_faults.answers_reset_on_their_way_cost_a_copy_each_and_nothing_else",
            "network_faults.answers_that_end_in_the_middle_are_no_answers",
        ),
    ),
    Row(
        "one request accepted and never answered",
        "resolved near its timeout; the others flow",
        ("service_faults.one_request_never_answered_is_resolved_near_its_timeout_and_the_others_flow",),
    ),
    Row(
        "while the shard map is refreshed, records of several shards share one aggregate",
        "never",
        ("service_faults.while_the_shard_map_is_refreshed_no_aggregate_mixes_shards",),
    ),
    Row(
        "a response where only some records failed, with more records queued meanwhile",
        "exactly the failed ones are retried",
        ("one_bad_record.exactly_the_failed_records_of_a_response_are_retried_while_more_are_queued",),
    ),
    Row(
        "one record fails with a code that is not throttling",
        "that record retried or reported, the rest go on",
        ("one_bad_record.a_code_that_is_not_throttling_is_retried_or_reported_and_the_rest_go_on",),
    ),
    Row(
        "one hot key on a limited stream",
        "the other shards do not slow down",
        ("one_bad_record.one_hot_key_on_a_limited_stream_does_not_slow_the_other_shards",),
    ),
    Row(
        "the cost of the limiter per record grows with the records in its window",
        "constant",
        (
            "limiter_cost.the_cost_of_limiting_a_record_is_constant_in_the_records_that_wait",
            "limiter_cost.the_cost_of_an_expiring_record_is_constant_in_the_records_that_wait",
        ),
    ),
    Row(
        "reading a result, or a flush with a timeout, after or while a blocking producer closes",
        "works, or one clear error",
        (
            "leaving.results_can_be_read_after_a_blocking_producer_closed",
            "leaving.calls_of_threads_while_a_blocking_producer_closes_work_or_fail_in_one_clear_way",
        ),
    ),
)


def _tests_in(path: Path) -> set[str]:
    module = path.stem.removeprefix("test_")
    return {
        f"{module}.{node.name.removeprefix('test_')}"
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


EXISTING = {name for path in HERE.glob("test_*.py") for name in _tests_in(path)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.fault)
def test_every_fault_found_in_a_peer_has_its_test(row: Row) -> None:
    assert row.tests
    assert set(row.tests) <= EXISTING


def test_no_fault_is_listed_twice() -> None:
    assert len({row.fault for row in ROWS}) == len(ROWS) == 19
