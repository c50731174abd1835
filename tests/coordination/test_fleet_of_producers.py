"""Fleets of producers on a stream of three shards, in virtual time. Most producers have load for one shard at a time.

The limits are a tenth of the service's own, and most intervals are one second, so a test takes little CPU time.
"""

import hashlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from kpl_core import Config, CoordinationOptions, Delivery, Producer
from kpl_core.coordination import MemoryStore, StoreFailed
from kpl_core.hooks import Fact, RequestCompleted
from kpl_core.testing import FakeKinesis, FakeTransport, ServiceLimits
from tests.support.virtual_time import Backend, virtual_time_backend

pytestmark = pytest.mark.anyio
STREAM = "orders"
SHARDS = 3
LIMIT = 100.0
BYTES_LIMIT = 104_857.6


@pytest.fixture
def anyio_backend() -> Backend:
    return virtual_time_backend("asyncio")


@pytest.fixture(autouse=True)
def _same_chance() -> None:
    """Give each run the same jitter, so that a failure can be repeated."""
    random.seed(1)


def key_of(shard: int) -> str:
    """Return a partition key of one of the even shards."""
    numbers = range(1_000)
    hashes = (int.from_bytes(hashlib.md5(f"{number}".encode()).digest(), "big") for number in numbers)  # noqa: S324
    return str(next(number for number, hashed in zip(numbers, hashes, strict=True) if hashed * SHARDS >> 128 == shard))


class Link(MemoryStore):
    """One producer's way to the shared store, which takes time and can be cut."""

    def __init__(self, store: MemoryStore, latency_seconds: float) -> None:
        super().__init__()
        self._store = store
        self._latency_seconds = latency_seconds
        self.is_cut = False

    async def _reach(self) -> MemoryStore:
        await anyio.sleep(self._latency_seconds)
        if self.is_cut:
            message = "no answer"
            raise StoreFailed(message, reason="down")
        return self._store

    async def read(self, name):
        return await (await self._reach()).read(name)

    async def write(self, name, body, *, expected=None):
        return await (await self._reach()).write(name, body, expected=expected)

    async def read_all(self, prefix):
        return await (await self._reach()).read_all(prefix)

    async def delete(self, name):
        await (await self._reach()).delete(name)


class Fleet:
    """Producers with one store. `sent` and `throttled` have the instant of each request and its records."""

    def __init__(self, *, interval_seconds: float = 1.0, latency_seconds: float = 0.0, limit: float = LIMIT) -> None:
        self.limit = limit
        self.interval_seconds = interval_seconds
        self.latency_seconds = latency_seconds
        began = time.time()
        limits = ServiceLimits(records_per_second_per_shard=limit, bytes_per_second_per_shard=BYTES_LIMIT)
        self.transport = FakeTransport(FakeKinesis({STREAM: SHARDS}, limits=limits), latency_seconds=0.01)
        self.store = MemoryStore(lambda: began + anyio.current_time())
        self.links: list[Link] = []
        self.producers: list[Producer] = []
        self.sent: list[tuple[float, int]] = []
        self.throttled: list[tuple[float, int]] = []

    def _hear(self, fact: Fact) -> None:
        if isinstance(fact, RequestCompleted):
            now = anyio.current_time()
            self.sent.append((now, fact.kinesis_records))
            self.throttled.append((now, sum(fact.throttled_by_shard.values())))

    def producer(self, *, max_workers: int, is_cut: bool = False) -> Producer:
        self.links.append(Link(self.store, self.latency_seconds))
        self.links[-1].is_cut = is_cut
        coordination = CoordinationOptions(
            store="memory://unused",
            max_workers=max_workers,
            interval_seconds=self.interval_seconds,
            worker_id=f"w{len(self.links)}",
        )
        config = Config(
            coordination=coordination,
            aggregation_enabled=False,
            record_ttl_ms=120_000,
            max_outstanding_records=50,
            rate_limit_records_per_sec_per_shard=self.limit,
            rate_limit_bytes_per_sec_per_shard=BYTES_LIMIT,
        )
        self.producers.append(
            Producer(config, transport=self.transport, hooks=[self._hear], coordination_store=self.links[-1])
        )
        return self.producers[-1]

    async def run(
        self,
        *loads: Callable[[Producer], Awaitable[Any]],
        seconds: float,
        max_workers: int = 0,
        cut_off: int = 0,
    ) -> None:
        """Run one producer for each load; the first `cut_off` of them never reach the store."""

        async def one(load: Callable[[Producer], Awaitable[Any]]) -> None:
            is_cut = len(self.links) < cut_off
            async with self.producer(max_workers=max_workers or len(loads), is_cut=is_cut) as producer:
                with anyio.move_on_after(seconds):
                    await load(producer)
                    await anyio.sleep_forever()
                await producer.close(timeout=0.1)

        async with anyio.create_task_group() as producers:
            for load in loads:
                producers.start_soon(one, load)

    def shares(self) -> float:
        """Return the sum of what all producers may send to the busiest shard, as a share of its limit."""
        sums: Counter[str] = Counter()
        for producer in self.producers:
            assert producer.coordination is not None
            sums.update(producer.coordination.shares())
        return max(value for name, value in sums.items() if name.endswith("records"))

    @staticmethod
    def _between(counts: list[tuple[float, int]], start: float, end: float) -> int:
        return sum(count for at, count in counts if start <= at < end)

    def attempted(self, start: float, end: float) -> float:
        """Return the records sent between two instants, as a share of one shard's limit."""
        return self._between(self.sent, start, end) / ((end - start) * self.limit)

    def used(self, start: float, end: float) -> float:
        """Return the records accepted between two instants, as a share of one shard's limit."""
        return self.attempted(start, end) - self._between(self.throttled, start, end) / ((end - start) * self.limit)


