"""`kpl demo`: sends records through the whole pipeline on one machine and verifies that none is lost."""

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from math import exp, log
from typing import Any, Final

import anyio
from anyio.abc import TaskGroup
from rich.progress import Progress, TaskID

from kpl_core import Delivery, Producer, ProducerReport
from kpl_core.options.kinesis_limits import BYTES_PER_SECOND_PER_SHARD, KIB, MIB
from kpl_integrations.cli.connection import Connection
from kpl_integrations.cli.exit_code import SIGNAL_CODES, ExitCode, until_signal
from kpl_integrations.cli.local import local_kinesis
from kpl_integrations.cli.progress import progress
from kpl_integrations.cli.put import RequestTotals, failure_reasons
from kpl_integrations.cli.tail import ReadRecord, StreamReader, raises_first
from kpl_integrations.cli.terminal import Figure, note, print_figures, results

STREAM: Final = "demo"
# From this share on, something is said to limit the rate.
NEARLY: Final = 0.7
_SHOW_SECONDS: Final = 0.1
# How much of the shards' capacity the demo uses.
LOAD: Final = 0.9
# Approximate bytes that aggregation adds to a small record.
_OVERHEAD_BYTES: Final = 10
_STEP_SECONDS: Final = 0.005
KEY_COUNT: Final = 10_000
SMALLEST_BYTES: Final = 20
LARGEST_BYTES: Final = 2 * KIB
# A record begins with its number, so that all records are different.
_NUMBER_BYTES: Final = 8
_SIZES: Final = 4_096
# A prime, so that the sequences of keys, sizes and contents do not repeat together.
_STRIDE: Final = 7_919
_TIMED_RECORDS: Final = 10_000


class Load(ABC):
    """How the demo puts its records. `seconds_to_ack` are those from a put, or a request, to its result."""

    def __init__(self, records: "DemoRecords", *, shards: int) -> None:
        self._records = records
        self._pace = DemoPace(shards)
        self.put_count = 0
        self.put_bytes = 0
        self.seconds_to_ack: list[float] = []

    @abstractmethod
    async def run(self, split: Callable[[], Any]) -> None:
        """Put all records and wait for their results; call `split` once, in the middle."""

    def record(self, number: int) -> tuple[str, bytes]:
        """Return partition key and data of a record that is put now, and count it."""
        key, data = self._records.record(number)
        self.put_count += 1
        self.put_bytes += len(data)
        return key, data


# Opens what the demo puts into; yields its producer and the load.
OpenLoad = Callable[[Connection, RequestTotals, "DemoRecords", int], AbstractAsyncContextManager[tuple[Producer, Load]]]


