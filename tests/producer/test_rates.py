"""How fast, and never faster: the shards' limits on the driver's clock."""

from time import monotonic

import anyio
import pytest

from kpl_core import BufferFull, Config, Producer
from kpl_core.hooks import ShardRateChanged
from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.testing import ErrorAnswer, Latency, RecordError, RecordingHook, When
from tests.support.producer_scene import (
    AT_A_TENTH,
    STREAM,
    TENTH,
    assert_books_close,
    key_of_each_shard,
    know_shards,
    most_above_the_rate,
    producer,
    put,
    sent_records,
    service,
    unmetered,
)
from tests.support.virtual_time import Backend, virtual_time_backend

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> Backend:
    """Thousands of records for a rate that the machines decide. The other tests of the folder run on both backends."""
    return virtual_time_backend("asyncio")


@pytest.mark.parametrize("throttling", [True, False])
async def test_3_000_records_through_a_shard_of_1_000_a_second_take_two_seconds_and_no_real_ones(throttling):
    transport = service(latency_seconds=0.0) if throttling else unmetered(latency_seconds=0.0)
    began = monotonic()
    async with producer(transport, aggregation_enabled=False) as orders:
        deliveries = put(orders, 3_000)
        report = await orders.flush()
        took = anyio.current_time()
    assert 2.0 <= took < 2.3
    assert monotonic() - began < 20
    assert_books_close(report, deliveries)
    assert report.delivered == 3_000
    records = [(at, 1.0) for at, _, _ in sent_records(transport)]
    assert most_above_the_rate(records, per_second=1_000.0) <= 1_000 + 1e-6


async def test_with_aggregation_a_hundred_times_as_many_pass_in_the_same_time():
    transport = service()
    async with producer(transport, aggregation_max_count=100) as orders:
        await know_shards(orders)
        began = anyio.current_time()
        put(orders, 30_000)
        report = await orders.flush()
        assert anyio.current_time() - began < 0.2
    assert report.delivered == 30_001
    assert len(sent_records(transport)) == 301


async def test_bytes_are_limited_like_records():
    transport = service()
    async with producer(transport) as orders:
        deliveries = put(orders, 300, size=10_000)
        report = await orders.flush()
        # 3 MB through a shard of 1 MiB a second, one MiB of it at once.
        assert 1.8 <= anyio.current_time() < 2.3
    assert_books_close(report, deliveries)
    sent = [(at, float(size)) for at, _, size in sent_records(transport)]
    assert most_above_the_rate(sent, per_second=1_048_576.0) <= 1_048_576.0 + 1e-3


async def test_each_shard_has_its_own_limit():
    transport = service(4)
    async with producer(transport, aggregation_enabled=False) as orders:
        await know_shards(orders)
        began = anyio.current_time()
        put(orders, 6_000, keys=key_of_each_shard(4))
        report = await orders.flush()
        assert 0.5 <= anyio.current_time() - began < 0.9
    assert report.delivered == 6_001


async def test_a_hot_key_does_not_slow_the_other_shards():
    transport = service(4)
    hot, *cold = key_of_each_shard(4)
    async with producer(transport, aggregation_enabled=False) as orders:
        put(orders, 5_000, keys=[hot])
        others = put(orders, 90, keys=cold)
        for delivery in others:
            assert (await delivery).successful
        assert anyio.current_time() < 0.3
        report = await orders.flush()
        assert anyio.current_time() > 3.5
    assert report.delivered == 5_090


async def test_without_a_shard_map_records_are_limited_as_for_one_shard():
    transport = unmetered(4)
    transport.kinesis.faults.add(ErrorAnswer("AccessDeniedException"), When(operation="ListShards"))
    async with producer(transport) as orders:
        put(orders, 2_500)
        report = await orders.flush()
        assert 1.4 <= anyio.current_time() < 2.0
    assert report.delivered == 2_500
    assert {shard for _, shard, _ in sent_records(transport)} == {None}
    records = [(at, 1.0) for at, _, _ in sent_records(transport)]
    assert most_above_the_rate(records, per_second=1_000.0) <= 1_000 + 1e-6


