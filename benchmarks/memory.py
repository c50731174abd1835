"""Memory of outstanding user records, garbage collections, and reference cycles.

The transport delays its answers until all records are put, so all are outstanding at once. Only the
producer references the records. The benchmark keeps the deliveries, as a caller would. The bodies of
requests in flight are not included, because the number of those requests is bounded.
"""

import asyncio
import gc
import os
from pathlib import Path
from typing import Any

from benchmarks.end_to_end import producer_config, put_many
from benchmarks.instant_transport import InstantTransport
from benchmarks.pacing import StepWatch
from benchmarks.trial import Trial, peak_rss_bytes
from benchmarks.workload import STREAM_NAME
from kpl_core import Delivery, Producer

# After this every open aggregated record has reached its deadline, 100 ms, and waits for its request.
_SETTLE_SECONDS = 0.3


async def outstanding(producer: Producer, trial: Trial, transport: InstantTransport) -> dict[str, Any]:
    """Return bytes and tracked objects of an outstanding record, and the longest collection meanwhile."""
    work, watch = trial.workload, StepWatch()
    known_keys = {key: key for index in range(10_000) if (key := work.key_of(index))} if work.keys == "10k" else {}
    deliveries: list[Delivery] = []
    transport.hold()
    gc.collect()
    tracked_before, rss_before = len(gc.get_objects()), _rss_bytes()
    with watch:
        for index in range(work.record_count):
            key = work.key_of(index)
            deliveries.append(
                await producer.put(STREAM_NAME, partition_key=known_keys.get(key, key), data=work.data_of(index))
            )
        await asyncio.sleep(_SETTLE_SECONDS)
    rss_after = _rss_bytes()
    gc.collect()
    tracked_after = len(gc.get_objects())
    transport.release()
    await producer.flush()
    return {
        "acknowledged": sum(delivery.result().successful for delivery in deliveries),
        "overhead_bytes": (rss_after - rss_before) / work.record_count - work.data_bytes,
        "tracked_objects": (tracked_after - tracked_before) / work.record_count,
        "longest_collection_ms": watch.figures()["longest_collection_ms"],
    }


async def cycles(producer: Producer, trial: Trial) -> float:
    """Return the objects per record that only the collector can free, once everything is done."""
    records = trial.measured_records()
    gc.collect()
    gc.disable()
    try:
        await put_many(producer, records)
        return gc.collect() / len(records)
    finally:
        gc.enable()


def _rss_bytes() -> int:
    """Return the resident set now; where only the peak is known, the peak."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else peak_rss_bytes()


async def main() -> None:
    trial = Trial.from_command_line()
    room = {"max_outstanding_records": 10**9, "max_outstanding_bytes": 10**12}
    trial.options = {**trial.options, "config": room}
    transport = InstantTransport(trial.workload.shard_count)
    async with Producer(producer_config(trial), transport=transport) as producer:
        await put_many(producer, trial.warm_up_records())
        figures = await outstanding(producer, trial, transport)
        figures["cycles"] = await cycles(producer, trial)
    trial.add(**figures)
    trial.finish(acknowledged=figures["acknowledged"])


if __name__ == "__main__":
    asyncio.run(main())
