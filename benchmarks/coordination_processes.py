"""Four real processes on one stream of two shards, in real time: with and without coordination through a folder.

python -m benchmarks.coordination_processes                 both, one after the other, about a minute
python -m benchmarks.coordination_processes --seconds 60    longer

Each process puts as fast as its producer accepts records. Aggregation is off, so the limit on records
matters. Counting starts after a third of the time, when the leases are stable.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time

import anyio

from kpl_core import Config, CoordinationOptions, Producer
from kpl_core.hooks import Fact, RequestCompleted
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis

WORKERS = 4
SHARDS = 2
STREAM = "orders"
RECORDS_PER_SECOND = 1_000 * SHARDS


def main() -> int:
    parser = argparse.ArgumentParser("coordination_processes", description=__doc__)
    parser.add_argument("--seconds", type=float, default=24.0)
    parser.add_argument("--worker", nargs=3, metavar=("ENDPOINT", "STORE", "BEGINS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        endpoint_url, store, begins = arguments.worker
        counts = anyio.run(_produce, endpoint_url, store, float(begins), arguments.seconds)
        print(json.dumps(counts))
        return 0
    for coordinated in (False, True):
        print(_described(_measure(arguments.seconds, coordinated=coordinated), arguments.seconds, coordinated))
    return 0


def _measure(seconds: float, *, coordinated: bool) -> list[dict[str, float]]:
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadedLocalKinesis(LocalKinesis({STREAM: SHARDS})) as kinesis,
    ):
        store = f"file://{folder}/store" if coordinated else ""
        # Long enough for the slowest process to start.
        begins = str(time.time() + 6.0)
        environment = os.environ | {"AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local"}
        command = [sys.executable, "-m", "benchmarks.coordination_processes", "--seconds", str(seconds), "--worker"]
        processes = [
            subprocess.Popen([*command, kinesis.endpoint_url, store, begins], stdout=subprocess.PIPE, env=environment)
            for _ in range(WORKERS)
        ]
        answers: list[dict[str, float]] = []
        threads = [
            threading.Thread(target=lambda process=process: answers.append(json.loads(process.communicate()[0])))
            for process in processes
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers


def _described(answers: list[dict[str, float]], seconds: float, coordinated: bool) -> str:  # noqa: FBT001
    sent = sum(answer["sent"] for answer in answers)
    throttled = sum(answer["throttled"] for answer in answers)
    measured = seconds * 2 / 3
    used = (sent - throttled) / (measured * RECORDS_PER_SECOND)
    name = "coordinated" if coordinated else "uncoordinated"
    each = ", ".join(f"{answer['sent'] - answer['throttled']:,.0f}" for answer in answers)
    return (
        f"{name}: {throttled / max(sent, 1):.2%} of {sent:,.0f} Kinesis records throttled, "
        f"{used:.1%} of the capacity of {SHARDS} shards used; delivered by each process: {each}"
    )


async def _produce(endpoint_url: str, store: str, begins: float, seconds: float) -> dict[str, float]:
    counts = {"sent": 0.0, "throttled": 0.0}
    # All processes count the same seconds, independent of their start times.
    counts_from, ends = begins + seconds / 3, begins + seconds

    def hear(fact: Fact) -> None:
        if isinstance(fact, RequestCompleted) and counts_from <= time.time() < ends:
            counts["sent"] += fact.kinesis_records
            counts["throttled"] += sum(fact.throttled_by_shard.values())

    coordination = CoordinationOptions(store=store, max_workers=WORKERS, interval_seconds=1.0) if store else None
    config = Config(
        region="us-east-1",
        endpoint_url=endpoint_url,
        aggregation_enabled=False,
        record_ttl_ms=600_000,
        max_outstanding_records=2_000,
        coordination=coordination,
    )
    await anyio.sleep(max(0.0, begins - time.time()))
    async with Producer(config, hooks=[hear]) as producer:
        number = 0
        while time.time() < ends:
            number += 1
            _ = await producer.put(STREAM, partition_key=str(number), data=b"x" * 50)
        await producer.close(timeout=0.1)
    return counts


if __name__ == "__main__":
    sys.exit(main())
