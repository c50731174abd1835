"""Puts one by one that wait in a batch, with the kernels in C: as if each was put at once. Both versions pass."""

from collections.abc import Sequence
from contextvars import ContextVar

import anyio
import anyio.lowlevel
import pytest

from kpl_core import BufferFull, Delivery
from kpl_core.hooks import Fact
from kpl_core.pipeline.open_record import BATCH
from kpl_core.pipeline.send_queue import SendQueue
from kpl_core.producer import delivery as delivery_module, producer as module
from kpl_core.records.kinesis_record import KinesisRecord
from kpl_core.records.outcome import Outcome, Waiter
from tests.support.consumers import read_everything
from tests.support.producer_scene import STREAM, producer, put, unmetered

pytestmark = pytest.mark.anyio
BUFFERED_SECONDS = 0.1


async def opened_at(shop: module.Producer) -> None:
    """Let the producer learn the shards, and be polled."""
    assert (await (await shop.put(STREAM, partition_key="first", data=b"first"))).successful


async def begun(shop: module.Producer) -> Delivery:
    """Let a record wait in an aggregated record, so that the next ones may wait in a batch."""
    delivery = shop.put_nowait(STREAM, partition_key="first", data=b"first")
    await anyio.sleep(0.01)
    return delivery


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


@pytest.mark.parametrize("count", [1, 2, BATCH - 1, BATCH, BATCH + 1])
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


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"collection_max_size": 52_224}, 104),
        ({"collection_max_count": 1}, 52),
        ({"collection_max_count": 2, "aggregation_max_size": 20_000}, 42),
        ({"collection_max_count": 1, "aggregation_max_count": 10}, 10),
        ({"collection_max_count": 20, "aggregation_max_count": 1}, 20),
    ],
    ids=str,
)
async def test_a_request_that_few_records_fill_leaves_when_it_is_full(options, count):
    transport = unmetered(1, latency_seconds=0.0)
    async with producer(transport, record_max_buffered_time_ms=10_000.0, **options) as shop:
        await opened_at(shop)
        _ = await begun(shop)
        first, *_ = put(shop, count, size=1_000)
        await anyio.sleep(0.1)
        assert first.done


async def test_a_full_request_leaves_at_once_if_the_next_put_finds_no_room():
    transport = unmetered(1, latency_seconds=0.0)
    options = {"record_max_buffered_time_ms": 10_000.0, "collection_max_size": 200_000}
    async with producer(transport, max_outstanding_records=220, **options) as shop:
        await opened_at(shop)
        first = await begun(shop)
        put(shop, 190, size=1_000)
        await anyio.sleep(0.1)
        assert not first.done
        with pytest.raises(BufferFull):
            put(shop, 40, size=1_000)
        await anyio.sleep(0.1)
        assert first.done


async def test_a_put_in_the_middle_of_a_poll_leaves_in_time(monkeypatch):
    """That of a signal handler, after the poll has drained the batch and taken the last request."""
    next_records = SendQueue.next_records
    deliveries: list[Delivery] = []

    def interrupted(queue: SendQueue, now: float) -> list[KinesisRecord] | None:
        records = next_records(queue, now)
        if len(deliveries) == 1:
            deliveries.append(shop.put_nowait(STREAM, partition_key="handler", data=b"x"))
        return records

    transport = unmetered(1, latency_seconds=10 * BUFFERED_SECONDS)
    async with producer(transport, record_max_buffered_time_ms=1_000 * BUFFERED_SECONDS) as shop:
        await opened_at(shop)
        deliveries += put(shop, 1)
        monkeypatch.setattr(SendQueue, "next_records", interrupted)
        await anyio.sleep(3 * BUFFERED_SECONDS)
        assert (len(deliveries), transport.in_flight) == (2, 2)


@pytest.fixture
def waits(monkeypatch) -> list[object]:
    """All that waits for an outcome."""
    waits: list[object] = []
    wait_with = delivery_module.wait_with

    def counted(outcome: Outcome, alarm: Waiter) -> list[Waiter]:
        waits.append(alarm)
        return wait_with(outcome, alarm)

    monkeypatch.setattr(delivery_module, "wait_with", counted)
    return waits


async def test_a_task_that_puts_and_awaits_waits_once(waits):
    successful: list[bool] = []

    async def put_and_await(number: int) -> None:
        delivery = await shop.put(STREAM, partition_key=f"key {number % 9}", data=b"x")
        successful.append((await delivery).successful)

    async with producer(unmetered(4)) as shop:
        await opened_at(shop)
        waits.clear()
        async with anyio.create_task_group() as tasks:
            for number in range(200):
                tasks.start_soon(put_and_await, number)
    assert (successful, len(waits)) == ([True] * 200, 200)


async def test_tasks_that_await_what_one_task_put_wait_once(waits):
    async def wait_for(delivery: Delivery) -> None:
        assert (await delivery).successful

    async with producer(unmetered(4)) as shop:
        await opened_at(shop)
        waits.clear()
        async with anyio.create_task_group() as tasks:
            for delivery in put(shop, 100, keys=["a", "b", "c"]):
                tasks.start_soon(wait_for, delivery)
    assert len(waits) == 100


async def test_a_callback_of_each_record_is_called_and_waits_once(waits):
    called: list[Delivery] = []
    async with producer(unmetered(4)) as shop:
        await opened_at(shop)
        waits.clear()
        for _ in range(3):
            for delivery in put(shop, 100, keys=[f"key {number}" for number in range(9)]):
                delivery.add_done_callback(called.append)
            await shop.flush()
            await anyio.lowlevel.checkpoint()
    assert (len(called), len(waits)) == (300, 300)


async def test_a_full_request_leaves_at_once_if_something_waits_for_its_last_record():
    transport = unmetered(1, latency_seconds=0.0)
    async with producer(transport, record_max_buffered_time_ms=10_000.0, collection_max_size=200_000) as shop:
        await opened_at(shop)
        first = await begun(shop)
        *_, last = put(shop, 230, size=1_000)
        last.add_done_callback(lambda _delivery: None)
        await anyio.sleep(0.1)
        assert first.done


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
