"""The fair intake: records that wait for their shard are kept apart from those that it let in."""

import pytest

from kpl_core import Config
from kpl_core.options.kinesis_limits import MAX_HASH_KEY
from kpl_core.options.policy import FairnessPolicy
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.intake.fair_intake import FairIntake
from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.pipeline.shard_map import Shard
from kpl_core.pipeline.stages import GroupTerms
from kpl_core.producer.stream_set import stream_parts
from kpl_core.records.put_records import PutRecordsEntry
from kpl_core.records.user_record import UserRecord
from tests.support.material import even_shards, keys_in, split

BYTES_PER_SECOND = 10_000
SHARD = Shard("shardId-000000000000", 0, MAX_HASH_KEY)


@pytest.fixture
def pipeline() -> StreamPipeline:
    config = Config(rate_limit_bytes_per_sec_per_shard=BYTES_PER_SECOND, fairness=FairnessPolicy())
    limit = BufferLimit(max_records=1_000, max_bytes=1_000_000)
    made = stream_parts("s", config, limit, now=0.0, chance=lambda: 0.5).pipeline
    made.shards_changed([SHARD], 0.0)
    return made


def intake(pipeline: StreamPipeline) -> FairIntake:
    assert isinstance(pipeline.fair, FairIntake)
    return pipeline.fair


def test_a_shard_does_not_keep_up_while_a_quarter_second_of_capacity_is_unanswered(pipeline: StreamPipeline) -> None:
    _ = pipeline.put("k", bytes(BYTES_PER_SECOND // 4), 0.0)
    pipeline.flush(0.2)
    assert intake(pipeline).all_let_pass()
    (request,) = pipeline.poll(0.2, 1).requests
    assert not intake(pipeline).lets_pass(SHARD.shard_id)
    assert not intake(pipeline).all_let_pass()
    assert intake(pipeline).lets_pass("another")
    pipeline.request_completed(request, [PutRecordsEntry(sequence_number="1", shard_id=SHARD.shard_id)], 0.3)
    assert intake(pipeline).all_let_pass()
    assert intake(pipeline).lets_pass(SHARD.shard_id)


def test_records_that_wait_do_not_join_a_record_that_was_let_in(
    pipeline: StreamPipeline,
) -> None:
    _ = pipeline.put("k", bytes(BYTES_PER_SECOND // 4), 0.0)
    pipeline.flush(0.2)
    passed = pipeline.put("k", b"in the next aggregated record", 0.2)
    assert pipeline.reaggregator.arrival_with(UserRecord("k", b"beside it"), passed) == 0.2
    assert len(pipeline.poll(0.2, 1).requests) == 1
    assert pipeline.reaggregator.arrival_with(UserRecord("k", b"waits"), passed) is None


def test_each_record_that_waits_expires_at_its_own_time() -> None:
    config = Config(rate_limit_bytes_per_sec_per_shard=BYTES_PER_SECOND, fairness=FairnessPolicy(), record_ttl_ms=1_000)
    limit = BufferLimit(max_records=1_000, max_bytes=1_000_000)
    pipeline = stream_parts("s", config, limit, now=0.0, chance=lambda: 0.5).pipeline
    pipeline.shards_changed([SHARD], 0.0)
    _ = pipeline.put("k", bytes(BYTES_PER_SECOND // 4), 0.0)
    pipeline.flush(0.0)
    assert len(pipeline.poll(0.0, 1).requests) == 1
    times = {"a": 0.125, "b": 0.5, "c": 0.75}
    waiting = [pipeline.put_record(UserRecord("k", b"x", flow=flow), at) for flow, at in times.items()]
    for now, done in ((1.0, 0), (1.125, 1), (1.375, 1), (1.5, 2), (1.625, 2), (1.75, 3)):
        pipeline.poll(now, 0)
        assert sum(delivery.done for delivery in waiting) == done


def test_a_group_without_aggregation_leaves_no_mark_on_the_next_group_of_its_flow(pipeline: StreamPipeline) -> None:
    for aggregate in (False, True, False, True):
        intake(pipeline).reserve(2, 1, GroupTerms("a", aggregate=aggregate))
        assert intake(pipeline).travels_alone("a") is not aggregate


def test_a_record_that_waits_keeps_its_metadata_and_its_flow(pipeline: StreamPipeline) -> None:
    waits = pipeline.stages.accept_detached(UserRecord("k", b"x", flow="a", metadata={"order": 7}), 0.0)
    assert waits.outcome.metadata == {0: {"order": 7}}
    assert waits.outcome.notes is not None
    assert waits.outcome.notes[0].flow == "a"
    plain = pipeline.stages.accept_detached(UserRecord("k", b"x"), 0.0)
    assert (plain.outcome.metadata, plain.outcome.notes) == (None, None)


def test_a_put_does_not_overtake_the_records_that_wait_although_the_shard_keeps_up(pipeline: StreamPipeline) -> None:
    assert intake(pipeline).lets_pass(SHARD.shard_id)
    waits = pipeline.stages.accept_detached(UserRecord("k", b"x"), 0.0)
    intake(pipeline).waiting.put(SHARD.shard_id, waits)
    assert intake(pipeline).keeps_up(SHARD.shard_id)
    assert not intake(pipeline).lets_pass(SHARD.shard_id)


def test_after_a_reshard_only_the_records_that_wait_for_a_closed_shard_are_routed_again(
    pipeline: StreamPipeline,
) -> None:
    stable, parent = even_shards(2)
    pipeline.shards_changed([stable, parent], 0.0)
    for shard in (stable, parent):
        _ = pipeline.put(keys_in(shard, 1)[0], bytes(BYTES_PER_SECOND // 4), 0.0)
    pipeline.flush(0.0)
    assert len(pipeline.poll(0.0, 2).requests) >= 1
    for shard in (stable, parent):
        _ = pipeline.put(keys_in(shard, 1)[0], b"waits", 0.0)
    assert pipeline.statistics().queueing == 2
    pipeline.shards_changed(split([stable, parent], parent.shard_id), 0.1)
    pipeline.poll(0.1, 0)
    # The children have no record in flight, so they keep up.
    assert pipeline.statistics().queueing == 1
    assert not intake(pipeline).lets_pass(stable.shard_id)
