import math

import pytest
from hypothesis import given, settings, strategies as st
from sortedcontainers import SortedKeyList

from kpl_core.options.stage_rules import ShardRules
from kpl_core.pipeline import shard_limiter
from kpl_core.pipeline.shard_limiter import Drained, ShardLimiter
from kpl_core.records.kinesis_record import KinesisRecord
from kpl_core.records.user_record import TIERS, UserRecord
from tests.support.material import kinesis_record, sized_record

MIB = 1_048_576.0


def rules(**fields) -> ShardRules:
    return ShardRules(**{"records_per_second": 1_000.0, "bytes_per_second": MIB, "burst_seconds": 1.0, **fields})


def tight(**fields) -> ShardLimiter:
    """One record a second, one at once."""
    return ShardLimiter(rules(records_per_second=1.0, **fields), 0.0)


def put(limiter: ShardLimiter, *records) -> None:
    for record in records:
        limiter.put(record)


def test_a_rested_shard_takes_a_second_of_its_rate_at_once_and_no_more():
    limiter = ShardLimiter(rules(), 0.0)
    put(limiter, *(kinesis_record() for _ in range(1_200)))
    assert len(limiter.drain(0.0).admitted) == 1_000
    assert len(limiter.drain(0.1).admitted) == 100
    assert len(limiter) == 100


def test_an_aggregated_record_costs_one_record_token_for_any_number_of_user_records():
    limiter = ShardLimiter(rules(records_per_second=2.0), 0.0)
    many = [UserRecord("k", b"x")] * 400
    put(limiter, kinesis_record(*many), kinesis_record(*many), kinesis_record(*many))
    assert len(limiter.drain(0.0).admitted) == 2
    assert limiter.user_record_count == 400


def test_bytes_are_key_and_data():
    limiter = ShardLimiter(rules(bytes_per_second=100.0), 0.0)
    put(limiter, sized_record(60), sized_record(40), sized_record(1))
    assert [record.size_bytes for record in limiter.drain(0.0).admitted] == [60, 40]
    assert limiter.wakeup_at(0.0) == pytest.approx(0.01)


def test_the_burst_is_so_many_seconds_of_the_rate():
    limiter = ShardLimiter(rules(burst_seconds=0.1), 0.0)
    put(limiter, *(kinesis_record() for _ in range(200)))
    assert len(limiter.drain(0.0).admitted) == 100


def test_the_expired_leave_before_the_admitted_and_spend_nothing():
    limiter = tight()
    old, young = kinesis_record(deadline=0.0, expires_at=1.0), kinesis_record(deadline=9.0, expires_at=9.0)
    put(limiter, old, young)
    assert limiter.drain(1.0) == Drained([old], [young])


def test_tokens_that_are_there_do_not_save_what_is_expired():
    limiter = ShardLimiter(rules(), 0.0)
    record = kinesis_record(expires_at=1.0)
    assert not limiter.admit_at_once(record, 1.0)
    limiter.put(record)
    assert limiter.drain(1.0) == Drained([record], [])
    assert limiter.admit_at_once(kinesis_record(), 1.0)


def test_records_are_admitted_by_deadline_under_saturation():
    limiter = tight()
    records = [kinesis_record(deadline=float(deadline), expires_at=90.0) for deadline in (5, 3, 9, 1, 7)]
    put(limiter, *records)
    admitted = [record for second in range(5) for record in limiter.drain(float(second)).admitted]
    assert [record.deadline for record in admitted] == [1.0, 3.0, 5.0, 7.0, 9.0]


def test_equal_deadlines_keep_the_order_of_closing():
    limiter = tight()
    records = [kinesis_record(deadline=1.0, expires_at=90.0, sequence=sequence) for sequence in (2, 1, 3)]
    put(limiter, *records)
    admitted = [record.sequence for second in range(3) for record in limiter.drain(float(second)).admitted]
    assert admitted == [1, 2, 3]


def test_critical_records_go_first_and_bulk_last():
    limiter = tight()
    put(limiter, *(kinesis_record(tier=tier, deadline=1.0, expires_at=90.0) for tier in reversed(TIERS)))
    admitted = [record.tier for second in range(3) for record in limiter.drain(float(second)).admitted]
    assert admitted == ["critical", "normal", "bulk"]


def test_the_first_that_does_not_fit_stops_those_behind_it_or_large_ones_would_starve():
    limiter = ShardLimiter(rules(bytes_per_second=100.0), 0.0)
    put(
        limiter,
        sized_record(50, deadline=1.0),
        sized_record(80, deadline=2.0),
        sized_record(10, deadline=3.0),
    )
    assert [record.size_bytes for record in limiter.drain(0.0).admitted] == [50]
    assert not limiter.admit_at_once(sized_record(1), 0.0)
    assert [record.size_bytes for record in limiter.drain(0.3).admitted] == [80]


