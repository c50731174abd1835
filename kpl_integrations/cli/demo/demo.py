"""`kpl demo`: the whole journey on one machine, and the proof that nothing was lost on it."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from signal import Signals
from typing import Any, Final, Protocol

import anyio
from rich.progress import Progress, TaskID

from kpl_core import Producer, ProducerReport
from kpl_integrations.cli.connection import Connection
from kpl_integrations.cli.demo.demo_records import DemoRecords, Inventory
from kpl_integrations.cli.demo.demo_traffic import DemoTraffic, percentile
from kpl_integrations.cli.demo.traffic import Traffic
from kpl_integrations.cli.exit_code import ExitCode
from kpl_integrations.cli.first_error import raises_first
from kpl_integrations.cli.local_server import local_kinesis
from kpl_integrations.cli.signals import exit_code_of, until_signal
from kpl_integrations.cli.tail.consumer_view import ReadRecord
from kpl_integrations.cli.tail.stream_reader import StreamReader
from kpl_integrations.cli.terminal import Figure, note, print_figures, progress, results

__all__ = ["Demo"]

_STREAM: Final = "demo"
_SHOW_SECONDS: Final = 0.1


class _Traffic(Protocol):
    put_count: int
    put_bytes: int
    seconds_to_ack: list[float]

    async def run(self, split: Callable[[], Any]) -> None:
        """Put all records, and learn what became of each."""


class _Gateway(Protocol):
    @property
    def producer(self) -> Producer:
        """Return the gateway's own producer."""

    def traffic(self, records: DemoRecords, stream: str, *, shards: int) -> _Traffic:
        """Return what puts `records` through it."""


_Put = tuple[_Traffic, ProducerReport]
OpenGateway = Callable[[Connection, Traffic], AbstractAsyncContextManager[_Gateway]]


