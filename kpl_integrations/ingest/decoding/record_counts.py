"""Count the user records in a Kinesis record, for the tenants' rates: those of a KPL aggregate or of an OTLP request.

Only the framing is read: tags, lengths and brackets. Nothing is copied, and a digest is not checked. A record that is
malformed counts as one, and so does one without user records. The work is bounded by the bytes: fields of protobuf
behind the first one for each 16 bytes of an aggregate, or for each 8 bytes of an export request, are not counted. JSON
with more objects than one for each 8 bytes counts as so many. Ordinary fields and objects are longer.

The functions are generators, as those of `steps`.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec.structs import astuple

from kpl_core import UserRecord
from kpl_core.records.aggregated_record import DIGEST_BYTES, MAGIC
from kpl_integrations.ingest.decoding.json_text import MALFORMED, SkippedObject

_Steps = Generator[None, None, int]
# A step reads so many fields: about 1 ms.
_STEP_FIELDS: Final = 2_000
_BYTES_PER_OBJECT: Final = 8
# Of a short record.
_LEAST: Final = 64
# Wire types of protobuf.
_VARINT: Final = 0
_LENGTH_DELIMITED: Final = 2
_FIXED_BYTES: Final = {1: 8, 5: 4}
_VARINT_BYTES: Final = 10
# The bit of a byte that says there is more.
_MORE: Final = 0x80


class _Framing(NamedTuple):
    """The numbers of the fields around each user record, from the outermost message on, and the bound on the work."""

    path: tuple[frozenset[int], ...]
    bytes_per_field: int


_AGGREGATED: Final = _Framing((frozenset({3}),), bytes_per_field=16)
_IN_SCOPES: Final = _Framing((frozenset({1}), frozenset({2}), frozenset({2})), bytes_per_field=8)
_POINTS: Final = {5: "gauge", 7: "sum", 9: "histogram", 10: "exponential_histogram", 11: "summary"}
_OTLP: Final = {
    "logs": _IN_SCOPES,
    "traces": _IN_SCOPES,
    "metrics": _IN_SCOPES._replace(path=(*_IN_SCOPES.path, frozenset(_POINTS), frozenset({1}))),
}


T = TypeVar("T")


class _Malformed(Exception):  # noqa: N818 - never leaves this file
    pass


def _count_in_aggregate(record: UserRecord) -> _Steps:
    """Return the number of user records in an aggregated KPL record, else 1."""
    data = record.data
    if not data.startswith(MAGIC):
        return 1
    return (yield from _count_in_protobuf(_AGGREGATED, data, len(MAGIC), len(data) - DIGEST_BYTES))


def otlp_counting(signal: str, *, is_protobuf: bool) -> Callable[[UserRecord], _Steps]:
    """Return a function that returns the number of log records, spans or data points in an export request."""
    if not is_protobuf:
        return partial(_count_in_json, signal)
    framing = _OTLP[signal]
    return lambda record: _count_in_protobuf(framing, record.data, 0, len(record.data))


def counts_in_steps(
    count: Callable[[UserRecord], _Steps], records: Iterable[UserRecord]
) -> Generator[None, None, list[int]]:
    """Return the count of each record."""
    counts = []
    for record in records:
        counts.append((yield from count(record)))
        yield
    return counts


def aggregate_counts_in_steps(records: Sequence[UserRecord]) -> Generator[None, None, list[int] | None]:
    """Return the number of user records in each record; None if none is an aggregated KPL record; no text is one."""
    if not any(record.data.startswith(MAGIC) for record in records):
        return None
    return (yield from counts_in_steps(_count_in_aggregate, records))


def aggregate_counts(records: Sequence[UserRecord]) -> list[int] | None:
    """Return the result of `aggregate_counts_in_steps`, in one step."""
    return result_of(aggregate_counts_in_steps(records))


def result_of(steps: Generator[None, None, T]) -> T:
    """Return the result of all steps, run at once."""
    while True:
        try:
            next(steps)
        except StopIteration as finished:
            return finished.value  # type: ignore[no-any-return]


def _count_in_protobuf(framing: _Framing, body: bytes, start: int, end: int) -> _Steps:
    try:
        return max(1, (yield from _fields_at(framing, body, start, end)))
    except _Malformed:
        return 1


def _fields_at(framing: _Framing, body: bytes, start: int, end: int) -> _Steps:
    """Count the fields at the end of the path in the message between `start` and `end`."""
    path, ends, at, found = framing.path, [end], start, 0
    for examined in range(1, len(body) // framing.bytes_per_field + _LEAST):
        while at >= ends[-1]:
            ends.pop()
            if not ends:
                return found
        end = ends[-1]
        tag, after = (body[at], at + 1) if body[at] < _MORE else _varint(body, at, end)
        kind = tag & 7
        if kind == _LENGTH_DELIMITED:
            length, after = _varint(body, after, end)
            at = after + length
        else:
            at = _varint(body, after, end)[1] if kind == _VARINT else after + _FIXED_BYTES.get(kind, len(body))
        if at > end:
            raise _Malformed
        if kind == _LENGTH_DELIMITED and tag >> 3 in path[len(ends) - 1]:
            if len(ends) == len(path):
                found += 1
            else:
                ends.append(at)
                at = after
        if not examined % _STEP_FIELDS:
            yield
    return found


def _varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    """Return the varint at `at`, and the position after it."""
    if at < end and body[at] < _MORE:
        return body[at], at + 1
    value = shift = 0
    for position in range(at, min(end, at + _VARINT_BYTES)):
        byte = body[position]
        value |= (byte & 0x7F) << shift
        if byte < _MORE:
            return value, position + 1
        shift += 7
    raise _Malformed


def _count_in_json(signal: str, record: UserRecord) -> _Steps:
    yield
    most = len(record.data) // _BYTES_PER_OBJECT + _LEAST
    if record.data.count(b"{") > most:
        # Decoding would take too long, and no ordinary request has so many objects.
        return most
    try:
        request = _REQUESTS[signal].decode(record.data)
    except MALFORMED:
        return 1
    scopes = [scope for resource in request.resources or () for scope in resource.scopes or ()]
    if signal != "metrics":
        return max(1, sum([len(scope.items or ()) for scope in scopes]))
    metrics = [metric for scope in scopes for metric in scope.items or ()]
    points = [each for metric in metrics for each in astuple(metric) if each is not None]
    return max(1, sum([len(each.points or ()) for each in points]))


def _list_of(element: type, struct: str, attribute: str, name: str) -> Any:  # noqa: ANN401 - a struct
    """Return a struct whose `attribute`, the member `name` in JSON, is a list or absent."""
    return msgspec.defstruct(struct, [(attribute, list[element] | None, None)], rename={attribute: name}, gc=False)  # type: ignore[valid-type]


_Points: Final = _list_of(SkippedObject, "Points", "points", "dataPoints")
_Metric: Final = msgspec.defstruct(
    "Metric", [(kind, _Points | None, None) for kind in _POINTS.values()], rename="camel", gc=False
)
_ITEMS: Final[dict[str, tuple[str, str, str, type]]] = {
    "logs": ("resourceLogs", "scopeLogs", "logRecords", SkippedObject),
    "traces": ("resourceSpans", "scopeSpans", "spans", SkippedObject),
    "metrics": ("resourceMetrics", "scopeMetrics", "metrics", _Metric),
}


def _request_of(signal: str) -> Any:  # noqa: ANN401 - a struct
    resources, scopes, items, item = _ITEMS[signal]
    scope = _list_of(item, "Scope", "items", items)
    return _list_of(_list_of(scope, "Resource", "scopes", scopes), "Request", "resources", resources)


_REQUESTS: Final = {signal: msgspec.json.Decoder(_request_of(signal)) for signal in _ITEMS}
