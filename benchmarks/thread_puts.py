"""What puts from threads cost the process, beside those of the loop: `python -m benchmarks.thread_puts`.

CPU of the whole process for each record, from the first put to the last result. The transport answers at once, so what
is compared is the way from the put to the request.
"""

import asyncio
import statistics
import threading
import time
from collections.abc import Callable

from benchmarks.instant_transport import InstantTransport
from kpl_core import COMPILED, BlockingProducer, Config, Producer

STREAM = "orders"
RECORDS = 200_000
ROUNDS = 3
SHARDS = 16
LIST_RECORDS = 1_000
WARM_RECORDS = 10_000
PAIRS = [(f"key-{number % 10_000}", b"x" * 100) for number in range(RECORDS)]
CONFIG = Config(max_outstanding_records=10**6, max_outstanding_bytes=2**30)


def _lists() -> list[list[tuple[str, bytes]]]:
    return [PAIRS[start : start + LIST_RECORDS] for start in range(0, RECORDS, LIST_RECORDS)]


def _in_threads(count: int, put: Callable[..., object]) -> None:
    """Put all records in so many threads, a part in each."""

    def work(number: int) -> None:
        for key, data in PAIRS[number::count]:
            put(STREAM, partition_key=key, data=data)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


async def _with_producer(put_all: Callable[[Producer], object]) -> float:
    async with Producer(CONFIG, transport=InstantTransport(SHARDS)) as producer:
        await producer.put_many(STREAM, PAIRS[:WARM_RECORDS])
        await producer.flush()
        began = time.process_time()
        if (waiting := put_all(producer)) is not None:
            await waiting  # type: ignore[misc] # a coroutine
        await producer.flush()
        return time.process_time() - began


def _with_blocking(put_all: Callable[[BlockingProducer], object]) -> float:
    with BlockingProducer(CONFIG, transport=InstantTransport(SHARDS)) as producer:
        producer.put_many(STREAM, PAIRS[:WARM_RECORDS])
        producer.flush()
        began = time.process_time()
        put_all(producer)
        producer.flush()
        return time.process_time() - began


async def _put_many(producer: Producer) -> None:
    for part in _lists():
        await producer.put_many(STREAM, part)


async def _put_nowait(producer: Producer) -> None:
    for number, (key, data) in enumerate(PAIRS):
        _ = producer.put_nowait(STREAM, partition_key=key, data=data)
        if number % 100 == 0:
            await asyncio.sleep(0)


def _blocking_put_many(producer: BlockingProducer) -> None:
    for part in _lists():
        producer.put_many(STREAM, part)


def _rows() -> dict[str, Callable[[], float]]:
    rows: dict[str, Callable[[], float]] = {
        "Producer.put_many": lambda: asyncio.run(_with_producer(_put_many)),
        "BlockingProducer.put_many": lambda: _with_blocking(_blocking_put_many),
        "Producer.put_nowait": lambda: asyncio.run(_with_producer(_put_nowait)),
    }
    for count in (1, 16, 64):
        rows[f"BlockingProducer.put, {count} threads"] = lambda count=count: _with_blocking(  # type: ignore[misc]
            lambda producer: _in_threads(count, producer.put)
        )
        rows[f"put_nowait in a sync route, {count} threads"] = lambda count=count: asyncio.run(  # type: ignore[misc]
            _with_producer(lambda producer: asyncio.to_thread(_in_threads, count, producer.put_nowait))
        )
    return rows


def main() -> None:
    """Print the median of each row, beside the put of the loop that it corresponds to."""
    rows = _rows()
    seen: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(ROUNDS):
        for name, run in rows.items():
            seen[name].append(run() / RECORDS * 1e9)
    cost = {name: statistics.median(each) for name, each in seen.items()}
    print(
        f"kernels: {'c' if COMPILED else 'python'}\n\n| put | CPU a record | beside the loop's |\n| --- | --- | --- |"
    )
    for name, nanoseconds in cost.items():
        beside = cost["Producer.put_many" if "put_many" in name else "Producer.put_nowait"]
        print(f"| {name} | {nanoseconds:,.0f} ns | {nanoseconds / beside:.2f} x |")


if __name__ == "__main__":
    main()
