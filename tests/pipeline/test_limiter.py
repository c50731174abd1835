import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings, strategies as st

from kpl_core.options.stage_rules import ShardRules
from kpl_core.pipeline.limiter import StreamLimiter
from kpl_core.pipeline.shard_limiter import Drained
from kpl_core.records.kinesis_record import KinesisRecord
from tests.support.material import kinesis_record, shard_id


def limiter(**fields) -> StreamLimiter:
    return StreamLimiter(
        ShardRules(**{"records_per_second": 1.0, "bytes_per_second": 1_000.0, "burst_seconds": 1.0, **fields})
    )


def record(shard: int | None = 0, **fields):
    return kinesis_record(shard=None if shard is None else shard_id(shard), **fields)


def test_a_record_whose_tokens_are_there_passes_at_once():
    assert limiter().put(record(), 0.0) is None


def test_a_put_drains_its_own_shard():
    shards = limiter()
    shards.put(record(), 0.0)
    late, urgent = record(deadline=9.0), record(deadline=1.0)
    assert shards.put(late, 0.0) == Drained([], [])
    assert shards.put(urgent, 1.0) == Drained([], [urgent])


def test_shards_are_made_when_first_needed_and_share_no_tokens():
    shards = limiter()
    assert shards.usages() == {}
    for number in range(3):
        assert shards.put(record(number), 0.0) is None
    assert set(shards.usages()) == {shard_id(number) for number in range(3)}
    assert shards.waiting == []
    shards.put(record(1), 0.0)
    assert len(shards.waiting) == 1


def test_records_without_a_prediction_are_limited_too():
    shards = limiter()
    assert shards.put(record(None), 0.0) is None
    assert shards.put(record(None), 0.0) == Drained([], [])
    assert shards.user_record_count == 1
    assert shards.next_wakeup() == 1.0


def test_it_says_when_tokens_are_there_instead_of_being_polled():
    shards = limiter(records_per_second=4.0, burst_seconds=0.25)
    for number in (0, 1):
        for _ in range(3):
            shards.put(record(number, expires_at=90.0), 0.125 * number)
    assert shards.next_wakeup() == 0.25
    assert shards.drain_due(0.2) == []
    assert [len(drained.admitted) for drained in shards.drain_due(0.25)] == [1]
    assert shards.next_wakeup() == 0.375
    assert [len(drained.admitted) for drained in shards.drain_due(0.375)] == [1]
    assert shards.next_wakeup() == 0.5


def test_nothing_waits_nothing_wakes():
    shards = limiter()
    shards.put(record(), 0.0)
    assert shards.next_wakeup() == math.inf


def test_a_record_already_expired_is_returned_as_such_at_once():
    shards = limiter()
    dead = record(expires_at=5.0)
    assert shards.put(dead, 5.0) == Drained([dead], [])


def test_expiring_while_queued_is_seen_in_time():
    shards = limiter()
    shards.put(record(), 0.0)
    dying = record(expires_at=0.75)
    shards.put(dying, 0.0)
    assert shards.next_wakeup() == 0.75
    assert shards.drain_due(0.75) == [Drained([dying], [])]


def test_a_forced_drain_empties_every_queue_and_limits_nothing_afterwards():
    shards = limiter()
    for number in (0, 1, None):
        for _ in range(3):
            shards.put(record(number), 0.0)
    dead = record(0, expires_at=0.0)
    drained = shards.drain_force(0.0)
    assert sorted(len(each.admitted) for each in drained) == [2, 2, 2]
    assert shards.put(record(0), 0.0) is None
    assert shards.put(dead, 0.0) == Drained([dead], [])
    assert shards.user_record_count == 0


def test_everything_waiting_can_be_taken_back_in_the_order_it_was_closed():
    shards = limiter()
    for sequence in range(8):
        shards.put(record(sequence % 2, sequence=sequence, deadline=-float(sequence)), 0.0)
    assert [taken.sequence for taken in shards.take_all()] == [2, 3, 4, 5, 6, 7]
    assert shards.user_record_count == 0


def test_shards_that_closed_are_forgotten_but_never_the_unpredicted_one():
    shards = limiter()
    for number in (0, 1, None):
        shards.put(record(number), 0.0)
    shards.keep_only({shard_id(1)})
    assert set(shards.usages()) == {shard_id(1), None}
    # The one kept still knows what it spent; the forgotten one starts full.
    assert shards.put(record(1), 0.5) == Drained([], [])
    assert shards.put(record(0), 1.0) is None


def test_a_shard_forgotten_while_a_wakeup_is_due_is_no_error():
    shards = limiter()
    for _ in range(2):
        shards.put(record(0), 0.0)
    shards.take_all()
    shards.keep_only(set())
    assert shards.drain_due(50.0) == []


def test_an_answer_teaches_its_own_shard_only():
    shards = limiter(adaptive=True)
    for number in (0, 1):
        shards.put(record(number), 0.0)
    assert shards.answered(shard_id(0), sent=10, throttled=10, now=0.0) == 0.85
    assert shards.answered(shard_id(1), sent=10, throttled=0, now=0.0) is None
    assert shards.answered(shard_id(7), sent=10, throttled=10, now=0.0) is None
    assert [shards.shard(shard_id(number), 0.0).rate_fraction for number in (0, 1)] == [0.85, 1.0]


def test_in_order_the_next_record_goes_when_the_one_before_is_final():
    shards = limiter(records_per_second=1_000.0, in_order=True)
    first, second = record(sequence=1), record(sequence=2)
    assert shards.put(first, 0.0) is None
    assert shards.put(second, 0.0) == Drained([], [])
    assert shards.next_wakeup() == second.expires_at
    shards.finished(first, 0.5)
    assert shards.next_wakeup() == 0.5
    assert shards.drain_due(0.5) == [Drained([], [second])]
    shards.finished(record(9), 0.5)


