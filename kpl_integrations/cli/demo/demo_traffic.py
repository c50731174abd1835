"""The demo's way without a gateway: records straight into a producer, and the time to each ack."""

import time
from collections.abc import Callable
from typing import Any, Final

import anyio
from anyio.abc import TaskGroup

from kpl_core import Delivery, Producer
from kpl_integrations.cli.demo.demo_pace import DemoPace
from kpl_integrations.cli.demo.demo_records import DemoRecords
from kpl_integrations.cli.demo.traffic import Traffic

__all__ = ["DemoTraffic", "percentile"]

_TIMED_RECORDS: Final = 10_000


class DemoTraffic:
    """Puts all records; `split` is called once, half-way."""

    def __init__(self, records: DemoRecords, producer: Producer, stream: str, traffic: Traffic, *, shards: int) -> None:
        self._records = records
        self._producer = producer
        self._stream = stream
        self._traffic = traffic
        self._pace = DemoPace(shards)
        self._timed_every = max(1, records.count // _TIMED_RECORDS)
        self.put_count = 0
        self.put_bytes = 0
        self.seconds_to_ack: list[float] = []

    async def run(self, split: Callable[[], Any]) -> None:
        """Put all records and wait until the producer knows what became of each."""
        half = self._records.count // 2
        async with anyio.create_task_group() as timing:
            await self._put(0, timing)
            await self._traffic.shard_map_known()
            self._pace.begin()
            for number in range(1, self._records.count):
                if number == half:
                    timing.start_soon(split)
                await self._pace.keep(1, await self._put(number, timing))
            await self._producer.flush()

    async def _put(self, number: int, timing: TaskGroup) -> int:
        key, data = self._records.record(number)
        put_at = time.monotonic()
        delivery = await self._producer.put(self._stream, partition_key=key, data=data)
        self.put_count += 1
        self.put_bytes += len(data)
        if number % self._timed_every == 0:
            timing.start_soon(self._time, delivery, put_at)
        return len(key) + len(data)

    async def _time(self, delivery: Delivery, put_at: float) -> None:
        await delivery
        self.seconds_to_ack.append(time.monotonic() - put_at)


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that at least `share` (0 .. 1) of all values do not pass; 0 for none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
