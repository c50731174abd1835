"""The batch in C of user records put one by one: what it takes, when it is put, and what its deliveries say."""

import asyncio
import contextlib
import gc
import sys
from bisect import bisect_left
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from kpl_core.pipeline.open_record import BATCH, PythonOpenRecord, python_append_pairs
from kpl_core.producer.delivery import Deliveries, Delivery
from kpl_core.records.hash_key import md5
from kpl_core.records.outcome import Outcome
from kpl_core.records.record_result import RecordResult
from tests.pipeline.one_stream import DEFAULTS, OPEN_KEY, OTHER_KEY, Text, own_streams_of, owner_of_batch, put

# When a record waits, and when it is put


def test_a_put_takes_room_and_its_record_waits_for_the_others(one_stream):
    delivery = put(one_stream)
    assert (type(delivery), delivery.done, one_stream.batch.count) == (Delivery, False, 1)
    assert (one_stream.room.free_records, one_stream.room.free_bytes) == (999, 99_995)
    assert one_stream.record.arrivals == []
    one_stream.batch.drain()
    assert (delivery.outcome is one_stream.record.outcome, delivery.index) == (True, 0)
    assert (one_stream.batch.count, one_stream.record.arrivals) == (0, [1.5])


def test_a_full_batch_is_put_in_the_order_of_its_records(one_stream):
    deliveries = [put(one_stream, data=b"%d" % number) for number in range(BATCH)]
    assert [delivery.index for delivery in deliveries] == list(range(BATCH))
    assert {delivery.outcome for delivery in deliveries} == {one_stream.record.outcome}
    assert one_stream.batch.count == 0
    put(one_stream)
    assert one_stream.batch.count == 1


def test_a_batch_of_many_bytes_is_full(one_stream):
    one_stream.batch.most = 40_000
    delivery = put(one_stream, data=bytes(39_999))
    assert (one_stream.batch.count, one_stream.placed) == (1, [])
    put(one_stream, data=bytes(39_999))
    assert (one_stream.batch.count, len(one_stream.placed), delivery.index) == (0, 2, 7)


def test_a_batch_of_one_record_is_put_at_once(one_stream):
    assert one_stream.batch.limit == BATCH
    one_stream.batch.limit = 1
    assert put(one_stream).outcome is one_stream.record.outcome
    assert one_stream.batch.count == 0


def test_a_batch_is_put_at_one_instant(one_stream):
    for one_stream.time[0] in (1.5, 1.5009, 1.6):
        put(one_stream)
    assert (one_stream.record.arrivals, one_stream.batch.count) == ([1.5, 1.5], 1)
    one_stream.batch.drain()
    assert one_stream.record.arrivals == [1.5, 1.5, 1.6]


def test_no_record_waits_longer_than_until_the_pipeline_is_polled(one_stream):
    one_stream.batch.opens_at = 2.0
    assert put(one_stream) == ("s", OPEN_KEY, b"data", DEFAULTS)
    one_stream.time[0] = 2.0
    assert put(one_stream).index == 0
    # One that began in time stays.
    one_stream.batch.opens_at = 3.0
    assert put(one_stream).index == 1
    assert one_stream.room.free_records == 998


def test_the_pipeline_puts_what_opens_or_closes_a_record_and_is_polled_if_it_wants(one_stream):
    for number in range(BATCH):
        one_stream.pipeline.attention = number == BATCH - 1
        put(one_stream, OTHER_KEY if number % 2 else OPEN_KEY, b"%d" % number)
    assert one_stream.placed == [(OTHER_KEY, b"%d" % number, None, None, 1.5) for number in range(1, BATCH, 2)]
    assert len(one_stream.record.arrivals) == BATCH // 2
    assert one_stream.woken == ["s"]


def test_an_explicit_hash_key_chooses_the_shard_of_its_record(one_stream):
    first, last, no_key = str(2**127 - 1), str(2**127), None
    for key, explicit in (
        (OTHER_KEY, first),
        (OPEN_KEY, last),
        (OPEN_KEY, no_key),
        (OTHER_KEY, "0"),
        (OTHER_KEY, first),
    ):
        put(one_stream, key, key.encode(), explicit)
    one_stream.batch.drain()
    record = one_stream.record
    assert one_stream.placed == [(OPEN_KEY, OPEN_KEY.encode(), last, None, 1.5)]
    assert (len(record.arrivals), record.key_count, record.explicit_count) == (4, 2, 2)
    assert [record.explicit_index(explicit) for explicit in (first, "0", last)] == [0, 1, None]


