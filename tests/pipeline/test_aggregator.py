"""Aggregation through its lanes; the KPL's cases for Aggregator and Reducer are among these."""

import math

import pytest
from hypothesis import given, settings, strategies as st

from kpl_core.records.aggregated_record import decode, encode
from kpl_core.records.kinesis_record import KinesisRecord
from kpl_core.records.user_record import TIERS, UserRecord
from tests.pipeline.lanes import aggregator, contents, plain, put
from tests.support.material import FIRST_SHARD, HASH_KEYS, shard_id, user_records

# Grouping


def test_user_records_of_different_shards_never_share_a_kinesis_record():
    stage = aggregator()
    for number in range(12):
        put(stage, plain(number), shard=shard_id(number % 3))
    stage.close_all()
    closed = stage.take_closed()
    assert [(record.predicted_shard, record.user_record_count) for record in closed] == [
        (shard_id(shard), 4) for shard in range(3)
    ]
    assert [len(held.data) for held in contents(closed[1])] == [1, 4, 7, 10]


@pytest.mark.parametrize("tier", TIERS)
def test_a_tier_travels_apart_from_the_others(tier):
    stage = aggregator()
    for each in (*TIERS, tier):
        put(stage, UserRecord("k", b"", tier=each))
    stage.close_all()
    assert {record.tier: record.user_record_count for record in stage.take_closed()} == {
        each: 2 if each == tier else 1 for each in TIERS
    }


def test_without_a_predicted_shard_every_user_record_travels_alone_and_at_once():
    stage = aggregator()
    records = [plain(1), UserRecord("k", b"2", "7"), UserRecord("ü", b"3")]
    for record in records:
        put(stage, record, shard=None)
    closed = stage.take_closed()
    assert [contents(each) for each in closed] == [[record] for record in records]
    assert not any(each.aggregated for each in closed)


def test_with_aggregation_off_every_user_record_travels_alone_but_keeps_its_shard():
    stage = aggregator(enabled=False)
    put(stage, UserRecord("k", b"1"), now=5.0)
    (record,) = stage.take_closed()
    assert (record.predicted_shard, record.aggregated, record.data) == (FIRST_SHARD, False, b"1")
    assert (record.deadline, record.expires_at) == (5.1, 35.0)


# What a Kinesis record says of itself


def test_one_user_record_alone_is_sent_raw_with_its_own_key():
    stage = aggregator()
    put(stage, UserRecord("ü", b"data"))
    stage.close_all()
    (record,) = stage.take_closed()
    assert (record.partition_key, record.data, record.aggregated) == ("ü", b"data", False)
    assert record.size_bytes == record.user_bytes == 6


def test_an_explicit_hash_key_is_always_sent():
    stage = aggregator()
    for key in ("abcd", "other"):
        put(stage, UserRecord(key, b""), shard=shard_id(1))
    put(stage, UserRecord("k", b"", "7"), shard=shard_id(2))
    put(stage, UserRecord("k", b"", "8"), shard=shard_id(2))
    put(stage, UserRecord("abcd", b""), shard=None)
    put(stage, UserRecord("abcd", b"", "0"), shard=None)
    put(stage, UserRecord("abcd", b"", "0"), shard=shard_id(3))
    stage.close_all()
    of_abcd = "301716283811389038011477436469853762335"
    sent = sorted(
        (record.explicit_hash_key, record.user_record_count, record.user_explicit_hash_key or "")
        for record in stage.take_closed()
    )
    assert sent == sorted([(of_abcd, 2, ""), ("7", 2, ""), (of_abcd, 1, ""), ("0", 1, "0"), ("0", 1, "0")])


@pytest.mark.parametrize(("first", "expected"), [(False, "a"), (True, "ü")])
def test_the_aggregate_partition_key_is_the_kpls_or_the_first_user_records(first, expected):
    stage = aggregator(first_partition_key=first)
    put(stage, UserRecord("ü", b"1"))
    put(stage, UserRecord("other", b"2"))
    stage.close_all()
    (record,) = stage.take_closed()
    assert record.partition_key == expected
    assert record.size_bytes == len(record.data) + len(expected.encode())
    assert record.user_bytes == 2 + 1 + 5 + 1


def test_the_deadline_never_lies_behind_the_expiration():
    stage = aggregator(buffered_seconds=5.0, ttl_seconds=1.0)
    put(stage, plain(1))
    stage.close_all()
    (record,) = stage.take_closed()
    assert (record.deadline, record.expires_at) == (1.0, 1.0)


def test_deliveries_are_numbered_as_the_user_records_stand():
    stage = aggregator()
    deliveries = [put(stage, plain(number)) for number in range(3)]
    deliveries.append(put(stage, UserRecord("k", b"", "5")))
    stage.close_all()
    (record,) = stage.take_closed()
    assert [delivery.index for delivery in deliveries] == [0, 1, 2, 3]
    assert all(delivery.outcome is record.outcome for delivery in deliveries)


# When it closes


def test_it_closes_exactly_at_the_count():
    stage = aggregator(count_limit=10)
    for number in range(25):
        put(stage, plain(number))
        assert len(stage.output.closed) == (number + 1) // 10
    assert stage.open_user_records == 5


def test_a_count_of_one_is_no_aggregation():
    stage = aggregator(count_limit=1)
    put(stage, plain(3))
    put(stage, UserRecord("k", b"", "9"))
    assert [record.aggregated for record in stage.take_closed()] == [False, False]


def test_it_closes_before_the_user_record_that_would_not_fit():
    records = [plain(30, "k") for _ in range(4)]
    stage = aggregator(size_limit=len(encode(records[:3])) + 1)
    for record in records:
        put(stage, record)
    (closed,) = stage.take_closed()
    assert contents(closed) == records[:3]
    assert stage.open_user_records == 1


