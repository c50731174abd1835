"""An export of spans by trace, encoded once: to encode each trace by itself would encode its resource each time."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans
from opentelemetry.sdk.trace import ReadableSpan

__all__ = ["TracePart", "trace_parts"]


class TracePart(NamedTuple):
    """The spans of one trace: its id in hex, the encoded request, and how many there are."""

    key: str
    data: bytes
    items: int


def trace_parts(spans: Sequence[ReadableSpan]) -> Iterator[TracePart]:
    """Yield each trace as `encode_spans` would encode it, in their order within a resource and scope."""
    requests: dict[bytes, ExportTraceServiceRequest] = {}
    counts: dict[bytes, int] = {}
    for resource in encode_spans(spans).resource_spans:
        of_resource: dict[bytes, ResourceSpans] = {}
        for scope in resource.scope_spans:
            of_scope: dict[bytes, ScopeSpans] = {}
            for span in scope.spans:
                trace_id = span.trace_id
                target = of_scope.get(trace_id)
                if target is None:
                    place = of_resource.get(trace_id)
                    if place is None:
                        request = requests.setdefault(trace_id, ExportTraceServiceRequest())
                        place = of_resource[trace_id] = request.resource_spans.add(schema_url=resource.schema_url)
                        place.resource.CopyFrom(resource.resource)
                    target = of_scope[trace_id] = place.scope_spans.add(schema_url=scope.schema_url)
                    target.scope.CopyFrom(scope.scope)
                target.spans.append(span)
                counts[trace_id] = counts.get(trace_id, 0) + 1
    for trace_id, request in requests.items():
        yield TracePart(trace_id.hex(), request.SerializeToString(), counts[trace_id])