def test_a_record_of_a_flow_waits_in_the_batch_of_a_stream_with_flows(one_stream):
    assert put(one_stream, flow="f") == ("s", OPEN_KEY, b"data", (None, "f", "normal", None))
    one_stream.batch.takes_flows = True
    wrong: list[Any] = ["é", Text("f"), 5, b"f"]
    for flow in wrong:
        assert put(one_stream, flow=flow)[3] == (None, flow, "normal", None)
    assert (one_stream.batch.count, one_stream.room.free_records) == (0, 1_000)
    for key in (OPEN_KEY, OTHER_KEY):
        put(one_stream, key, key.encode(), "0" if key == OPEN_KEY else None, "f")
    put(one_stream)
    one_stream.batch.drain()
    assert one_stream.placed == [(OTHER_KEY, OTHER_KEY.encode(), None, "f", 1.5)]
    assert len(one_stream.record.arrivals) == 2


def test_while_a_record_waits_for_the_turn_of_its_flow_python_puts_all(one_stream):
    one_stream.batch.takes_flows = True
    one_stream.pipeline.all_pass = lambda: False
    assert put(one_stream) == ("s", OPEN_KEY, b"data", DEFAULTS)
    assert put(one_stream, flow="f") == ("s", OPEN_KEY, b"data", (None, "f", "normal", None))
    assert (one_stream.batch.count, one_stream.room.free_records) == (0, 1_000)


def test_the_pipeline_puts_the_rest_of_a_batch_in_which_a_shard_no_longer_keeps_up(one_stream):
    """It looks at the shard of each record then."""
    one_stream.batch.takes_flows = True
    one_stream.pipeline.all_pass = lambda: not one_stream.placed
    keys = [OTHER_KEY if number == 5 else OPEN_KEY for number in range(40)]
    for number, key in enumerate(keys):
        put(one_stream, key, b"%d" % number, flow=f"flow {number}")
    one_stream.batch.drain()
    assert len(one_stream.record.arrivals) == 5
    assert one_stream.placed == [(key, b"%d" % n, None, f"flow {n}", 1.5) for n, key in enumerate(keys) if n >= 5]
    assert put(one_stream) == ("s", OPEN_KEY, b"data", DEFAULTS)


def test_an_error_of_the_look_at_the_flows_is_raised_and_loses_no_record(one_stream):
    answers: list[bool] = [True]
    one_stream.batch.takes_flows = True
    one_stream.pipeline.all_pass = answers.pop
    deliveries = [put(one_stream, OTHER_KEY, flow="f") for _ in range(3)]
    with pytest.raises(IndexError):
        one_stream.batch.drain()
    assert (len(one_stream.placed), [delivery.index for delivery in deliveries]) == (3, [7] * 3)
    with pytest.raises(IndexError):
        put(one_stream)
    assert (one_stream.batch.count, one_stream.room.free_records) == (0, 997)


def test_without_a_shard_map_the_pipeline_puts_all(one_stream, in_c):
    batch = in_c.PutBatch(one_stream.pipeline, SimpleNamespace(table=None), one_stream.room, Delivery)
    batch.most, batch.opens_at = 50, 0.0
    one_stream.batches["s"] = batch
    delivery = put(one_stream)
    batch.drain()
    assert (len(one_stream.placed), delivery.index) == (1, 7)


@pytest.mark.parametrize("raised", [MemoryError, TimeoutError, KeyboardInterrupt], ids=str)
@pytest.mark.parametrize("explicit", [None, "0"], ids=["key", "explicit hash key"])
def test_a_record_that_cannot_be_put_has_failed_and_the_others_are_put(one_stream, raised, explicit):
    def place(key: str, *_: object) -> Delivery:
        raise raised(key)

    one_stream.pipeline.place = place
    deliveries = [
        put(one_stream, OTHER_KEY, explicit=str(2**128 - 1)) if number in (1, 3) else put(one_stream, explicit=explicit)
        for number in range(BATCH - 1)
    ]
    with contextlib.nullcontext() if raised is MemoryError else pytest.raises(raised, match=OTHER_KEY):
        put(one_stream)
    assert len(one_stream.record.arrivals) == BATCH - 2
    for number, delivery in enumerate(deliveries):
        is_failed = number in (1, 3)
        assert (delivery.done, delivery.outcome is one_stream.record.outcome) == (is_failed, not is_failed)
        assert not is_failed or delivery.result().error_message == f"{raised.__name__}('{OTHER_KEY}')"


