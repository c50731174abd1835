"""Measure hooks: the CPU time of a hook per user record, as a share of the producer's.

    python -m benchmarks.hooks_cost        prints a table; --json the shares

A hook receives a fact for each Kinesis record and each request, so the user records in them share its cost: 400 of
100 bytes. The producer's time is measured in the same run, through its real transport to the sink. The hook's time is
measured by passing it the same facts again. The table also shows instructions, which are the same on every run: the
hook's as a share of those of the journey without its transport.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider

from benchmarks.figures import figure_of
from benchmarks.machine import cores
from benchmarks.plan import OURS, short_plan
from benchmarks.put_cost import Journey, counted_instructions
from benchmarks.rounds import run_rounds
from benchmarks.workload import Workload
from kpl_core.hooks import Fact, Hook
from kpl_integrations.metrics.cloudwatch import CloudWatchMetrics
from kpl_integrations.metrics.opentelemetry import OpenTelemetryMetrics
from kpl_integrations.metrics.prometheus import PrometheusMetrics
from kpl_integrations.otel.put_records_spans import PutRecordsSpans

__all__ = ["HOOKS", "producer_seconds", "shares"]

_RECORD_COUNT = 10_000
_ROUNDS = 9
_REPEATS = 20
_PRODUCER_ROUNDS = 5

HOOKS: dict[str, Callable[[], Hook]] = {
    "Prometheus": PrometheusMetrics,
    "OpenTelemetry metrics": lambda: OpenTelemetryMetrics(
        MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False)
    ),
    "CloudWatch": CloudWatchMetrics,
    "PutRecords spans": lambda: PutRecordsSpans(TracerProvider(shutdown_on_exit=False)),
}


def shares() -> dict[str, dict[str, float]]:
    """Return for each hook its share of the journey's instructions, and its seconds of CPU for a user record."""
    workload = Workload(data_bytes=100, shard_count=16)
    records = workload.records(0, _RECORD_COUNT)
    journey = Journey(workload, {}, listening=True)
    journey.deliver(records)
    journey.pipeline.ledger.take_facts()
    instructions = counted_instructions(lambda: journey.deliver(records))
    facts = journey.pipeline.ledger.take_facts()
    found = {}
    for name, make in HOOKS.items():
        hook = make()
        tell = partial(_tell, hook, facts)
        tell()
        times = [_seconds(tell) / _RECORD_COUNT for _ in range(_ROUNDS)]
        counted = counted_instructions(tell)
        found[name] = {
            "instructions_per_record": counted / _RECORD_COUNT,
            "instructions": counted / instructions,
            "seconds": median(times),
        }
    return found


def producer_seconds() -> float:
    """Return the CPU seconds of the producer for a user record of the same workload, from put to result."""
    (row,) = (
        row for row in short_plan() if row.kind == "peers" and row.subject == OURS and row.workload.data_bytes == 100
    )
    placed_on, _ = cores()
    results = run_rounds([row], _PRODUCER_ROUNDS, placed_on, {})
    figure = figure_of(results, row)
    assert figure is not None, results.failure_of(row)
    return 1 / figure.median


def _tell(hook: Hook, facts: list[Fact]) -> None:
    for fact in facts:
        hook(fact)


def _seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    for _ in range(_REPEATS):
        work()
    return (time.process_time() - began) / _REPEATS


def main(arguments: list[str]) -> None:
    """Print the shares; with --counts, as JSON and without the producer's time, which takes half a minute."""
    found: dict[str, Any] = shares()
    if "--counts" in arguments:
        print(json.dumps(found, indent=1))
        return
    whole = producer_seconds()
    for share in found.values():
        share["cpu_time"] = share["seconds"] / whole
    if "--json" in arguments:
        print(json.dumps(found, indent=1))
        return
    print(f"A user record of 100 bytes on 16 shards takes {whole * 1e6:.2f} us of CPU; a hook adds\n")
    for name, share in found.items():
        print(f"{name:24}{share['cpu_time']:7.2%} CPU time {share['instructions']:7.2%} instructions without transport")


if __name__ == "__main__":
    main(sys.argv[1:])
