"""What a scenario of the durable store is made of: a service, a producer, records, the invariant, a storm."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import anyio

from kpl_core import BufferFull, Config, Producer, ProducerReport, decode
from kpl_core.durability.spool import Spool, SpooledRecord
from kpl_core.records.record_result import Attempt, RecordResult
from kpl_core.records.user_record import Tier
from kpl_core.testing import FakeKinesis
from kpl_core.testing.fake_transport import FakeTransport
from tests.support.waiting import until

STREAM = "orders"


def service(shards: int = 1, *, latency_seconds: float = 0.01, **options: Any) -> FakeTransport:
    return FakeTransport(FakeKinesis({STREAM: shards}, **options), latency_seconds=latency_seconds)


def producer(transport: FakeTransport, *, hooks: Iterable[Any] = (), sink: Any = None, **options: Any) -> Producer:
    quick = {"record_max_buffered_time_ms": 5, "retry_backoff_base_ms": 2, "retry_backoff_cap_ms": 20}
    return Producer(
        Config(region="us-east-1", **{**quick, **options}),
        transport=transport,
        hooks=tuple(hooks),
        dead_letter_sink=sink,
    )


def set_writable(spool: Spool, *, writable: bool) -> "Future[Any]":
    """Let the spool's file take writes, or none. Its user finds out by the next write."""
    statement = f"PRAGMA query_only = {int(not writable)}"
    return spool.ask(lambda store: store.connection.execute(statement).fetchone())


async def make_writable(each: Producer, *, writable: bool) -> None:
    """Let the file of a producer's spool take writes, or none, and wait until it is so."""
    assert each.spool is not None
    await until(set_writable(each.spool, writable=writable).done)


def assert_invariant(report: ProducerReport) -> None:
    kept = report.spooled + report.dead_lettered
    assert report.spooled >= 0
    assert report.dead_lettered >= 0
    assert report.accepted == report.delivered + report.failed_total + kept + report.buffered, report


def assert_streams_add_up(producer: Producer) -> None:
    for each in producer.statistics().values():
        came = each.accepted + each.replayed + each.redriven
        went = each.delivered + sum(each.failed.values()) + each.spooled + each.dead_lettered
        assert came == went + each.buffered, each


def consumed(transport: FakeTransport, stream: str = STREAM) -> Counter[bytes]:
    """Every user record a de-aggregating consumer reads, and how often."""
    seen: Counter[bytes] = Counter()
    for stored in transport.kinesis.records(stream):
        user_records = decode(stored.data)
        seen.update([stored.data] if user_records is None else [each.data for each in user_records])
    return seen


DELIVERED = RecordResult(True, "shardId-000000000000", "4957", (Attempt(True, None, None, 1.0, 1.5),))
THROTTLED = Attempt(False, "ProvisionedThroughputExceededException", "Rate exceeded", 1.0, 2.0)
EXPIRED = Attempt(False, "Expired", "Record expired", 3.0, 3.0)
INVALID = Attempt(False, "ValidationException", "1 validation error detected", 1.0, 2.0)


def failed(*attempts: Attempt) -> RecordResult:
    return RecordResult(False, None, None, attempts)


def spooled(
    number: int = 0, *, key: str = "key", data: bytes | None = None, tier: Tier = "normal", stream: str = "orders"
) -> SpooledRecord:
    """Return a record whose data is its number."""
    return SpooledRecord(
        stream=stream,
        partition_key=key,
        data=b"%d" % number if data is None else data,
        accepted_at=1_700_000_000.0,
        tier=tier,
    )


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