def test_an_error_of_the_pipeline_is_raised_after_the_records_are_put_and_the_stream_is_woken(one_stream):
    def attend(_now: float) -> None:
        one_stream.pipeline.attention = True
        raise RuntimeError

    one_stream.pipeline.attend = attend
    first = put(one_stream, OTHER_KEY)
    one_stream.time[0] = 2.0
    with pytest.raises(RuntimeError):
        put(one_stream)
    assert (one_stream.woken, first.index, one_stream.batch.count) == (["s"], 7, 0)


def test_a_put_of_a_hook_inside_a_drain_is_put_when_that_ends(one_stream):
    """Each drain takes 18 KB of the C stack."""
    nested, most_nested = 0, 0

    def place(key: str, data: bytes, *_: object) -> Delivery:
        nonlocal nested, most_nested
        nested += 1
        most_nested = max(most_nested, nested)
        one_stream.placed.append(data)
        if len(one_stream.placed) < 100:
            put(one_stream, key, b"%d" % len(one_stream.placed))
        nested -= 1
        return Delivery(Outcome(), 7)

    one_stream.pipeline.place = place
    one_stream.batch.limit = 1
    put(one_stream, OTHER_KEY, b"0")
    assert one_stream.placed == [b"%d" % number for number in range(100)]
    assert (most_nested, one_stream.batch.count) == (1, 0)


def test_an_error_while_one_record_moves_leaves_the_others_their_outcome(one_stream, monkeypatch):
    deliveries = [put(one_stream) for _ in range(3)]
    move = Outcome.move

    def move_or_fail(outcome: Outcome, index: int, *to: Any) -> None:
        if index == 1:
            raise TimeoutError
        move(outcome, index, *to)

    monkeypatch.setattr(Outcome, "move", move_or_fail)
    kept = deliveries[0].outcome
    with pytest.raises(TimeoutError):
        one_stream.batch.drain()
    assert kept is not one_stream.record.outcome
    assert [delivery.follow() is one_stream.record.outcome for delivery in deliveries] == [True, False, True]


def test_a_drained_batch_wakes_its_stream_also_if_python_must_put_the_next_record(one_stream):
    put(one_stream)
    one_stream.pipeline.attention = True
    one_stream.time[0] = 2.0
    one_stream.room.free_records = 0
    assert put(one_stream) == ("s", OPEN_KEY, b"data", DEFAULTS)
    assert one_stream.woken == ["s"]


def test_a_put_of_a_signal_handler_while_a_batch_begins_is_in_that_batch(one_stream):
    """The handler runs before the outcome of the batch is there, as the first call of Python lets it."""

    def new_outcome() -> Outcome:
        one_stream.pipeline.new_outcome = Outcome
        inner.append(put(one_stream, data=b"handler"))
        return Outcome()

    inner: list[Delivery] = []
    one_stream.pipeline.new_outcome = new_outcome
    outer = put(one_stream)
    one_stream.batch.drain()
    assert [each.outcome for each in (inner[0], outer)] == [one_stream.record.outcome] * 2
    assert [each.index for each in (inner[0], outer)] == [0, 1]


def test_a_put_from_inside_a_drain_is_in_the_next_batch(one_stream):
    def place(key: str, *_: object) -> Delivery:
        inner.append(put(one_stream, data=key.encode()))
        return Delivery(Outcome(), 9)

    inner: list[Delivery] = []
    one_stream.pipeline.place = place
    outer = put(one_stream, OTHER_KEY)
    one_stream.batch.drain()
    assert (outer.index, one_stream.batch.count, inner[0].done) == (9, 1, False)
    one_stream.batch.drain()
    assert inner[0].outcome is one_stream.record.outcome


# What its deliveries say


