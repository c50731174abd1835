"""The batch in C of user records put one by one: what it takes, when it is put, and what its deliveries say."""

import asyncio
import gc
import inspect
import sys
import threading
import time
from bisect import bisect_left
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from kpl_core.pipeline.open_record import BATCH, PythonOpenRecord, python_append_pairs
from kpl_core.producer.delivery import Deliveries, Delivery
from kpl_core.records.hash_key import md5
from kpl_core.records.outcome import Outcome
from kpl_core.records.record_result import RecordResult

# The first half of the hash keys, and the second.
OPEN_KEY, OTHER_KEY = "a", "b"
OTHERS = ("explicit_hash_key", "flow", "tier", "metadata")
DEFAULTS = (None, None, "normal", None)


class OneStream(NamedTuple):
    """A producer with one stream of two shards, whose `put_nowait` is the method in C before one in Python."""

    producer: Any
    pipeline: Any
    batch: Any
    room: Any
    record: Any
    placed: list[Any]
    woken: list[str]
    time: list[float]


@pytest.fixture
def one_stream(in_c) -> OneStream:
    record, room = in_c.OpenRecord(Delivery), in_c.Room()
    record.restart(Outcome())
    record.limit, room.free_records, room.free_bytes = 10_000, 1_000, 100_000
    # Half of the keys belong to a shard without an open record.
    router = SimpleNamespace(table=(b"\x7f" + b"\xff" * 31, [record, None]))
    batch = in_c.PutBatch(router, room, Delivery)
    batch.most, batch.opens_at = 50, 1.0
    placed: list[Any] = []
    woken: list[str] = []
    now = [1.5]

    def place(key: str, data: bytes, now: float) -> Delivery:
        placed.append((key, data, now))
        return Delivery(Outcome(), 7)

    batch.place = place
    pipeline = SimpleNamespace(entrance=batch, attention=False)
    streams = {"s": pipeline, "indirect": SimpleNamespace(entrance=None, attention=False)}
    loop = SimpleNamespace(_thread_id=threading.get_ident())

    def put(_self, stream, *, partition_key, data, explicit_hash_key=None, flow=None, tier="normal", metadata=None):
        """Put in Python."""
        return stream, partition_key, data, (explicit_hash_key, flow, tier, metadata)

    class Producer:
        _own_streams: Any = (loop, None, lambda: now[0], streams, in_c.count_forks(0))
        _wake = staticmethod(woken.append)
        put_nowait = in_c.put_method(put)

    return OneStream(Producer(), pipeline, batch, room, record, placed, woken, now)


def put(one_stream: OneStream, key: str = OPEN_KEY, data: bytes = b"data") -> Any:
    return one_stream.producer.put_nowait("s", partition_key=key, data=data)


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
    assert one_stream.placed == [(OTHER_KEY, b"%d" % number, 1.5) for number in range(1, BATCH, 2)]
    assert len(one_stream.record.arrivals) == BATCH // 2
    assert one_stream.woken == ["s"]


def test_without_a_shard_map_the_pipeline_puts_all(one_stream, in_c):
    batch = in_c.PutBatch(SimpleNamespace(table=None), one_stream.room, Delivery)
    batch.most, batch.opens_at, batch.place = 50, 0.0, one_stream.batch.place
    one_stream.pipeline.entrance = batch
    delivery = put(one_stream)
    batch.drain()
    assert (len(one_stream.placed), delivery.index) == (1, 7)


def test_an_error_of_the_pipeline_is_raised_after_the_other_records_are_put(one_stream):
    def place(key: str, _data: bytes, _now: float) -> Delivery:
        raise KeyboardInterrupt(key)

    one_stream.batch.place = place
    deliveries = [put(one_stream, OTHER_KEY if number in (1, 3) else OPEN_KEY) for number in range(BATCH - 1)]
    with pytest.raises(KeyboardInterrupt, match=OTHER_KEY):
        put(one_stream)
    assert len(one_stream.record.arrivals) == BATCH - 2
    assert [position for position, delivery in enumerate(deliveries) if not delivery.outcome.settled] == list(range(63))
    assert [deliveries[position].outcome is one_stream.record.outcome for position in range(4)] == [True, False] * 2


def test_a_put_from_inside_a_drain_is_in_the_next_batch(one_stream):
    def place(key: str, _data: bytes, _now: float) -> Delivery:
        inner.append(put(one_stream, data=key.encode()))
        return Delivery(Outcome(), 9)

    inner: list[Delivery] = []
    one_stream.batch.place = place
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
    key, data = f"{OPEN_KEY}-key", bytes([1, 2, 3])
    one_stream.room.free_records = one_stream.room.free_bytes = 10**9

    def rounds(count: int) -> None:
        for number in range(count):
            kept = put(one_stream, key, data)
            put(one_stream, OTHER_KEY, data)
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
    before = sys.getrefcount(key), sys.getrefcount(data), len(gc.get_objects())
    rounds(10_000)
    one_stream.record.restart(Outcome())
    gc.collect()
    assert (sys.getrefcount(key), sys.getrefcount(data)) == before[:2]
    assert abs(len(gc.get_objects()) - before[2]) < 50


