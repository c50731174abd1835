"""A storm: bulk at 20 times what the shard takes, and critical user records that must not feel it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import anyio

from kpl_core import BufferFull, Producer
from tests.durability.scene import STREAM

SHARD_BYTES_PER_SECOND = 1_048_576
TICK_SECONDS = 0.01
BULK_BYTES = 8_192


@dataclass
class Storm:
    """Critical user records 100 a second, bulk (if any) `bulk_factor` times the shard's limit in bytes."""

    producer: Producer
    seconds: float
    bulk_factor: float = 0.0
    # Seconds that others kept a processor from each of our threads so far. What one of them waited while a
    # critical user record was on its way counts in no latency.
    withheld: Callable[[], Mapping[str, float]] = dict
    latencies: list[float] = field(default_factory=list)
    critical: int = 0
    refused_critical: int = 0
    # Only counted: to keep tens of thousands of results alive would have the collector stop the loop for their sake.
    bulk: int = 0
    refused_bulk: int = 0

    async def run(self) -> None:
        started_at = anyio.current_time()
        per_tick = self.bulk_factor * SHARD_BYTES_PER_SECOND * TICK_SECONDS / BULK_BYTES
        owed = 0.0
        data = bytes(BULK_BYTES)
        async with anyio.create_task_group() as tasks:
            while (now := anyio.current_time()) - started_at < self.seconds:
                owed = math.floor(per_tick * (now - started_at) / TICK_SECONDS) - self.bulk - self.refused_bulk
                for _ in range(int(min(owed, 10 * per_tick))):
                    self._put_bulk(data, now)
                tasks.start_soon(self._critical, self.critical)
                self.critical += 1
                await anyio.sleep(TICK_SECONDS)

    def _put_bulk(self, data: bytes, now: float) -> None:
        note = {"severity": "debug", "timestamp": f"t{now:.3f}"}
        try:
            _ = self.producer.put_nowait(
                STREAM, partition_key=f"b{self.bulk % 50}", data=data, tier="bulk", metadata=note
            )
        except BufferFull:
            self.refused_bulk += 1
        else:
            self.bulk += 1

    async def _critical(self, number: int) -> None:
        began, withheld = anyio.current_time(), self.withheld()
        try:
            delivery = self.producer.put_nowait(
                STREAM, partition_key=f"c{number % 50}", data=b"c%d" % number, tier="critical"
            )
        except BufferFull:
            self.refused_critical += 1
            return
        if (await delivery).successful:
            waits = (now - withheld.get(thread, 0.0) for thread, now in self.withheld().items())
            self.latencies.append(anyio.current_time() - began - max(waits, default=0.0))

    def p99(self) -> float:
        return sorted(self.latencies)[int(len(self.latencies) * 0.99)]
