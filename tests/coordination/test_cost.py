"""The cost of coordination: calls counted over minutes of a settled fleet, and the table of the documentation."""

import random
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.coordination_fleet import finished
from kpl_core.coordination.demand import Usage
from kpl_core.coordination.lease_sync import LeaseSync
from kpl_core.coordination.leaseholder import HolderRules, Leaseholder
from kpl_core.coordination.store import Listing, MemoryStore, Reading, Written

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "coordination.md"
INTERVAL = 5.0
MINUTES = 5
# Dollars, us-east-1, November 2025: S3 standard and DynamoDB on demand.
S3_PUT, S3_GET = 5.0e-6, 0.4e-6
DYNAMODB_WRITE, DYNAMODB_READ = 0.625e-6, 0.125e-6


class Cost(NamedTuple):
    """Calls per worker and hour."""

    reads: float
    writes: float
    read_by_computing: float
    s3: float
    dynamodb: float


class CountingStore(MemoryStore):
    def __init__(self, clock) -> None:
        super().__init__(clock)
        self.forget()

    def forget(self) -> None:
        self.reads = self.writes = self.lists = self.listed = 0
        self.read_units = self.write_units = 0

    async def read(self, name: str) -> Reading:
        reading = await super().read(name)
        self.reads += 1
        self.read_units += -(-max(1, len(reading.body or b"")) // 4096)
        return reading

    async def write(self, name: str, body: bytes, *, expected: str | None = None) -> Written:
        self.writes += 1
        self.write_units += -(-len(body) // 1024)
        return await super().write(name, body, expected=expected)

    async def read_all(self, prefix: str) -> Listing:
        listing = await super().read_all(prefix)
        self.lists += 1
        self.listed += len(listing.bodies)
        self.read_units += -(-sum(map(len, listing.bodies.values())) // 4096)
        return listing


@cache
def measured(workers: int, shards: int = 2) -> Cost:
    now = [1_000_000.0]
    chance = random.Random(1)
    store = CountingStore(lambda: now[0])
    rules = [
        HolderRules(worker_id=f"worker-{index:04d}", interval_seconds=INTERVAL, max_workers=workers)
        for index in range(workers)
    ]
    fleet = []
    for each in rules:
        holder = Leaseholder(each)
        meeting = LeaseSync(
            store,
            holder,
            may_compute=True,
            on_problem=lambda *_: None,
        )
        fleet.append((holder, meeting, now[0] + chance.uniform(0, 1)))
    usual = [INTERVAL] * workers

    def pass_by(seconds: float) -> None:
        end = now[0] + seconds
        while now[0] < end:
            now[0] += 0.25
            for index, (holder, meeting, began) in enumerate(fleet):
                if not holder.sync_due(now[0], usual_seconds=usual[index]) or now[0] < began:
                    continue
                offered = (now[0] - began) * 400.0
                usage = Usage((1_000.0, 1_048_576.0), (offered, offered * 1_000))
                holder.measure({f"orders/shardId-{shard:012d}": usage for shard in range(shards)}, now[0])
                usual[index] = INTERVAL * chance.uniform(0.9, 1.1)
                finished(meeting.sync(lambda: now[0], lambda: now[0]))

    pass_by(12 * INTERVAL)
    store.forget()
    pass_by(MINUTES * 60)
    hours = workers * MINUTES / 60
    s3 = (store.reads + store.listed) * S3_GET + (store.writes + store.lists * -(-workers // 1_000)) * S3_PUT
    dynamodb = store.read_units * DYNAMODB_READ + store.write_units * DYNAMODB_WRITE
    return Cost(
        store.reads / hours, store.writes / hours, (store.listed + store.lists) / hours, s3 / hours, dynamodb / hours
    )


def rows() -> dict[int, list[float]]:
    """Return the documented table: the number of workers -> the other cells."""
    found = re.findall(r"^\| (\d+) \| (.+?) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {
        int(workers): [float(cell.strip().removeprefix("$").replace(",", "")) for cell in cells.split("|")]
        for workers, cells in found
    }


@pytest.mark.parametrize("workers", [4, 20, 100])
def test_the_documented_table_agrees_with_the_counted_calls(workers):
    cost = measured(workers)
    assert rows()[workers] == pytest.approx(list(cost), rel=0.1)


def test_the_calls_per_worker_do_not_grow_with_the_fleet():
    # Per worker and hour: the same in a fleet five times as large.
    small, large = measured(20), measured(100)
    assert large.reads + large.writes <= 1.1 * (small.reads + small.writes)
    assert large.read_by_computing <= 1.3 * small.read_by_computing