def test_a_batch_that_is_dropped_with_its_records_frees_them(one_stream, in_c):
    batch = in_c.PutBatch(SimpleNamespace(table=None), one_stream.room, Delivery)
    batch.most, batch.opens_at, batch.place = 50, 0.0, batch.drain
    one_stream.pipeline.entrance = batch
    data = bytes([1, 2, 3])
    before = sys.getrefcount(data)
    put(one_stream, data=data)
    assert sys.getrefcount(data) == before + 1
    one_stream.pipeline.entrance = None
    del batch
    gc.collect()
    assert sys.getrefcount(data) == before


keys = st.sampled_from(["a", "b", "key-1", "key-2", "x" * 256])
run = st.lists(st.tuples(keys, st.binary(max_size=40)), max_size=200)


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
            batch = in_c.PutBatch(SimpleNamespace(table=(b"".join(ends), opened)), room, Delivery)
            batch.most, batch.opens_at = 1_000, 0.0
            batch.place = lambda key, data, _now, left=left: left.append((key, data)) or Delivery(Outcome(), 0)
            _put_in_c(in_c, records, batch)
        both.append(([record.aggregated() for record in opened], left))
    assert both[0] == both[1]


def _put_in_python(records: list[Any], ends: list[bytes], opened: list[Any], left: list[Any]) -> None:
    routes = {}
    for key, _ in records:
        entry = b"\x0a" + (bytes([len(key)]) if len(key) < 128 else b"\x80\x02") + key.encode()
        routes[key] = (None, entry, len(key), opened[bisect_left(ends, md5(key.encode()).digest())])
    router = SimpleNamespace(routes=routes, explicit_routes={}, table=None)
    position = 0
    while position < len(records):
        position, _ = python_append_pairs(records, (position, len(records)), router, (10**9, 10**9), 1.5, None)
        left += records[position : position + 1]
        position += 1


def _put_in_c(in_c: Any, records: list[Any], batch: Any) -> None:
    loop = SimpleNamespace(_thread_id=threading.get_ident())
    streams = {"s": SimpleNamespace(entrance=batch, attention=False)}

    class Producer:
        _own_streams: Any = (loop, None, lambda: 1.5, streams, in_c.count_forks(0))
        put_nowait = in_c.put_method(lambda *_given, **_named: pytest.fail("left to Python"))

    producer = Producer()
    for key, data in records:
        producer.put_nowait("s", partition_key=key, data=data)
    batch.drain()


# What it takes


@pytest.mark.parametrize(
    "spelled",
    [
        lambda method: method("s", partition_key=OPEN_KEY, data=b"x"),
        lambda method: method("s", data=b"x", partition_key=OPEN_KEY),
        lambda method: method(stream="s", data=b"x", partition_key=OPEN_KEY),
        lambda method: method(data=b"x", partition_key=OPEN_KEY, stream="s", tier="normal"),
        lambda method: method("s", partition_key=OPEN_KEY, data=b"x", flow=None, metadata=None, explicit_hash_key=None),
        lambda method: method("s", partition_key=OPEN_KEY, data=bytearray(b"x")),
        lambda method: method("s", partition_key=OPEN_KEY, data=memoryview(b"zxz")[1:2]),
    ],
)
def test_the_put_method_takes_every_spelling(one_stream, spelled):
    assert spelled(one_stream.producer.put_nowait).index == 0
    one_stream.batch.drain()
    assert (one_stream.record.arrivals, one_stream.room.free_records) == ([1.5], 999)
    assert b"x" in one_stream.record.aggregated()


@pytest.mark.parametrize(
    ("stream", "options"),
    [
        ("t", {}),
        ("indirect", {}),
        ("s", {"partition_key": ""}),
        ("s", {"partition_key": "x" * 257}),
        ("s", {"partition_key": "é"}),
        ("s", {"partition_key": 5}),
        ("s", {"data": "text"}),
        ("s", {"data": bytes(50)}),
        ("s", {"flow": "f"}),
        ("s", {"tier": "bulk"}),
        ("s", {"tier": 5}),
        ("s", {"metadata": {}}),
        ("s", {"explicit_hash_key": "7"}),
        (["unhashable"], {}),
    ],
)
def test_the_put_method_leaves_what_is_unusual_to_python(one_stream, stream, options):
    given_ = {"partition_key": OPEN_KEY, "data": b"x", **options}
    others = tuple(given_.get(name, default) for name, default in zip(OTHERS, DEFAULTS, strict=True))
    assert one_stream.producer.put_nowait(stream, **given_) == (stream, given_["partition_key"], given_["data"], others)
    assert (one_stream.batch.count, one_stream.room.free_records) == (0, 1_000)


