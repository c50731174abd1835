"""Fault injection: which requests and records a fault applies to, and the plan of a request."""

import itertools

import pytest

from kpl_core.testing import (
    SERVICE_ERRORS,
    BadBody,
    Effect,
    ErrorAnswer,
    FakeKinesis,
    Faults,
    Hang,
    KinesisError,
    Latency,
    MergeDuringRequest,
    PutRecord,
    RecordError,
    ResetAfterCommit,
    ResetBeforeCommit,
    SplitDuringRequest,
    When,
    WrongCount,
)

THROTTLED = "ProvisionedThroughputExceededException"


def met(faults: Faults, count: int, *, operation: str = "PutRecords", now: float = 0.0) -> list[int]:
    """Return which of `count` requests hang, counted from 1."""
    return [number for number in range(1, count + 1) if faults.plan(operation, stream="orders", now=now).hang]


SELECTIONS: list[tuple[When, list[int]]] = [
    (When(), [1, 2, 3, 4, 5, 6]),
    (When(times=2), [1, 2]),
    (When(skip=2), [3, 4, 5, 6]),
    (When(every=3), [3, 6]),
    (When(skip=1, every=2, times=1), [3]),
    (When(operation="PutRecords"), [1, 2, 3, 4, 5, 6]),
    (When(operation="ListShards"), []),
    (When(stream="other"), []),
    (When(stream="orders", times=1), [1]),
    (When(page=2), []),
    (When(starts_at=0.0, ends_at=1.0, times=1), [1]),
    (When(starts_at=1.0), []),
    (When(ends_at=0.0), []),
]


@pytest.mark.parametrize(("when", "hanging"), SELECTIONS)
def test_a_fault_applies_to_the_requests_it_was_armed_for(when: When, hanging: list[int]) -> None:
    faults = Faults()
    fault = faults.add(Hang(), when)
    assert met(faults, 6) == hanging
    assert fault.fired == len(hanging)


def test_chance_is_injected_and_seeded() -> None:
    draws = itertools.cycle([0.1, 0.9])
    faults = Faults(chance=lambda: next(draws))
    faults.add(Hang(), When(probability=0.5))
    assert met(faults, 6) == [1, 3, 5]
    runs = []
    for _ in range(2):
        seeded = Faults()
        seeded.add(Hang(), When(probability=0.5))
        runs.append(met(seeded, 100))
    assert runs[0] == runs[1]
    assert 30 < len(runs[0]) < 70


def test_a_removed_fault_applies_to_no_request() -> None:
    faults = Faults()
    first, second = faults.add(Hang()), faults.add(RecordError())
    assert len(faults) == 2
    faults.remove(first)
    faults.remove(first)
    assert met(faults, 1) == []
    faults.clear()
    assert len(faults) == 0
    faults.remove(second)


def test_a_plan_has_all_effects_that_apply_to_the_request() -> None:
    faults = Faults()
    effects: list[Effect] = [
        Latency(0.5),
        Latency(0.25),
        Latency(2.0, after_commit=True),
        ResetBeforeCommit(),
        ErrorAnswer("AccessDeniedException"),
        ErrorAnswer("InternalFailure", "later"),
        SplitDuringRequest(),
        MergeDuringRequest("shardId-000000000001"),
        ResetAfterCommit(),
        WrongCount(-2),
        BadBody(b"{"),
    ]
    for effect in effects:
        faults.add(effect)
    plan = faults.plan("PutRecords", stream="orders", now=0.0)
    assert (plan.latency_seconds, plan.answer_latency_seconds) == (0.75, 2.0)
    assert (plan.hang, plan.reset_before, plan.reset_after) == (False, True, True)
    assert plan.error is not None
    assert plan.error.code == "AccessDeniedException"
    assert plan.reshards == (SplitDuringRequest(), MergeDuringRequest("shardId-000000000001"))
    assert (plan.count_change, plan.body) == (-2, b"{")


@pytest.mark.parametrize("code", SERVICE_ERRORS)
def test_an_error_answer_has_the_message_and_status_of_the_service(code: str) -> None:
    faults = Faults()
    faults.add(ErrorAnswer(code))
    error = faults.plan("PutRecords", stream="orders", now=0.0).error
    assert error is not None
    assert (error.status, error.message) == SERVICE_ERRORS[code]


def test_an_error_answer_can_have_another_message_and_status() -> None:
    faults = Faults()
    faults.add(ErrorAnswer("Strange", "never seen", 418))
    error = faults.plan("PutRecords", stream="orders", now=0.0).error
    assert isinstance(error, KinesisError)
    assert (error.code, error.message, error.status) == ("Strange", "never seen", 418)
    assert str(error) == "Strange: never seen"


