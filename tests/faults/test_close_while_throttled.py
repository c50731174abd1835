"""Closing in time while a stream takes much less than is waiting for it."""

from typing import Any

import anyio
import pytest

from kpl_core import Config, Producer
from kpl_core.testing import FakeKinesis, RecordError, ServiceLimits, When
from kpl_core.testing.fake_transport import FakeTransport
from tests.faults.books import STREAM, Books
from tests.support.virtual_time import Backend

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend(virtual_time_backend: Backend) -> Backend:
    return virtual_time_backend


SLOW = ServiceLimits().scaled(0.01)
BOTH = {"rate_limit_records_per_sec_per_shard": 10}
SINGLE = {"aggregation_enabled": False}
TROUBLE = {
    # The service takes a hundredth of what the producer believes it does.
    "service slower, aggregated": (SLOW, {}, 3_000),
    "service slower, single": (SLOW, SINGLE, 3_000),
    # Both know that it takes little.
    "both slow, aggregated": (SLOW, BOTH, 3_000),
    "both slow, single": (SLOW, BOTH | SINGLE, 3_000),
    # Two shards take 8,000 single records in the second before and the three of the close.
    "buffer full": (ServiceLimits(), SINGLE, 9_000),
}


@pytest.mark.long
@pytest.mark.parametrize(("limits", "options", "records"), TROUBLE.values(), ids=TROUBLE)
async def test_close_within_3_seconds_of_a_throttled_stream_reports_exactly_what_is_stored(
    limits: ServiceLimits, options: dict[str, Any], records: int
) -> None:
    kinesis = FakeKinesis({STREAM: 2}, limits=limits)
    transport = FakeTransport(kinesis, latency_seconds=0.03)
    async with Producer(Config(region="us-east-1", **options), transport=transport) as producer:
        books = Books(producer)
        books.put_nowait()
        await producer.flush()
        books.put_nowait(records, size=500)
        await anyio.sleep(1.0)
        began_at = anyio.current_time()
        report = await producer.close(timeout=3.0)
        assert anyio.current_time() - began_at <= 3.5
    reading = books.balance(kinesis)
    assert report == producer.report()
    assert report.accepted == records + 1
    # With no answer lost, each record is stored if, and only if, it was reported so, or no answer arrived.
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
