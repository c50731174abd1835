"""The put method in C: which puts it takes, and what it leaves to Python; and how a known result is awaited."""

import asyncio
import gc
import inspect
import sys
import threading
import time
from typing import Any

import pytest

from kpl_core.producer.delivery import Delivery
from kpl_core.records.outcome import Outcome
from tests.pipeline.one_stream import DEFAULTS, OPEN_KEY, OTHER_KEY, OTHERS, Text, own_streams_of, put

# Linux's CLOCK_MONOTONIC_COARSE, for which `time` has no name.
COARSE = 6


NO_HASH_KEYS: list[Any] = [
    "",
    "-1",
    "+1",
    "01",
    "1 ",
    "0x1",
    "x",
    "７",
    "1" * 40,
    str(2**128),
    Text("7"),
    b"7",
    7,
    True,
]

# What the put method takes


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
        lambda method: method("s", partition_key=OTHER_KEY, data=b"x", explicit_hash_key="0"),
        lambda method: method("s", explicit_hash_key=str(2**127 - 1), data=bytearray(b"x"), partition_key=OPEN_KEY),
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
        *[("s", {"explicit_hash_key": each}) for each in NO_HASH_KEYS],
        ("s", {"explicit_hash_key": "7", "metadata": {}}),
        ("s", {"explicit_hash_key": "7", "data": "text"}),
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
        ({}, None, *others),
        ({"_thread_id": None}, None, *others),
        ({"_thread_id": here + 1}, None, *others),
        (lambda: False, here, *others),
        (lambda: True, here + 1, *others),
        (lambda: 1 / 0, here, *others),
        (loop, None, *others[:2], in_c.count_forks(0) + 1, False),
        (loop, None, time.monotonic, {"s": None}, in_c.count_forks(0), True),
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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the coarse clock")
def test_the_put_method_reads_the_systems_clock_only_after_a_step_of_the_coarse_one(one_stream, in_c):
    def clock() -> float:
        readings.append(1.5)
        return 1.5

    readings: list[float] = []
    for has_system_clock in (False, True):
        streams = own_streams_of(clock, one_stream.batches, in_c.count_forks(0), has_system_clock=has_system_clock)
        vars(one_stream.producer).update(_own_streams=streams)
        one_stream.batch.drain()
        readings.clear()
        for _ in range(100):
            put(one_stream)
        assert (len(readings) == 100) is not has_system_clock
    before = len(readings), time.clock_gettime(COARSE)
    while time.clock_gettime(COARSE) == before[1]:
        pass
    put(one_stream)
    assert len(readings) == before[0] + 1


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
