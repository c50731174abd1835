"""Splits and merges under load, read by a consumer that drops what a KCL drops: lost 0."""

import random
from collections.abc import Sequence

import anyio
import pytest

from kpl_core import Delivery
from kpl_core.pipeline.shard_map import Shard
from kpl_core.records.put_records import RequestFailure
from kpl_core.testing import (
    ErrorAnswer,
    FakeKinesis,
    Latency,
    MergeDuringRequest,
    RecordError,
    ResetAfterCommit,
    SplitDuringRequest,
    When,
)
from kpl_core.testing.fake_transport import FakeTransport
from tests.support.material import even_shards, keys_in
from tests.support.producer_scene import (
    STREAM,
    assert_books_close,
    producer,
    put,
    reasons,
    seen_by_kcl,
    stored,
    unmetered,
)

pytestmark = pytest.mark.anyio


async def load(orders, deliveries: list[Delivery], *, rounds: int = 100, each: int = 20) -> None:
    """User records "0", "1", ... of 500 keys, for as many times 20 ms as there are rounds."""
    for _ in range(rounds):
        start = len(deliveries)
        deliveries += [
            orders.put_nowait(STREAM, partition_key=f"key {number % 500}", data=f"{number}".encode())
            for number in range(start, start + each)
        ]
        await anyio.sleep(0.02)


def numbers(count: int) -> set[bytes]:
    return {f"{number}".encode() for number in range(count)}


@pytest.mark.parametrize(
    "effects",
    [
        [SplitDuringRequest()],
        [MergeDuringRequest()],
        [SplitDuringRequest(), MergeDuringRequest()],
        [SplitDuringRequest(), RecordError()],
        [SplitDuringRequest(), ErrorAnswer("InternalFailure")],
        [MergeDuringRequest(), SplitDuringRequest(), RecordError(), ResetAfterCommit()],
    ],
    ids=lambda effects: " ".join(type(effect).__name__ for effect in effects),
)
async def test_nothing_is_lost_to_a_kcl_while_the_stream_is_resharded(effects):
    transport = unmetered(4)
    for position, effect in enumerate(effects):
        operation = None if isinstance(effect, RecordError) else "PutRecords"
        every = 7 if isinstance(effect, SplitDuringRequest | MergeDuringRequest) else 5
        transport.kinesis.faults.add(effect, When(operation=operation, skip=3 + position, every=every, times=20))
    deliveries: list[Delivery] = []
    async with producer(transport) as orders:
        await load(orders, deliveries)
        report = await orders.close(timeout=60.0)
        now = anyio.current_time()
    assert_books_close(report, deliveries)
    assert report.delivered == 2_000
    assert len(transport.kinesis.list_shards(STREAM, now=now).shards) > 5
    # Lost 0.
    assert seen_by_kcl(transport, now=now) == numbers(2_000)


@pytest.mark.parametrize("seed", range(5))
async def test_nothing_is_lost_to_a_kcl_however_faults_fall(seed):
    chance = random.Random(seed)
    transport = unmetered(3, chance=chance.random)
    faults = transport.kinesis.faults
    for effect in (SplitDuringRequest(), MergeDuringRequest()):
        faults.add(effect, When(operation="PutRecords", probability=0.1, times=15))
    faults.add(RecordError(), When(probability=0.1))
    faults.add(ResetAfterCommit(), When(operation="PutRecords", probability=0.05))
    faults.add(ErrorAnswer("ServiceUnavailable"), When(operation="ListShards", probability=0.5))
    faults.add(Latency(0.3), When(operation="PutRecords", probability=0.1))
    deliveries: list[Delivery] = []
    async with producer(transport) as orders:
        await load(orders, deliveries)
        report = await orders.close(timeout=100.0)
        now = anyio.current_time()
    assert_books_close(report, deliveries)
    delivered = {f"{number}".encode() for number, delivery in enumerate(deliveries) if delivery.result().successful}
    assert len(delivered) == 2_000
    assert seen_by_kcl(transport, now=now) == delivered


