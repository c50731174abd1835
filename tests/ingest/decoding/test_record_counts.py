"""The number of user records in a record, by its framing only."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kpl_core import UserRecord, encode
from kpl_core.records.aggregated_record import MAGIC
from kpl_integrations.ingest.decoding.record_counts import (
    aggregate_counts,
    otlp_counting,
    result_of,
)

REQUESTS: dict[str, Any] = {
    "logs": ExportLogsServiceRequest,
    "traces": ExportTraceServiceRequest,
    "metrics": ExportMetricsServiceRequest,
}
POINT = {"time_unix_nano": 1, "as_int": 7}
GAUGE = {"name": "requests.count", "gauge": {"data_points": [POINT]}}
SHAPES = {
    "logs": ("resource_logs", "scope_logs", "log_records", {"body": {"string_value": "a line of a log"}}),
    "traces": ("resource_spans", "scope_spans", "spans", {"name": "GET /orders", "trace_id": b"0123456789abcdef"}),
    "metrics": (
        "resource_metrics",
        "scope_metrics",
        "metrics",
        {"name": "requests.count", "gauge": {"data_points": [POINT]}},
    ),
}


def otlp(data: bytes, signal: str, *, is_protobuf: bool = True) -> int:
    return result_of(otlp_counting(signal, is_protobuf=is_protobuf)(UserRecord("k", data)))


def count_in_aggregate(record: UserRecord) -> int:
    counts = aggregate_counts([record])
    assert counts is not None
    return counts[0]


def export_request(signal: str, scopes: list[list[int]]) -> dict[str, object]:
    resources, scope_list, items, item = SHAPES[signal]
    return {resources: [{scope_list: [{items: [item] * count} for count in counts]} for counts in scopes]}


def in_json(value: object) -> object:
    """Return the message with the names of JSON, and bytes as text."""
    if isinstance(value, dict):
        camel = (name.split("_") for name in value)
        names = [head + "".join(word.title() for word in rest) for head, *rest in camel]
        return dict(zip(names, map(in_json, value.values()), strict=True))
    if isinstance(value, list):
        return list(map(in_json, value))
    return value.hex() if isinstance(value, bytes) else value


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=50), st.sampled_from([None, "0", "340"]))
def test_each_user_record_of_an_aggregate_counts(data: list[bytes], hash_key: str | None) -> None:
    records = [UserRecord(str(index), each, hash_key) for index, each in enumerate(data)]
    aggregate = UserRecord("k", encode(records))
    # Only of empty records the bound on the fields leaves some out.
    least = min(len(data), len(aggregate.data) // 48)
    assert least <= count_in_aggregate(aggregate) <= len(data)
    assert aggregate_counts([UserRecord("k", b"plain"), aggregate]) == [1, count_in_aggregate(aggregate)]


def test_records_without_an_aggregate_have_no_counts() -> None:
    assert aggregate_counts([UserRecord("k", b"plain"), UserRecord("k", b"")]) is None


@pytest.mark.parametrize("signal", REQUESTS)
@pytest.mark.parametrize("scopes", [[[1]], [[3, 0, 4], [2]], [[0]], [], [[40] * 5] * 5])
def test_each_item_of_an_export_request_counts(signal: str, scopes: list[list[int]]) -> None:
    request = export_request(signal, scopes)
    expected = max(1, sum(map(sum, scopes)))
    assert otlp(REQUESTS[signal](**request).SerializeToString(), signal) == expected
    assert otlp(json.dumps(in_json(request)).encode(), signal, is_protobuf=False) == expected


def test_the_data_points_of_every_kind_of_metric_count() -> None:
    kinds = ("gauge", "sum", "histogram", "exponential_histogram", "summary")
    metrics = [{"name": kind, kind: {"data_points": [{"time_unix_nano": 1}] * 2}} for kind in kinds]
    request = {"resource_metrics": [{"scope_metrics": [{"metrics": [*metrics, {"name": "none"}]}]}]}
    assert otlp(REQUESTS["metrics"](**request).SerializeToString(), "metrics") == 10
    assert otlp(json.dumps(in_json(request)).encode(), "metrics", is_protobuf=False) == 10


MALFORMED = [
    b"\x1a",
    b"\x1a\xff",
    b"\x1a\x05x",
    b"\x1a\x01x\x1b",
    b"\x1a" + b"\xff" * 11,
    b"\x08",
    b"\x09123",
    b"\x0d1",
    b"\x0f",
]


@pytest.mark.parametrize("fields", MALFORMED)
def test_a_malformed_aggregate_counts_as_one(fields: bytes) -> None:
    well_formed = b"\x1a\x00" * 5
    assert count_in_aggregate(UserRecord("k", MAGIC + well_formed + bytes(16))) == 5
    assert count_in_aggregate(UserRecord("k", MAGIC + well_formed + fields + bytes(16))) == 1


@pytest.mark.parametrize("size", [0, 3, 15])
def test_an_aggregate_without_room_for_its_digest_counts_as_one(size: int) -> None:
    assert count_in_aggregate(UserRecord("k", MAGIC + b"\x1a\x00" * 5 + bytes(size))) <= 5
    assert count_in_aggregate(UserRecord("k", MAGIC + bytes(size))) == 1


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"resourceLogs": 1}', b'{"resourceLogs": [{"scopeLogs": [1]}]}'])
def test_malformed_json_counts_as_one(body: bytes) -> None:
    assert otlp(body, "logs", is_protobuf=False) == 1


@given(st.binary(max_size=400), st.sampled_from(sorted(REQUESTS)), st.booleans())
def test_any_bytes_have_a_bounded_count(data: bytes, signal: str, is_protobuf: bool) -> None:
    most = len(data) // 8 + 64
    assert 1 <= otlp(data, signal, is_protobuf=is_protobuf) <= most
    assert 1 <= count_in_aggregate(UserRecord("k", MAGIC + data)) <= most


def test_the_work_for_tiny_fields_is_bounded_by_the_bytes() -> None:
    tiny = UserRecord("k", MAGIC + b"\x1a\x00" * 20_000 + bytes(16))
    assert count_in_aggregate(tiny) == len(tiny.data) // 16 + 63
    objects = msgspec.json.encode({"resourceLogs": [{"scopeLogs": [{"logRecords": [{}] * 20_000}]}]})
    assert otlp(objects, "logs", is_protobuf=False) == len(objects) // 8 + 64
