"""Closing in time while a stream takes much less than is waiting for it."""

from typing import Any

import anyio
import pytest

from kpl_core import Config, Producer
from kpl_core.testing import FakeKinesis, RecordError, ServiceLimits, When
from kpl_core.testing.fake_transport import FakeTransport
from tests.faults.books import STREAM, Books
from tests.virtual_time import Backend

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend(virtual_time_backend: Backend) -> Backend:
    return virtual_time_backend


TROUBLE = [
    # The service takes a hundredth of what the producer believes it does.
    (ServiceLimits().scaled(0.01), {}),
    # Both know that it takes little.
    (ServiceLimits().scaled(0.01), {"rate_limit_records_per_sec_per_shard": 10}),
    (ServiceLimits(), {"aggregation_enabled": False}),
]


@pytest.mark.parametrize("aggregation_enabled", [True, False], ids=["aggregated", "single"])
@pytest.mark.parametrize(("limits", "options"), TROUBLE, ids=["service-slower", "both-slow", "buffer-full"])
async def test_close_within_3_seconds_of_a_throttled_stream_reports_exactly_what_is_stored(
    limits: ServiceLimits, options: dict[str, Any], aggregation_enabled: bool
) -> None:
    kinesis = FakeKinesis({STREAM: 2}, limits=limits)
    transport = FakeTransport(kinesis, latency_seconds=0.03)
    options = {"aggregation_enabled": aggregation_enabled, **options}
    async with Producer(Config(region="us-east-1", **options), transport=transport) as producer:
        books = Books(producer)
        books.put_nowait()
        await producer.flush()
        books.put_nowait(9_000, size=500)
        await anyio.sleep(1.0)
        began_at = anyio.current_time()
        report = await producer.close(timeout=3.0)
        assert anyio.current_time() - began_at <= 3.5
    reading = books.balance(kinesis)
    assert report == producer.report()
    assert report.accepted == 9_001
    # With no answer lost, each record is stored if, and only if, it was reported so, or nobody was told.
    unknown = report.failed.get("Unknown", 0)
    assert report.delivered <= len(reading.kept) <= report.delivered + unknown
    assert reading.duplicates == 0


async def test_close_while_every_record_is_refused_reports_that_nothing_is_stored() -> None:
    kinesis = FakeKinesis({STREAM: 2})
    kinesis.faults.add(RecordError(), When(operation=None))
    producer = Producer(Config(region="us-east-1"), transport=FakeTransport(kinesis, latency_seconds=0.03))
    async with producer:
        books = Books(producer)
        books.put_nowait(5_000, size=500)
        await anyio.sleep(1.0)
        began_at = anyio.current_time()
        report = await producer.close(timeout=3.0)
        assert anyio.current_time() - began_at <= 3.5
    assert (report.delivered, report.failed_total) == (0, 5_000)
    assert not books.balance(kinesis).kept
