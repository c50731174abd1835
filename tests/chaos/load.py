"""A producer under load, and the checks after the fault is over."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kpl_core import BufferFull, Config, NotSpooled, Producer, SpoolOptions, decode
from kpl_core.options.reliability import SpoolMode
from kpl_integrations.local_kinesis import LocalKinesis
from kpl_integrations.metrics.prometheus import PrometheusMetrics
from tests.support.durability_scene import assert_invariant, assert_streams_add_up
from tests.support.metrics import Scrape, watched

STREAM = "orders"
# From the end of the fault until everything acknowledged is delivered.
RECOVERY_SECONDS = 10.0


def config(endpoint_url: str, path: Path, mode: SpoolMode, **options: Any) -> Config:
    return Config(
        **{
            "region": "us-east-1",
            "endpoint_url": endpoint_url,
            "aws_access_key_id": "testing",
            "aws_secret_access_key": "testing",
            "record_max_buffered_time_ms": 10,
            "retry_backoff_base_ms": 5,
            "retry_backoff_cap_ms": 50,
            "record_ttl_ms": 500,
            "request_timeout_ms": 400,
            "connect_timeout_ms": 400,
            "spool": SpoolOptions(path=path, mode=mode, commit_interval_ms=2.0),
            **options,
        }
    )


@dataclass
class Load:
    """Puts numbered user records, 500 a second, until it is stopped."""

    producer: Producer
    acknowledged: set[bytes] = field(default_factory=set)
    put: int = 0
    refused: int = 0
    ended: bool = False

    async def run(self) -> None:
        while not self.ended:
            for _ in range(5):
                await self.put_one()
            await asyncio.sleep(0.01)

    async def put_one(self) -> None:
        data = b"%d" % self.put
        self.put += 1
        try:
            _ = await self.producer.put(STREAM, partition_key=f"key-{self.put % 100}", data=data)
        except (BufferFull, NotSpooled):
            self.refused += 1
        else:
            self.acknowledged.add(data)


def consumed(kinesis: LocalKinesis, stream: str = STREAM) -> Counter[bytes]:
    """What a de-aggregating consumer reads, and how often."""
    seen: Counter[bytes] = Counter()
    for stored in kinesis.fake.records(stream):
        user_records = decode(stored.data)
        seen.update([stored.data] if user_records is None else [each.data for each in user_records])
    return seen


async def assert_recovers(load: Load, kinesis: LocalKinesis, metrics: PrometheusMetrics) -> None:
    """After the trouble: all is delivered soon, nothing acknowledged is missing, nothing is left behind."""
    producer = load.producer
    healed_at = time.monotonic()
    before = producer.report().delivered
    while True:
        report = producer.report()
        assert_invariant(report)
        if report.delivered >= len(load.acknowledged) and report.spooled == report.buffered == 0:
            break
        assert time.monotonic() - healed_at < RECOVERY_SECONDS, f"{report} {producer.statistics()}"
        await asyncio.sleep(0.01)
    assert report.delivered > before or before >= len(load.acknowledged)
    assert_streams_add_up(producer)
    Scrape(watched(producer, metrics)).assert_invariant()
    missing = load.acknowledged - consumed(kinesis).keys()
    assert not missing, f"{len(missing)} acknowledged, and not at the consumer: {sorted(missing)[:5]}"
    # Back to the start: no buffer used, no write pending, nothing in the spool.
    assert (producer.buffer_limit.outstanding_records, producer.buffer_limit.outstanding_bytes) == (0, 0)
    assert producer.spool is not None
    while producer.spool.statistics().records:
        assert time.monotonic() - healed_at < RECOVERY_SECONDS, producer.spool.statistics()
        await asyncio.sleep(0.01)
