"""A producer with a spool in the world: service and disk fail, and at one instant the power is cut; all by one seed.

The spool is the real one, on a real SQLite file (`disk.py`). After the story, two more producers open what is left: the
file itself, and the copy that the power cut left. Each delivers what it finds.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kpl_core import BreakerPolicy, BufferFull, Config, Delivery, NotSpooled, Producer, ProducerReport, SpoolOptions
from kpl_core.durability.durable_ledger import MOST_PENDING
from kpl_core.testing import FakeKinesis
from kpl_core.testing.fake_transport import FakeTransport
from tests.support.consumers import read_everything
from tests.world.disk import DISK_FAULTS, SLOW_DISK, Disk, copy_of, world_disk
from tests.world.invariants import Ledger, Put, Run, conserved, delivered_is_stored, drained, in_order, shown
from tests.world.network import WHOLE, Less, World
from tests.world.producer_story import STREAM
from tests.world.service_faults import PASSING_FAULTS, arm
from tests.world.world_loop import run_in_world, world_loop

STORY_SECONDS = 30.0
MOST_RECORDS = 3_000


class SpoolStory:
    """The story; `letters_story.py` continues it."""

    possible_faults: Iterable[str] = PASSING_FAULTS

    def __init__(self, world: World, disk: Disk, folder: Path) -> None:
        chance = world.chance
        self.world, self.chance, self.disk, self.folder = world, chance, disk, folder
        self.path = folder / "spool.db"
        self.service_faults = world.drawn(self.possible_faults, 0.2)
        self.disk_faults = world.drawn((*DISK_FAULTS, SLOW_DISK), 0.4)
        self.until = min(STORY_SECONDS, world.less.seconds)
        self.writes_ahead = chance.random() < 0.5
        self.ttl_ms = chance.choice([2_000.0, 10_000.0])
        self.options: dict[str, Any] = {
            "aggregation_enabled": chance.random() < 0.6,
            "max_outstanding_records": chance.choice([50, 1_000]),
            "record_ttl_ms": self.ttl_ms,
            "request_timeout_ms": chance.choice([500, 2_000]),
            "connect_timeout_ms": 500,
            "ordering": chance.choice(["none", "none", "per_key"]),
            "breaker": BreakerPolicy() if chance.random() < 0.7 else None,
        }
        self.commit_ms = chance.choice([1.0, 20.0])
        self.failure: Any = chance.choice(["fail", "bypass", "refuse"]) if self.writes_ahead else "fail"
        self.kinesis = FakeKinesis({STREAM: chance.choice([1, 3])}, chance=chance.random)
        self.transport = FakeTransport(self.kinesis, latency_seconds=chance.choice([0.002, 0.05]))
        self.ledger = Ledger()
        # Records of which a client knows that they are on the disk, before the power cut.
        self.durable: list[Put] = []
        self.is_cut = False
        self.false: list[str] = []

    def config(self, path: Path) -> Config:
        mode: Any = "write_ahead" if self.writes_ahead else "overflow"
        spool = SpoolOptions(path=path, mode=mode, commit_interval_ms=self.commit_ms, failure=self.failure)
        return Config(region="us-east-1", spool=spool, **self.options)

    def check(self, producer: Producer) -> None:
        if not self.false:
            report = producer.report()
            self.false += conserved(report, self.ledger)
            limit = producer.config.max_outstanding_records
            if report.buffered > limit + max(MOST_PENDING, limit):
                self.false.append(f"{report.buffered} records buffered or waiting for the disk, of {limit}")

    async def client(self, producer: Producer, name: str, until: float) -> None:
        chance = self.chance
        rate, waits = chance.choice([5.0, 50.0, 400.0]), chance.random() < 0.5
        keys = chance.choice([1, 10])
        while self.world.now() < until and len(self.ledger.puts) < MOST_RECORDS:
            put = self.ledger.made(f"{name}, {chance.randrange(keys)}", chance.choice([20, 500]))
            delivery: Delivery | None = None
            try:
                if waits:
                    delivery = await producer.put(STREAM, **put.arguments())
                else:
                    delivery = producer.put_nowait(STREAM, **put.arguments())
            except (BufferFull, NotSpooled):
                self.ledger.refused(put)
            else:
                self.ledger.accepted(put, delivery)
                # With "bypass" a put also returns when its record goes straight to Kinesis.
                if waits and self.writes_ahead and self.failure != "bypass" and not self.is_cut:
                    self.durable.append(put)
            self.check(producer)
            await asyncio.sleep(chance.expovariate(rate))

    async def faults(self, until: float) -> None:
        chance, world = self.chance, self.world
        while self.service_faults and world.now() < until:
            seconds = min(chance.expovariate(0.2), until - world.now())
            arm(self.kinesis.faults, chance.choice(self.service_faults), chance, now=world.now(), seconds=seconds)
            await asyncio.sleep(chance.expovariate(0.3))

    async def power_cut(self) -> None:
        await asyncio.sleep(self.chance.uniform(1.0, self.until))
        self.is_cut = True
        self.durable += [put for put, result in self.ledger.with_results() if result.kept == "spooled"]
        _ = copy_of(self.path, self.folder / "cut.db")

    async def tell(self) -> None:
        async with Producer(self.config(self.path), transport=self.transport) as producer:
            async with asyncio.TaskGroup() as tasks:
                _ = tasks.create_task(self.faults(self.until))
                _ = tasks.create_task(self.disk.trouble(self.disk_faults, self.world, self.until))
                _ = tasks.create_task(self.power_cut())
                _ = tasks.create_task(self.world.befall(self.until))
                for number in range(min(self.chance.randint(1, 3), self.world.less.clients)):
                    _ = tasks.create_task(self.client(producer, f"client {number}", self.until))
            self.kinesis.faults.clear()
            self.false += await self.settled(producer)
            self.check(producer)
            report = await producer.close()
        if not report.complete:
            self.false.append(f"nothing was left, and the close was not complete: {report}")
        self.after_close(report)
        await self.replayed(self.path)
        kept = [put for put, result in self.ledger.with_results() if result.kept == "spooled"]
        self.arrived("said to be in the spool", kept)
        await self.replayed(self.folder / "cut.db")
        self.arrived("on the disk before the power cut", self.durable)

    async def settled(self, producer: Producer) -> list[str]:
        """Wait without faults until nothing more leaves by itself."""
        return await drained(producer)

    async def replayed(self, path: Path) -> None:
        """Let a producer deliver what is in a spool."""
        async with Producer(self.config(path), transport=self.transport) as producer:
            self.false += await drained(producer)

    def arrived(self, what: str, puts: list[Put]) -> None:
        there = {read.data for read in read_everything(self.kinesis, STREAM)}
        missing = [put.number for put in puts if put.data not in there]
        if missing:
            self.false.append(f"{what} and never delivered: {shown(missing)}")

    def after_close(self, report: ProducerReport) -> None:
        without = [put.number for put in self.ledger.puts if put.delivery is not None and put.delivery.peek() is None]
        if without:
            self.false.append(f"no result: {shown(without)}")
        self.false += delivered_is_stored(self.ledger, self.kinesis, STREAM, self.world.now())
        if self.options["ordering"] == "per_key":
            # What stays in the spool comes later than new records of its key.
            passed = {put.data for put, result in self.ledger.with_results() if result.successful}
            self.false += in_order(self.ledger, self.kinesis, STREAM, self.world.now(), among=passed)
        if (
            report.buffered
            or report.accepted != report.delivered + report.failed_total + report.spooled + report.dead_lettered
        ):
            self.false.append(f"the books do not close: {report}")


def run_spool_story(seed: int, less: Less = WHOLE, story: type[SpoolStory] = SpoolStory) -> Run:
    """Run the story of a seed."""
    random.seed(seed)
    with world_disk() as (disk, folder):
        return run_in_world(lambda: _tell(story(World(seed, less), disk, folder)))


async def _tell(story: SpoolStory) -> Run:
    await story.tell()
    outcomes = Counter(result.error_code or "delivered" for _, result in story.ledger.with_results())
    return Run(
        story.service_faults + story.disk_faults + story.world.own_faults,
        story.world.now(),
        len(story.ledger.puts),
        len(story.transport.requests),
        outcomes,
        story.false,
        *world_loop().trace(),
    )
