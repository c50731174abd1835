"""The order of a key: a service that refuses many requests, and what a reader of its stream sees."""

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import anyio

from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsEntry, PutRecordsRequest, RequestFailure
from kpl_core.testing import FakeKinesis, FakeTransport
from tests.support.consumers import read_as_kcl
from tests.support.producer_scene import STREAM

PER_KEY: dict[str, Any] = {"ordering": "per_key"}


class Unreliable(FakeTransport):
    """Takes its time, and refuses three requests of ten, or all records in them; all while it is down."""

    def __init__(self, seed: int, *, shards: int = 2, is_down: bool = False) -> None:
        super().__init__(FakeKinesis({STREAM: shards}, enforce_limits=False), latency_seconds=0.01)
        self.chance = random.Random(seed)
        self.is_down = is_down

    async def put_records(self, request: PutRecordsRequest) -> PutRecordsAnswer:
        drawn = self.chance.random()
        await anyio.sleep(self.chance.random() * 0.05)
        if drawn < 0.15 or self.is_down:
            return RequestFailure("Internal", "refused before it was stored")
        if drawn < 0.3:
            return [PutRecordsEntry(error_code="InternalFailure", error_message="oops")] * len(request.records)
        return await super().put_records(request)


def seen(transport: FakeTransport) -> dict[str, list[int]]:
    """The numbers of each key, in the order in which a reader sees them first."""
    found: dict[str, list[int]] = defaultdict(list)
    for read in read_as_kcl(transport.kinesis, STREAM, now=anyio.current_time()):
        if int(read.data) not in found[read.partition_key]:
            found[read.partition_key].append(int(read.data))
    return found


def are_in_order(found: dict[str, list[int]], *, part: Callable[[int], object] = lambda _: None) -> bool:
    """Return True if the records of each key are in order, or those of each key and `part`."""
    parts: dict[object, list[int]] = defaultdict(list)
    for key, numbers in found.items():
        for number in numbers:
            parts[key, part(number)].append(number)
    return all(numbers == sorted(numbers) for numbers in parts.values())


def scene(**options: Any) -> dict[str, Any]:
    return {
        "record_max_buffered_time_ms": 10,
        "retry_backoff_base_ms": 5,
        "retry_backoff_cap_ms": 100,
        "record_ttl_ms": 600_000,
        # Behind an overloaded shard, flows and tiers wait.
        "rate_limit_records_per_sec_per_shard": 100,
    } | options