async def test_a_split_doubles_only_what_was_on_its_way():
    transport = unmetered(1, latency_seconds=0.05)
    deliveries: list[Delivery] = []
    async with producer(transport) as orders:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load, orders, deliveries)
            await anyio.sleep(1.0)
            transport.kinesis.reshard(STREAM, SplitDuringRequest(), now=anyio.current_time())
        await orders.flush()
    assert reasons(deliveries) == {"": 2_000}
    # 1,000 user records a second; what was aggregated or in flight for some 300 ms may be stored twice.
    assert len(stored(transport)) <= 2_400
    retried = [delivery for delivery in deliveries if len(delivery.result().attempts) > 1]
    assert {delivery.result().attempts[0].error_code for delivery in retried} <= {"Wrong Shard"}
    assert max(len(delivery.result().attempts) for delivery in deliveries) <= 3


async def test_without_aggregation_a_reshard_doubles_nothing():
    transport = unmetered(2)
    transport.kinesis.faults.add(SplitDuringRequest(), When(operation="PutRecords", every=10, times=10))
    deliveries: list[Delivery] = []
    async with producer(transport, aggregation_enabled=False) as orders:
        await load(orders, deliveries)
    assert reasons(deliveries) == {"": 2_000}
    assert len(transport.kinesis.records(STREAM)) == 2_000


async def test_consumers_that_do_not_look_at_ranges_get_nothing_twice():
    transport = unmetered(2)
    transport.kinesis.faults.add(SplitDuringRequest(), When(operation="PutRecords", every=10, times=10))
    deliveries: list[Delivery] = []
    async with producer(transport, consumer="range_blind") as orders:
        await load(orders, deliveries)
    assert reasons(deliveries) == {"": 2_000}
    assert len(stored(transport)) == 2_000


async def test_a_stream_deleted_and_created_again_with_other_shards_is_learnt():
    transport = unmetered(4)
    async with producer(transport) as orders:
        put(orders, 100)
        await orders.flush()
        now = anyio.current_time()
        transport.kinesis.delete_stream(STREAM, now=now)
        transport.kinesis.create_stream(STREAM, shard_count=1, now=now)
        deliveries = put(orders, 100)
        await orders.flush()
    assert reasons(deliveries) == {"": 100}
    assert {read for _, read in stored(transport)} == {str(number).encode().ljust(10, b".") for number in range(100)}


async def test_the_rate_grows_with_the_shards():
    transport = unmetered(1)
    async with producer(transport, aggregation_enabled=False, burst_seconds=0.01) as orders:
        put(orders, 1_000)
        await orders.flush()
        slow = anyio.current_time()
        for _ in range(3):
            transport.kinesis.reshard(STREAM, SplitDuringRequest(), now=anyio.current_time())
        put(orders, 10)
        await orders.flush()
        await anyio.sleep(1.0)
        began = anyio.current_time()
        put(orders, 1_000)
        await orders.flush()
        assert anyio.current_time() - began < slow / 1.8


class ListsLate(FakeTransport):
    """Lists a reshard only when it was asked once before, as a service that is only eventually consistent does."""

    def __init__(self, kinesis: FakeKinesis) -> None:
        super().__init__(kinesis, latency_seconds=0.02)
        self._before: Sequence[Shard] | RequestFailure = ()

    async def list_shards(self, stream: str) -> Sequence[Shard] | RequestFailure:
        listed, self._before = self._before, await super().list_shards(stream)
        return listed or self._before


async def test_a_child_that_is_listed_late_delays_its_first_record_by_one_more_listing_and_doubles_nothing():
    transport = ListsLate(FakeKinesis({STREAM: 1}, enforce_limits=False))
    transport.kinesis.faults.add(SplitDuringRequest(), When(operation="PutRecords", times=1))
    lower = keys_in(even_shards(2)[0], 20)
    async with producer(transport) as orders:
        await anyio.sleep(0.5)
        put_at = anyio.current_time()
        deliveries = [orders.put_nowait(STREAM, partition_key=key, data=b"x") for key in lower]
        assert (await deliveries[0]).successful
        assert anyio.current_time() - put_at < 1.0
        assert_books_close(await orders.close(), deliveries)
    assert len(transport.requests) == 1