def test_a_record_above_the_burst_passes_a_full_bucket_and_leaves_it_in_debt():
    limiter = ShardLimiter(rules(bytes_per_second=100.0), 0.0)
    put(limiter, sized_record(300), sized_record(1, deadline=9.0))
    assert len(limiter.drain(0.0).admitted) == 1
    assert limiter.wakeup_at(0.0) == pytest.approx(2.01)


def test_it_says_exactly_when_to_drain_again():
    limiter = tight()
    put(limiter, kinesis_record(), kinesis_record(deadline=5.0))
    limiter.drain(0.0)
    assert limiter.wakeup_at(0.0) == 1.0
    assert limiter.drain(math.nextafter(1.0, 0.0)).admitted == []
    assert len(limiter.drain(1.0).admitted) == 1
    assert limiter.wakeup_at(1.0) == math.inf


def test_it_wakes_for_an_expiration_that_comes_before_the_tokens():
    limiter = tight()
    put(limiter, kinesis_record(), kinesis_record(expires_at=0.5))
    limiter.drain(0.0)
    assert limiter.wakeup_at(0.0) == 0.5
    assert len(limiter.drain(0.5).expired) == 1


def test_to_find_the_expired_costs_the_same_however_many_wait(monkeypatch):
    looked_at = 0

    class Counting(SortedKeyList):  # type: ignore[misc] # sortedcontainers has no types
        def __iter__(self):
            nonlocal looked_at
            looked_at += len(self)
            return super().__iter__()

    monkeypatch.setattr(shard_limiter, "SortedKeyList", Counting)
    limiter = tight()
    put(limiter, *(kinesis_record(expires_at=5.0 + number, deadline=-float(number)) for number in range(5_000)))
    for number in range(100):
        assert [record.expires_at for record in limiter.drain(5.0 + number).expired] == [5.0 + number]
    assert looked_at == 0


def test_a_forced_drain_admits_all_that_is_not_expired_without_tokens():
    limiter = tight()
    expired = kinesis_record(expires_at=1.0, deadline=0.5)
    waiting = [kinesis_record(expires_at=9.0, deadline=float(number)) for number in range(5)]
    put(limiter, expired, *waiting)
    assert limiter.drain_force(1.0) == Drained([expired], waiting)
    assert len(limiter) == 0
    assert limiter.wakeup_at(1.0) == math.inf


def test_everything_can_be_taken_back_in_order():
    limiter = tight()
    records = [kinesis_record(deadline=float(number)) for number in range(3)]
    put(limiter, *reversed(records))
    assert limiter.take_all() == records
    assert limiter.drain(99.0) == Drained([], [])


def test_in_order_only_one_is_on_its_way_and_arrival_decides_not_the_deadline():
    limiter = ShardLimiter(rules(in_order=True), 0.0)
    first, second, third = (kinesis_record(sequence=sequence, deadline=9.0 - sequence) for sequence in range(3))
    assert limiter.admit_at_once(first, 0.0)
    assert not limiter.admit_at_once(second, 0.0)
    put(limiter, third, second)
    assert limiter.drain(0.0) == Drained([], [])
    assert limiter.wakeup_at(0.0) == 30.0
    limiter.finished(first)
    assert limiter.wakeup_at(0.0) == 0.0
    assert limiter.drain(0.0).admitted == [second]
    limiter.finished(third)
    assert limiter.drain(0.0).admitted == []
    limiter.finished(second)
    assert limiter.drain(0.0).admitted == [third]


def test_in_order_a_retried_record_goes_before_its_successors():
    limiter = ShardLimiter(rules(in_order=True), 0.0)
    first, second = kinesis_record(sequence=1), kinesis_record(sequence=2)
    assert limiter.admit_at_once(first, 0.0)
    put(limiter, second)
    limiter.finished(first)
    put(limiter, first)
    assert limiter.drain(0.0).admitted == [first]


def test_where_the_rate_adapts_a_quarter_of_the_burst_is_left_to_what_travels_faster():
    limiter = ShardLimiter(rules(adaptive=True), 0.0)
    put(limiter, *(kinesis_record(expires_at=900.0) for _ in range(5_000)))
    assert len(limiter.drain(0.0).admitted) == 750
    assert len(limiter.drain(0.5).admitted) == 500


def test_it_can_begin_with_the_tokens_another_has_left():
    other = ShardLimiter(rules(bytes_per_second=100.0), 0.0)
    put(other, *(sized_record(1, expires_at=900.0) for _ in range(60)))
    other.drain(0.0)
    limiter = ShardLimiter(rules(bytes_per_second=100.0), 0.0)
    limiter.begin_like(other, 0.25)
    put(limiter, *(sized_record(1, expires_at=900.0) for _ in range(90)))
    assert len(limiter.drain(0.25).admitted) == 100 - 60 + 25


