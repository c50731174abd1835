"""Measure memory and objects under a steady load, to detect leaks.

    python -m benchmarks.steady_memory [--seconds 60]

The default producer through its real transport to LocalKinesis in another process. After the warm-up
the resident set and the objects the garbage collector tracks are sampled every five seconds. Exits 1 if
one of them grows by more than the bounds from the first half of the run to the second.
"""

import argparse
import asyncio
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import cores, describe_machine, pin_to
from benchmarks.steady_load import RECORDS_PER_SECOND, SHARDS, config_for, put_steadily
from benchmarks.trial import peak_rss_bytes
from benchmarks.watched_kinesis import watched_kinesis
from kpl_core import Producer
from kpl_core.options.kinesis_limits import MIB

__all__ = ["main"]

WARM_UP_SECONDS = 10
SAMPLE_EVERY_SECONDS = 5
MOST_GROWTH_MIB = 1.0
MOST_MORE_OBJECTS = 500


def rss_bytes() -> int:
    """Return the resident set now; where only the peak is known, the peak."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else peak_rss_bytes()


async def watch(endpoint_url: str, seconds: int) -> list[tuple[int, float, int]]:
    """Return (second, resident MiB, tracked objects), sampled after the warm-up."""
    samples: list[tuple[int, float, int]] = []

    async def sample(second: int) -> None:
        if second > WARM_UP_SECONDS and second % SAMPLE_EVERY_SECONDS == 0:
            # Records in flight are in every sample; free the garbage before each.
            gc.collect()
            samples.append((second, rss_bytes() / MIB, len(gc.get_objects())))
            print(f"  {second:3d} s  {samples[-1][1]:7.2f} MiB  {samples[-1][2]:,} objects", flush=True)

    async with Producer(config_for(endpoint_url)) as producer:
        count = await put_steadily(producer, WARM_UP_SECONDS + seconds, sample)
        report = await producer.flush()
        assert report.delivered == count, f"{report}"
        assert producer.buffer_limit.outstanding_bytes == 0
    return samples


def growth(values: Sequence[float]) -> float:
    """Return by how much the minimum of the second half exceeds that of the first half, without records in flight."""
    middle = len(values) // 2
    return min(values[middle:]) - min(values[:middle])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steady_memory", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60)
    options = parser.parse_args(arguments)
    producer_cpu, service_cpu = cores()[0]
    print(f"{describe_machine()}; {RECORDS_PER_SECOND:,} records/s of 1 KiB, {SHARDS} shards")
    with watched_kinesis(shards=SHARDS, enforce_limits=True, retention_seconds=5.0, cpu=service_cpu) as kinesis:
        pin_to(producer_cpu)
        samples = asyncio.run(watch(kinesis.endpoint_url, options.seconds))
    more_mib, more_objects = growth([sample[1] for sample in samples]), growth([sample[2] for sample in samples])
    print(f"grew by {more_mib:.2f} MiB (bound {MOST_GROWTH_MIB}), {more_objects:+,.0f} objects ({MOST_MORE_OBJECTS})")
    return 1 if more_mib > MOST_GROWTH_MIB or more_objects > MOST_MORE_OBJECTS else 0


if __name__ == "__main__":
    sys.exit(main())
