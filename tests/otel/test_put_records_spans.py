"""One span for each PutRecords, linked to the spans in which its Kinesis records opened."""

from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kpl_core import Config, Producer
from kpl_core.hooks import Fact, RequestCompleted
from kpl_core.testing import FakeKinesis, FakeTransport
from kpl_integrations.otel import PutRecordsSpans
from tests.support.virtual_time import Backend

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend(virtual_time_backend: Backend) -> Backend:
    return virtual_time_backend


class Traces:
    def __init__(self) -> None:
        self.made = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.made))
        self.tracer = self.provider.get_tracer("tests")

    def requests(self):
        return [span for span in self.made.get_finished_spans() if span.name == "Kinesis.PutRecords"]


async def test_a_request_is_linked_to_the_span_that_opened_each_aggregated_record():
    traces = Traces()
    kinesis = FakeKinesis({"orders": 1})
    hook = PutRecordsSpans(traces.provider, clock=lambda: 1_000.0)
    async with Producer(Config(), transport=FakeTransport(kinesis), hooks=[hook]) as producer:
        # The shard map comes with the first flush; until then each user record travels alone.
        _ = await producer.put("orders", partition_key="k", data=b"first")
        await producer.flush()
        for name in ("opens", "joins", "joins too"):
            with traces.tracer.start_as_current_span(name):
                for _ in range(20):
                    _ = await producer.put("orders", partition_key="k", data=b"data")
        await producer.flush()
    first, second = traces.requests()
    (opens,) = [span for span in traces.made.get_finished_spans() if span.name == "opens"]
    assert (first.links, [link.context.span_id for link in second.links]) == ((), [opens.context.span_id])
    assert second.parent is None
    assert second.attributes["aws.kinesis.stream_name"] == "orders"
    assert (second.attributes["messaging.batch.message_count"], second.attributes["kpl.user_records"]) == (1, 60)
    assert second.end_time == 1_000 * 10**9
    assert second.status.status_code is StatusCode.UNSET


async def test_without_aggregation_each_span_is_linked_once_however_much_it_put():
    traces = Traces()
    config = Config(aggregation_enabled=False, record_max_buffered_time_ms=1_000)
    transport = FakeTransport(FakeKinesis({"orders": 1}))
    async with Producer(config, transport=transport, hooks=[PutRecordsSpans(traces.provider)]) as producer:
        for _ in range(3):
            with traces.tracer.start_as_current_span("order"):
                for _ in range(5):
                    _ = await producer.put("orders", partition_key="k", data=b"data")
        await producer.flush()
    linked = [link.context.span_id for span in traces.requests() for link in span.links]
    orders = [span.context.span_id for span in traces.made.get_finished_spans() if span.name == "order"]
    assert sorted(set(linked)) == sorted(orders)
    assert all(len({link.context.span_id for link in span.links}) == len(span.links) for span in traces.requests())


def completed(**facts: Any) -> Fact:
    known: dict[str, Any] = {
        "stream": "orders",
        "started_at": 1.0,
        "ended_at": 1.5,
        "kinesis_records": 2,
        "user_records": 2,
        "size_bytes": 10,
        "error_code": None,
        "record_errors": {},
        "throttled_by_shard": {},
    }
    return RequestCompleted(**{**known, **facts})


@pytest.mark.parametrize(
    ("facts", "code", "words"),
    [
        ({"error_code": "InternalFailure"}, "InternalFailure", "InternalFailure"),
        ({"record_errors": {"Throttled": 1}}, "Throttled", "some records: Throttled"),
    ],
)
async def test_a_failure_is_the_spans_status(facts, code, words):
    traces = Traces()
    PutRecordsSpans(traces.provider, clock=lambda: 10.0)(completed(**facts))
    (span,) = traces.requests()
    assert (span.attributes["error.type"], span.status.status_code, span.status.description) == (
        code,
        StatusCode.ERROR,
        words,
    )
    assert (span.start_time, span.end_time) == (9_500_000_000, 10_000_000_000)


async def test_a_record_opened_outside_of_any_span_has_no_context():
    assert PutRecordsSpans(Traces().provider).opening_context() is None
