"""Faults found in other producers, and what is wanted instead; each row was a bug of another producer."""

import anyio
import pytest

from kpl_core import Config, Delivery, Producer
from kpl_core.testing import (
    BadBody,
    ErrorAnswer,
    Hang,
    Latency,
    RecordError,
    ResetAfterCommit,
    ResetBeforeCommit,
    When,
    WrongCount,
)
from tests.support.producer_scene import (
    STREAM,
    assert_books_close,
    key_of_each_shard,
    know_shards,
    producer,
    put,
    reasons,
    sent_records,
    service,
    stored,
    unmetered,
)

pytestmark = pytest.mark.anyio

PUT = "PutRecords"


def copies(transport) -> dict[int, int]:
    """How many user records are stored once, twice, ..."""
    counts: dict[bytes, int] = {}
    for _, data in stored(transport):
        counts[data] = counts.get(data, 0) + 1
    return {times: list(counts.values()).count(times) for times in set(counts.values())}


@pytest.mark.parametrize(
    ("effects", "duplicates"),
    [
        ([(RecordError(), When(every=5, once_per_record=True))], False),
        ([(RecordError("InternalFailure", "oops"), When(probability=0.3))], False),
        ([(ErrorAnswer("InternalFailure"), When(operation=PUT, times=1))], False),
        ([(ErrorAnswer("ServiceUnavailable", status=503), When(operation=PUT, ends_at=4.0))], False),
        ([(ErrorAnswer("LimitExceededException"), When(operation=PUT, every=2))], False),
        ([(ErrorAnswer("KMSThrottlingException"), When(operation=PUT, every=2))], False),
        ([(ResetBeforeCommit(), When(operation=PUT, every=2))], False),
        ([(ResetAfterCommit(), When(operation=PUT, every=2))], True),
        ([(WrongCount(-1), When(operation=PUT, every=2))], True),
        ([(WrongCount(1), When(operation=PUT, every=2))], True),
        ([(BadBody(), When(operation=PUT, every=2))], True),
        (
            [
                (ErrorAnswer("InternalFailure"), When(ends_at=3.0)),
                (ResetBeforeCommit(), When(starts_at=3.0, ends_at=6.0)),
            ],
            False,
        ),
    ],
    ids=lambda value: "+".join(str(effect) for effect, _ in value) if isinstance(value, list) else None,
)
@pytest.mark.parametrize("aggregation", [True, False])
async def test_nothing_is_lost_and_only_what_was_stored_unanswered_is_doubled(effects, duplicates, aggregation):
    transport = unmetered(2)
    for effect, when in effects:
        transport.kinesis.faults.add(effect, when)
    async with producer(transport, aggregation_enabled=aggregation, collection_max_count=50) as orders:
        deliveries: list[Delivery] = []
        for _ in range(10):
            deliveries += [
                orders.put_nowait(STREAM, partition_key=str(number), data=f"{len(deliveries)}/{number}".encode())
                for number in range(100)
            ]
            await anyio.sleep(0.05)
        report = await orders.close(timeout=60.0)
    assert_books_close(report, deliveries)
    assert report.delivered == 1_000
    assert report.complete
    if duplicates:
        assert len(copies(transport)) > 1
        assert sum(copies(transport).values()) == 1_000
    else:
        assert copies(transport) == {1: 1_000}


async def test_an_answer_with_some_failures_retries_exactly_those_while_more_is_queued():
    transport = unmetered()
    transport.kinesis.faults.add(
        RecordError(), When(record=lambda key, data: data.endswith(b"7"), once_per_record=True)
    )
    async with producer(transport, aggregation_enabled=False) as orders:
        await know_shards(orders)
        deliveries = [
            orders.put_nowait(STREAM, partition_key=str(number), data=str(number).encode()) for number in range(100)
        ]
        await anyio.sleep(0.101)
        deliveries += [
            orders.put_nowait(STREAM, partition_key=str(number), data=str(number).encode())
            for number in range(100, 200)
        ]
        await orders.flush()
    attempts = [len(delivery.result().attempts) for delivery in deliveries]
    assert attempts == [2 if number % 10 == 7 else 1 for number in range(200)]


