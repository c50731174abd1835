"""Write-ahead: what was acknowledged is in the file before, and leaves it when Kinesis has it."""

from pathlib import Path

import anyio
import pytest

from kpl_core import Delivery, NotSpooled, Producer
from kpl_core.options.reliability import SpoolOptions
from kpl_core.testing import ErrorAnswer, RecordError, When
from kpl_integrations.metrics.prometheus import PrometheusMetrics
from tests.support.durability_scene import STREAM, assert_invariant, assert_streams_add_up, consumed, producer, service
from tests.support.metrics import Scrape, watched
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
def spool(tmp_path: Path) -> SpoolOptions:
    return SpoolOptions(path=tmp_path / "spool.db", mode="write_ahead", commit_interval_ms=1.0)


async def test_a_put_returns_when_the_spool_has_it_and_the_spool_is_empty_when_kinesis_has_it(spool: SpoolOptions):
    transport = service()
    async with producer(transport, spool=spool) as each:
        delivery = await each.put(STREAM, partition_key="k", data=b"0")
        kept = each.spool
        assert kept is not None
        assert kept.statistics().appended_records == 1
        more = await each.put_many(STREAM, [(f"k{n % 5}", b"%d" % n) for n in range(1, 500)])
        assert kept.statistics().appended_records == 500
        assert all([(await each_delivery).successful for each_delivery in [delivery, *more]])
        await until(lambda: kept.statistics().records == 0)
        assert_streams_add_up(each)
    report = each.report()
    assert (report.accepted, report.delivered, report.spooled) == (500, 500, 0)
    assert consumed(transport) == {b"%d" % n: 1 for n in range(500)}


async def test_through_faults_everything_arrives_and_the_text_of_prometheus_adds_up(spool: SpoolOptions):
    transport = service(shards=2)
    transport.kinesis.faults.add(RecordError(), When(probability=0.2))
    outage = transport.kinesis.faults.add(ErrorAnswer("InternalFailure"), When(operation="PutRecords"))
    metrics = PrometheusMetrics()
    # Longer than a busy machine keeps the loop from running: a replayed record whose time is up is not sent.
    async with producer(transport, spool=spool, hooks=[metrics], record_ttl_ms=1_000) as each:
        watched(each, metrics)
        _ = await each.put_many(STREAM, [(f"k{n % 50}", b"%d" % n) for n in range(300)])
        Scrape(metrics).assert_invariant()
        await until(lambda: each.report().spooled > 100)
        Scrape(metrics).assert_invariant()
        transport.kinesis.faults.remove(outage)
        await until(lambda: each.report().delivered == 300)
        assert_streams_add_up(each)
        Scrape(metrics).assert_invariant()
    assert_invariant(each.report())
    assert set(consumed(transport)) == {b"%d" % n for n in range(300)}


async def test_a_full_spool_refuses_before_anything_is_acknowledged(tmp_path: Path):
    spool = SpoolOptions(path=tmp_path / "spool.db", mode="write_ahead", commit_interval_ms=0.0, max_bytes=1 << 20)
    transport = service()
    transport.kinesis.faults.add(ErrorAnswer("InternalFailure"), When(operation="PutRecords"))
    async with producer(transport, spool=spool) as each:
        acknowledged = 0
        refused: NotSpooled | None = None
        while refused is None and acknowledged < 40:
            try:
                _ = await each.put(STREAM, partition_key="k", data=bytes(50_000))
                acknowledged += 1
            except NotSpooled as error:
                refused = error
        assert "spool" in str(refused)
        assert acknowledged >= 18
        report = await each.close(timeout=0.5)
    assert (report.accepted, report.failed, report.spooled) == (acknowledged + 1, {"NotSpooled": 1}, acknowledged)
    assert_invariant(report)


async def test_a_producer_that_is_cancelled_leaves_everything_in_the_spool(spool: SpoolOptions):
    transport = service(latency_seconds=30.0)
    with anyio.move_on_after(0.5):
        async with producer(transport, spool=spool) as each:
            _ = await each.put_many(STREAM, [("k", b"%d" % n) for n in range(20)])
            await anyio.sleep_forever()
    assert_invariant(each.report())
    assert (each.report().accepted, each.report().spooled, each.report().buffered) == (20, 20, 0)
    async with producer(service(), spool=spool) as again:
        await until(lambda: again.report().delivered == 20)
        assert_invariant(again.report())


async def put_spilled(each: Producer) -> Delivery:
    """Put a record that finds no room, and wait for the spool to have it."""
    _ = each.put_nowait(STREAM, partition_key="k", data=bytes(each.buffer_limit.max_bytes - 1))
    delivery = each.put_nowait(STREAM, partition_key="k", data=b"spilled")
    await each.internal.acknowledged([delivery])
    return delivery


async def test_a_put_that_is_spilled_is_acknowledged_when_the_spool_has_it(tmp_path: Path):
    # So long the first append waits for others, and the disk has nothing.
    spool = SpoolOptions(path=tmp_path / "spool.db", mode="write_ahead", commit_interval_ms=300.0)
    async with producer(service(), spool=spool, max_outstanding_bytes=1 << 16) as each:
        assert each.spool is not None
        delivery = await put_spilled(each)
        assert each.spool.statistics().appended_records == 2
        assert (await delivery).kept == "spooled"
        await until(lambda: each.report().delivered == 2)
        assert_invariant(each.report())
        assert each.buffer_limit.outstanding_records == 0


async def test_a_put_that_is_spilled_to_a_disk_that_takes_nothing_raises(spool: SpoolOptions):
    async with producer(service(), spool=spool, max_outstanding_bytes=1 << 16) as each:
        assert each.spool is not None
        statement = "PRAGMA query_only = ON"
        await until(each.spool.ask(lambda store: store.connection.execute(statement).fetchone()).done)
        with pytest.raises(NotSpooled, match=r"no room in the buffer, and .*read-only"):
            _ = await put_spilled(each)
        assert each.unready() == ["the spool cannot store records"]
    assert_invariant(each.report())
    assert each.report().failed == {"NotSpooled": 2}
