"""The demo's producer side: records at a steady rate, a split on the way, and the time to each ack."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import anyio
from anyio.abc import TaskGroup

from kpl_core import Delivery, Producer
from kpl_core.kinesis_limits import BYTES_PER_SECOND_PER_SHARD
from kpl_integrations.cli.demo_records import DemoRecords
from kpl_integrations.cli.traffic import Traffic

__all__ = ["DemoTraffic", "percentile"]

# Of what the shards take. At more than all of it, put-to-ack would only tell how long a queue is.
LOAD: Final = 0.9
# What aggregation adds to a small record, about.
_OVERHEAD_BYTES: Final = 10
_STEP_SECONDS: Final = 0.005
_TIMED_RECORDS: Final = 10_000


class DemoTraffic:
    """Puts all records; `split` is called once, half-way."""

    def __init__(self, records: DemoRecords, producer: Producer, stream: str, traffic: Traffic, *, shards: int) -> None:
        self._records = records
        self._producer = producer
        self._stream = stream
        self._traffic = traffic
        self._bytes_per_second = LOAD * shards * BYTES_PER_SECOND_PER_SHARD
        self._timed_every = max(1, records.count // _TIMED_RECORDS)
        self.put_count = 0
        self.put_bytes = 0
        self.seconds_to_ack: list[float] = []

    async def run(self, split: Callable[[], Any]) -> None:
        """Put all records and wait until the producer knows what became of each."""
        half = self._records.count // 2
        async with anyio.create_task_group() as timing:
            sent = await self._put(0, timing)
            await self._traffic.shard_map_known()
            started_at = time.monotonic()
            for number in range(1, self._records.count):
                if number == half:
                    timing.start_soon(split)
                sent += await self._put(number, timing)
                ahead = sent / self._bytes_per_second - (time.monotonic() - started_at)
                if ahead > _STEP_SECONDS:
                    await asyncio.sleep(ahead)
            await self._producer.flush()

    async def _put(self, number: int, timing: TaskGroup) -> int:
        key, data = self._records.record(number)
        put_at = time.monotonic()
        delivery = await self._producer.put(self._stream, partition_key=key, data=data)
        self.put_count += 1
        self.put_bytes += len(data)
        if number % self._timed_every == 0:
            timing.start_soon(self._time, delivery, put_at)
        return len(key) + len(data) + _OVERHEAD_BYTES

    async def _time(self, delivery: Delivery, put_at: float) -> None:
        await delivery
        self.seconds_to_ack.append(time.monotonic() - put_at)


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that at least `share` (0 .. 1) of all values do not pass; 0 for none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
