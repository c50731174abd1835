"""The gates of the shards: records in front of a closed gate are kept apart from records behind it."""

import pytest

from kpl_core import Config
from kpl_core.fairness.fair_intake import FairIntake
from kpl_core.options.kinesis_limits import MAX_HASH_KEY
from kpl_core.options.policy import FairnessPolicy
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.pipeline.shard_map import Shard
from kpl_core.producer.composition import stream_pipeline
from kpl_core.records.put_records import PutRecordsEntry
from kpl_core.records.user_record import UserRecord

BYTES_PER_SECOND = 10_000
SHARD = Shard("shardId-000000000000", 0, MAX_HASH_KEY)


@pytest.fixture
def pipeline() -> StreamPipeline:
    config = Config(rate_limit_bytes_per_sec_per_shard=BYTES_PER_SECOND, fairness=FairnessPolicy())
    limit = BufferLimit(max_records=1_000, max_bytes=1_000_000)
    made = stream_pipeline("s", config, limit, now=0.0, chance=lambda: 0.5)
    made.shards_changed([SHARD], 0.0)
    return made


def gates(pipeline: StreamPipeline) -> FairIntake:
    assert isinstance(pipeline.fair, FairIntake)
    return pipeline.fair


def test_a_gate_is_closed_while_a_quarter_second_of_capacity_is_unanswered(pipeline: StreamPipeline) -> None:
    _ = pipeline.put("k", bytes(BYTES_PER_SECOND // 4), 0.0)
    pipeline.flush(0.2)
    assert gates(pipeline).all_let_pass()
    (request,) = pipeline.poll(0.2, 1).requests
    assert not gates(pipeline).lets_pass(SHARD.shard_id)
    assert not gates(pipeline).all_let_pass()
    assert gates(pipeline).lets_pass("another")
    pipeline.request_completed(request, [PutRecordsEntry(sequence_number="1", shard_id=SHARD.shard_id)], 0.3)
    assert gates(pipeline).all_let_pass()
    assert gates(pipeline).lets_pass(SHARD.shard_id)


def test_records_in_front_of_a_closed_gate_do_not_join_a_record_behind_it(
    pipeline: StreamPipeline,
) -> None:
    _ = pipeline.put("k", bytes(BYTES_PER_SECOND // 4), 0.0)
    pipeline.flush(0.2)
    passed = pipeline.put("k", b"in the next aggregated record", 0.2)
    assert pipeline.reaggregator.arrival_with(UserRecord("k", b"beside it"), passed) == 0.2
    assert len(pipeline.poll(0.2, 1).requests) == 1
    assert pipeline.reaggregator.arrival_with(UserRecord("k", b"in front of the gate"), passed) is None
