"""Overload a stream of two shards that has the service's own limits.

    python -m benchmarks.pressure [--seconds 30] [--only NAME ...]

Each producer is a process that puts whenever its buffer has space. The service is a process too, and
its own counts of stored and throttled records are used. Prints for each scenario: the share of the limit in use (bytes
for aggregated records of 1 KiB, records for single ones of 100 B), the share of records throttled,
over the whole run and by the second, peak memory and CPU of a producer, and whether the report of
each producer agrees with what is stored. Exits 1 if a bound of `SCENARIOS` is broken.
"""

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import calibration_ms, cores, describe_machine, pin_to
from benchmarks.trial import REGION, peak_rss_bytes
from benchmarks.watched_kinesis import STREAM_NAME, WatchedKinesis, watched_kinesis
from kpl_core import Config, Producer
from kpl_core.options.kinesis_limits import BYTES_PER_SECOND_PER_SHARD, MIB, RECORDS_PER_SECOND_PER_SHARD

__all__ = ["SCENARIOS", "Scenario", "main"]

SHARDS = 2
# After this the throttled share is stable, and two producers have divided the capacity.
SETTLED_AFTER_SECONDS = 5
_RECORDS_PER_PUT_MANY = 100
_RETENTION_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The records, the number of producers, and the bounds as shares of 1.

    `room_seconds` limits the buffer to the records that the shards accept in this time, because records that
    wait longer than their time to live expire. None: the default buffer.
    """

    name: str
    data_bytes: int
    options: dict[str, Any] = field(default_factory=dict)
    producers: int = 1
    least_used: float = 0.97
    most_throttled: float = 0.005
    # After `SETTLED_AFTER_SECONDS`; None: `most_throttled` holds for the whole run, start included.
    most_throttled_settled: float | None = None
    most_rss_mib: int = 400

    @property
    def aggregated(self) -> bool:
        """Return whether bytes are the limiting factor, not records."""
        return bool(self.options.get("aggregation_enabled", True))


_SINGLE: dict[str, Any] = {"aggregation_enabled": False}
SCENARIOS = (
    Scenario(name="aggregated", data_bytes=1024),
    Scenario(name="single", data_bytes=100, options=_SINGLE),
    Scenario(
        name="two-aggregated",
        data_bytes=1024,
        producers=2,
        least_used=0.9,
        most_throttled=1.0,
        most_throttled_settled=0.15,
    ),
    Scenario(
        name="two-single",
        data_bytes=100,
        options=_SINGLE,
        producers=2,
        least_used=0.9,
        most_throttled=1.0,
        most_throttled_settled=0.15,
    ),
    # The default buffer holds more records than two shards accept in a time to live, so the rest would expire.
    Scenario(name="expiring", data_bytes=100, options=_SINGLE | {"record_ttl_ms": 10_000}, least_used=0.9),
)


async def produce(task: dict[str, Any]) -> None:
    """Put whenever the buffer has space until standard input closes; print the report as JSON."""
    pin_to(task["cpu"])
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stopped.set)
    config = Config(
        region=REGION,
        endpoint_url=task["endpoint_url"],
        aws_access_key_id="benchmark",
        aws_secret_access_key="benchmark",  # noqa: S106 - not checked
        **task["options"],
    )
    data, first, number = bytes(task["data_bytes"] - 16), task["name"], 0
    async with Producer(config) as producer:
        while not stopped.is_set():
            records = [(f"{first}-{number + more:014d}", data) for more in range(_RECORDS_PER_PUT_MANY)]
            number += len(records)
            putting = asyncio.ensure_future(producer.put_many(STREAM_NAME, records))
            stopping = asyncio.ensure_future(stopped.wait())
            await asyncio.wait((putting, stopping), return_when=asyncio.FIRST_COMPLETED)
            for waiting in (putting, stopping):
                waiting.cancel()
        report = await producer.close(timeout=1.0)
    cpu_seconds = time.process_time()
    figures = {"delivered": report.delivered, "failed": dict(report.failed), "accepted": report.accepted}
    print(json.dumps({**figures, "rss_bytes": peak_rss_bytes(), "cpu_seconds": cpu_seconds}), flush=True)


def start_producer(scenario: Scenario, name: str, endpoint_url: str, cpu: int | None) -> "subprocess.Popen[str]":
    task = {
        "endpoint_url": endpoint_url,
        "options": scenario.options,
        "data_bytes": scenario.data_bytes,
        "name": name,
        "cpu": cpu,
    }
    command = [sys.executable, "-m", "benchmarks.pressure", "--produce", json.dumps(task)]
    return subprocess.Popen(
        command, cwd=Path(__file__).parent.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def run(scenario: Scenario, seconds: int) -> list[str]:
    """Run one scenario and print its figures; return the bounds it broke."""
    producer_cpu, service_cpu = cores()[0]
    with watched_kinesis(
        shards=SHARDS, enforce_limits=True, retention_seconds=_RETENTION_SECONDS, cpu=service_cpu
    ) as kinesis:
        producers = [
            start_producer(scenario, f"{number}", kinesis.endpoint_url, producer_cpu)
            for number in range(scenario.producers)
        ]
        samples = _sample(kinesis, seconds)
        answers = [json.loads(producer.communicate()[0]) for producer in producers]
        contents = kinesis.ask("contents")
    return _judge(scenario, samples, answers, contents)


def _sample(kinesis: WatchedKinesis, seconds: int) -> list[dict[str, Any]]:
    """Return the service's counters by the second, from the first second with a record."""
    samples = [kinesis.ask("counters")]
    while len(samples) <= seconds:
        time.sleep(1.0)
        sample = kinesis.ask("counters")
        if sample["records_offered"]:
            samples.append(sample)
    return samples