async def test_one_record_that_always_fails_does_not_hold_up_the_rest():
    transport = unmetered()
    transport.kinesis.faults.add(
        RecordError("InternalFailure", "bad sector"), When(record=lambda key, _: key == "cursed")
    )
    async with producer(transport, aggregation_enabled=False, record_ttl_ms=5_000) as orders:
        (cursed,) = put(orders, 1, keys=["cursed"])
        others = put(orders, 500)
        await anyio.sleep(1.0)
        assert reasons(others) == {"": 500}
        await orders.flush()
    codes = [attempt.error_code for attempt in cursed.result().attempts]
    assert codes[-1] == "Expired"
    assert set(codes[:-1]) == {"InternalFailure"}


async def test_a_request_the_service_calls_invalid_costs_one_record_and_not_five_hundred():
    transport = unmetered()
    # A record the client believes in and the service does not: its limit is lower than the default.
    async with producer(transport, aggregation_enabled=False, max_record_size=2 * 1024 * 1024) as orders:
        small = put(orders, 200)
        (large,) = put(orders, 1, size=1_500_000)
        small += put(orders, 200)
        report = await orders.flush()
        assert anyio.current_time() < 10.0
    assert large.result().error_code == "ValidationException"
    assert reasons(small) == {"": 400}
    assert report.failed == {"ValidationException": 1}
    assert len(transport.kinesis.records(STREAM)) == 400


async def test_a_request_never_answered_does_not_hold_up_the_others():
    transport = unmetered()
    transport.kinesis.faults.add(Hang(), When(operation=PUT, times=1))
    async with producer(transport, aggregation_enabled=False) as orders:
        stuck = put(orders, 10)
        await anyio.sleep(1.0)
        others = put(orders, 1_000)
        await anyio.sleep(1.5)
        assert reasons(others) == {"": 1_000}
        assert not any(delivery.done for delivery in stuck)
        report = await orders.close(timeout=5.0)
    assert reasons(stuck) == {"Unknown": 10}
    assert report.failed == {"Unknown": 10}


async def test_a_close_is_bounded_even_while_the_service_is_down():
    transport = unmetered()
    transport.kinesis.faults.add(ErrorAnswer("InternalFailure"))
    async with producer(transport) as orders:
        deliveries = put(orders, 1_000)
        await anyio.sleep(1.0)
        began = anyio.current_time()
        report = await orders.close(timeout=3.0)
        assert anyio.current_time() - began <= 3.0
    assert_books_close(report, deliveries)
    # A request may have been on its way in that very moment.
    assert set(report.failed) <= {"Shutdown", "Unknown"}
    codes = [attempt.error_code for attempt in deliveries[0].result().attempts]
    assert codes[0] == "InternalFailure"


async def test_while_the_service_is_down_it_is_not_hammered():
    transport = unmetered(latency_seconds=0.0)
    transport.kinesis.faults.add(ErrorAnswer("InternalFailure"), When(operation=PUT, ends_at=25.0))
    async with producer(transport) as orders:
        await know_shards(orders)
        put(orders, 1_000)
        await anyio.sleep(20.0)
        # 50 ms, 100, ... 5 s, on average half of each: a dozen tries in 20 s, not one every 50 ms.
        assert len(transport.requests) <= 40
        await orders.flush()
    assert orders.report().delivered == 1_001


async def test_records_throttled_on_one_shard_do_not_slow_the_others():
    transport = unmetered(4)
    hot, *cold = key_of_each_shard(4)
    shard = "shardId-000000000000"
    async with producer(transport, aggregation_enabled=False) as orders:
        await know_shards(orders)
        transport.kinesis.faults.add(RecordError(), When(shard_id=shard, ends_at=5.0))
        throttled = put(orders, 300, keys=[hot])
        others = put(orders, 300, keys=cold)
        began = anyio.current_time()
        for delivery in others:
            assert (await delivery).successful
        assert anyio.current_time() - began < 0.3
        assert not any(delivery.done for delivery in throttled)
        await orders.flush()
    assert reasons(throttled) == {"": 300}