def test_handles_that_have_the_outcome_of_the_batch_follow_it(one_stream):
    deliveries = [put(one_stream, OTHER_KEY if number == 1 else OPEN_KEY) for number in range(3)]
    kept = Deliveries.of(deliveries)
    one_stream.batch.drain()
    for found in (deliveries, list(kept)):
        assert [delivery.follow() is one_stream.record.outcome for delivery in found] == [True, False, True]
        assert [delivery.index for delivery in found] == [0, 7, 1]


def test_a_task_that_waits_for_a_record_of_the_batch_gets_its_result(one_stream):
    async def main() -> list[RecordResult]:
        deliveries = [put(one_stream) for _ in range(2)]
        results = asyncio.gather(*deliveries)
        await asyncio.sleep(0)
        one_stream.batch.drain()
        await asyncio.sleep(0)
        assert not results.done()
        one_stream.record.outcome.settle(shard_id="shardId-0", sequence_number="5")
        return await results

    assert [result.sequence_number for result in asyncio.run(main())] == ["5", "5"]


def test_a_callback_for_a_record_of_the_batch_is_called_once(one_stream):
    """It refers to the delivery only, so only the list of waiters has it."""
    called: list[Delivery] = []
    deliveries = [put(one_stream) for _ in range(3)]
    for delivery in deliveries[:2]:
        delivery.add_done_callback(called.append)
    one_stream.batch.drain()
    assert called == []

    async def settle() -> None:
        one_stream.record.outcome.settle(shard_id="shardId-0", sequence_number="5")
        await asyncio.sleep(0)

    asyncio.run(settle())
    assert called == deliveries[:2]


def test_a_dropped_delivery_costs_its_record_nothing(one_stream):
    for _ in range(3):
        put(one_stream)
    one_stream.batch.drain()
    assert len(one_stream.record.arrivals) == 3


def test_no_reference_is_lost_or_left(one_stream):
    """Ten thousand rounds with all ways out of the batch."""
    key, data, explicit, flow = f"{OPEN_KEY}-key", bytes([1, 2, 3]), [str(2**100), str(2**127)], f"{OPEN_KEY}-flow"
    one_stream.batch.takes_flows = True
    one_stream.pipeline.all_pass = lambda: len(one_stream.placed) < 2
    one_stream.room.free_records = one_stream.room.free_bytes = 10**9

    def rounds(count: int) -> None:
        for number in range(count):
            kept = put(one_stream, key, data)
            put(one_stream, OTHER_KEY, data)
            put(one_stream, OTHER_KEY, data, explicit[number % 2], flow)
            outcome = kept.outcome if number % 3 == 0 else None
            one_stream.batch.drain()
            assert kept.follow() is not outcome
            one_stream.placed.clear()
            if number % 50 == 0:
                one_stream.record.restart(Outcome())
                one_stream.record.limit = 10_000

    rounds(100)
    one_stream.record.restart(Outcome())
    gc.collect()
    counted = [key, data, *explicit, flow]
    before = [sys.getrefcount(each) for each in counted], len(gc.get_objects()), sys.getrefcount(None)
    rounds(10_000)
    one_stream.record.restart(Outcome())
    gc.collect()
    assert [sys.getrefcount(each) for each in counted] == before[0]
    assert abs(len(gc.get_objects()) - before[1]) < 50
    assert abs(sys.getrefcount(None) - before[2]) < 1_000


def test_a_batch_that_is_dropped_is_drained_by_a_finalizer_at_most_once(one_stream, in_c):
    """The finalizer of a pipeline that only its batch refers to."""

    class Owner(SimpleNamespace):
        def __del__(self) -> None:
            self.entrance.drain()

    record = in_c.OpenRecord(Delivery)
    record.restart(Outcome())
    record.limit = 1_000
    owner = Owner(**vars(one_stream.pipeline))
    owner.entrance = batch = in_c.PutBatch(
        owner, SimpleNamespace(table=(b"\xff" * 16, [record])), one_stream.room, Delivery
    )
    batch.most, batch.opens_at = 50, 0.0
    one_stream.batches["s"] = batch
    delivery = put(one_stream)
    one_stream.batches.clear()
    del owner, batch
    gc.collect()
    assert (len(record.arrivals), delivery.outcome is record.outcome) == (1, True)