@dataclass
class DemoCommand:
    """One run of the command."""

    count: int
    shards: int
    seed: int
    split: bool
    open_load: OpenLoad
    as_json: bool

    def __post_init__(self) -> None:
        self._records = DemoRecords(self.count, seed=self.seed)
        self._inventory = Inventory(self._records)
        self._hook = RequestTotals()
        # Of one core, while records were put.
        self._cpu_share = 0.0

    async def run(self) -> ExitCode:
        """Put, read back, compare, print; the status is 0 only if every record was read back unchanged."""
        with raises_first():
            status = await until_signal(self._journey)
        if status in SIGNAL_CODES.values():
            note("interrupted; all temporary data is gone")
        return status

    async def _journey(self) -> ExitCode:
        async with local_kinesis({STREAM: self.shards}) as server:
            connection = Connection.to_own_server(STREAM, endpoint_url=server.endpoint_url)
            with progress(as_json=self.as_json) as bars:
                started_at, cpu_before = time.monotonic(), time.process_time()
                async with connection.client() as client:
                    opening = self.open_load(connection, self._hook, self._records, self.shards)
                    async with opening as (producer, load):
                        await self._run(load, producer, client, bars)
                    report = producer.report()
                put_seconds = time.monotonic() - started_at
                self._cpu_share = (time.process_time() - cpu_before) / put_seconds
                reader, read_seconds = await self._read_all(connection, bars)
        figures = self._figures(load, report, reader, put_seconds=put_seconds, read_seconds=read_seconds)
        print_figures(figures, as_json=self.as_json)
        lost = self._inventory.lost
        is_lossless = lost == 0 and self._inventory.altered == 0
        if not self.as_json:
            outcome = "every record" if is_lossless else "not every record"
            style = "bold green" if is_lossless else "bold red"
            results().print(f"lost {lost:,}: {outcome} was read back unchanged", style=style, soft_wrap=True)
        return ExitCode.DONE if is_lossless else ExitCode.NOT_ALL_ARRIVED

    async def _run(self, load: Load, producer: Producer, client: Any, bars: Progress) -> None:  # noqa: ANN401 - aiobotocore has no types
        shown = bars.add_task("put and acknowledged", total=self._records.count, unit="records", bytes=0, limited_by="")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._show, producer, load, bars, shown)
            await load.run(lambda: self._split_first_shard(client))
            tasks.cancel_scope.cancel()
        bars.update(shown, completed=producer.report().delivered, bytes=load.put_bytes, limited_by="")

    async def _show(self, producer: Producer, load: Load, bars: Progress, shown: TaskID) -> None:
        """Show what is delivered, and what limited the last second: the shards or the CPU."""
        since, cpu, size, limited_by = time.monotonic(), time.process_time(), 0, ""
        while True:
            now = time.monotonic()
            if now - since >= 1.0:
                shards = (load.put_bytes - size) / (now - since) / (self.shards * MIB)
                limited_by = limiting(shards, (time.process_time() - cpu) / (now - since))
                since, cpu, size = now, time.process_time(), load.put_bytes
            delivered = producer.report().delivered
            size_bytes = load.put_bytes * delivered // max(1, load.put_count)
            bars.update(shown, completed=delivered, bytes=size_bytes, limited_by=limited_by)
            await anyio.sleep(_SHOW_SECONDS)

    async def _split_first_shard(self, client: Any) -> None:  # noqa: ANN401 - aiobotocore has no types
        if not self.split:
            return
        listed = await client.list_shards(StreamName=STREAM, MaxResults=1)
        shard = listed["Shards"][0]
        middle = (int(shard["HashKeyRange"]["EndingHashKey"]) + 1) // 2
        await client.split_shard(StreamName=STREAM, ShardToSplit=shard["ShardId"], NewStartingHashKey=str(middle))

    async def _read_all(self, connection: Connection, bars: Progress) -> tuple[StreamReader, float]:
        started_at = time.monotonic()
        shown = bars.add_task("read back", total=self._records.count, unit="records")

        def take(records: Sequence[ReadRecord]) -> bool:
            self._inventory.add(records)
            bars.update(shown, completed=self._inventory.found)
            return True

        async with connection.client() as client:
            reader = StreamReader(client, connection.stream_argument, take, start="TRIM_HORIZON", follow=False)
            await reader.run()
        return reader, time.monotonic() - started_at

    def _figures(
        self,
        load: Load,
        report: ProducerReport,
        reader: StreamReader,
        *,
        put_seconds: float,
        read_seconds: float,
    ) -> list[Figure]:
        hook, inventory = self._hook, self._inventory
        # Records that were in more than one request; a record that was in none has failed.
        retried = max(0, hook.user_records - report.accepted)
        p50, p99 = (1000 * percentile(load.seconds_to_ack, share) for share in (0.5, 0.99))
        per_second = load.put_count / put_seconds
        now_open = self.shards + 1 if self.split else self.shards
        return [
            Figure("records", load.put_count, f"{per_second:,.0f} a second"),
            Figure("bytes", load.put_bytes, "of data"),
            Figure("shards", now_open, "one was split in the middle" if self.split else ""),
            *self._limits(load.put_bytes / put_seconds),
            Figure("aggregation_ratio", round(hook.aggregation_ratio, 1), "user records per Kinesis record"),
            Figure("put_records_calls", hook.requests),
            Figure("throttled", hook.throttled_records, "Kinesis records"),
            Figure("retried", retried, "user records sent again"),
            Figure("put_to_ack_p50_ms", round(p50, 1), text=f"{p50:,.0f}"),
            Figure("put_to_ack_p99_ms", round(p99, 1), text=f"{p99:,.0f}"),
            Figure("put_seconds", round(put_seconds, 2), text=f"{put_seconds:,.1f}"),
            Figure("read_seconds", round(read_seconds, 2), text=f"{read_seconds:,.1f}"),
            Figure("failed", report.failed_total, failure_reasons(report)),
            Figure("dropped_aggregates", reader.dropped_records, "found on the wrong shard, sent again"),
            Figure("altered", inventory.altered),
            Figure("lost", inventory.lost),
            Figure("duplicated", inventory.duplicated),
        ]

    def _limits(self, bytes_per_second: float) -> list[Figure]:
        """Return what the load used of its shards and of the CPU: one of them limits it."""
        shards = bytes_per_second / (self.shards * MIB)
        limits_it = "which limits the rate"
        return [
            Figure(
                "shards_used",
                round(shards, 2),
                f"of 1 MiB/s each{f', {limits_it}' if shards > NEARLY else ''}",
                f"{shards:.0%}",
            ),
            Figure(
                "cpu_used",
                round(self._cpu_share, 2),
                f"of one core{f', {limits_it}' if shards <= NEARLY < self._cpu_share else ''}",
                f"{self._cpu_share:.0%}",
            ),
        ]


def limiting(shards: float, cpu: float) -> str:
    """Return what limits the rate, with its share in use: of the shards' 1 MiB/s each, or of one core; "" if neither.

    The table at the end uses the same bounds.
    """
    if shards > NEARLY:
        return f"the shards ({shards:.0%})"
    return f"the CPU ({cpu:.0%})" if cpu > NEARLY else ""