def _used(scenario: Scenario, before: dict[str, Any], after: dict[str, Any]) -> float:
    """Return the share of the shards' limit that was stored between two samples."""
    per_second = BYTES_PER_SECOND_PER_SHARD if scenario.aggregated else RECORDS_PER_SECOND_PER_SHARD
    what = "bytes_stored" if scenario.aggregated else "records_stored"
    return float((after[what] - before[what]) / (after["at"] - before["at"]) / (SHARDS * per_second))


def _throttled(before: dict[str, Any], after: dict[str, Any]) -> float:
    offered = after["records_offered"] - before["records_offered"]
    return (after["records_throttled"] - before["records_throttled"]) / offered if offered else 0.0


def _judge(
    scenario: Scenario, samples: list[dict[str, Any]], answers: list[dict[str, Any]], contents: dict[str, Any]
) -> list[str]:
    settled, last = samples[SETTLED_AFTER_SECONDS], samples[-1]
    used, throttled = _used(scenario, settled, last), _throttled(samples[0], last)
    throttled_settled = _throttled(settled, last)
    by_second = [_throttled(one, other) for one, other in itertools.pairwise(samples)]
    rss_mib = max(answer["rss_bytes"] for answer in answers) / MIB
    delivered = sum(answer["delivered"] for answer in answers)
    unknown = sum(answer["failed"].get("Unknown", 0) for answer in answers)
    expired = sum(answer["failed"].get("Expired", 0) for answer in answers)
    cpu_share = max(answer["cpu_seconds"] for answer in answers) / (len(samples) - 1)
    print(f"{scenario.name}: {len(samples) - 1} s, {scenario.producers} producer(s), {SHARDS} shards")
    print(f"  used        {used:.1%} of the limit, from second {SETTLED_AFTER_SECONDS} on")
    print(
        f"  throttled   {throttled:.2%} of all records, {throttled_settled:.2%} from second {SETTLED_AFTER_SECONDS} on"
    )
    print(f"  by second   {' '.join(f'{share:.1%}' for share in by_second)}")
    print(f"  memory      {rss_mib:.0f} MiB at most in a producer; CPU {cpu_share:.0%} of a core")
    books = {"delivered": delivered, "stored": contents["distinct"], "unknown": unknown, "expired": expired}
    print(f"  books       {', '.join(f'{count:,} {what}' for what, count in books.items())}")
    print(f"  duplicates  {contents['user_records'] - contents['distinct']:,}", flush=True)
    bounds = [
        (used >= scenario.least_used, f"used {used:.1%} of the limit, not {scenario.least_used:.0%}"),
        (throttled <= scenario.most_throttled, f"throttled {throttled:.2%}, more than {scenario.most_throttled:.2%}"),
        (rss_mib <= scenario.most_rss_mib, f"{rss_mib:.0f} MiB, more than {scenario.most_rss_mib}"),
        (
            delivered <= contents["distinct"] <= delivered + unknown,
            f"{delivered:,} delivered and {unknown:,} unknown, but {contents['distinct']:,} stored",
        ),
    ]
    if scenario.most_throttled_settled is not None:
        most = scenario.most_throttled_settled
        bounds.append((throttled_settled <= most, f"throttled {throttled_settled:.2%} once settled, not {most:.0%}"))
    return [f"{scenario.name}: {broken}" for holds, broken in bounds if not holds]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pressure", description=__doc__)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--only", nargs="*", choices=[scenario.name for scenario in SCENARIOS])
    parser.add_argument("--produce", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.produce:
        asyncio.run(produce(json.loads(options.produce)))
        return 0
    print(f"{describe_machine()}; a fixed loop takes {calibration_ms():.0f} ms")
    broken = [
        line
        for scenario in SCENARIOS
        if not options.only or scenario.name in options.only
        for line in run(scenario, options.seconds)
    ]
    print("\n".join(broken) or "Every bound holds.")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
