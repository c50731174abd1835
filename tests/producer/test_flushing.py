"""Flushing: everything put before, quickly, and nothing else."""

import gc

import anyio
import anyio.lowlevel
import pytest

from kpl_core import Delivery
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsRequest
from kpl_core.testing import FakeTransport, RecordError, When
from tests.support.producer_scene import (
    assert_books_close,
    key_of_each_shard,
    know_shards,
    producer,
    put,
    reasons,
    service,
    unmetered,
)

pytestmark = pytest.mark.anyio


async def test_a_flush_waits_for_what_was_put_before_and_not_for_what_comes_after():
    transport = service(latency_seconds=0.3)
    async with producer(transport, record_max_buffered_time_ms=10_000) as orders:
        before = put(orders, 10)
        async with anyio.create_task_group() as tasks:

            async def put_later() -> None:
                await anyio.sleep(0.1)
                after.extend(put(orders, 10))

            after: list[Delivery] = []
            tasks.start_soon(put_later)
            report = await orders.flush()
            assert reasons(before) == {"": 10}
            assert not any(delivery.done for delivery in after)
            assert report.complete
            assert (report.delivered, report.buffered) == (10, 10)
            assert anyio.current_time() < 1.0
    assert reasons(after) == {"": 10}


async def test_a_flush_with_a_timeout_says_that_it_is_not_complete():
    transport = service(latency_seconds=5.0)
    async with producer(transport) as orders:
        deliveries = put(orders, 10)
        report = await orders.flush(timeout=1.0)
        assert anyio.current_time() == 1.0
        assert not report.complete
        assert (report.accepted, report.buffered) == (10, 10)
        assert report.buffered_bytes == sum(len(f"key {number}") + 10 for number in range(10))
        report = await orders.flush()
        assert report.complete
    assert reasons(deliveries) == {"": 10}


async def test_one_task_sends_all_requests_that_follow_each_other_and_keeps_none():
    senders = set()

    class Sent(FakeTransport):
        async def put_records(self, request: PutRecordsRequest) -> PutRecordsAnswer:
            senders.add(anyio.get_current_task().id)
            return await super().put_records(request)

    transport = Sent(service().kinesis)
    async with producer(transport) as orders:
        for _ in range(5):
            put(orders, 10)
            await orders.flush()
        assert (len(transport.requests), len(senders)) == (5, 1)
        sent = set(map(id, transport.requests))
        transport.requests.clear()
        gc.collect()
        kept = [each for each in gc.get_objects() if type(each) is PutRecordsRequest and id(each) in sent]
    assert kept == []


@pytest.mark.parametrize("most", [1, 4, 24])
async def test_large_requests_that_are_due_together_start_in_rounds_of_their_own(anyio_backend_name, most):
    rounds, started = [0], list[int]()

    class Noted(FakeTransport):
        async def put_records(self, request: PutRecordsRequest) -> PutRecordsAnswer:
            started.append(rounds[0])
            return await super().put_records(request)

    transport = Noted(unmetered(8).kinesis, latency_seconds=0.01)
    async with producer(transport, max_in_flight_requests=most) as orders:
        await know_shards(orders)
        before = anyio.current_time()
        deliveries = put(orders, 8, size=1_000_000, keys=key_of_each_shard(8))
        started.clear()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(orders.flush)
            while not all(delivery.done for delivery in deliveries):
                rounds[0] += 1
                # Virtual time passes only if no task can run.
                await (anyio.lowlevel.checkpoint() if len(started) < min(8, most) else anyio.sleep(0.001))
        assert reasons(deliveries) == {"": 8}
        assert anyio.current_time() - before <= 0.01 * (8 // min(8, most)) + 0.02
    # trio runs the tasks of a round in any order.
    if anyio_backend_name == "asyncio":
        assert len(set(started[:most])) == min(8, most)


async def test_a_flush_of_nothing_is_complete_at_once():
    async with producer(service()) as orders:
        assert (await orders.flush()).complete
        assert anyio.current_time() == 0.0


async def test_a_flush_lets_many_streams_finish():
    streams = {f"stream-{number}": 1 for number in range(20)}
    transport = service(streams=streams)
    async with producer(transport) as orders:
        deliveries = [delivery for stream in streams for delivery in put(orders, 10, stream=stream)]
        report = await orders.flush()
    assert_books_close(report, deliveries)
    assert report.delivered == 200


async def test_a_cancelled_flush_harms_nothing():
    transport = service(latency_seconds=1.0)
    async with producer(transport) as orders:
        deliveries = put(orders, 10)
        with anyio.move_on_after(0.5):
            await orders.flush()
        await orders.flush()
        assert reasons(deliveries) == {"": 10}


async def test_a_flush_is_quick_even_if_records_have_late_deadlines_and_are_retried():
    """Those that waited for tokens, or were refused once, waited for other records up to their deadline of a minute."""
    transport = unmetered()
    transport.kinesis.faults.add(RecordError(), When(probability=0.1, once_per_record=True))
    async with producer(
        transport, aggregation_enabled=False, record_max_buffered_time_ms=60_000, record_ttl_ms=600_000
    ) as orders:
        await know_shards(orders)
        deliveries = put(orders, 1_517)
        began = anyio.current_time()
        report = await orders.flush()
        assert anyio.current_time() - began < 3.0
    assert report.complete
    assert reasons(deliveries) == {"": 1_517}


@pytest.mark.parametrize(("timeout", "complete", "buffered"), [(None, True, 0), (5.0, True, 0), (0.1, False, 10)])
async def test_a_flush_beside_a_close_waits_for_the_results_too(timeout: float | None, complete: bool, buffered: int):
    async with producer(service(latency_seconds=0.5)) as orders, anyio.create_task_group() as tasks:
        put(orders, 10)
        tasks.start_soon(orders.close)
        await anyio.lowlevel.checkpoint()
        report = await orders.flush(timeout)
        assert (report.complete, report.buffered) == (complete, buffered)
