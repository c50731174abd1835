"""Measure one summary for 10,000 workers on 1,000 shards, ten each: its CPU time, its size and its calls."""

import random
import time
from collections.abc import Callable
from typing import Any

from benchmarks.coordination_fleet import SimulatedStore, finished
from kpl_core.coordination.lease_sync import REPORT_PREFIX, SUMMARY_NAME, SummaryWriter
from kpl_core.coordination.lease_table import TableRules
from kpl_core.coordination.store_objects import Claim, Summary, WorkerReport, decode, encode

__all__ = ["filled_store", "measure", "summarise"]

LIMIT = (1_000.0, 1_048_576.0)
SHARDS_OF_A_WORKER = 10


def filled_store(worker_count: int, shard_count: int, *, at: float = 1_000.0) -> tuple[SimulatedStore, list[float]]:
    """Return a store with every worker's report, and its clock."""
    clock = [at]
    store = SimulatedStore(lambda: clock[0])
    chance = random.Random(7)
    for index in range(worker_count):
        claims = {
            f"orders/shardId-{shard:012d}": Claim(
                (chance.uniform(0, 50), chance.uniform(0, 50_000)), (0.1, 100.0), LIMIT, 10.0, 0.0
            )
            for shard in chance.sample(range(shard_count), min(SHARDS_OF_A_WORKER, shard_count))
        }
        report = WorkerReport(
            worker_id=f"worker-{index}", written_at=at, generation=0, claims=claims, max_workers=worker_count
        )
        finished(store.write(f"{REPORT_PREFIX}{report.worker_id}.json", encode(report)))
    return store, clock


def summarise(store: SimulatedStore, at: float) -> Any:  # noqa: ANN401
    """Compute the next summary as a worker does; return it."""
    reading = finished(store.read(SUMMARY_NAME))
    head = None if reading.body is None else decode(reading.body, Summary)
    writer = SummaryWriter(store, TableRules(interval_seconds=5.0), lambda *_: None)
    summary = finished(writer.compute(head, reading.version, at=at))
    finished(writer.remove_old())
    return summary


def _timed(function: Callable[[], Any]) -> float:
    # CPU time, which excludes other programs.
    began = time.process_time()
    function()
    return time.process_time() - began


def measure(worker_count: int = 10_000, shard_count: int = 1_000) -> list[str]:
    """Return the lines to print."""
    store, clock = filled_store(worker_count, shard_count)
    summarise(store, clock[0])
    rounds = []
    for _ in range(5):
        clock[0] += 1.0
        rounds.append(_timed(lambda: summarise(store, clock[0])))
    store.calls.clear()
    clock[0] += 1.0
    summarise(store, clock[0])
    head = finished(store.read(SUMMARY_NAME)).body
    parts = finished(store.read_all("part-")).bodies
    largest = max(map(len, parts.values()))
    return [
        f"{worker_count:,} workers on {shard_count:,} shards, {SHARDS_OF_A_WORKER} each",
        f"one summary, reports decoded and parts encoded: {min(rounds):.2f} - {max(rounds):.2f} CPU-seconds",
        f"its head {len(head):,} bytes, {decode(head, Summary).part_count} parts of up to {largest:,} bytes",
        f"calls: {dict(store.calls)}; each worker in addition: 2 reads and 1 write an interval",
    ]