async def test_a_put_that_closes_an_aggregated_record_may_be_cancelled_at_any_point():
    """The others in it are delivered, and nothing stays reserved."""
    transport = unmetered()
    async with producer(transport, aggregation_max_count=3, max_outstanding_records=6) as orders:
        await know_shards(orders)
        got: list[Delivery] = []

        async def one(delay: float) -> None:
            with anyio.move_on_after(delay):
                got.append(await orders.put(STREAM, partition_key="k", data=b"x"))
                await got[-1]

        async with anyio.create_task_group() as tasks:
            for step in range(120):
                tasks.start_soon(one, step / 1_000)
        report = await orders.flush()
    assert report.accepted == len(got) + 1
    assert report.delivered == report.accepted
    assert (report.buffered, report.buffered_bytes) == (0, 0)


async def test_while_the_map_is_refreshed_records_of_several_shards_never_share_an_aggregate():
    transport = unmetered(4)
    transport.kinesis.faults.add(Latency(0.5), When(operation="ListShards"))
    async with producer(transport) as orders:
        for _ in range(20):
            put(orders, 50)
            await anyio.sleep(0.1)
        await orders.flush()
    for request in transport.requests:
        for record in request.records:
            assert record.predicted_shard is not None or not record.aggregated
    assert sum(len(record.arrivals) for request in transport.requests for record in request.records) == 1_000


async def test_one_hot_key_is_retried_together_and_in_time():
    transport = service()
    async with producer(transport) as orders:
        deliveries = put(orders, 5_000, keys=["hot"], size=300)
        report = await orders.flush()
        assert anyio.current_time() < 2.0
    assert_books_close(report, deliveries)
    assert report.delivered == 5_000
    assert len({shard for _, shard, _ in sent_records(transport) if shard}) == 1


async def test_fail_if_throttled_fails_at_once():
    transport = unmetered()
    transport.kinesis.faults.add(RecordError(), When(every=2))
    async with producer(transport, aggregation_enabled=False, fail_if_throttled=True) as orders:
        deliveries = put(orders, 100)
        await orders.flush()
        assert anyio.current_time() < 0.3
    assert reasons(deliveries) == {"": 50, "ProvisionedThroughputExceededException": 50}


async def test_the_kpls_preset_retries_what_cannot_be_cured_until_it_expires():
    transport = service()
    transport.kinesis.faults.add(ErrorAnswer("AccessDeniedException"), When(operation=PUT))
    async with Producer(Config.kpl_compatible(record_ttl_ms=2_000), transport=transport) as orders:
        (delivery,) = put(orders, 1)
        await orders.flush()
        assert 2.0 <= anyio.current_time() < 2.5
    codes = [attempt.error_code for attempt in delivery.result().attempts]
    assert codes[-1] == "Expired"
    assert set(codes[:-1]) == {"AccessDeniedException"}


async def test_in_order_a_keys_records_are_stored_as_they_were_put_also_after_refusals():
    transport = unmetered(2)
    transport.kinesis.faults.add(RecordError(), When(probability=0.2))
    transport.kinesis.faults.add(ErrorAnswer("InternalFailure"), When(operation=PUT, every=4))
    async with producer(
        transport, ordering="per_key", record_max_buffered_time_ms=20, retry_backoff_cap_ms=100
    ) as orders:
        await know_shards(orders)
        for start in range(0, 400, 20):
            for number in range(start, start + 20):
                await orders.put(STREAM, partition_key=f"key {number % 5}", data=f"{number:03}".encode())  # type: ignore[unused-awaitable]
            await anyio.sleep(0.02)
        await orders.flush()
    by_key: dict[str, list[bytes]] = {}
    for key, data in stored(transport):
        by_key.setdefault(key, []).append(data)
    assert orders.report().delivered == 401
    for key, in_order in by_key.items():
        assert in_order == sorted(in_order), key
