"""A producer in write-ahead mode that runs until it is killed, and prints each acknowledgement.

Usage: python -m tests.chaos.spooling_producer ENDPOINT_URL FILE FIRST_NUMBER. Lines: `a NUMBER`, after
`await put()` returned: the record is acknowledged. On SIGTERM it closes, writes the last metrics that
Prometheus would scrape to FILE.metrics, and prints `closed REPORT`.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from kpl_core import Producer
from kpl_integrations.metrics.prometheus import PrometheusMetrics
from tests.chaos.load import STREAM, config
from tests.support.metrics import watched

WRITERS = 20
# Bounds the records in flight at a kill, and so the duplicates.
MOST_OUTSTANDING = 500


async def main(endpoint_url: str, path: Path, number: int) -> None:
    options = config(endpoint_url, path, "write_ahead", record_ttl_ms=30_000, max_outstanding_records=MOST_OUTSTANDING)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)

    async def write(first: int) -> None:
        own = first
        while not ended.is_set():
            _ = await producer.put(STREAM, partition_key=f"key-{own % 50}", data=b"%d" % own)
            os.write(1, f"a {own}\n".encode())
            own += WRITERS

    metrics = PrometheusMetrics()
    async with Producer(options, hooks=[metrics]) as producer:
        watched(producer, metrics)
        async with asyncio.TaskGroup() as tasks:
            for writer in range(WRITERS):
                tasks.create_task(write(number + writer))
        report = await producer.close(timeout=2.0)
    path.with_name(f"{path.name}.metrics").write_bytes(metrics.exposition()[0])
    os.write(1, f"closed {report}\n".encode())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