async def press(producer: Producer, *, shard: int = 0, seconds: float = 1e9) -> None:
    """Put as fast as there is room."""
    key, end = key_of(shard), anyio.current_time() + seconds
    while anyio.current_time() < end:
        _ = await producer.put(STREAM, partition_key=key, data=b"x" * 20)


async def greet(producer: Producer) -> None:
    """Put some records for each shard, and nothing afterwards."""
    for shard in range(SHARDS):
        await press(producer, shard=shard, seconds=1.0)


@pytest.mark.long
async def test_idle_producers_leave_the_limit_to_a_busy_one():
    fleet = Fleet()

    async def busy(producer: Producer) -> None:
        await greet(producer)
        await press(producer)

    await fleet.run(busy, *[greet] * 7, seconds=40.0)
    # An idle producer gives a shard up after six seconds. Fifteen seconds later it would have claimed it twice again.
    assert fleet.used(20.0, 40.0) >= 0.93
    assert min(fleet.used(start, start + 1.0) for start in range(20, 40)) >= 0.9


@pytest.mark.long
@pytest.mark.parametrize("interval_seconds", [1.0, 5.0])
async def test_a_backlog_has_what_seven_others_leave_and_they_are_served_when_they_send_more(interval_seconds):
    # The service's own limit: at a tenth, one record more in a measurement is a tenth more.
    fleet = Fleet(interval_seconds=interval_seconds, limit=1_000.0)
    waits: list[tuple[float, float]] = []

    async def modest(producer: Producer) -> None:
        await anyio.sleep(random.random())
        async with anyio.create_task_group() as tasks:
            while True:
                began_at = anyio.current_time()
                delivery = await producer.put(STREAM, partition_key=key_of(0), data=b"x" * 20)
                tasks.start_soon(note, delivery, began_at)
                rate = fleet.limit / 8 * (0.8 if began_at < 25.0 else 0.96)
                await anyio.sleep(max(0.0, began_at + 1.0 / rate - anyio.current_time()))

    async def note(delivery: Delivery, began_at: float) -> None:
        _ = await delivery
        waits.append((began_at, anyio.current_time() - began_at))

    await fleet.run(press, *[modest] * 7, seconds=35.0)
    assert fleet.used(15.0, 25.0) >= 0.93
    assert fleet.attempted(15.0, 25.0) <= 1.0
    # A record waits for at most a tenth of a second before it is sent.
    assert max(wait for began_at, wait in waits if 15.0 <= began_at < 25.0) <= 0.15
    assert max(wait for began_at, wait in waits if 25.0 <= began_at < 34.0) <= 0.3