def test_throttling_lowers_both_rates_and_success_restores_them():
    limiter = ShardLimiter(rules(adaptive=True), 0.0)
    put(limiter, *(kinesis_record(expires_at=900.0) for _ in range(5_000)))
    limiter.drain(0.0)
    assert limiter.answered(sent=1_000, throttled=500, now=0.0)
    assert limiter.rate_fraction == 0.85
    assert len(limiter.drain(0.5).admitted) == 425
    for step in range(1, 41):
        limiter.answered(sent=10, throttled=0, now=1.0 + step / 8)
    assert limiter.rate_fraction == 1.0
    limiter.drain(6.0)
    assert len(limiter.drain(6.5).admitted) == 500


def test_without_the_adaptive_rate_throttling_changes_nothing():
    limiter = ShardLimiter(rules(adaptive=False), 0.0)
    assert not limiter.answered(sent=10, throttled=10, now=0.0)
    assert limiter.rate_fraction == 1.0


def test_it_shows_how_many_wait_and_at_what_rate():
    limiter = tight()
    put(limiter, kinesis_record())
    assert repr(limiter) == "<ShardLimiter 1 waiting, at 100% of its limit>"


arriving = st.tuples(st.floats(0, 0.4), st.integers(1, 400), st.floats(0.001, 3.0), st.floats(0.001, 3.0))


@settings(max_examples=80)
@given(st.lists(arriving, max_size=50), st.floats(1, 50), st.floats(50, 2_000), st.floats(0.05, 2.0))
def test_every_record_leaves_once_and_no_window_sees_more_than_the_capacity_and_the_rate(
    steps, records_per_second, bytes_per_second, burst_seconds
):
    limiter = ShardLimiter(
        rules(records_per_second=records_per_second, bytes_per_second=bytes_per_second, burst_seconds=burst_seconds),
        0.0,
    )
    now = 0.0
    everything: list[KinesisRecord] = []
    admitted: list[tuple[float, KinesisRecord]] = []
    expired: list[KinesisRecord] = []

    def drain(until: float) -> None:
        nonlocal now
        for _ in range(10_000):
            drained = limiter.drain(now)
            assert all(record.expires_at <= now for record in drained.expired)
            assert all(record.expires_at > now for record in drained.admitted)
            expired.extend(drained.expired)
            admitted.extend((now, record) for record in drained.admitted)
            at = limiter.wakeup_at(now)
            # Never a wake-up for nothing.
            assert at > now
            if at > until:
                break
            now = at
        now = max(now, until)

    for wait, size, patience, life in steps:
        record = sized_record(size, deadline=now + patience, expires_at=now + life)
        everything.append(record)
        if limiter.admit_at_once(record, now):
            admitted.append((now, record))
        else:
            limiter.put(record)
        drain(now + wait)
    drain(now + 10.0)
    assert sorted(map(id, everything)) == sorted([*map(id, expired), *(id(record) for _, record in admitted)])
    for first, (start, _) in enumerate(admitted):
        spent_records = spent_bytes = 0.0
        for instant, record in admitted[first:]:
            # What one cost exceeds the capacity by is debt, paid before anything else passes.
            spent_records += 1
            spent_bytes += record.size_bytes
            window = instant - start
            largest = max(0.0, record.size_bytes - bytes_per_second * burst_seconds)
            too_many = max(0.0, 1 - records_per_second * burst_seconds)
            assert spent_records <= records_per_second * (burst_seconds + window) + too_many + 1e-6
            assert spent_bytes <= bytes_per_second * (burst_seconds + window) + largest + 1e-6


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.floats(0, 2.0), st.floats(0.0, 3.0)),
        max_size=20,
    ),
    st.booleans(),
)
def test_a_run_is_admitted_like_its_records_one_by_one(steps, in_order):
    in_runs, one_by_one = (
        ShardLimiter(rules(records_per_second=6.0, bytes_per_second=120.0, in_order=in_order), 0.0) for _ in range(2)
    )
    now = 0.0
    for sizes, wait, life in steps:
        records = [sized_record(size, deadline=now + 0.1, expires_at=now + life) for size in sizes]
        count = in_runs.admit_run(records, now)
        assert count in {0, len(records)}
        admitted = records[:count] + [record for record in records[count:] if in_runs.admit_at_once(record, now)]
        assert admitted == [record for record in records if one_by_one.admit_at_once(record, now)]
        for record in records:
            if record not in admitted:
                in_runs.put(record)
                one_by_one.put(record)
            in_runs.finished(record)
            one_by_one.finished(record)
        now += wait
        assert in_runs.drain(now) == one_by_one.drain(now)
        assert in_runs.wakeup_at(now) == one_by_one.wakeup_at(now)


def test_the_usage_counts_each_record_once_whether_it_waited_or_not():
    limiter = ShardLimiter(rules(bytes_per_second=100.0), 0.0)
    put(limiter, sized_record(60), sized_record(40), sized_record(30))
    limiter.drain(0.0)
    assert (limiter.usage().offered, limiter.usage().waiting) == ((3, 130), (1, 30))
    limiter.drain(1.0)
    assert (limiter.usage().offered, limiter.usage().waiting) == ((3, 130), (0, 0))
