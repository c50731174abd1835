"""Count the work per user record instead of timing it, with the same numbers on every run.

    python -m benchmarks.put_cost        prints the counts as JSON

Times on shared machines differ by a third from run to run, so a test with a bound on them
would fail at random. Bytecode instructions, calls, allocated bytes and tracked objects of fixed work
never differ. The work is the journey without its driver: put, request, answer, result, through
`StreamPipeline`, at a constant time.
"""

import gc
import json
import sys
import tracemalloc
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from benchmarks.ledger import ShardRanges
from benchmarks.workload import STREAM_NAME, Keys, Workload
from kpl_core.options.config import Config
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.shard_map import Shard
from kpl_core.producer.stream_set import stream_parts
from kpl_core.records.outcome import ResultHandle
from kpl_core.records.put_records import PutRecordsEntry, PutRecordsRequest

__all__ = ["PROFILES", "Journey", "costs", "counted_instructions"]

#: What is counted: the keys of the records, and the options that differ from the default.
PROFILES: dict[str, tuple[Keys, dict[str, Any]]] = {
    "10k": ("10k", {}),
    "unique": ("unique", {}),
    "alone": ("10k", {"aggregation_enabled": False}),
}

_WARM_UP_RECORD_COUNT = 60_000
_RECORD_COUNT = 10_000
_NOW = 0.0

Records = list[tuple[str, bytes]]


class Journey:
    """A pipeline without limits whose requests succeed at once."""

    def __init__(self, workload: Workload, options: dict[str, Any], *, listening: bool = False) -> None:
        unlimited = {"rate_limit_records_per_sec_per_shard": 1e12, "rate_limit_bytes_per_sec_per_shard": 1e15}
        config = Config(**(unlimited | options))
        room = BufferLimit(max_records=10**9, max_bytes=10**12)
        self.pipeline = stream_parts(
            STREAM_NAME, config, room, now=_NOW, chance=lambda: 0.5, listening=listening
        ).pipeline
        ranges = ShardRanges(workload.shard_count).ranges
        self.pipeline.shards_changed(
            [Shard(f"shardId-{number:012d}", start, end) for number, (start, end) in enumerate(ranges)], _NOW
        )

    def put(self, records: Records) -> list[ResultHandle]:
        """Put the records; they are aggregated, and wait."""
        put = self.pipeline.put
        return [put(key, data, _NOW) for key, data in records]

    def deliver(self, records: Records) -> int:
        """Put the records and answer their requests; return how many results are successes."""
        deliveries = self.put(records)
        self.finish()
        return sum(result.successful for delivery in deliveries if (result := delivery.peek()) is not None)

    def finish(self) -> None:
        """Close the open records and answer every request."""
        self.pipeline.flush(_NOW)
        while requests := self.pipeline.poll(_NOW, 1_000).requests:
            for request in requests:
                self.pipeline.request_completed(request, _success(request), _NOW)


def costs(profile: str) -> dict[str, float]:
    """Return the counts of a profile per user record of 100 B on 16 shards.

    `instructions`, `python_calls`: of the put alone, and of the whole journey. `bytes`, `tracked`: bytes of an
    outstanding user record over its data, and objects that the collector visits, delivery included.
    `cycles`: unreachable objects that only the collector could free, after everything is done.
    """
    keys, options = PROFILES[profile]
    workload = Workload(data_bytes=100, keys=keys, shard_count=16)
    records = workload.records(_WARM_UP_RECORD_COUNT, _WARM_UP_RECORD_COUNT + _RECORD_COUNT)
    journey = Journey(workload, options)
    journey.deliver(workload.records(0, _WARM_UP_RECORD_COUNT))
    outstanding = _outstanding(workload, options)
    counted_instructions(lambda: workload.key_of(0))  # Python 3.12.0 and 3.12.1 count nothing the first time
    counted: dict[str, int] = {
        "cycles": _cycles(lambda: journey.deliver(records)),
        "put_instructions": counted_instructions(lambda: journey.put(records)),
        "put_python_calls": _calls(lambda: journey.put(records)),
        "journey_instructions": counted_instructions(lambda: journey.deliver(records)),
        **outstanding,
    }
    return {name: count / _RECORD_COUNT for name, count in counted.items()}


def _success(request: PutRecordsRequest) -> list[PutRecordsEntry]:
    return [
        PutRecordsEntry(sequence_number="1", shard_id=record.predicted_shard or "shardId-000000000000")
        for record in request.records
    ]


def counted_instructions(work: Callable[[], object]) -> int:
    """Return the bytecode instructions of `work` and everything it calls in Python."""
    count = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Callable[..., Any]:  # noqa: ANN401
        nonlocal count
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def _calls(work: Callable[[], object]) -> int:
    """Return the calls of Python functions that `work` makes."""
    count = 0

    def profile(_frame: FrameType, event: str, _argument: Any) -> None:  # noqa: ANN401
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def _outstanding(workload: Workload, options: dict[str, Any]) -> dict[str, int]:
    """Return bytes and objects of waiting records, in addition to their data."""
    keys: dict[str, str] = {}

    def records() -> Iterable[tuple[str, bytes]]:
        """Yield records that only the pipeline references, so that all remaining memory is its own."""
        for index in range(_WARM_UP_RECORD_COUNT, _WARM_UP_RECORD_COUNT + _RECORD_COUNT):
            key = workload.key_of(index)
            yield keys.setdefault(key, key) if workload.keys == "10k" else key, workload.data_of(index)

    journey = Journey(workload, options)
    # Fill the route cache first: it is bounded and not part of a record.
    journey.deliver([(keys.setdefault(key, key), data) for key, data in workload.records(0, _WARM_UP_RECORD_COUNT)])
    gc.collect()
    tracked_before = len(gc.get_objects())
    tracemalloc.start()
    bytes_before, _ = tracemalloc.get_traced_memory()
    deliveries = [journey.pipeline.put(key, data, _NOW) for key, data in records()]
    bytes_after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    gc.collect()
    tracked_after = len(gc.get_objects())
    return {
        "bytes": bytes_after - bytes_before - workload.data_bytes * len(deliveries),
        "tracked": tracked_after - tracked_before,
    }


def _cycles(work: Callable[[], object]) -> int:
    """Return how many objects of `work` only the collector can free."""
    gc.collect()
    gc.disable()
    try:
        work()
        return gc.collect()
    finally:
        gc.enable()


if __name__ == "__main__":
    print(json.dumps({profile: costs(profile) for profile in PROFILES}, indent=1))
