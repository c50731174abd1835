import math
from collections import Counter

import pytest
from hypothesis import example, given, settings, strategies as st

from kpl_core.options.stage_rules import CollectionRules
from kpl_core.pipeline.collector import Collector
from kpl_core.records.kinesis_record import KinesisRecord
from tests.support.material import kinesis_record, shard_id, sized_record

KIB = 1024
MIB = 1024 * KIB
# How long what was admitted waits for more records past its deadline: 20 % of 100 ms.
EXTENSION = 0.1 * 0.1


def rules(*, count: int = 500, size: int = MIB, buffered: float = 0.1) -> CollectionRules:
    return CollectionRules(count_limit=count, size_limit=size, buffered_seconds=buffered)


def sent(collector: Collector, now: float = 0.0) -> list[KinesisRecord]:
    records = collector.next_records(now)
    assert records is not None
    return records


def test_an_empty_collector_has_nothing_to_send_and_wants_nothing():
    collector = Collector(rules())
    assert collector.next_records(1e9) is None
    assert not collector.is_due(1e9)
    assert collector.next_wakeup() == math.inf
    collector.flush()
    assert collector.next_records(1e9) is None
    assert collector.take_all() == collector.take_expired(1e9) == []


def test_a_request_leaves_with_500_records():
    collector = Collector(rules())
    records = [kinesis_record(shard=shard_id(number)) for number in range(501)]
    for record in records[:499]:
        collector.add(record, 0.0)
    assert not collector.is_due(0.0)
    for record in records[499:]:
        collector.add(record, 0.0)
    assert collector.next_wakeup() == -math.inf
    assert collector.next_records(0.0) == records[:500]
    assert not collector.is_due(0.0)


def test_a_request_leaves_before_it_would_be_too_large():
    collector = Collector(rules(size=100_000))
    for number in range(3):
        collector.add(sized_record(40_000, shard=shard_id(number)), 0.0)
    assert [record.size_bytes for record in sent(collector)] == [40_000, 40_000]
    assert not collector.is_due(0.0)


def test_a_record_larger_than_a_request_leaves_alone():
    collector = Collector(rules(size=100_000))
    collector.add(sized_record(10, shard=shard_id(1)), 0.0)
    collector.add(sized_record(150_000, shard=shard_id(2)), 0.0)
    collector.add(sized_record(10, shard=shard_id(3)), 0.0)
    sizes = []
    collector.flush()
    while (records := collector.next_records(0.0)) is not None:
        sizes.append([record.size_bytes for record in records])
    assert sizes == [[10], [150_000], [10]]


def test_a_request_leaves_at_the_deadline_of_its_most_urgent_record():
    collector = Collector(rules())
    collector.add(kinesis_record(shard=shard_id(1), deadline=0.5), 0.0)
    collector.add(kinesis_record(shard=shard_id(2), deadline=0.3), 0.0)
    assert collector.next_wakeup() == 0.3
    assert collector.next_records(0.299) is None
    assert len(sent(collector, 0.3)) == 2


@pytest.mark.parametrize(("buffered", "extension"), [(0.1, 0.01), (0.2, 0.02), (0.5, 0.05), (10.0, 0.05), (0.0, 0.0)])
def test_a_late_record_waits_for_company_a_tenth_of_the_buffered_time_and_50_ms_at_most(buffered, extension):
    collector = Collector(rules(buffered=buffered))
    collector.add(kinesis_record(deadline=3.0), 5.0)
    assert collector.next_wakeup() == pytest.approx(5.0 + extension, abs=1e-12)
    assert collector.is_due(collector.next_wakeup())


def test_what_was_admitted_in_time_is_sent_even_if_it_expires_while_it_waits_for_company():
    collector = Collector(rules())
    record = kinesis_record(deadline=5.0, expires_at=math.nextafter(5.0, 6.0))
    collector.add(record, 5.0)
    assert collector.next_wakeup() == 5.0 + EXTENSION
    assert collector.take_expired(5.0 + EXTENSION) == []
    assert collector.next_records(5.0 + EXTENSION) == [record]