@pytest.mark.parametrize("bursting", [1, 4, 8])
@pytest.mark.parametrize("instant", [60.0, 61.3, 63.7])
async def test_a_burst_after_idle_time_uses_the_limit_within_a_second(bursting, instant):
    """The interval is five seconds, and each call of the store takes 50 ms. Each producer is busy on another shard."""
    fleet = Fleet(interval_seconds=5.0, latency_seconds=0.05)

    async def idle(producer: Producer) -> None:
        await greet(producer)
        while True:
            _ = await producer.put(STREAM, partition_key=key_of(1), data=b"x" * 20)
            await anyio.sleep(2.0)

    async def burst(producer: Producer) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(idle, producer)
            await anyio.sleep(instant)
            fleet.sent.clear()
            tasks.cancel_scope.cancel()
        await press(producer)

    await fleet.run(*[burst] * bursting, *[idle] * (8 - bursting), seconds=instant + 6.0)
    windows = [fleet.attempted(instant + start / 4, instant + start / 4 + 1.0) for start in range(20)]
    assert windows[4] >= 0.8
    assert max(windows) <= 1.1
    # Of 63 runs with other jitter two dipped for a second later, to 0.55 and 0.73, with four of eight bursting.
    assert min(windows[4:]) >= 0.5
    assert sum(windows[4:]) / len(windows[4:]) >= 0.75


@pytest.mark.long
@pytest.mark.parametrize("max_workers", [8, 64])
@pytest.mark.parametrize("cut_off", [4, 8])
async def test_a_cut_off_half_of_the_fleet_yields_to_throttling_and_a_dead_store_changes_nothing(max_workers, cut_off):
    """A shard takes a burst of a second above its limit, so throttling begins two seconds after the overload."""
    fleet = Fleet(interval_seconds=5.0)
    sums: list[float] = []

    async def busy(producer: Producer) -> None:
        await press(producer)

    async def cut(producer: Producer) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(press, producer)
            await anyio.sleep(15.0)
            for link in fleet.links[:cut_off]:
                link.is_cut = True
            await anyio.sleep(20.0)
            while True:
                await anyio.sleep(0.5)
                sums.append(fleet.shares())

    await fleet.run(cut, *[busy] * 7, seconds=50.0, max_workers=max_workers)
    # From three intervals after the cut on.
    seconds = [30.0 + start / 2 for start in range(30)]
    assert max(fleet.attempted(second, second + 5.0) for second in seconds) <= 1.1
    assert min(fleet.used(second, second + 5.0) for second in seconds) >= 0.8
    assert max(sums) <= 1.15


async def test_a_lone_producer_without_a_store_since_the_start_soon_has_the_whole_limit():
    fleet = Fleet(interval_seconds=5.0)
    await fleet.run(press, seconds=25.0, max_workers=64, cut_off=1)
    assert fleet.used(10.0, 15.0) >= 0.9
    assert fleet.attempted(15.0, 25.0) <= 1.0


@pytest.mark.long
@pytest.mark.parametrize("count", [8, 64])
async def test_without_a_store_since_the_start_the_shard_decides(count):
    fleet = Fleet(interval_seconds=5.0)
    await fleet.run(*[press] * count, seconds=60.0, max_workers=64, cut_off=count)
    windows = [fleet.attempted(15.0 + start, 20.0 + start) for start in range(40)]
    assert max(windows) <= 1.2
    assert min(windows) >= 0.4


@pytest.mark.long
async def test_a_producer_that_starts_cut_off_while_others_hold_leases_yields_to_throttling():
    fleet = Fleet(interval_seconds=5.0)

    async def late(producer: Producer) -> None:
        await anyio.sleep(15.0)
        await press(producer)

    await fleet.run(late, *[press] * 7, seconds=60.0, max_workers=8, cut_off=1)
    assert max(fleet.attempted(30.0 + start, 35.0 + start) for start in range(25)) <= 1.2
