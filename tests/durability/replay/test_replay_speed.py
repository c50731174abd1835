"""A replay uses all free capacity, with any number of keys, in order, and delays no fresh record. In virtual time."""

from typing import Any

import anyio
import pytest

from kpl_core import FairnessPolicy, decode, encode
from kpl_core.durability.spool import SpooledRecord
from kpl_core.records.user_record import UserRecord
from kpl_core.testing import ErrorAnswer, FakeKinesis, RecordError
from kpl_core.testing.fake_transport import FakeTransport
from kpl_core.testing.faults import When
from tests.durability.replay.replay_scene import (
    STREAM,
    MemorySpool,
    backlog,
    consumed,
    replaying,
    seconds_until_replayed,
)
from tests.support.virtual_time import Backend, virtual_time_backend

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> Backend:
    """Thousands of records for a rate that the machines decide. The other tests of the folder run on both backends."""
    return virtual_time_backend("asyncio")


def service(shards: int = 4, **options: Any) -> FakeTransport:
    return FakeTransport(FakeKinesis({STREAM: shards}, **options), latency_seconds=0.01)


@pytest.mark.parametrize("keys", [1, 50, 5_000])
async def test_five_thousand_records_are_replayed_at_nearly_the_configured_rate(keys: int) -> None:
    spool = MemorySpool(backlog(5_000, keys=keys))
    transport = service()
    async with replaying(spool, transport):
        seconds = await seconds_until_replayed(spool)
    # 5,000 a second are allowed, with a burst of 500.
    assert 0.9 <= seconds <= 1.3
    assert consumed(transport) == {f"key-{key}": list(range(key, 5_000, keys)) for key in range(keys)}


async def test_without_shared_fate_a_key_is_limited_to_ten_records_a_second() -> None:
    """The weakness that `SharedPut` removes."""
    spool = MemorySpool(backlog(50, keys=1))
    async with replaying(spool, service(), apart=True):
        assert await seconds_until_replayed(spool) > 5.0


async def test_key_order_holds_through_throttling_failures_and_expiry() -> None:
    spool = MemorySpool(backlog(3_000, keys=20, size=400))
    transport = service(shards=2)
    transport.kinesis.faults.add(RecordError(), When(probability=0.3))
    transport.kinesis.faults.add(ErrorAnswer("InternalFailure"), When(operation="PutRecords", probability=0.2))
    async with replaying(spool, transport, record_ttl_ms=250, retry_backoff_base_ms=20):
        await seconds_until_replayed(spool)
    for numbers in consumed(transport).values():
        assert numbers == sorted(numbers)
    assert sum(map(len, consumed(transport).values())) == 3_000


async def test_a_replay_does_not_delay_fresh_records_of_other_tenants() -> None:
    """The replay alone saturates one shard; a fresh record of another tenant still goes at once."""

    async def longest_wait(spool: MemorySpool) -> tuple[float, float]:
        waits: list[float] = []
        started_at = anyio.current_time()
        async with replaying(spool, service(shards=1), options={"replay_bytes_per_second": 5e6}) as (_, fresh):
            await anyio.sleep(1.0)
            for number in range(100):
                record = SpooledRecord(STREAM, f"fresh-{number}", b"x", 1_700_000_000.0, flow="quiet")
                put_at, arrived = anyio.current_time(), anyio.Event()
                fresh(record, lambda _, arrived=arrived: arrived.set())  # type: ignore[misc]
                await arrived.wait()
                waits.append(anyio.current_time() - put_at)
            return max(waits), len(spool.delivered) / (anyio.current_time() - started_at)

    alone, _ = await longest_wait(MemorySpool([]))
    beside, replayed_per_second = await longest_wait(MemorySpool(backlog(30_000, keys=3, size=2_000)))
    assert beside <= 2 * alone + 0.025
    # 2,004 bytes each, so the shard accepts 520 a second.
    assert replayed_per_second >= 450


async def test_only_records_of_one_aggregated_record_share_a_fate() -> None:
    spool = MemorySpool([])
    async with replaying(spool, service(shards=1)) as (pipeline, fresh):
        await anyio.sleep(0.1)
        put_at = anyio.current_time()
        first = fresh(SpooledRecord(STREAM, "key", b"1", 1_700_000_000.0), lambda _: None)
        await anyio.sleep(0.05)
        assert pipeline.reaggregator.arrival_with(UserRecord("key", b"2"), first) == put_at
        assert pipeline.reaggregator.arrival_with(UserRecord("key", b"2", None, None, "bulk"), first) is None
        assert pipeline.reaggregator.arrival_with(UserRecord("key", bytes(60_000)), first) is None
        assert pipeline.reaggregator.arrival_with(UserRecord("", b"2"), first) is None
        await anyio.sleep(0.1)
        assert pipeline.reaggregator.arrival_with(UserRecord("key", b"2"), first) is None


@pytest.mark.parametrize("fairness", [None, FairnessPolicy()], ids=["in a line", "fair"])
async def test_a_record_aggregated_by_another_producer_is_not_aggregated_again(
    fairness: FairnessPolicy | None,
) -> None:
    ready_made = [
        SpooledRecord(STREAM, "key-0", encode([UserRecord("key-0", b"%d-%d" % (each, part)) for part in range(3)]), 0.0)
        for each in range(20)
    ]
    mixed = [record for pair in zip(ready_made, backlog(20, keys=1), strict=True) for record in pair]
    transport = service(shards=1)
    spool = MemorySpool(mixed)
    async with replaying(spool, transport, fairness=fairness):
        await seconds_until_replayed(spool)
    found = [inner for stored in transport.kinesis.records(STREAM) for inner in decode(stored.data) or [stored]]
    wanted = {b"%d-%d" % (each, part) for each in range(20) for part in range(3)} | {b"%d" % each for each in range(20)}
    assert {record.data for record in found} == wanted


class _OneWithoutAggregation(FairnessPolicy):
    def aggregates(self, flow: object) -> bool:
        return flow != "plain"


async def test_a_flow_without_aggregation_is_replayed_without_aggregation() -> None:
    mixed = [*backlog(30, keys=3, flow="plain"), *backlog(30, keys=3)]
    transport = service(shards=1)
    spool = MemorySpool(mixed)
    async with replaying(spool, transport, fairness=_OneWithoutAggregation()):
        await seconds_until_replayed(spool)
    alone = [stored.data for stored in transport.kinesis.records(STREAM) if decode(stored.data) is None]
    assert sorted(alone, key=int) == [b"%d" % number for number in range(30)]
    assert len(consumed(transport)) == 3