class DemoRecords:
    """`count` records generated from a seed, so that each can be generated again and compared.

    Sizes are log-uniform, which is typical of events: as many records from 20 to 200 bytes as from 200 to 2,000.
    """

    def __init__(self, count: int, *, seed: int) -> None:
        chance = random.Random(seed)  # noqa: S311 - content, not secrets
        self.count = count
        self._content = chance.randbytes(MIB)
        low, high = log(SMALLEST_BYTES), log(LARGEST_BYTES)
        self._sizes = [round(exp(chance.uniform(low, high))) for _ in range(_SIZES)]
        self._keys = [f"customer-{number}" for number in range(KEY_COUNT)]
        chance.shuffle(self._keys)

    def record(self, number: int) -> tuple[str, bytes]:
        """Return partition key and data of a record; always the same for a number."""
        step = number * _STRIDE
        begin = step % (MIB - LARGEST_BYTES)
        content = self._content[begin : begin + self._sizes[step % _SIZES] - _NUMBER_BYTES]
        return self._keys[step % KEY_COUNT], number.to_bytes(_NUMBER_BYTES, "big") + content

    def number_of(self, data: bytes) -> int:
        """Return the record number at the beginning of `data`."""
        return int.from_bytes(data[:_NUMBER_BYTES], "big")


class Inventory:
    """Compares the records that were read with those that were put."""

    def __init__(self, expected: DemoRecords) -> None:
        self._expected = expected
        self._seen: Counter[int] = Counter()
        # Records that equal none that was put.
        self.altered = 0

    def add(self, records: Sequence[ReadRecord]) -> None:
        """Add records that were read."""
        expected = self._expected
        for record in records:
            number = expected.number_of(record.data)
            if number < expected.count and expected.record(number) == (record.partition_key, record.data):
                self._seen[number] += 1
            else:
                self.altered += 1

    @property
    def found(self) -> int:
        """The number of records that were read at least once."""
        return len(self._seen)

    @property
    def lost(self) -> int:
        """The number of records that were never read."""
        return self._expected.count - len(self._seen)

    @property
    def duplicated(self) -> int:
        """The number of copies beyond the first of each record."""
        return self._seen.total() - len(self._seen)


class DemoPace:
    """Limits the demo to 90 % of the shards' byte capacity. Above that, put-to-ack would mostly be queue time."""

    def __init__(self, shards: int) -> None:
        self._bytes_per_second = LOAD * shards * BYTES_PER_SECOND_PER_SHARD
        self._began = 0.0
        self._put_bytes = 0

    def begin(self) -> None:
        """Start to count."""
        self._began = time.monotonic()

    async def keep(self, records: int, size_bytes: int) -> None:
        """Count records that were put, keys and data; sleep if the load is too high."""
        self._put_bytes += size_bytes + records * _OVERHEAD_BYTES
        ahead = self._put_bytes / self._bytes_per_second - (time.monotonic() - self._began)
        if ahead > _STEP_SECONDS:
            await asyncio.sleep(ahead)


@asynccontextmanager
async def open_direct_load(
    connection: Connection, totals: RequestTotals, records: DemoRecords, shards: int
) -> AsyncIterator[tuple[Producer, Load]]:
    """Open a producer to put into without the gateway."""
    async with Producer(connection.producer_config(), session=connection.session, hooks=[totals]) as producer:
        yield producer, DirectLoad(records, producer, totals, shards=shards)


class DirectLoad(Load):
    """Puts all records into a producer, without the gateway."""

    def __init__(self, records: DemoRecords, producer: Producer, totals: RequestTotals, *, shards: int) -> None:
        super().__init__(records, shards=shards)
        self._producer = producer
        self._totals = totals
        self._timed_every = max(1, records.count // _TIMED_RECORDS)

    async def run(self, split: Callable[[], Any]) -> None:
        """Put all records and wait for their results."""
        half = self._records.count // 2
        async with anyio.create_task_group() as timing:
            await self._put(0, timing)
            await self._totals.shard_map_known()
            self._pace.begin()
            for number in range(1, self._records.count):
                if number == half:
                    timing.start_soon(split)
                await self._pace.keep(1, await self._put(number, timing))
            await self._producer.flush()

    async def _put(self, number: int, timing: TaskGroup) -> int:
        key, data = self.record(number)
        put_at = time.monotonic()
        delivery = await self._producer.put(STREAM, partition_key=key, data=data)
        if number % self._timed_every == 0:
            timing.start_soon(self._time, delivery, put_at)
        return len(key) + len(data)

    async def _time(self, delivery: Delivery, put_at: float) -> None:
        await delivery
        self.seconds_to_ack.append(time.monotonic() - put_at)


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that at least a `share` (0 to 1) of all values does not exceed; 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