class Demo:
    """One run of the command."""

    def __init__(
        self, *, count: int, shards: int, seed: int, split: bool, open_gateway: OpenGateway | None, as_json: bool
    ) -> None:
        self._records = DemoRecords(count, seed=seed)
        self._shards = shards
        self._split = split
        self._open_gateway = open_gateway
        self._as_json = as_json
        self._inventory = Inventory(self._records)
        self._hook = Traffic()

    async def run(self) -> ExitCode:
        """Put, read back, compare, print; status 0 only if every record came back as it was put."""
        with raises_first():
            outcome = await until_signal(self._journey)
        if isinstance(outcome, Signals):
            note("interrupted; nothing is left behind")
            return exit_code_of(outcome)
        return outcome

    async def _journey(self) -> ExitCode:
        async with local_kinesis({_STREAM: self._shards}) as server:
            connection = Connection.to_our_own(_STREAM, endpoint_url=server.endpoint_url)
            with progress() as bars:
                started_at = time.monotonic()
                if self._open_gateway is None:
                    traffic, report = await self._put_directly(connection, bars)
                else:
                    traffic, report = await self._put_through(
                        self._open_gateway(connection, self._hook), connection, bars
                    )
                put_seconds = time.monotonic() - started_at
                reader, read_seconds = await self._read_all(connection, bars)
        figures = self._figures(traffic, report, reader, put_seconds=put_seconds, read_seconds=read_seconds)
        print_figures(figures, as_json=self._as_json)
        is_whole = self._inventory.lost == 0 and self._inventory.altered == 0
        if not self._as_json:
            self._conclude(is_whole=is_whole)
        return ExitCode.DONE if is_whole else ExitCode.NOT_ALL_ARRIVED

    async def _put_through(
        self, opening: AbstractAsyncContextManager[_Gateway], connection: Connection, bars: Progress
    ) -> _Put:
        async with connection.client() as client:
            async with opening as gateway:
                traffic = gateway.traffic(self._records, _STREAM, shards=self._shards)
                await self._run(traffic, gateway.producer, client, bars)
            report = gateway.producer.report()
        return traffic, report

    async def _put_directly(self, connection: Connection, bars: Progress) -> _Put:
        producer = Producer(connection.producer_config(), session=connection.session, hooks=[self._hook])
        async with connection.client() as client, producer:
            traffic = DemoTraffic(self._records, producer, _STREAM, self._hook, shards=self._shards)
            await self._run(traffic, producer, client, bars)
            report = await producer.close()
        return traffic, report

    async def _run(self, traffic: _Traffic, producer: Producer, client: Any, bars: Progress) -> None:  # noqa: ANN401 - aiobotocore has no types
        shown = bars.add_task("put and acknowledged", total=self._records.count)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_show, producer, bars, shown)
            await traffic.run(lambda: self._split_first_shard(client))
            tasks.cancel_scope.cancel()
        bars.update(shown, completed=producer.report().delivered)

    async def _split_first_shard(self, client: Any) -> None:  # noqa: ANN401 - aiobotocore has no types
        if not self._split:
            return
        listed = await client.list_shards(StreamName=_STREAM, MaxResults=1)
        shard = listed["Shards"][0]
        middle = (int(shard["HashKeyRange"]["EndingHashKey"]) + 1) // 2
        await client.split_shard(StreamName=_STREAM, ShardToSplit=shard["ShardId"], NewStartingHashKey=str(middle))

    async def _read_all(self, connection: Connection, bars: Progress) -> tuple[StreamReader, float]:
        started_at = time.monotonic()
        shown = bars.add_task("read back", total=self._records.count)

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
        traffic: _Traffic,
        report: ProducerReport,
        reader: StreamReader,
        *,
        put_seconds: float,
        read_seconds: float,
    ) -> list[Figure]:
        hook, inventory = self._hook, self._inventory
        # What was in requests more often than once; a record that never was in one has failed.
        retried = max(0, hook.user_records - report.accepted)
        p50, p99 = (1000 * percentile(traffic.seconds_to_ack, share) for share in (0.5, 0.99))
        per_second = traffic.put_count / put_seconds
        now_open = self._shards + 1 if self._split else self._shards
        return [
            Figure("records", traffic.put_count, f"{traffic.put_count:,}", f"{per_second:,.0f} a second"),
            Figure("bytes", traffic.put_bytes, f"{traffic.put_bytes:,}", "of data"),
            Figure("shards", now_open, f"{now_open}", "one was split half-way" if self._split else ""),
            Figure(
                "aggregation_ratio",
                round(hook.aggregation_ratio, 1),
                f"{hook.aggregation_ratio:,.1f}",
                "user records in a Kinesis record",
            ),
            Figure("put_records_calls", hook.requests, f"{hook.requests:,}"),
            Figure("throttled", hook.throttled_records, f"{hook.throttled_records:,}", "Kinesis records"),
            Figure("retried", retried, f"{retried:,}", "user records sent once more"),
            Figure("put_to_ack_p50_ms", round(p50, 1), f"{p50:,.0f}"),
            Figure("put_to_ack_p99_ms", round(p99, 1), f"{p99:,.0f}"),
            Figure("put_seconds", round(put_seconds, 2), f"{put_seconds:,.1f}"),
            Figure("read_seconds", round(read_seconds, 2), f"{read_seconds:,.1f}"),
            Figure("failed", report.failed_total, f"{report.failed_total:,}", _reasons(report)),
            Figure(
                "dropped_aggregates",
                reader.dropped_records,
                f"{reader.dropped_records:,}",
                "found on the wrong shard, and sent again",
            ),
            Figure("altered", inventory.altered, f"{inventory.altered:,}"),
            Figure("lost", inventory.lost, f"{inventory.lost:,}"),
            Figure("duplicated", inventory.duplicated, f"{inventory.duplicated:,}"),
        ]

    def _conclude(self, *, is_whole: bool) -> None:
        lost = self._inventory.lost
        verdict = (
            f"lost {lost}: every record came back as it was put"
            if is_whole
            else f"lost {lost:,}: not every record came back as it was put"
        )
        results().print(verdict, style="bold green" if is_whole else "bold red", soft_wrap=True)


async def _show(producer: Producer, bars: Progress, shown: TaskID) -> None:
    while True:
        bars.update(shown, completed=producer.report().delivered)
        await anyio.sleep(_SHOW_SECONDS)


def _reasons(report: ProducerReport) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(report.failed.items()))
