"""Flows that share a hot shard: a flood waits alone, and without flows it costs nothing."""

from contextlib import suppress
from typing import Any

import anyio
import pytest

from kpl_core import BufferFull, Config, FairnessPolicy, Producer, decode
from kpl_core.pipeline.intake.fair_intake import FairIntake
from kpl_core.testing import MergeDuringRequest, SplitDuringRequest, When
from tests.support.producer_scene import STREAM, service, unmetered

pytestmark = pytest.mark.anyio

QUIET = [f"quiet {number}" for number in range(9)]
SECONDS = 3.0


class Waits:
    """How long user records of quiet flows took from put to result, beside a flood or alone."""

    def __init__(self, producer: Producer, *, size: int) -> None:
        self.producer = producer
        self.size = size
        self.seconds: list[float] = []
        self.refused = 0

    async def flood(self, per_second: int) -> None:
        while True:
            for _ in range(per_second // 100):
                try:
                    _ = self.producer.put_nowait(STREAM, partition_key="flood", data=bytes(self.size), flow="flood")
                except BufferFull:
                    self.refused += 1
            await anyio.sleep(0.01)

    async def quiet(self, flow: str, waiting: Any) -> None:
        # Not in step with each other, nor with the flood.
        await anyio.sleep(0.0037 * QUIET.index(flow))
        for _ in range(int(SECONDS * 20)):
            started = anyio.current_time()
            delivery = await self.producer.put(STREAM, partition_key=flow, data=bytes(self.size), flow=flow)
            waiting.start_soon(self.wait, delivery, started)
            await anyio.sleep(0.05)

    async def wait(self, delivery: Any, started: float) -> None:
        assert (await delivery).successful
        self.seconds.append(anyio.current_time() - started)

    def p99(self) -> float:
        return sorted(self.seconds)[int(len(self.seconds) * 0.99)]


async def quiet_waits(flood_per_second: int, *, size: int, **options: Any) -> Waits:
    async with Producer(Config(max_outstanding_records=20_000, **options), transport=service()) as producer:
        waits = Waits(producer, size=size)
        async with anyio.create_task_group() as flooding:
            if flood_per_second:
                flooding.start_soon(waits.flood, flood_per_second)
            async with anyio.create_task_group() as waiting:
                for flow in QUIET:
                    waiting.start_soon(waits.quiet, flow, waiting)
            flooding.cancel_scope.cancel()
        await producer.close(timeout=0)
    return waits


@pytest.mark.long
@pytest.mark.parametrize(
    ("flood", "size", "aggregation"), [(20_000, 200, True), (3_000, 200, False), (3_000, 1_000, True)]
)
async def test_quiet_flows_wait_as_if_there_was_no_flood(flood, size, aggregation):
    options: dict[str, Any] = {"fairness": FairnessPolicy(), "aggregation_enabled": aggregation}
    alone = await quiet_waits(0, size=size, **options)
    beside_a_flood = await quiet_waits(flood, size=size, **options)
    assert len(beside_a_flood.seconds) == len(alone.seconds) == len(QUIET) * SECONDS * 20
    assert beside_a_flood.p99() <= alone.p99() + 0.025


async def test_without_flows_the_same_flood_makes_them_wait_for_seconds():
    assert (await quiet_waits(3_000, size=1_000)).p99() > 2.0


@pytest.mark.long
async def test_shares_of_a_hot_shard_follow_the_weights():
    transport = service()
    fairness = FairnessPolicy(weights={"gold": 3, "tin": 1})
    async with Producer(Config(fairness=fairness), transport=transport) as producer:

        async def fill(flow: str) -> None:
            while True:
                _ = await producer.put(STREAM, partition_key=flow, data=bytes(1_000), flow=flow)

        with anyio.move_on_after(8):
            async with anyio.create_task_group() as filling:
                filling.start_soon(fill, "gold")
                filling.start_soon(fill, "tin")
        await producer.close(timeout=0)
    stored = [record for blob in transport.kinesis.records(STREAM) for record in decode(blob.data) or ()]
    # The first second's burst went straight through: nothing had to wait yet.
    competing = [record.partition_key for record in stored[2_000:]]
    assert len(competing) > 5_000
    assert competing.count("gold") / len(competing) == pytest.approx(0.75, abs=0.02)


async def test_a_flood_that_waits_for_its_share_does_not_hold_up_a_quiet_put():
    transport = service()
    config = Config(fairness=FairnessPolicy(), max_outstanding_records=1_000)
    async with Producer(config, transport=transport) as producer:
        async with anyio.create_task_group() as tasks:

            async def flood() -> None:
                while True:
                    _ = await producer.put(STREAM, partition_key="f", data=bytes(5_000), flow="flood")

            tasks.start_soon(flood)
            await anyio.sleep(2.0)
            with pytest.raises(BufferFull, match=r"flow .flood. has .* its share of the room"):
                _ = producer.put_nowait(STREAM, partition_key="f", data=bytes(5_000), flow="flood")
            with anyio.fail_after(0.001):
                delivery = await producer.put(STREAM, partition_key="q", data=b"x", flow="quiet")
            assert (await delivery).successful
            tasks.cancel_scope.cancel()
        await producer.close(timeout=0)


async def test_what_waits_in_a_flow_expires_there_with_one_attempt():
    async with Producer(Config(fairness=FairnessPolicy(), record_ttl_ms=500), transport=service()) as producer:
        deliveries = [
            producer.put_nowait(STREAM, partition_key="k", data=bytes(10_000), flow="flood") for _ in range(300)
        ]
        results = [await delivery for delivery in deliveries]
        late = [result for result in results if not result.successful]
        assert late
        assert {len(result.attempts) for result in late} == {1}
        assert {result.error_code for result in late} == {"Expired"}
        report = await producer.close()
    assert report.accepted == 300 == report.delivered + report.failed_total


@pytest.mark.parametrize("effect", [SplitDuringRequest(), MergeDuringRequest()])
async def test_what_waits_in_a_flow_finds_its_new_shard(effect):
    transport = unmetered(2)
    transport.kinesis.faults.add(effect, When(operation="PutRecords", skip=3, times=1))
    options: dict[str, Any] = {"rate_limit_bytes_per_sec_per_shard": 100_000, "record_ttl_ms": 60_000}
    async with Producer(Config(fairness=FairnessPolicy(), **options), transport=transport) as producer:
        deliveries = [
            producer.put_nowait(STREAM, partition_key=f"k{number}", data=bytes(2_000), flow=f"f{number % 5}")
            for number in range(500)
        ]
        assert producer.statistics()[STREAM].queueing > 0
        report = await producer.flush()
        assert report.complete
        assert all(delivery.result().successful for delivery in deliveries)


async def test_a_close_out_of_time_sends_what_still_waits_in_its_flows():
    transport = unmetered()
    options: dict[str, Any] = {"rate_limit_bytes_per_sec_per_shard": 10_000}
    async with Producer(Config(fairness=FairnessPolicy(), **options), transport=transport) as producer:
        for _ in range(100):
            _ = producer.put_nowait(STREAM, partition_key="k", data=bytes(2_000), flow="f")
        report = await producer.close(timeout=2.0)
    assert report.delivered == 100
    assert report.complete


@pytest.mark.parametrize("most", [60, 100, 1_000])
async def test_a_flow_that_fills_a_buffer_leaves_room_to_a_quiet_one(most: int) -> None:
    """In one batch it took all of a buffer of 100 records."""
    config = Config(
        fairness=FairnessPolicy(),
        max_outstanding_records=most,
        rate_limit_records_per_sec_per_shard=1,
        aggregation_max_size=600,
    )
    async with Producer(config, transport=service()) as producer:
        _ = await producer.put(STREAM, partition_key="k", data=b"first")
        await producer.flush()
        await anyio.sleep(10.0)
        put = {"flood": 0, "quiet": 0}
        for flow in list(put):
            with suppress(BufferFull):
                while put[flow] < most:
                    _ = producer.put_nowait(STREAM, partition_key="k", data=bytes(100), flow=flow)
                    put[flow] += 1
        assert put["flood"] <= 0.65 * most
        assert put["quiet"] >= 0.2 * most
        await producer.close(timeout=0.1)


async def test_records_put_in_all_ways_stay_in_the_order_of_their_calls():
    transport = unmetered()
    config = Config(fairness=FairnessPolicy(), ordering="per_key")
    async with Producer(config, transport=transport) as producer:
        _ = await producer.put(STREAM, partition_key="k", data=b"first", flow="f")
        await producer.flush()
        numbers = iter(range(1_000))
        for _ in range(20):
            for _ in range(3):
                _ = producer.put_nowait(STREAM, partition_key="k", data=b"%d" % next(numbers), flow="f")
            await producer.put_many(STREAM, [("k", b"%d" % next(numbers)) for _ in range(2)])
            _ = producer.put_nowait(STREAM, partition_key="k", data=b"%d" % next(numbers))
            producer.internal.put_pairs_together_nowait(STREAM, [("k", b"%d" % next(numbers))], flow="g")
            _ = producer.put_nowait(STREAM, partition_key="k", data=b"%d" % next(numbers), metadata={})
        report = await producer.close()
    stored = [record.data for blob in transport.kinesis.records(STREAM) for record in decode(blob.data) or ()]
    assert stored == [b"%d" % number for number in range(160)]
    assert report.delivered == 161


async def test_without_a_policy_a_flow_is_only_a_name():
    async with Producer(Config(), transport=unmetered()) as producer:
        assert (await producer.put_nowait(STREAM, partition_key="k", data=b"x", flow="anything")).successful
        assert producer._open[STREAM].fair is None  # noqa: SLF001 - how the pipeline is built is the point
    async with Producer(Config(fairness=FairnessPolicy()), transport=unmetered()) as producer:
        _ = producer.put_nowait(STREAM, partition_key="k", data=b"x")
        assert isinstance(producer._open[STREAM].fair, FairIntake)  # noqa: SLF001
