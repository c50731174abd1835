"""One producer: many tasks, many streams, and what it shows of itself."""

import gc
import logging
import weakref

import anyio
import anyio.lowlevel
import pytest

from kpl_core import COMPILED, Config, Producer
from kpl_core.hooks import RecordsFinished, ShardMapRefreshed
from kpl_core.testing import ErrorAnswer, Latency, RecordError, RecordingHook, When
from tests.support.material import even_shards
from tests.support.producer_scene import (
    STREAM,
    key_of_each_shard,
    know_shards,
    producer,
    put,
    reasons,
    results,
    service,
    unmetered,
)

pytestmark = pytest.mark.anyio

# Tasks


async def test_a_listener_that_raises_costs_no_record(caplog):
    """It ended the producer, and all that was put with it."""
    seen: list[int] = []

    def listener() -> None:
        seen.append(orders.buffer_limit.outstanding_records)
        raise KeyError(STREAM)

    async with producer(service()) as orders:
        orders.internal.on_progress(listener)
        deliveries = put(orders, 100)
        assert (await orders.flush()).delivered == 100
    assert reasons(deliveries) == {"": 100}
    assert seen
    assert "a listener to the producer's progress failed" in caplog.text


async def test_any_task_may_put_and_await():
    transport = service(2)

    async def handle(number: int) -> None:
        with anyio.fail_after(5.0):
            delivery = await orders.put(STREAM, partition_key=str(number), data=b"x")
            assert (await delivery).successful
            handled.append(number)

    handled: list[int] = []
    async with producer(transport) as orders, anyio.create_task_group() as tasks:
        for number in range(50):
            tasks.start_soon(handle, number)
    assert sorted(handled) == list(range(50))
    assert orders.report().delivered == 50


async def test_a_task_that_awaits_its_delivery_and_is_cancelled_does_not_cancel_the_record():
    transport = service(latency_seconds=1.0)
    async with producer(transport) as orders:
        deliveries = put(orders, 10)
        with anyio.move_on_after(0.5):
            await deliveries[0]
        assert (await deliveries[0]).successful
    assert reasons(deliveries) == {"": 10}


async def test_an_attempt_is_timed_by_the_loops_clock():
    transport = service(latency_seconds=0.25)
    async with producer(transport) as orders:
        await anyio.sleep(7.0)
        (delivery,) = put(orders, 1)
        result = await delivery
    (attempt,) = result.attempts
    assert 7.0 <= attempt.started_at <= 7.2
    assert attempt.ended_at == attempt.started_at + 0.25


# Streams


async def test_many_streams_share_the_requests_in_flight_fairly():
    """A slow stream with much to send does not hold back the others."""
    transport = unmetered(streams={"slow": 1, **{f"quick-{number}": 1 for number in range(5)}})
    transport.kinesis.faults.add(Latency(2.0), When(operation="PutRecords", stream="slow"))
    async with producer(
        transport,
        aggregation_enabled=False,
        collection_max_count=10,
        max_in_flight_requests=3,
        rate_limit_records_per_sec_per_shard=1e6,
        record_ttl_ms=300_000,
    ) as orders:
        slow = put(orders, 1_000, stream="slow")
        await anyio.sleep(1.0)
        began = anyio.current_time()
        quick = [delivery for number in range(5) for delivery in put(orders, 20, stream=f"quick-{number}")]
        for delivery in quick:
            await delivery
        # Each place given back goes first to a stream that has none: ten requests, three at a time, beside the slow.
        assert anyio.current_time() - began < 5.0
        assert sum(delivery.done for delivery in slow) < 200
        assert transport.most_in_flight == 3
        await orders.close(timeout=200.0)
    assert reasons([*quick, *slow]) == {"": 1_100}


async def test_a_stream_may_be_an_arn_of_another_account():
    transport = service()
    arn = transport.kinesis.arn(STREAM)
    async with producer(transport) as orders:
        deliveries = put(orders, 5, stream=arn)
    assert reasons(deliveries) == {"": 5}


# Sizes


async def test_a_record_of_ten_mebibytes_passes_where_the_stream_takes_it():
    ten = 10 * 1024 * 1024
    transport = unmetered()
    transport.kinesis.update_max_record_size(STREAM, max_record_size_kib=10_240, now=0.0)
    async with producer(
        transport, max_record_size=ten, collection_max_size=ten, max_outstanding_bytes=4 * ten
    ) as orders:
        deliveries = [orders.put_nowait(STREAM, partition_key="k", data=bytes(ten - 1))]
        deliveries += put(orders, 2, size=6 * 1024 * 1024)
        deliveries += put(orders, 50, size=1_000)
        await orders.flush()
    assert reasons(deliveries) == {"": 53}
    assert max(request.size_bytes for request in transport.requests) == ten


# Looking


async def test_hooks_get_the_same_counts_as_the_report():
    transport = unmetered()
    transport.kinesis.faults.add(RecordError(), When(every=3, once_per_record=True))
    facts = RecordingHook()
    async with Producer(Config(aggregation_enabled=False), transport=transport, hooks=[facts]) as orders:
        put(orders, 300)
    finished = facts.of(RecordsFinished)
    assert sum(fact.user_records for fact in finished) == orders.report().delivered == 300
    assert len(facts.of(ShardMapRefreshed)) == 1


async def test_statistics_say_where_user_records_are():
    transport = service(latency_seconds=1.0)
    async with producer(transport) as orders:
        put(orders, 10)
        assert orders.statistics()[STREAM].accepted == 10
        assert orders.statistics()[STREAM].buffered == 10
    assert orders.statistics()[STREAM].delivered == 10


async def test_nothing_is_left_to_the_garbage_collector():
    transport = service()
    async with producer(transport) as orders:
        put(orders, 100)
    left = weakref.ref(orders)
    del orders
    gc.collect()
    # Only this producer: those of other tests may still be there.
    assert left() is None


async def test_what_was_put_is_logged_nowhere(caplog):
    caplog.set_level(logging.DEBUG)
    transport = service()
    transport.kinesis.faults.add(ErrorAnswer("AccessDeniedException"), When(operation="PutRecords"))
    async with producer(transport) as orders:
        delivery = orders.put_nowait(STREAM, partition_key="secret-key", data=b"secret-data")
    assert [result.error_code for result in results([delivery])] == ["AccessDeniedException"]
    assert "secret" not in caplog.text


async def test_the_log_says_at_the_level_debug_which_kernels_run(caplog):
    caplog.set_level(logging.DEBUG, "kpl_core")
    async with producer(service()):
        pass
    kernels = "c" if COMPILED else "python"
    assert [record.message for record in caplog.records] == [f"producer opened: kernels={kernels}"]


async def test_the_shard_of_a_partition_key_is_known_once_the_shards_are():
    async with producer(service(4)) as orders:
        keys = key_of_each_shard(4)
        assert orders.internal.predicted_shard(STREAM, keys[0]) is None
        await know_shards(orders)
        assert [orders.internal.predicted_shard(STREAM, key) for key in keys] == [
            shard.shard_id for shard in even_shards(4)
        ]
        assert orders.internal.predicted_shard("other", keys[0]) is None