def test_256_kib_for_one_shard_leave_alone():
    collector = Collector(rules())
    cold = [sized_record(100, shard=shard_id(number)) for number in range(1, 4)]
    for record in cold:
        collector.add(record, 0.0)
    hot = [sized_record(64 * KIB, shard=shard_id(0)) for _ in range(4)]
    for record in hot:
        collector.add(record, 0.0)
    assert collector.next_records(0.0) == hot
    assert not collector.is_due(0.0)
    collector.flush()
    assert collector.next_records(0.0) == cold


def test_unpredicted_records_are_of_many_shards_and_leave_together():
    collector = Collector(rules())
    for _ in range(5):
        collector.add(sized_record(64 * KIB, shard=None), 0.0)
    assert not collector.is_due(0.0)


def test_a_shard_that_left_alone_leaves_no_deadline_behind():
    collector = Collector(rules())
    collector.add(sized_record(256 * KIB, shard=shard_id(0), deadline=0.1), 0.0)
    assert collector.next_records(0.0) is not None
    assert collector.next_wakeup() == math.inf


def test_full_requests_leave_in_the_order_they_were_filled():
    collector = Collector(rules(count=2))
    records = [kinesis_record(shard=shard_id(0)) for _ in range(6)]
    for record in records:
        collector.add(record, 0.0)
    assert [collector.next_records(0.0) for _ in range(4)] == [records[0:2], records[2:4], records[4:6], None]


def test_one_shards_records_keep_their_order():
    collector = Collector(rules())
    records = [kinesis_record(shard=shard_id(number % 3)) for number in range(30)]
    for record in records:
        collector.add(record, 0.0)
    collector.flush()
    packed = sent(collector)
    for shard in range(3):
        assert [record for record in packed if record.predicted_shard == shard_id(shard)] == records[shard::3]


def test_the_expired_leave_and_the_others_keep_their_place_and_their_deadline():
    collector = Collector(rules(count=2))
    first, second = (kinesis_record(expires_at=expires_at) for expires_at in (1.0, 9.0))
    third = kinesis_record(expires_at=1.5, deadline=0.3)
    fourth = kinesis_record(shard=shard_id(1), expires_at=9.0, deadline=8.0)
    for record in (first, second, third):
        collector.add(record, 0.0)
    assert collector.take_expired(1.005) == []
    assert collector.take_expired(1.53) == [first, third]
    collector.add(fourth, 1.53)
    assert collector.next_records(1.53) == [second]
    assert collector.user_record_count == 1


def test_a_record_that_expires_every_moment_does_not_keep_the_others_waiting():
    collector = Collector(rules())
    for step in range(64):
        collector.add(kinesis_record(deadline=0.125, expires_at=0.125 + step / 64), 0.0)
    for step in range(32):
        now = 0.125 + 1 / 32 + step / 64
        assert collector.take_expired(now)
        # No place for a request in all this time, yet due the moment there is one.
        assert collector.is_due(now)


def test_a_request_whose_records_all_expired_is_none():
    collector = Collector(rules(count=2))
    for _ in range(3):
        collector.add(kinesis_record(expires_at=1.0), 0.0)
    assert len(collector.take_expired(1.0 + EXTENSION)) == 3
    assert not collector.is_due(1e9)
    assert collector.next_records(1e9) is None
    assert collector.next_wakeup() == collector.next_wakeup(may_send=False) == math.inf


def test_without_a_place_to_send_only_expirations_are_waited_for():
    collector = Collector(rules(count=1))
    collector.add(kinesis_record(expires_at=7.0), 0.0)
    assert collector.next_wakeup() == -math.inf
    assert collector.next_wakeup(may_send=False) == 7.0 + EXTENSION


