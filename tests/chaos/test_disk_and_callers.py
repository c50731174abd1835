"""A full disk, cancelled puts, invalid records: no other record is affected."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kpl_core import DeadLetterOptions, InvalidUserRecord, NotSpooled, Producer
from kpl_core.testing import ErrorAnswer, RecordError, When
from kpl_integrations.local_kinesis import LocalKinesis
from kpl_integrations.metrics.prometheus import PrometheusMetrics
from tests.chaos.load import STREAM, Load, assert_recovers, config, consumed
from tests.support.durability_scene import assert_invariant
from tests.support.metrics import Scrape, watched
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


async def test_a_full_disk_rejects_puts_and_works_again_once_space_is_freed(tmp_path: Path) -> None:
    metrics = PrometheusMetrics()
    async with LocalKinesis({STREAM: 4}) as kinesis:
        options = config(kinesis.endpoint_url, tmp_path / "spool.db", "write_ahead")
        async with Producer(options, hooks=[metrics]) as producer:
            load = Load(producer)
            for _ in range(50):
                await load.put_one()
            assert producer.spool is not None
            writer = producer.spool
            bound = await asyncio.wrap_future(
                writer.ask(lambda store: store.connection.execute("PRAGMA page_count").fetchone()[0])
            )
            await asyncio.wrap_future(
                writer.ask(lambda store: store.connection.execute(f"PRAGMA max_page_count = {bound}").fetchone())
            )
            # Nothing is delivered meanwhile, or a slow disk would never be full.
            outage = kinesis.faults.add(ErrorAnswer("ServiceUnavailable"), When(operation="PutRecords"))
            full = False
            for _ in range(200):
                try:
                    _ = await producer.put(STREAM, partition_key="k", data=bytes(40_000))
                except NotSpooled as error:
                    full = "full" in str(error)
                    break
            assert full
            kinesis.faults.remove(outage)
            await asyncio.wrap_future(
                writer.ask(lambda store: store.connection.execute("PRAGMA max_page_count = 1000000").fetchone())
            )
            before = len(load.acknowledged)
            await until(lambda: producer.report().buffered == 0)
            await load.put_one()
            assert len(load.acknowledged) == before + 1
            await until(lambda: producer.report().spooled == producer.report().buffered == 0)
            assert_invariant(producer.report())
            Scrape(watched(producer, metrics)).assert_invariant()
        assert not load.acknowledged - consumed(kinesis).keys()
        assert producer.report().failed == {"NotSpooled": 1}


async def test_puts_cancelled_at_any_instant_affect_no_other_record(tmp_path: Path) -> None:
    metrics = PrometheusMetrics()
    async with LocalKinesis({STREAM: 4}) as kinesis:
        options = config(kinesis.endpoint_url, tmp_path / "spool.db", "write_ahead", max_outstanding_records=50)
        kinesis.faults.add(RecordError(), When(probability=0.1))
        async with Producer(options, hooks=[metrics]) as producer:
            load = Load(producer)
            tasks = [asyncio.create_task(load.put_one()) for _ in range(400)]
            for number, task in enumerate(tasks):
                if number % 3 == 0:
                    task.cancel()
                if number % 20 == 0:
                    await asyncio.sleep(0.001)
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: producer.report().spooled == producer.report().buffered == 0)
            await assert_recovers(load, kinesis, metrics)


async def test_invalid_records_become_dead_letters_and_block_no_other_record(tmp_path: Path) -> None:
    metrics = PrometheusMetrics()
    async with LocalKinesis({STREAM: 1}) as kinesis:
        kinesis.faults.add(RecordError("ValidationException"), When(record=lambda key, _: key == "poison"))
        options = config(
            kinesis.endpoint_url,
            tmp_path / "spool.db",
            "overflow",
            dead_letters=DeadLetterOptions(),
            aggregation_enabled=False,
        )
        async with Producer(options, hooks=[metrics]) as producer:
            load = Load(producer)
            poison = [producer.put_nowait(STREAM, partition_key="poison", data=b"p") for _ in range(5)]
            wrongs: list[dict[str, Any]] = [
                {"data": bytes(2 << 20)},
                {"partition_key": ""},
                {"explicit_hash_key": "-1"},
            ]
            for wrong in wrongs:
                with pytest.raises(InvalidUserRecord):
                    _ = producer.put_nowait(STREAM, **{"partition_key": "k", "data": b"x", **wrong})
            with pytest.raises(TypeError):
                _ = producer.put_nowait(STREAM, partition_key="k", data="text")  # type: ignore[arg-type]
            for _ in range(100):
                await load.put_one()
            assert {(await each).kept for each in poison} == {"dead_lettered"}
            await until(lambda: producer.report().delivered == 100)
            assert_invariant(producer.report())
            Scrape(watched(producer, metrics)).assert_invariant()
            assert producer.report().dead_lettered == 5


async def test_a_close_while_throttled_and_in_flight_spools_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "spool.db"
    async with LocalKinesis({STREAM: 2}) as kinesis:
        outage = [
            kinesis.faults.add(RecordError()),
            kinesis.faults.add(ErrorAnswer("InternalFailure"), When(operation="PutRecords", probability=0.3)),
        ]
        options = config(kinesis.endpoint_url, path, "overflow", record_ttl_ms=30_000)
        metrics = PrometheusMetrics()
        async with Producer(options, hooks=[metrics]) as producer:
            watched(producer, metrics)
            for n in range(300):
                _ = producer.put_nowait(STREAM, partition_key=f"k{n}", data=b"%d" % n)
            await asyncio.sleep(0.2)
            report = await producer.close(timeout=0.5)
        assert (report.accepted, report.spooled, report.failed_total, report.buffered) == (300, 300, 0, 0)
        Scrape(metrics).assert_invariant()
        for each in outage:
            kinesis.faults.remove(each)
        metrics = PrometheusMetrics()
        async with Producer(config(kinesis.endpoint_url, path, "overflow"), hooks=[metrics]) as again:
            watched(again, metrics)
            Scrape(metrics).assert_invariant()
            await until(lambda: again.report().delivered == 300)
            assert_invariant(again.report())
            Scrape(metrics).assert_invariant()
        assert consumed(kinesis).keys() == {b"%d" % n for n in range(300)}
