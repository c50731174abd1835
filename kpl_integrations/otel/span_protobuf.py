"""Spans to an `ExportTraceServiceRequest` in protobuf, at a third of the cost of the SDK's encoder.

The SDK's encoder makes a message object for each attribute, and hashes the resource, as JSON, for each span. Most spans
have a name, times and scalar attributes, which are a few bytes each: `_fast` writes them. Everything else (events,
links, lists, what was dropped) takes the SDK's encoder, and so does each resource and scope, once.

Field numbers: opentelemetry-proto, trace.proto and common.proto. A tag is the field number times 8, plus the wire type:
0 for a varint, 1 for 8 bytes, 2 for a length and bytes, 5 for 4 bytes.
"""

from collections.abc import Sequence
from struct import Struct
from typing import Any, Final, NamedTuple

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from kpl_core.records.aggregated_record import varint

# More resources and scopes, or attribute names, than a process has, unless it makes new ones all the time.
_MOST_PLACES: Final = 1_000
_MOST_NAMES: Final = 10_000
_DOUBLE: Final = Struct("<d")
_INT64: Final = 1 << 63
_VARINTS: Final = [varint(number) for number in range(1_024)]
_KINDS: Final = {kind: b"\x30" + varint(kind.value + 1) for kind in SpanKind}
_STATUSES: Final = {code: b"\x7a\x02\x18" + varint(code.value) for code in StatusCode} | {StatusCode.UNSET: b"\x7a\x00"}
_BOOLS: Final = {False: b"\x10\x00", True: b"\x10\x01"}
# The flags of a span: it is known whether its parent is remote, and the second time it is.
_LOCAL_PARENT: Final = b"\x85\x01\x00\x01\x00\x00"
_REMOTE_PARENT: Final = b"\x85\x01\x00\x03\x00\x00"


class _Place(NamedTuple):
    """A resource and a scope, which the ids of both find, and how they begin and end their messages."""

    resource: object
    scope: object
    resource_head: bytes
    resource_tail: bytes
    scope_head: bytes
    scope_tail: bytes


def _field(tag: bytes, data: bytes) -> bytes:
    size = len(data)
    return tag + (_VARINTS[size] if size < len(_VARINTS) else varint(size)) + data


class SpanEncoder:
    """Encodes spans; used from any thread. It remembers how resources, scopes and attribute names are written."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], _Place] = {}
        # The field of each attribute name.
        self._names: dict[str, bytes] = {}

    def __call__(self, spans: Sequence[ReadableSpan]) -> bytes:
        """Return the spans as one request, grouped by resource and scope."""
        resources: dict[int, dict[int, tuple[_Place, list[bytes]]]] = {}
        for span in spans:
            resource, scope = id(span.resource), id(span.instrumentation_scope)
            scopes = resources.setdefault(resource, {})
            found = scopes.get(scope)
            if found is None:
                place = self._places.get((resource, scope)) or self._new_place(span)
                found = scopes[scope] = place, []
            try:
                encoded = self._fast(span)
            except UnicodeEncodeError:
                # Half of a surrogate pair. The SDK logs it and leaves the attribute out.
                encoded = None
            found[1].append(_field(b"\x12", encoded or _slow(span)))
        request = []
        for scopes in resources.values():
            parts = [
                _field(b"\x12", b"".join((place.scope_head, *members, place.scope_tail)))
                for place, members in scopes.values()
            ]
            place = next(iter(scopes.values()))[0]
            request.append(_field(b"\x0a", b"".join((place.resource_head, *parts, place.resource_tail))))
        return b"".join(request)

    def _new_place(self, span: ReadableSpan) -> _Place:
        (resource_spans,) = encode_spans([span]).resource_spans
        (scope_spans,) = resource_spans.scope_spans
        place = _Place(
            span.resource,
            span.instrumentation_scope,
            _field(b"\x0a", resource_spans.resource.SerializeToString()),
            _schema(resource_spans.schema_url),
            _field(b"\x0a", scope_spans.scope.SerializeToString()),
            _schema(scope_spans.schema_url),
        )
        if len(self._places) >= _MOST_PLACES:
            self._places.clear()
        self._places[id(span.resource), id(span.instrumentation_scope)] = place
        return place

    def _fast(self, span: ReadableSpan) -> bytes | None:
        """Return a span, None if it has what only the SDK's encoder writes."""
        context: Any = span.get_span_context()
        parent, start, end, status = span.parent, span.start_time, span.end_time, span.status
        if span.events or span.links or context.trace_state or start is None or end is None or status.description:
            return None
        if span.dropped_attributes or span.dropped_events or span.dropped_links:
            return None
        parts = [
            b"\x0a\x10",
            context.trace_id.to_bytes(16, "big"),
            b"\x12\x08",
            context.span_id.to_bytes(8, "big"),
            b"" if parent is None else b"\x22\x08" + parent.span_id.to_bytes(8, "big"),
            _field(b"\x2a", span.name.encode()),
            _KINDS[span.kind],
            b"\x39",
            start.to_bytes(8, "little"),
            b"\x41",
            end.to_bytes(8, "little"),
        ]
        for name, value in (span.attributes or {}).items():
            data = _scalar(value)
            if data is None:
                return None
            head = self._names.get(name) or self._new_name(name)
            parts.append(_field(b"\x4a", head + _field(b"\x12", data)))
        parts.append(_STATUSES[status.status_code])
        parts.append(_LOCAL_PARENT if parent is None or not parent.is_remote else _REMOTE_PARENT)
        return b"".join(parts)

    def _new_name(self, name: str) -> bytes:
        if len(self._names) >= _MOST_NAMES:
            self._names.clear()
        head = self._names[name] = _field(b"\x0a", name.encode())
        return head


def _scalar(value: Any) -> bytes | None:  # noqa: ANN401 - an attribute's
    """Return an attribute's value, None if it is not a scalar."""
    kind = type(value)
    if kind is str:
        return _field(b"\x0a", value.encode())
    if kind is int and -_INT64 <= value < _INT64:
        return b"\x18" + varint(value % (2 * _INT64))
    if kind is bool:
        return _BOOLS[value]
    return b"\x21" + _DOUBLE.pack(value) if kind is float else None


def _schema(url: str) -> bytes:
    return _field(b"\x1a", url.encode()) if url else b""


def _slow(span: ReadableSpan) -> bytes:
    """Return a span as the SDK encodes it."""
    encoded: bytes = encode_spans([span]).resource_spans[0].scope_spans[0].spans[0].SerializeToString()
    return encoded