def test_everything_can_be_taken_back():
    collector = Collector(rules(count=2))
    records = [kinesis_record(shard=shard_id(number)) for number in range(3)]
    for record in records:
        collector.add(record, 0.0)
    assert collector.take_all() == records
    assert collector.user_record_count == 0
    assert collector.next_wakeup() == math.inf


arriving = st.tuples(
    st.integers(0, 4),
    st.integers(1, 300 * KIB),
    st.floats(0, 0.05),
    st.floats(0.01, 0.4),
    st.sampled_from(["send", "wait", "expire"]),
)


@settings(max_examples=60)
# Asked a rounding before the 20 ms are over.
@example([(0, 1, 0.02, 0.0625, "send")], 2, 52_224)
@given(st.lists(arriving, max_size=60), st.integers(1, 20), st.integers(52_224, MIB))
def test_every_record_leaves_once_in_requests_within_the_limits_and_in_time(steps, count, size):
    collector = Collector(rules(count=count, size=size))
    now = 0.0
    left: Counter[int] = Counter()
    waiting: dict[int, tuple[KinesisRecord, float]] = {}

    def leave(records, *, now):
        for record in records:
            left[id(record)] += 1
            del waiting[id(record)]

    def send_due():
        while (records := collector.next_records(now)) is not None:
            assert len(records) <= count
            assert sum(record.size_bytes for record in records) <= size or len(records) == 1
            leave(records, now=now)
        # Every record has left by its deadline, or by the extension after a late arrival.
        for record, arrived in waiting.values():
            assert max(record.deadline, arrived + EXTENSION) > now

    everything = []
    for shard, record_size, wait, patience, then in steps:
        record = sized_record(
            record_size,
            shard=shard_id(shard) if shard else None,
            deadline=now + patience - 0.1,
            expires_at=now + patience,
        )
        everything.append(record)
        waiting[id(record)] = record, now
        collector.add(record, now)
        now += wait
        if then == "expire":
            expired = collector.take_expired(now)
            assert all(record.expires_at <= now for record in expired)
            leave(expired, now=now)
            assert all(record.expires_at + EXTENSION > now for record, _ in waiting.values())
        elif then == "send":
            send_due()
        assert collector.user_record_count == len(waiting)
        assert collector.next_wakeup(may_send=False) <= min(
            (record.expires_at + EXTENSION for record, _ in waiting.values()), default=math.inf
        )
    collector.flush()
    send_due()
    assert left == Counter({id(record): 1 for record in everything})


@given(
    runs=st.lists(
        st.tuples(
            st.integers(min_value=0, max_value=3),  # 0: unpredicted
            st.lists(
                st.tuples(
                    st.sampled_from([1, 100, 40 * KIB, 200 * KIB]),
                    st.floats(min_value=0, max_value=0.2),
                    st.floats(min_value=0, max_value=1),
                ),
                min_size=1,
                max_size=6,
            ),
        ),
        max_size=20,
    ),
    count=st.integers(min_value=1, max_value=12),
)
def test_a_run_of_one_shard_is_packed_as_its_records_are_one_by_one(runs, count):
    by_runs, one_by_one = (Collector(rules(count=count, size=600 * KIB)) for _ in range(2))
    for number, (shard, fields) in enumerate(runs):
        now = number * 0.01
        run = [
            sized_record(
                size,
                shard=shard_id(shard) if shard else None,
                deadline=now + patience,
                expires_at=now + patience + more,
            )
            for size, patience, more in fields
        ]
        by_runs.add_run(run, now)
        for record in run:
            one_by_one.add(record, now)
        assert by_runs.next_wakeup() == one_by_one.next_wakeup()
        assert by_runs.next_wakeup(may_send=False) == one_by_one.next_wakeup(may_send=False)
        assert by_runs.is_due(now) == one_by_one.is_due(now)
        assert by_runs.user_record_count == one_by_one.user_record_count
    by_runs.flush()
    one_by_one.flush()
    for _ in range(sum(len(fields) for _, fields in runs) + 1):
        assert by_runs.next_records(0.0) == one_by_one.next_records(0.0)
