"""What leaves the pipeline for hooks."""

import pytest

from kpl_core.hooks import RecordsFinished, RequestCompleted, ShardMapRefreshed, ShardRateChanged
from kpl_core.records.put_records import RequestFailure
from tests.support.material import shard_id
from tests.support.stream import CHILDREN, LOWER, PARENT, THROTTLED, UPPER, Stream


def test_metadata_goes_with_its_user_record_when_it_moves():
    stream = Stream(PARENT)
    stream.put(LOWER[0], metadata={"name": "lower"})
    moved = stream.put(UPPER[0], metadata={"name": "upper"})
    stream.pipeline.shards_changed(CHILDREN, 0.01)
    outcome = moved.follow()
    assert outcome.metadata == {moved.index: {"name": "upper"}}


def test_the_facts_of_a_request_are_reported_once():
    stream = Stream(PARENT, aggregation_enabled=False, adaptive_rate=True)
    for key in LOWER[:3]:
        stream.put(key, now=0.0)
    request = stream.only(0.125)
    answer = [*stream.stored(request)[:2], THROTTLED]
    stream.pipeline.request_completed(request, answer, 0.2)
    facts = stream.pipeline.ledger.take_facts()
    assert stream.pipeline.ledger.take_facts() == []
    (completed,) = [fact for fact in facts if isinstance(fact, RequestCompleted)]
    assert completed == RequestCompleted(
        stream="s",
        started_at=request.started_at,
        ended_at=0.2,
        kinesis_records=3,
        user_records=3,
        size_bytes=request.size_bytes,
        error_code=None,
        record_errors={"ProvisionedThroughputExceededException": 1},
        throttled_by_shard={shard_id(0): 1},
        queue_wait=0.1,
        errors_by_shard={(shard_id(0), "ProvisionedThroughputExceededException"): 1},
    )
    assert [fact.user_records for fact in facts if isinstance(fact, RecordsFinished)] == [1, 1]
    assert [fact for fact in facts if isinstance(fact, ShardRateChanged)] == [ShardRateChanged("s", shard_id(0), 0.85)]


@pytest.mark.parametrize(
    ("answer", "code"),
    [(RequestFailure("InternalFailure", ""), "InternalFailure"), ([THROTTLED] * 2, "RecordCountMismatch")],
)
def test_the_fact_of_a_failed_request_has_its_code(answer, code):
    stream = Stream(PARENT)
    stream.put("k")
    stream.pipeline.request_completed(stream.only(0.125), answer, 0.2)
    (completed,) = stream.facts(RequestCompleted)
    assert (completed.error_code, completed.record_errors, completed.throttled_by_shard) == (code, {}, {})


def test_a_new_map_is_a_fact():
    stream = Stream(PARENT)
    stream.pipeline.shards_changed(CHILDREN, 1.0)
    assert stream.facts(ShardMapRefreshed) == [ShardMapRefreshed("s", 2)]


def test_a_final_result_is_a_fact_with_age_and_attempts():
    stream = Stream(PARENT, chance=0.0)
    for _ in range(2):
        stream.put("k", b"12", now=0.0)
    stream.pipeline.request_completed(stream.only(0.125), [THROTTLED], 0.2)
    request = stream.only(0.3)
    stream.pipeline.ledger.take_facts()
    stream.pipeline.request_completed(request, stream.stored(request), 0.5)
    assert stream.facts(RecordsFinished) == [
        RecordsFinished(
            stream="s",
            shard_id=shard_id(0),
            tier="normal",
            outcome="delivered",
            reason="",
            user_records=2,
            user_bytes=6,
            attempts=2,
            age=0.5,
            kinesis_bytes=40,
        )
    ]