async def test_the_limits_are_config():
    transport = unmetered()
    async with producer(
        transport,
        aggregation_enabled=False,
        rate_limit_records_per_sec_per_shard=100.0,
        burst_seconds=0.1,
        adaptive_rate=False,
    ) as orders:
        put(orders, 100)
        await orders.flush()
        assert 0.9 <= anyio.current_time() < 1.05
    records = [(at, 1.0) for at, _, _ in sent_records(transport)]
    assert most_above_the_rate(records, per_second=100.0) <= 10 + 1e-6


async def test_a_shard_that_another_process_fills_gets_less_and_recovers():
    transport = unmetered()
    transport.kinesis.faults.add(RecordError(), When(probability=0.5, ends_at=6.0))
    facts = RecordingHook()
    orders = Producer(Config(aggregation_enabled=False), transport=transport, hooks=[facts])
    async with orders:
        for _ in range(140):
            put(orders, 50)
            await anyio.sleep(0.1)
        report = await orders.flush()
    rates = [fact.fraction for fact in facts.of(ShardRateChanged)]
    assert min(rates) == pytest.approx(0.85**6, rel=0.2)
    assert rates[-1] == 1.0
    assert report.delivered == 7_000


@pytest.mark.long
async def test_two_producers_that_share_a_shard_waste_little_and_lose_nothing():
    """Each is offered twice what it can get; both know nothing of each other."""
    transport = service(limits=TENTH)
    options = {"aggregation_enabled": False, "record_ttl_ms": 5_000, "max_outstanding_records": 400, **AT_A_TENTH}
    async with producer(transport, **options) as mine, producer(transport, **options) as theirs:
        shed = 0
        for _ in range(300):
            for each in (mine, theirs):
                try:
                    put(each, 10)
                except BufferFull:
                    shed += 1
            await anyio.sleep(0.1)
        reports = [await each.close(timeout=10.0) for each in (mine, theirs)]
    delivered = sum(report.delivered for report in reports)
    # 30 s of a shard that takes 100 a second.
    assert delivered >= 0.8 * 3_000
    assert len(sent_records(transport)) <= 1.35 * delivered
    assert shed
    for report in reports:
        assert report.buffered == 0
        assert set(report.failed) <= {"Expired", "Shutdown", "Unknown"}
        assert report.accepted == report.delivered + report.failed_total
        assert report.delivered >= 0.3 * delivered


async def test_after_an_outage_the_backlog_recovers_and_nothing_is_lost_or_doubled():
    """All of it had been admitted while no request could leave, went at once, and half of it was refused."""
    transport = service(limits=TENTH)
    transport.kinesis.faults.add(Latency(20.0), When(operation="PutRecords", ends_at=10.0))
    async with producer(transport, aggregation_enabled=False, record_ttl_ms=300_000, **AT_A_TENTH) as orders:
        deliveries = []
        for _ in range(200):
            deliveries += put(orders, 5)
            await anyio.sleep(0.1)
        report = await orders.flush()
        # A thousand records are ten seconds' worth, from the moment the service answers again.
        assert anyio.current_time() < 20 + 15
    assert_books_close(report, deliveries)
    assert report.delivered == len(transport.kinesis.records(STREAM)) == 1_000
    sent = sent_records(transport)
    assert len(sent) <= 1.7 * 1_000
    # What goes at once is the burst and the one request that was being packed.
    assert most_above_the_rate([(at, 1.0) for at, _, _ in sent], per_second=100.0) <= 100 + 500


async def test_an_idle_producer_does_not_poll(monkeypatch):
    wakeups = []
    poll = StreamPipeline.poll

    def counted(pipeline, now, free_requests):
        wakeups.append(now)
        return poll(pipeline, now, free_requests)

    monkeypatch.setattr(StreamPipeline, "poll", counted)
    async with producer(service(latency_seconds=0.0)) as orders:
        put(orders, 10)
        await orders.flush()
        await anyio.sleep(10)
        before = len(wakeups)
        await anyio.sleep(86_400)
        assert len(wakeups) == before
        # One record costs a few polls, not 40 a second.
        put(orders, 1)
        await anyio.sleep(60)
        assert len(wakeups) - before <= 6
