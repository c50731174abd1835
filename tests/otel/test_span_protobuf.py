"""Our encoder of spans beside the SDK's: the same messages."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from kpl_integrations.otel.span_protobuf import SpanEncoder
from kpl_integrations.otel.telemetry_records import trace_keys

RESOURCES = [Resource({"service.name": "orders", "pid": 7}, "https://schema"), Resource({"service.name": "billing"})]
SCOPES = [InstrumentationScope("http", "1"), InstrumentationScope("sql", schema_url="https://schema"), None]
INT64 = 1 << 63

contexts = st.builds(
    SpanContext,
    trace_id=st.integers(1, 2**128 - 1),
    span_id=st.integers(1, 2**64 - 1),
    is_remote=st.booleans(),
    trace_flags=st.just(TraceFlags(1)),
    trace_state=st.sampled_from([TraceState(), TraceState([("vendor", "1")])]),
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
values: st.SearchStrategy[Any] = st.one_of(
    texts,
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1_100, max_size=1_200),
    st.booleans(),
    st.integers(-INT64, INT64 - 1),
    st.floats(allow_nan=False),
    st.lists(texts, max_size=3),
    st.binary(max_size=5),
)
attributes = st.dictionaries(st.text("abc.", min_size=1), values, max_size=5)
spans = st.builds(
    ReadableSpan,
    name=texts,
    context=contexts,
    parent=st.none() | contexts,
    resource=st.sampled_from(RESOURCES),
    attributes=attributes,
    events=st.lists(st.builds(Event, name=texts, attributes=attributes, timestamp=st.just(5)), max_size=1),
    links=st.lists(st.builds(Link, context=contexts, attributes=attributes), max_size=1),
    kind=st.sampled_from(SpanKind),
    status=st.sampled_from([Status(), Status(StatusCode.OK), Status(StatusCode.ERROR, "gone")]),
    start_time=st.integers(0, 2**63),
    end_time=st.integers(0, 2**63),
    instrumentation_scope=st.sampled_from(SCOPES),
)


@pytest.mark.long
# Texts above 1 KiB take another way.
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.lists(spans, max_size=8))
def test_the_message_is_that_of_the_sdk(drawn):
    encode = SpanEncoder()
    for _ in range(2):
        assert ExportTraceServiceRequest.FromString(encode(drawn)) == encode_spans(drawn)


def test_spans_of_the_sdk_take_the_fast_way_and_are_the_same():
    provider = TracerProvider(resource=RESOURCES[0], shutdown_on_exit=False)
    made: list[Any] = []
    with provider.get_tracer("http", "1").start_as_current_span("parent", attributes={"a": 1, "b": "x"}) as parent:
        made += (parent, provider.get_tracer("http", "1").start_span("child", attributes={"c": 2.5, "d": True}))
    for span in made:
        span.end()
    encoded = SpanEncoder()(made)
    assert encoded == encode_spans(made).SerializeToString()


def test_text_that_is_no_unicode_costs_its_attribute_only():
    context = SpanContext(1, 1, is_remote=False)
    attributes = {"good": "x", "bad": "\ud800"}
    span = ReadableSpan("span", context, resource=RESOURCES[0], attributes=attributes, start_time=1, end_time=2)
    found = ExportTraceServiceRequest.FromString(SpanEncoder()([span]))
    (kept,) = found.resource_spans[0].scope_spans[0].spans[0].attributes
    assert kept.key == "good"


def test_more_resources_than_it_remembers_are_encoded():
    encode = SpanEncoder()
    for number in range(1_100):
        context = SpanContext(1, 1, is_remote=False)
        attributes = {f"name {number} {index}": "x" for index in range(10)}
        span = ReadableSpan(
            "span", context, resource=Resource({"number": number}), attributes=attributes, start_time=1, end_time=2
        )
        assert ExportTraceServiceRequest.FromString(encode([span])) == encode_spans([span])


def test_traces_of_one_shard_share_the_key_of_the_first_one():
    made = [ReadableSpan("span", SpanContext(number, 1, is_remote=False)) for number in (1, 2, 3, 4, 1)]
    shards = {f"{number:032x}": str(number % 2) for number in (1, 2, 3, 4)}
    assert trace_keys(made, shards.get) == {1: f"{1:032x}", 2: f"{2:032x}", 3: f"{1:032x}", 4: f"{2:032x}"}
    assert trace_keys(made, lambda _key: None) == {number: f"{number:032x}" for number in (1, 2, 3, 4)}
