"""What a scenario of the safety net is made of: a service with faults, a producer that keeps, and the invariant."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import anyio

from kpl_core import Config, Producer, ProducerReport, decode
from kpl_core.testing import FakeKinesis
from kpl_core.testing.fake_transport import FakeTransport

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


async def until(condition: Any, *, seconds: float = 20.0) -> None:
    """Wait for what another thread brings about, the spool's."""
    with anyio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - no event crosses from there to here for every condition
            await anyio.sleep(0.002)