def windows_of(instants: list[float]) -> Iterator[tuple[float, float, int]]:
    """Every window between two of these instants, and how many of them are in it."""
    for first, start in enumerate(instants):
        for count, end in enumerate(instants[first:], start=1):
            yield start, end, count


steps = st.tuples(st.integers(0, 3), st.floats(0, 0.5), st.floats(0.01, 5.0))


@settings(max_examples=60)
@given(st.lists(steps, max_size=60), st.floats(0.5, 20))
def test_driven_by_its_own_wakeups_it_loses_nothing_and_never_wakes_for_nothing(arrivals, rate):
    shards = limiter(records_per_second=rate, bytes_per_second=1e6)
    now = 0.0
    left: Counter[int] = Counter()
    admitted: dict[str | None, list[float]] = {}
    everything = []

    def note(drained: Drained) -> None:
        for gone in drained.expired:
            left[id(gone)] += 1
        for gone in drained.admitted:
            left[id(gone)] += 1
            admitted.setdefault(gone.predicted_shard, []).append(now)

    def drive(until: float) -> None:
        nonlocal now
        for _ in range(10_000):
            at = shards.next_wakeup()
            if at > until:
                break
            now = max(now, at)
            for drained in shards.drain_due(now):
                note(drained)
            assert shards.next_wakeup() > now
        now = max(now, until)

    for number, wait, life in arrivals:
        put = record(number or None, expires_at=now + life)
        everything.append(put)
        drained = shards.put(put, now)
        note(Drained([], [put]) if drained is None else drained)
        drive(now + wait)
    drive(now + 10.0)
    assert left == Counter({id(each): 1 for each in everything})
    for instants in admitted.values():
        windows = [(end - start, count) for start, end, count in windows_of(instants)]
        assert all(count <= rate + rate * window + max(0.0, 1 - rate) + 1e-6 for window, count in windows)


def calls_of(work: Callable[[], object]) -> int:
    """How many functions, of Python and of C, some work calls."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_the_cost_of_a_record_does_not_grow_with_those_that_wait():
    costs = []
    for waiting in (100, 10_000):
        shards = limiter(records_per_second=10.0)
        for number in range(waiting):
            shards.put(record(number % 4, expires_at=1e6, deadline=float(number)), 0.0)
        late = record(0, expires_at=1e6, deadline=1e6)

        def pass_one_by(shards: StreamLimiter = shards, late: KinesisRecord = late) -> None:
            shards.put(late, 0.5)
            shards.drain_due(shards.next_wakeup())

        costs.append(calls_of(pass_one_by))
    assert costs[1] <= 1.5 * costs[0]


@pytest.mark.parametrize("shard", [0, None])
def test_a_waiting_record_leaves_within_25_ms_of_its_tokens(shard):
    shards = limiter(records_per_second=7.0, burst_seconds=1 / 7)
    for _ in range(5):
        shards.put(record(shard, expires_at=90.0), 0.0)
    left_at = []
    while (at := shards.next_wakeup()) != math.inf:
        left_at += [at for drained in shards.drain_due(at) for _ in drained.admitted]
    assert left_at == pytest.approx([number / 7 for number in range(1, 5)], abs=0.025)


def test_a_shard_that_becomes_known_has_no_more_tokens_than_the_unpredicted_have_left():
    shards = limiter(records_per_second=10.0)
    for _ in range(8):
        assert shards.put(record(None), 0.0) is None
    assert [shards.put(record(), 0.0) for _ in range(3)] == [None, None, Drained([], [])]


def test_while_held_nothing_is_admitted_and_the_expired_still_leave():
    shards = limiter(records_per_second=10.0)
    shards.pause(math.inf, 0.0)
    first, second = record(expires_at=0.5), record(expires_at=9.0)
    assert shards.put(first, 0.0) == Drained([], [])
    assert shards.put(second, 0.0) == Drained([], [])
    assert shards.next_wakeup() == 0.5
    assert shards.drain_due(0.4) == []
    assert shards.drain_due(0.5) == [Drained([first], [])]
    # No tokens are waited for, as there are plenty.
    assert shards.next_wakeup() == 9.0


def test_what_was_held_back_goes_at_once_afterwards_as_far_as_the_burst_reaches():
    shards = limiter(records_per_second=10.0)
    shards.pause(math.inf, 0.0)
    for number in (0, 1):
        for _ in range(30):
            shards.put(record(number, expires_at=900.0), 5.0)
    shards.pause(-math.inf, 100.0)
    assert shards.next_wakeup() == 100.0
    assert [len(drained.admitted) for drained in shards.drain_due(100.0)] == [10, 10]
    assert shards.next_wakeup() == pytest.approx(100.1)
    shards.pause(-math.inf, 100.0)
    assert shards.next_wakeup() == pytest.approx(100.1)


def test_a_hold_with_an_end_promises_to_look_then_if_anything_was_held_back():
    shards = limiter()
    shards.pause(3.0, 0.0)
    assert shards.next_wakeup() == math.inf
    shards.put(record(expires_at=9.0), 1.0)
    assert shards.next_wakeup() == 3.0
    # It ends with a call, after the admitted records have left.
    assert shards.drain_due(3.0) == []
    shards.pause(-math.inf, 3.0)
    assert [len(drained.admitted) for drained in shards.drain_due(3.0)] == [1]


def test_a_shard_forgotten_while_held_back_is_no_error():
    shards = limiter()
    shards.pause(math.inf, 0.0)
    shards.put(record(), 0.0)
    assert len(shards.take_all()) == 1
    shards.keep_only(set())
    shards.pause(-math.inf, 1.0)
    assert shards.drain_due(1.0) == []