@pytest.mark.parametrize(("free_records", "free_bytes"), [(0, 100), (1, 4)])
def test_the_put_method_leaves_a_record_without_room_to_python(one_stream, free_records, free_bytes):
    one_stream.room.free_records, one_stream.room.free_bytes = free_records, free_bytes
    assert put(one_stream) == ("s", OPEN_KEY, b"data", DEFAULTS)
    assert one_stream.batch.count == 0


def test_the_put_method_raises_what_python_raises_for_a_wrong_call(one_stream):
    released = memoryview(b"x")
    released.release()
    assert one_stream.producer.put_nowait("s", partition_key=OPEN_KEY, data=released)[:2] == ("s", OPEN_KEY)
    for positional, named in (
        (("s", OPEN_KEY), {"data": b"x"}),
        ((), {"data": b"x"}),
        (("s",), {"stream": "s", "data": b"x"}),
    ):
        with pytest.raises(TypeError):
            one_stream.producer.put_nowait(*positional, **named)
    with pytest.raises(TypeError, match="unknown"):
        one_stream.producer.put_nowait("s", partition_key=OPEN_KEY, data=b"x", unknown=1)
    assert one_stream.batch.count == 0


def test_the_put_method_leaves_another_loop_and_a_forked_child_to_python(one_stream, in_c):
    producer, here = one_stream.producer, threading.get_ident()
    loop, _, *others = vars(type(producer))["_own_streams"]
    expected = "s", OPEN_KEY, b"x", DEFAULTS
    for streams in (
        None,
        (SimpleNamespace(), None, *others),
        (SimpleNamespace(_thread_id=None), None, *others),
        (SimpleNamespace(_thread_id=here + 1), None, *others),
        (lambda: False, here, *others),
        (lambda: True, here + 1, *others),
        (lambda: 1 / 0, here, *others),
        (loop, None, *others[:2], in_c.count_forks(0) + 1),
        (loop, None, time.monotonic, {"s": None}, in_c.count_forks(0)),
    ):
        vars(producer).update(_own_streams=streams)
        assert producer.put_nowait("s", partition_key=OPEN_KEY, data=b"x") == expected
    vars(producer).update(_own_streams=(lambda: True, here, *others))
    assert producer.put_nowait("s", partition_key=OPEN_KEY, data=b"x").index == 0
    in_c.count_forks(1)
    assert producer.put_nowait("s", partition_key=OPEN_KEY, data=b"x") == expected
    assert one_stream.batch.count == 1


def test_the_put_method_raises_what_the_clock_raises(one_stream):
    def interrupted() -> float:
        raise KeyboardInterrupt

    producer = one_stream.producer
    loop, thread, _, *others = vars(type(producer))["_own_streams"]
    vars(producer).update(_own_streams=(loop, thread, interrupted, *others))
    with pytest.raises(KeyboardInterrupt):
        put(one_stream)
    assert one_stream.batch.count == 0


def test_the_put_method_looks_like_the_one_in_python(one_stream):
    producer = one_stream.producer
    method = producer.put_nowait
    assert (method.__name__, method.__doc__) == ("put", "Put in Python.")
    signature = "(stream, *, partition_key, data, explicit_hash_key=None, flow=None, tier='normal', metadata=None)"
    assert str(inspect.signature(method)) == signature
    assert isinstance(type(producer).put_nowait, type(producer).put_nowait.__class__)
    assert method("s", partition_key=OPEN_KEY, data=b"x").index == 0
    with pytest.raises(TypeError, match="partition_key"):
        method("s", data=b"x")


# How a known result is awaited


@pytest.fixture
def awaited(in_c) -> type[Delivery]:
    def looked_for(_self):
        yield from asyncio.sleep(0).__await__()
        return "looked for"

    class Awaited(Delivery, gc=False, eq=False):
        __await__ = in_c.await_method(looked_for)

    return Awaited


def test_a_result_that_is_known_and_shared_is_awaited_without_python(awaited):
    async def main() -> None:
        outcome = Outcome()
        delivery = awaited(outcome, 0)
        assert await delivery == "looked for"
        outcome.settle(shard_id="shardId-0", sequence_number="5")
        assert await delivery == "looked for"
        result = outcome.result_of(0)
        assert [await delivery for _ in range(3)] == [result] * 3
        assert await asyncio.gather(delivery, delivery) == [result] * 2
        outcome.moved = {}
        assert await delivery == "looked for"

    asyncio.run(main())


def test_what_an_await_of_a_known_result_asks_is_an_iterator_of_one_value(awaited):
    outcome = Outcome()
    outcome.settle(shard_id="shardId-0", sequence_number="5")
    result = outcome.result_of(0)
    before = sys.getrefcount(result)
    for _ in range(1_000):
        _require_one_value(awaited(outcome, 0).__await__(), result)
    gc.collect()
    assert sys.getrefcount(result) == before


def _require_one_value(known: Any, value: object) -> None:
    assert iter(known) is known
    with pytest.raises(StopIteration) as stopped:
        next(known)
    assert stopped.value.value is value
    with pytest.raises(RuntimeError, match="cannot reuse"):
        next(known)
