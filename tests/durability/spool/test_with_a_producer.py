"""Spool, replay and redrive with the real producer, against a service that throttles and fails at random."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio
import pytest

from kpl_core import Config, Delivery, Producer, RecordResult, decode
from kpl_core.durability.dead_letters import DeadLetterQueue, Redriver
from kpl_core.durability.delivery_pace import DeliveryPace
from kpl_core.durability.replay.replayer import Replayer
from kpl_core.durability.spool import AsyncSpool, LetterFilter, Spool, SpooledPut, SpooledRecord, SpoolOptions
from kpl_core.testing import ErrorAnswer, FakeKinesis, RecordError
from kpl_core.testing.fake_transport import FakeTransport
from kpl_core.testing.faults import When
from tests.support.durability_scene import spooled
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


class ResultCallback:
    """Calls `finished` when a delivery has its result: a waiter, as the outcome knows them."""

    def __init__(self, delivery: Delivery, finished: Callable[[RecordResult], None]) -> None:
        self._delivery = delivery
        self._finished = finished
        self.set()

    def set(self) -> None:
        outcome = self._delivery.follow()
        if outcome.settled:
            self._finished(outcome.result_of(self._delivery.index))
        elif outcome.waiters is None:
            outcome.waiters = [self]
        else:
            outcome.waiters.append(self)


def put_into(producer: Producer) -> SpooledPut:
    def put(record: SpooledRecord, finished: Callable[[RecordResult], None]) -> None:
        delivery = producer.put_nowait(
            record.stream,
            partition_key=record.partition_key,
            data=record.data,
            explicit_hash_key=record.explicit_hash_key,
            tier=record.tier,
        )
        ResultCallback(delivery, finished)

    return put


@pytest.fixture
def options(tmp_path: Path) -> SpoolOptions:
    return SpoolOptions(path=tmp_path / "spool.db", commit_interval_ms=0.0)


@pytest.fixture
def kinesis() -> FakeKinesis:
    return FakeKinesis()


@pytest.fixture
async def producer(request: pytest.FixtureRequest, kinesis: FakeKinesis) -> AsyncIterator[Producer]:
    kinesis.create_stream("orders", shard_count=2, now=anyio.current_time())
    config = Config(
        region="us-east-1",
        record_max_buffered_time_ms=2,
        retry_backoff_base_ms=1,
        retry_backoff_cap_ms=5,
        record_ttl_ms=getattr(request, "param", 200),
    )
    async with Producer(config, transport=FakeTransport(kinesis)) as each:
        yield each


def consumed(kinesis: FakeKinesis) -> dict[str, list[int]]:
    """Return what a consumer reads for each key, in shard order."""
    numbers: dict[str, list[int]] = {}
    for stored in kinesis.records("orders"):
        user_records = decode(stored.data)
        pairs = (
            [(stored.partition_key, stored.data)]
            if user_records is None
            else [(each.partition_key, each.data) for each in user_records]
        )
        for key, data in pairs:
            numbers.setdefault(key, []).append(int(data))
    return numbers


async def test_a_backlog_is_delivered_in_key_order_despite_faults(
    options: SpoolOptions, kinesis: FakeKinesis, producer: Producer
) -> None:
    kinesis.faults.add(RecordError(), When(probability=0.2))
    kinesis.faults.add(ErrorAnswer("InternalFailure"), When(operation="PutRecords", probability=0.1))
    async with AsyncSpool(Spool(options)) as spool:
        await spool.append([spooled(n, key=f"key-{n % 50}") for n in range(600)], claim=False)
        replayer = Replayer(spool, put_into(producer), options, dead_letters=DeadLetterQueue(spool.spool))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(replayer.run)
            await until(lambda: spool.statistics().records == 0)
            tasks.cancel_scope.cancel()
    numbers = consumed(kinesis)
    for key in range(50):
        assert numbers[f"key-{key}"] == list(range(key, 600, 50))


async def test_records_stay_in_the_spool_during_an_outage_and_leave_after_it(
    options: SpoolOptions, kinesis: FakeKinesis, producer: Producer
) -> None:
    outage = kinesis.faults.add(RecordError())
    async with AsyncSpool(Spool(options)) as spool:
        await spool.append([spooled(n, key=f"key-{n}") for n in range(100)], claim=False)
        replayer = Replayer(
            spool, put_into(producer), options, dead_letters=DeadLetterQueue(spool.spool), chance=lambda: 0.01
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(replayer.run)
            await until(lambda: sum(producer.report().failed.values()) > 0)
            assert spool.statistics().records == 100
            kinesis.faults.remove(outage)
            await until(lambda: spool.statistics().records == 0)
            tasks.cancel_scope.cancel()
    assert sorted(number for numbers in consumed(kinesis).values() for number in numbers) == list(range(100))


@pytest.mark.parametrize("producer", [30_000], indirect=True)
async def test_all_dead_letters_are_redriven_critical_first(
    options: SpoolOptions, kinesis: FakeKinesis, producer: Producer
) -> None:
    pace = DeliveryPace(
        records_per_second=1e6, bytes_per_second=1e9, in_flight_records=10, in_flight_bytes=1 << 20, chance=lambda: 0.0
    )
    async with AsyncSpool(Spool(options)) as spool:
        queue = DeadLetterQueue(spool.spool)
        letters = [queue.letter(spooled(n, tier="bulk"), "rate_limited") for n in range(100)]
        letters += [queue.letter(spooled(n, tier="critical"), "rate_limited") for n in range(100, 150)]
        await spool.mailbox.wait_for(queue.add_nowait(letters))
        report = await Redriver(queue, put_into(producer), pace).redrive(LetterFilter())
        assert (report.total, report.delivered, queue.depth) == (150, 150, 0)
    numbers = consumed(kinesis)["key"]
    assert sorted(numbers) == list(range(150))
    # Ten may be in flight together, so the order within ten at a tier's boundary is not guaranteed.
    assert set(numbers[:40]) <= set(range(100, 150))
