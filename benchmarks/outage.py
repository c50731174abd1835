"""Measure an outage under steady load: 10 s of answers with 500, 5 s of refused connections, then recovery.

    python -m benchmarks.outage

2,000 records of 1 KiB a second on 64 shards, before, during and after; the default producer except for
its time to live. Prints the CPU of the producing process in each part (the part before the outage shows the cost of
the load itself), its resident set, the time until all records are delivered, and the number of shard
listings. Exits 1 if a record is lost, the outage costs more than 20 % of a core, memory is not
released, or the shards were listed more than once.
"""

import argparse
import asyncio
import ctypes
import gc
import sys
import time
from collections.abc import Sequence

from benchmarks.machine import calibration_ms, cores, describe_machine, pin_to
from benchmarks.steady_load import RECORDS_PER_SECOND, SHARDS, config_for, put_steadily
from benchmarks.steady_memory import rss_bytes
from benchmarks.watched_kinesis import WatchedKinesis, watched_kinesis
from kpl_core import Producer
from kpl_core.options.kinesis_limits import MIB

__all__ = ["main"]

MOST_CPU_SHARE = 0.2
# Above the level before the first outage, after the allocator released free memory.
MOST_MORE_MIB = 15.0
# The faults and their durations.
_WARM_UP_SECONDS = 3
PARTS = (("health", 5), ("fail", 10), ("refuse", 5))


def _resident_mib() -> float:
    """Return the resident set without garbage and without memory that glibc retains."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return rss_bytes() / MIB


async def outage(producer: Producer, kinesis: WatchedKinesis) -> tuple[dict[str, float], int]:
    """Run the parts; return the CPU share of each, and how many records were put."""
    shares: dict[str, float] = {}
    count = 0
    for part, seconds in PARTS:
        kinesis.ask(part)
        cpu_before, wall_before = time.process_time(), time.monotonic()
        count += await put_steadily(producer, seconds)
        shares[part] = (time.process_time() - cpu_before) / (time.monotonic() - wall_before)
        print(
            f"  {part:8s} {shares[part]:5.0%} of a core  {rss_bytes() / MIB:6.1f} MiB  {producer.report()}", flush=True
        )
    return shares, count


async def run(kinesis: WatchedKinesis) -> list[str]:
    """Run two outages, to separate memory retained once from memory that grows each time; return broken bounds."""
    broken: list[str] = []
    async with Producer(config_for(kinesis.endpoint_url, record_ttl_ms=60_000)) as producer:
        count = await put_steadily(producer, _WARM_UP_SECONDS)
        await producer.flush()
        resident = [_resident_mib()]
        for number in (1, 2):
            print(f"outage {number}")
            shares, put = await outage(producer, kinesis)
            count += put
            kinesis.ask("heal")
            healed_at = time.monotonic()
            report = await producer.flush()
            print(f"  all delivered {time.monotonic() - healed_at:.1f} s after it healed")
            resident.append(_resident_mib())
            broken += [
                f"{part}: {shares[part]:.1%} of a core, more than {MOST_CPU_SHARE:.0%}"
                for part in ("fail", "refuse")
                if shares[part] > MOST_CPU_SHARE
            ]
            if report.delivered != count:
                broken.append(f"{count:,} put, but {report}")
            if producer.buffer_limit.outstanding_records or producer.buffer_limit.outstanding_bytes:
                broken.append(f"{producer.buffer_limit!r}")
    listings = kinesis.ask("counters")["list_shards_requests"]
    print(
        f"  resident before, and after each: {', '.join(f'{each:.1f} MiB' for each in resident)}; listings: {listings}"
    )
    if resident[-1] - resident[0] > MOST_MORE_MIB:
        broken.append(f"{resident[-1] - resident[0]:.1f} MiB more than before")
    if listings != 1:
        broken.append(f"the shards were listed {listings} times")
    return broken


def main(arguments: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(prog="python -m benchmarks.outage", description=__doc__).parse_args(arguments)
    producer_cpu, service_cpu = cores()[0]
    print(f"{describe_machine()}; a fixed loop takes {calibration_ms():.0f} ms")
    print(f"{RECORDS_PER_SECOND:,} records/s of 1 KiB, {SHARDS} shards")
    with watched_kinesis(shards=SHARDS, enforce_limits=True, retention_seconds=120.0, cpu=service_cpu) as kinesis:
        pin_to(producer_cpu)
        broken = asyncio.run(run(kinesis))
        contents = kinesis.ask("contents")
    print(f"  stored: {contents['user_records']:,} user records")
    print("\n".join(broken) or "Every bound holds.")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
