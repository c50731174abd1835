"""A put that waits for room does not wait for batches that no other record can join."""

import anyio
import pytest

from kpl_core import BufferFull
from tests.support.producer_scene import STREAM, know_shards, producer, put, stored, unmetered

pytestmark = pytest.mark.anyio
SLOWLY = {"record_max_buffered_time_ms": 2_000.0}


@pytest.mark.parametrize("options", [{"max_outstanding_records": 1}, {"max_outstanding_bytes": 12}])
async def test_puts_with_room_for_one_record_do_not_wait_for_its_deadline(options):
    """Each waited for `record_max_buffered_time_ms`: 9 a second with the default."""
    transport = unmetered(latency_seconds=0.01)
    async with producer(transport, **options, **SLOWLY) as orders:
        await know_shards(orders)
        began = anyio.current_time()
        for number in range(20):
            _ = await orders.put(STREAM, partition_key="k", data=str(number).encode().ljust(10))
        assert anyio.current_time() - began < 0.5
    assert len(stored(transport)) == 21


async def test_a_full_buffer_leaves_as_full_batches():
    transport = unmetered(latency_seconds=0.01)
    async with producer(transport, max_outstanding_records=50, **SLOWLY) as orders:
        await know_shards(orders)
        began = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for number in range(1_000):
                tasks.start_soon(lambda key: orders.put(STREAM, partition_key=key, data=b"x"), str(number))
        assert anyio.current_time() - began < 0.5
    assert [record.user_record_count for request in transport.requests[1:] for record in request.records] == [50] * 20


async def test_records_of_several_streams_leave_together():
    transport = unmetered(streams={STREAM: 1, "clicks": 1}, latency_seconds=0.01)
    async with producer(transport, max_outstanding_records=2, **SLOWLY) as orders:
        for stream in (STREAM, "clicks"):
            await know_shards(orders, stream=stream)
        put(orders, 1)
        put(orders, 1, stream="clicks")
        began = anyio.current_time()
        _ = await orders.put(STREAM, partition_key="k", data=b"x")
        assert anyio.current_time() - began < 0.1
    assert [len(stored(transport, stream)) for stream in (STREAM, "clicks")] == [3, 2]


async def test_a_batch_may_fill_up_while_requests_are_in_flight():
    """Their answers free room, so the open record waits for more user records until its own deadline."""
    transport = unmetered(latency_seconds=1.0)
    async with producer(transport, max_outstanding_records=10, **SLOWLY) as orders:
        await know_shards(orders)
        put(orders, 5)
        await orders.flush(timeout=0.5)
        put(orders, 5)
        requests = len(transport.requests)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: orders.put(STREAM, partition_key="k", data=b"x"))
            await anyio.sleep(1.0)
            assert len(transport.requests) == requests
        await orders.flush()
    assert [record.user_record_count for record in transport.requests[-1].records] == [6]


async def test_a_put_that_is_refused_closes_no_batch():
    """Nothing waits for room, so the batch keeps its deadline."""
    transport = unmetered()
    async with producer(transport, max_outstanding_records=1, **SLOWLY) as orders:
        await know_shards(orders)
        put(orders, 1)
        with pytest.raises(BufferFull):
            put(orders, 1)
        await anyio.sleep(1.0)
        assert len(transport.requests) == 1
