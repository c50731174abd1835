"""Lanes: their bytes, and user records that come with a past."""

import pytest
from hypothesis import example, given, strategies as st

from kpl_core.pipeline.open_record import sealed
from kpl_core.records.aggregated_record import encode
from kpl_core.records.user_record import UserRecord
from tests.pipeline.lanes import aggregator, contents, move, plain, put
from tests.support.material import FIRST_SHARD, user_records


def test_a_mover_brings_its_arrival_and_hurries_its_company():
    stage = aggregator()
    put(stage, plain(1), now=10.0)
    move(stage, plain(2), arrived_at=3.0, deadline=10.02)
    assert stage.output.deadlines.next_at == 10.02
    stage.close_due(10.02)
    (record,) = stage.take_closed()
    assert record.arrivals == [10.0, 3.0]
    assert (record.deadline, record.expires_at) == (10.02, 33.0)


def test_a_mover_in_an_empty_lane_waits_until_its_own_deadline():
    stage = aggregator()
    move(stage, plain(2), arrived_at=3.0, deadline=10.5)
    stage.close_due(10.4)
    assert stage.take_closed() == []
    stage.close_due(10.5)
    assert len(stage.take_closed()) == 1


def test_a_mover_is_accepted_only_once():
    stage = aggregator()
    put(stage, plain(1))
    move(stage, plain(2), arrived_at=0.0, deadline=1.0)
    assert stage.accepted == 1
    stage.close_all()
    assert stage.accepted == 1
    assert stage.open_user_records == 0


@pytest.mark.parametrize("enabled", [True, False])
def test_a_mover_keeps_its_generation_and_gives_it_to_its_company(enabled):
    stage = aggregator(enabled=enabled)
    generations = stage.output.generations
    first = generations.advance()
    assert generations.is_finished(first)
    if enabled:
        put(stage, plain(1))
    move(stage, UserRecord("k", b"", "5"), arrived_at=0.0, deadline=1.0, generation=first)
    stage.close_all()
    (record,) = stage.take_closed()
    assert record.generation == first
    assert not generations.is_finished(first)
    generations.release(record.generation)
    assert generations.is_finished(generations.advance())


def test_the_younger_of_two_generations_joins_the_older():
    stage = aggregator()
    move(stage, plain(1), arrived_at=0.0, deadline=1.0, generation=0)
    stage.output.generations.advance()
    put(stage, plain(2))
    stage.close_all()
    (record,) = stage.take_closed()
    assert record.generation == 0


def test_lanes_show_what_they_hold():
    stage = aggregator()
    put(stage, plain(1))
    shown = repr(stage.lane(FIRST_SHARD))
    assert shown.startswith(f"<AggregatingLane {FIRST_SHARD} normal: 1 user records, ")
    assert repr(stage.lane(None)) == "<SingleLane None normal>"


@given(st.lists(user_records, min_size=1, max_size=12))
@example([UserRecord(f"{number}", b"") for number in range(300)])
@example([UserRecord(f"{number}", bytes(number % 100)) for number in range(2_200)])
@example([UserRecord(f"{number % 150}", bytes(number)) for number in range(300)])
@example([UserRecord("k", bytes(size)) for size in (126, 127, 128, 1_278, 1_279, 1_280, 16_383, 16_384)])
def test_the_lanes_bytes_are_the_codecs(records):
    stage = aggregator(size_limit=10 * 1024 * 1024)
    for record in records:
        put(stage, record)
    stage.close_all()
    (closed,) = stage.take_closed()
    assert closed.is_sealed == (len(records) == 1)
    (data,) = [closed.data] if closed.is_sealed else sealed([closed.data])
    assert data == (encode(records) if len(records) > 1 else records[0].data)
    assert closed.size_bytes == len(closed.data) + len(closed.partition_key.encode())
    assert contents(closed) == records
