"""Encoded once and parted by trace, or encoded trace by trace: the same."""

from collections import Counter

from hypothesis import given, strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext

from kpl_integrations.otel.encoding import trace_keys, trace_parts

RESOURCES = [Resource({"service.name": "orders"}, "https://schema"), Resource({"service.name": "billing"})]
SCOPES = [InstrumentationScope("http", "1"), InstrumentationScope("sql", schema_url="https://schema"), None]


def span(trace_id: int, span_id: int, resource: Resource, scope: InstrumentationScope | None) -> ReadableSpan:
    context = SpanContext(trace_id, span_id, is_remote=False)
    return ReadableSpan(f"span {span_id}", context, resource=resource, instrumentation_scope=scope, start_time=1)


def spans_of(request: ExportTraceServiceRequest) -> Counter[tuple[bytes, str, bytes, str, bytes]]:
    """Return every span with all that stands above it."""
    return Counter(
        (
            resource.resource.SerializeToString(deterministic=True),
            resource.schema_url,
            scope.scope.SerializeToString(deterministic=True),
            scope.schema_url,
            each.SerializeToString(deterministic=True),
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for each in scope.spans
    )


@given(st.lists(st.tuples(st.integers(1, 6), st.sampled_from(RESOURCES), st.sampled_from(SCOPES)), max_size=40))
def test_each_trace_is_encoded_as_if_it_were_alone(drawn):
    spans = [span(trace_id, number + 1, resource, scope) for number, (trace_id, resource, scope) in enumerate(drawn)]
    found = {part.key: part for part in trace_parts(spans, trace_keys(spans, lambda _key: None))}
    counts = Counter(trace_id for trace_id, _, _ in drawn)
    assert {int(key or "", 16): part.items for key, part in found.items()} == counts
    for trace_id in counts:
        alone = encode_spans([each for each in spans if each.context is not None and each.context.trace_id == trace_id])
        parted = ExportTraceServiceRequest.FromString(found[f"{trace_id:032x}"].data)
        assert spans_of(parted) == spans_of(alone)