def test_a_batch_keeps_what_it_puts_its_records_with(one_stream):
    for name in ("pipeline", "place", "count"):
        with pytest.raises((AttributeError, TypeError)):
            delattr(one_stream.batch, name)
    for name in ("limit", "most", "opens_at", "takes_flows"):
        with pytest.raises(TypeError):
            delattr(one_stream.batch, name)


def test_a_batch_that_is_dropped_with_its_records_frees_them(one_stream, in_c):
    batch = in_c.PutBatch(one_stream.pipeline, SimpleNamespace(table=None), one_stream.room, Delivery)
    batch.most, batch.opens_at = 50, 0.0
    one_stream.pipeline.place = batch.drain
    one_stream.batches["s"] = batch
    data, explicit = bytes([1, 2, 3]), str(2**100)
    before = sys.getrefcount(data), sys.getrefcount(explicit)
    put(one_stream, data=data, explicit=explicit)
    assert (sys.getrefcount(data), sys.getrefcount(explicit)) == (before[0] + 1, before[1] + 1)
    vars(one_stream.pipeline).clear()
    one_stream.batches.clear()
    del batch
    gc.collect()
    assert (sys.getrefcount(data), sys.getrefcount(explicit)) == before


keys = st.sampled_from(["a", "b", "key-1", "key-2", "x" * 256])
explicit_hash_keys = st.none() | st.sampled_from(["0", "1", str(2**128 - 1)]) | st.integers(0, 2**128 - 1).map(str)
run = st.lists(st.tuples(keys, st.binary(max_size=40), explicit_hash_keys), max_size=200)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(run, st.integers(1, 5), st.lists(st.integers(-1, 4_000), min_size=5, max_size=5))
def test_a_batch_puts_what_pairs_put_in_python(in_c, records, shards, limits):
    """Byte for byte, in the same order; what an open record does not take, neither does."""
    ends = [((number + 1) * 2**128 // shards - 1).to_bytes(16, "big") for number in range(shards)]
    both: list[tuple[list[bytes], list[Any]]] = []
    for make in (PythonOpenRecord, in_c.OpenRecord):
        opened = [make(Delivery) for _ in range(shards)]
        for record, limit in zip(opened, limits, strict=False):
            record.restart(Outcome())
            record.limit = limit
        left: list[Any] = []
        if make is PythonOpenRecord:
            _put_in_python(records, ends, opened, left)
        else:
            room = in_c.Room()
            room.free_records = room.free_bytes = 10**9
            owner = owner_of_batch(lambda *record, left=left: left.append(record[:3]) or Delivery(Outcome(), 0))
            batch = in_c.PutBatch(owner, SimpleNamespace(table=(b"".join(ends), opened)), room, Delivery)
            batch.most, batch.opens_at = 1_000, 0.0
            _put_in_c(in_c, records, batch)
        both.append(([record.aggregated() for record in opened], left))
    assert both[0] == both[1]


def _put_in_python(records: list[Any], ends: list[bytes], opened: list[Any], left: list[Any]) -> None:
    routes, explicit_routes = {}, {}
    for key, _, explicit in records:
        entry = b"\x0a" + (bytes([len(key)]) if len(key) < 128 else b"\x80\x02") + key.encode()
        routes[key] = (None, entry, len(key), opened[bisect_left(ends, md5(key.encode()).digest())])
        if explicit is not None:
            lane = SimpleNamespace(open_record=opened[bisect_left(ends, int(explicit).to_bytes(16, "big"))])
            explicit_routes[explicit] = (lane, b"\x12" + bytes([len(explicit)]) + explicit.encode())
    router = SimpleNamespace(routes=routes, explicit_routes=explicit_routes, table=None)
    pairs = [record[:2] if record[2] is None else record for record in records]
    position = 0
    while position < len(records):
        position, _ = python_append_pairs(pairs, (position, len(pairs)), router, (10**9, 10**9), 1.5, None)
        left += records[position : position + 1]
        position += 1


def _put_in_c(in_c: Any, records: list[Any], batch: Any) -> None:
    class Producer:
        _own_streams: Any = own_streams_of(lambda: 1.5, {"s": batch}, in_c.count_forks(0))
        put_nowait = in_c.put_method(lambda *_given, **_named: pytest.fail("left to Python"))

    producer = Producer()
    for key, data, explicit in records:
        producer.put_nowait("s", partition_key=key, data=data, explicit_hash_key=explicit)
    batch.drain()
