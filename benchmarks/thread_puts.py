"""What a put from a thread costs that thread in CPU, beside a put in the loop: `python -m benchmarks.thread_puts`.

The transport is in memory. While the threads put, the loop takes their records, and all share the interpreter lock.
"""

import asyncio
import statistics
import time

from kpl_core import Config, Producer
from kpl_core.testing import FakeKinesis
from kpl_core.testing.fake_transport import FakeTransport

PUTS = 20_000
ROUNDS = 5
KEYS = [f"key {number % 100}" for number in range(PUTS)]


def _microseconds_per_put(producer: Producer) -> float:
    started_at = time.thread_time()
    for key in KEYS:
        _ = producer.put_nowait("orders", partition_key=key, data=b"x" * 100)
    return (time.thread_time() - started_at) / PUTS * 1e6


async def main() -> None:
    """Print the median of several rounds, and its ratio to that of the loop."""
    transport = FakeTransport(FakeKinesis({"orders": 4}, enforce_limits=False))
    async with Producer(Config(max_outstanding_records=10**6, max_outstanding_bytes=2**30), transport=transport) as it:
        costs: dict[int, list[float]] = {0: [], 1: [], 4: []}
        for _ in range(ROUNDS):
            for threads, seen in costs.items():
                each = [asyncio.to_thread(_microseconds_per_put, it) for _ in range(threads)]
                seen.extend(await asyncio.gather(*each) if threads else [_microseconds_per_put(it)])
                await it.flush()
    in_loop = statistics.median(costs[0])
    for threads, seen in costs.items():
        where = f"{threads} threads" if threads else "the loop"
        print(f"{where:10} {statistics.median(seen):5.2f} us a put, {statistics.median(seen) / in_loop:4.1f} x")


if __name__ == "__main__":
    asyncio.run(main())
