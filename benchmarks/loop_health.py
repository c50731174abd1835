"""Measure how long the producer blocks its event loop under a steady load.

    python -m benchmarks.loop_health [--seconds 30]

The default producer through its real transport to LocalKinesis in another process. A step is one
callback of the loop, by CPU time of the thread. On a shared machine wall time also measures other
programs, so it is only printed, as the lateness of a heartbeat, and has no bound. Garbage
collections are measured separately. A full one traverses all tracked objects of the process. Nine
tenths of them are imported modules and botocore's model of the service, and none are records.
`gc.freeze()` after the imports excludes them, so the benchmark runs twice, without and with it.
Exits 1 if a step, or with `gc.freeze()` a step or a collection, takes more than 20 ms.
"""

import argparse
import asyncio
import gc
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.machine import calibration_ms, cores, describe_machine, pin_to
from benchmarks.pacing import StepWatch
from benchmarks.steady_load import RECORDS_PER_SECOND, SHARDS, config_for, put_steadily
from benchmarks.watched_kinesis import watched_kinesis
from kpl_core import Producer

__all__ = ["main"]

MOST_MS = 20.0
_HEARTBEAT_SECONDS = 0.002
_WARM_UP_SECONDS = 3


@dataclass
class Collections:
    """The garbage collections of a run: how many of each generation, and the longest in milliseconds."""

    counts: Counter[int] = field(default_factory=Counter)
    longest_ms: dict[int, float] = field(default_factory=dict)
    _began_at: float = 0.0

    def note(self, phase: str, information: dict[str, int]) -> None:
        if phase == "start":
            self._began_at = time.thread_time()
            return
        generation, taken_ms = information["generation"], (time.thread_time() - self._began_at) * 1000
        self.counts[generation] += 1
        self.longest_ms[generation] = max(self.longest_ms.get(generation, 0.0), taken_ms)


async def heartbeat(lateness: list[float]) -> None:
    """Record by how much each beat is late, in seconds of wall time."""
    loop = asyncio.get_running_loop()
    while True:
        due_at = loop.time() + _HEARTBEAT_SECONDS
        await asyncio.sleep(_HEARTBEAT_SECONDS)
        lateness.append(loop.time() - due_at)


async def watch(endpoint_url: str, seconds: int, *, freeze: bool) -> list[str]:
    """Run the load, print the figures, and return the broken bounds."""
    collections, lateness = Collections(), list[float]()
    async with Producer(config_for(endpoint_url)) as producer:
        await put_steadily(producer, _WARM_UP_SECONDS)
        gc.collect()
        if freeze:
            gc.freeze()
        tracked = len(gc.get_objects())
        beating = asyncio.ensure_future(heartbeat(lateness))
        gc.callbacks.append(collections.note)
        with StepWatch() as steps:
            await put_steadily(producer, seconds)
        # A separate step, so that the following code is not part of the last measured one.
        await asyncio.sleep(0)
        # There may have been no full collection, so measure one now.
        gc.collect()
        gc.callbacks.remove(collections.note)
        beating.cancel()
        report = await producer.flush()
        assert report.failed_total == 0, f"{report}"
    if freeze:
        gc.unfreeze()
    lateness.sort()
    figures = steps.figures()
    full_by_themselves = collections.counts[2] - 1
    print(f"{'with' if freeze else 'without'} gc.freeze(): {seconds} s, {report.delivered:,} records")
    print(f"  longest step        {figures['longest_step_ms']:.1f} ms of CPU, without collections")
    print(
        f"  full collection     {collections.longest_ms[2]:.1f} ms for {tracked:,} objects; {full_by_themselves} came"
    )
    print(
        f"  young collections   {collections.counts[0] + collections.counts[1]}, {_longest_young(collections):.1f} ms"
    )
    print(f"  heartbeat late      {_late(lateness, 0.5)}, p99 {_late(lateness, 0.99)}, longest {_late(lateness, 1.0)}")
    longest = figures["longest_step_ms"] + (max(collections.longest_ms.values()) if freeze else 0.0)
    return [f"blocked for {longest:.1f} ms, more than {MOST_MS:.0f}"] if longest > MOST_MS else []


def _longest_young(collections: Collections) -> float:
    return max(collections.longest_ms.get(0, 0.0), collections.longest_ms.get(1, 0.0))


def _late(ordered: list[float], quantile: float) -> str:
    return f"{ordered[min(len(ordered) - 1, int(len(ordered) * quantile))] * 1000:.1f} ms"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loop_health", description=__doc__)
    parser.add_argument("--seconds", type=int, default=30)
    options = parser.parse_args(arguments)
    producer_cpu, service_cpu = cores()[0]
    print(f"{describe_machine()}; a fixed loop takes {calibration_ms():.0f} ms")
    print(f"{RECORDS_PER_SECOND:,} records/s of 1 KiB, {SHARDS} shards")
    broken: list[str] = []
    with watched_kinesis(shards=SHARDS, enforce_limits=True, retention_seconds=5.0, cpu=service_cpu) as kinesis:
        pin_to(producer_cpu)
        for freeze in (False, True):
            broken += asyncio.run(watch(kinesis.endpoint_url, options.seconds, freeze=freeze))
    print("\n".join(broken) or "Every bound holds.")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