def put(kinesis: FakeKinesis, *data: bytes, key: str = "k") -> list[str | None]:
    records: list[PutRecord] = [(key, None, one) for one in data]
    return [entry.error_code for entry in kinesis.put_records("orders", records, now=0.0)]


def test_every_fifth_record_fails_once_and_succeeds_on_retry() -> None:
    kinesis = FakeKinesis({"orders": 1})
    kinesis.faults.add(RecordError(), When(every=5, once_per_record=True))
    data = [b"%d" % number for number in range(10)]
    codes = put(kinesis, *data)
    assert codes == [None] * 4 + [THROTTLED] + [None] * 4 + [THROTTLED]
    assert put(kinesis, data[4], data[9]) == [None, None]
    assert [record.data for record in kinesis.records("orders")] == [*data[:4], *data[5:9], data[4], data[9]]
    assert kinesis.statistics("orders").records_faulted == 2


def test_a_record_error_has_the_message_of_the_service_or_its_own() -> None:
    kinesis = FakeKinesis({"orders": 1})
    for effect, words in (
        (RecordError(), "Rate exceeded for shard shardId-000000000000 in stream orders under account 000000000000."),
        (RecordError("InternalFailure"), "Internal Service Failure"),
        (RecordError("InternalFailure", "as told"), "as told"),
        (RecordError("Strange"), "Strange"),
    ):
        fault = kinesis.faults.add(effect)
        (entry,) = kinesis.put_records("orders", [("k", None, b"")], now=0.0)
        assert (entry.error_code, entry.error_message) == (effect.code, words)
        kinesis.faults.remove(fault)


def test_a_record_error_can_be_limited_to_a_shard_a_stream_or_a_record() -> None:
    kinesis = FakeKinesis({"orders": 2, "other": 1})
    kinesis.faults.add(RecordError(), When(shard_id="shardId-000000000001", stream="orders"))
    kinesis.faults.add(RecordError("InternalFailure"), When(record=lambda key, data: (key, data) == ("x", b"bad")))
    records: list[PutRecord] = [("x", "0", b"good"), ("x", "0", b"bad"), ("x", str(2**127), b"good")]
    codes = [entry.error_code for entry in kinesis.put_records("orders", records, now=0.0)]
    assert codes == [None, "InternalFailure", THROTTLED]
    assert [entry.error_code for entry in kinesis.put_records("other", records[2:], now=0.0)] == [None]


def test_a_failed_record_uses_no_capacity() -> None:
    kinesis = FakeKinesis({"orders": 1})
    fault = kinesis.faults.add(RecordError("InternalFailure"))
    assert put(kinesis, *[b""] * 500) == ["InternalFailure"] * 500
    kinesis.faults.remove(fault)
    assert put(kinesis, *[b""] * 500) + put(kinesis, *[b""] * 500) == [None] * 1000


def test_a_split_fault_splits_the_widest_shard_during_the_request() -> None:
    kinesis = FakeKinesis({"orders": 1})
    kinesis.split_shard("orders", shard_id="shardId-0", new_starting_hash_key=100, now=0.0)
    kinesis.reshard("orders", SplitDuringRequest(), now=0.0)
    assert [shard.shard_id[-1] for shard in kinesis.open_shards("orders")] == ["1", "3", "4"]
    kinesis.reshard("orders", SplitDuringRequest("shardId-000000000001"), now=0.0)
    assert [shard.starting_hash_key for shard in kinesis.open_shards("orders")][:2] == [0, 50]


def test_a_merge_fault_merges_neighbours_and_does_nothing_without_a_neighbour() -> None:
    kinesis = FakeKinesis({"orders": 3})
    kinesis.reshard("orders", MergeDuringRequest(), now=0.0)
    assert [shard.shard_id[-1] for shard in kinesis.open_shards("orders")] == ["3", "2"]
    for impossible in (
        MergeDuringRequest("shardId-000000000002"),
        MergeDuringRequest("shardId-000000000000"),
        SplitDuringRequest("shardId-000000000000"),
    ):
        kinesis.reshard("orders", impossible, now=0.0)
    assert len(kinesis.open_shards("orders")) == 2


def test_faults_and_errors_have_a_readable_repr() -> None:
    faults = Faults()
    fault = faults.add(Hang())
    met(faults, 3)
    assert repr(fault) == "<Fault Hang() seen 3 fired 3>"