def test_it_closes_at_once_when_exactly_full():
    records = [plain(30, "k") for _ in range(3)]
    stage = aggregator(size_limit=len(encode(records)))
    for record in records:
        put(stage, record)
    (closed,) = stage.take_closed()
    assert len(closed.data) == len(encode(records))


def test_a_giant_user_record_leaves_raw_and_its_neighbours_unharmed():
    stage = aggregator(size_limit=1_000)
    for record in (plain(10), plain(50_000, "giant"), plain(10)):
        put(stage, record)
    stage.close_all()
    closed = stage.take_closed()
    assert [len(record.data) for record in closed] == [10, 50_000, 10]
    assert not any(record.aggregated for record in closed)


def test_it_closes_at_the_deadline_of_its_first_user_record_and_no_sooner():
    stage = aggregator()
    put(stage, plain(1), now=1.0)
    put(stage, plain(2), now=1.09)
    assert stage.output.deadlines.next_at == 1.1
    stage.close_due(1.0999)
    assert stage.take_closed() == []
    stage.close_due(1.1)
    (record,) = stage.take_closed()
    assert record.arrivals == [1.0, 1.09]
    assert (record.deadline, record.expires_at) == (1.1, 31.0)


def test_closing_by_size_moves_the_timer_to_the_next_deadline():
    stage = aggregator(count_limit=2)
    put(stage, plain(1), now=0.0)
    put(stage, plain(1), now=0.0)
    put(stage, plain(1), now=0.05)
    assert len(stage.take_closed()) == 1
    stage.close_due(0.1)
    assert stage.take_closed() == []
    assert stage.output.deadlines.next_at == pytest.approx(0.15)
    stage.close_due(stage.output.deadlines.next_at)
    assert len(stage.take_closed()) == 1
    assert stage.output.deadlines.next_at == math.inf


def test_the_shards_that_are_due_close_and_the_others_do_not():
    stage = aggregator()
    for shard in range(3):
        put(stage, plain(1), now=shard / 100, shard=shard_id(shard))
    stage.close_due(0.115)
    assert [record.predicted_shard for record in stage.take_closed()] == [shard_id(0), shard_id(1)]


def test_closing_nothing_closes_nothing():
    stage = aggregator()
    stage.close_all()
    stage.lane(FIRST_SHARD)
    stage.lane(None)
    stage.close_all()
    stage.close_due(1e9)
    stage.close_lanes_except(set())
    assert stage.take_closed() == []


def test_the_lanes_of_closed_shards_are_closed_and_forgotten():
    stage = aggregator()
    for shard in range(3):
        put(stage, plain(1), shard=shard_id(shard))
    lane = stage.lane(shard_id(1))
    stage.close_lanes_except({shard_id(1)})
    assert sorted(str(record.predicted_shard) for record in stage.take_closed()) == [shard_id(0), shard_id(2)]
    assert stage.lane(shard_id(1)) is lane
    assert stage.accepted == 3


def test_what_is_closed_is_news_and_what_merely_joins_is_not():
    stage = aggregator(size_limit=200)
    put(stage, plain(1))
    assert stage.output.has_closed
    stage.output.has_closed = False
    put(stage, plain(1))
    assert not stage.output.has_closed
    put(stage, plain(170))
    assert stage.output.has_closed


arriving = st.tuples(user_records, st.floats(0, 0.03), st.integers(0, 2))


@settings(max_examples=80)
@given(
    st.lists(arriving, max_size=60),
    st.integers(64, 2_000),
    st.none() | st.integers(1, 8),
    st.booleans(),
)
def test_everything_put_is_closed_once_in_order_in_time_and_within_the_limits(steps, size_limit, count_limit, enabled):
    stage = aggregator(size_limit=size_limit, count_limit=count_limit, enabled=enabled)
    now = 0.0
    expected: dict[str, list[UserRecord]] = {}
    closed: list[KinesisRecord] = []
    for count, (record, wait, shard) in enumerate(steps, start=1):
        put(stage, record, now=now, shard=shard_id(shard))
        expected.setdefault(shard_id(shard), []).append(record)
        now += wait
        while (at := stage.output.deadlines.next_at) <= now:
            stage.close_due(at)
            # The timer moved on: no deadline stays due.
            assert stage.output.deadlines.next_at > at
        new = stage.take_closed()
        assert all(each.deadline == each.arrivals[0] + 0.1 for each in new)
        closed += new
        assert stage.accepted == count == sum(each.user_record_count for each in closed) + stage.open_user_records
    stage.close_all()
    closed += stage.take_closed()
    for each in closed:
        assert not each.aggregated or len(each.data) <= size_limit
        assert count_limit is None or each.user_record_count <= count_limit
        assert int(each.explicit_hash_key) < HASH_KEYS
        assert each.user_bytes == sum(len(held.partition_key.encode()) + len(held.data) for held in contents(each))
    by_shard: dict[str, list[UserRecord]] = {}
    for each in closed:
        by_shard.setdefault(str(each.predicted_shard), []).extend(contents(each))
    assert by_shard == expected
    assert [each.sequence for each in closed] == list(range(1, len(closed) + 1))


def test_data_that_looks_aggregated_stays_what_it_is_when_it_travels_alone():
    stage = aggregator()
    disguised = encode([plain(1), plain(2)])
    put(stage, UserRecord("k", disguised))
    stage.close_all()
    (record,) = stage.take_closed()
    assert decode(record.data) is not None
    assert contents(record) == [UserRecord("k", disguised)]
