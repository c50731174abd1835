"""Puts one by one that wait in a batch, with the kernels in C: as if each was put at once. Both versions pass."""

from collections.abc import Sequence
from contextvars import ContextVar

import anyio
import anyio.lowlevel
import pytest

from kpl_core import Delivery
from kpl_core.hooks import Fact
from kpl_core.producer import producer as module
from tests.support.consumers import read_everything
from tests.support.producer_scene import STREAM, producer, put, unmetered

pytestmark = pytest.mark.anyio
BUFFERED_SECONDS = 0.1


async def opened_at(shop: module.Producer) -> None:
    """Let the producer learn the shards, and be polled."""
    assert (await (await shop.put(STREAM, partition_key="first", data=b"first"))).successful


async def test_all_records_are_delivered_in_the_order_of_their_key():
    transport = unmetered(4)
    async with producer(transport) as shop:
        await opened_at(shop)
        deliveries: Sequence[Delivery] = put(shop, 3_000, keys=[f"key {number}" for number in range(7)])
        assert shop.report().accepted == 3_001
        assert shop.report().buffered == 3_000
        report = await shop.flush()
        assert (report.delivered, report.buffered) == (3_001, 0)
        results = [await delivery for delivery in deliveries]
    assert all(result.successful for result in results)
    read = [record for record in read_everything(transport.kinesis, STREAM) if record.data != b"first"]
    assert len(read) == 3_000
    for key in {record.partition_key for record in read}:
        numbers = [int(record.data.rstrip(b".")) for record in read if record.partition_key == key]
        assert numbers == sorted(numbers)


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65])
async def test_no_record_leaves_after_it_is_due(count):
    transport = unmetered(4, latency_seconds=0.0)
    async with producer(transport, record_max_buffered_time_ms=1_000 * BUFFERED_SECONDS) as shop:
        await opened_at(shop)
        for _ in range(3):
            started_at = anyio.current_time()
            deliveries = []
            for each in put(shop, count, keys=[f"key {number}" for number in range(9)]):
                deliveries.append(each)
                await anyio.sleep(0.0005)
            for delivery in deliveries:
                await delivery
            assert anyio.current_time() - started_at <= BUFFERED_SECONDS + 0.0005 * count + 0.01


async def test_a_callback_of_each_record_is_called():
    called: list[Delivery] = []
    async with producer(unmetered(4)) as shop:
        await opened_at(shop)
        for _ in range(3):
            for delivery in put(shop, 100, keys=[f"key {number}" for number in range(9)]):
                delivery.add_done_callback(called.append)
            await shop.flush()
            await anyio.lowlevel.checkpoint()
    assert len(called) == 300


async def test_a_put_of_another_kind_comes_after_those_before_it():
    transport = unmetered(1)
    async with producer(transport) as shop:
        await opened_at(shop)
        for number in range(5):
            put(shop, 3)
            _ = shop.put_nowait(STREAM, partition_key="k", data=b"%d" % number, metadata={})
            await shop.put_many(STREAM, [("k", b"many")])
        await shop.flush()
    data = [record.data.rstrip(b".") for record in read_everything(transport.kinesis, STREAM)][1:]
    assert data == [each for number in range(5) for each in (b"0", b"1", b"2", b"%d" % number, b"many")]


async def test_a_hook_sees_the_context_of_the_put_that_opens_a_record():
    asked_by: ContextVar[str] = ContextVar("asked_by", default="none")
    opened: list[str] = []

    class Spans:
        def __call__(self, fact: Fact) -> None: ...

        def opening_context(self) -> object:
            opened.append(asked_by.get())
            return None

    async with module.Producer(hooks=[Spans()], transport=unmetered(4)) as shop:
        await opened_at(shop)
        opened.clear()
        for number in range(8):
            asked_by.set(f"put {number}")
            _ = shop.put_nowait(STREAM, partition_key=f"key {number}", data=b"x")
        await shop.flush()
    assert "none" not in opened
    assert len(opened) == len(set(opened)) > 1
