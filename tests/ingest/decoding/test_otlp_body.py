"""Export requests as records: complete, or split between resources. opentelemetry-proto is the oracle."""

import json

import pytest
from hypothesis import given, strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from kpl_integrations.ingest.decoding import DecodeLimits, DecodeRefusal, otlp_records
from kpl_integrations.ingest.decoding.otlp_body import JSON, PROTOBUF, RESOURCES

LIMITS = DecodeLimits(max_records=100, max_record_bytes=400, max_depth=20)


def export_request(sizes: list[int]) -> ExportLogsServiceRequest:
    request = ExportLogsServiceRequest()
    for number, size in enumerate(sizes):
        resource = request.resource_logs.add()
        resource.schema_url = f"{number}:{'x' * size}"
    return request


def parts(media_type: str, body: bytes, signal: str = "logs") -> list[bytes]:
    records = otlp_records(signal, media_type, body, limits=LIMITS, partition_key="key")
    assert {record.partition_key for record in records} <= {"key"}
    return [record.data for record in records]


@given(st.lists(st.integers(0, 300), max_size=12))
def test_protobuf_is_stored_unchanged_or_in_parts_that_are_requests(sizes):
    request = export_request(sizes)
    body = request.SerializeToString()
    stored = parts(PROTOBUF, body)
    assert all(len(part) + len("key") <= LIMITS.max_record_bytes for part in stored)
    if body and len(body) + len("key") <= LIMITS.max_record_bytes:
        assert stored == [body]
    together = ExportLogsServiceRequest()
    for part in stored:
        together.MergeFromString(part)
    assert together == request


@given(st.lists(st.integers(0, 300), max_size=12), st.sampled_from(sorted(RESOURCES)))
def test_json_is_stored_unchanged_or_in_parts_that_are_requests(sizes, signal):
    name = RESOURCES[signal]
    request = {name: [{"schemaUrl": f"{number}:{'x' * size}"} for number, size in enumerate(sizes)]}
    body = json.dumps(request).encode()
    stored = parts(JSON, body, signal)
    assert all(len(part) + len("key") <= LIMITS.max_record_bytes for part in stored)
    if sizes and len(body) + len("key") <= LIMITS.max_record_bytes:
        assert stored == [body]
    assert [each for part in stored for each in json.loads(part)[name]] == request[name]


def test_an_empty_request_stores_nothing():
    assert parts(PROTOBUF, b"") == []
    assert parts(JSON, b"{}") == []
    assert parts(JSON, b'{"resourceLogs":[]}') == []


def test_unknown_fields_are_kept():
    body = export_request([3]).SerializeToString() + bytes([0x10, 0x96, 0x01, 0x1D, 1, 2, 3, 4])
    assert parts(PROTOBUF, body) == [body]


@pytest.mark.parametrize(
    ("media_type", "body", "status"),
    [
        (PROTOBUF, export_request([500]).SerializeToString(), 413),
        (PROTOBUF, export_request([0] * 101).SerializeToString(), 413),
        (PROTOBUF, b"\x0a" * 3, 400),
        (PROTOBUF, b"\x0a\x05abc", 400),
        (PROTOBUF, b"\x0b", 400),
        (PROTOBUF, b"\x08\x01", 400),
        (PROTOBUF, b"\x00\x01", 400),
        (PROTOBUF, b"\xff" * 20, 400),
        (PROTOBUF, b"\x1d\x00", 400),
        (PROTOBUF, b'{"resourceLogs":[]}', 400),
        (JSON, json.dumps({"resourceLogs": [{"x": "x" * 500}]}).encode(), 413),
        (JSON, json.dumps({"resourceLogs": [{}] * 101}).encode(), 413),
        (JSON, b"", 400),
        (JSON, b"[]", 400),
        (JSON, b'{"resourceLogs":{}}', 400),
        (JSON, b'{"resourceLogs":[', 400),
        (JSON, b'{"resourceLogs":[{}, []]}', 400),
        (JSON, b'{"resourceSpans":[]}', 400),
        (JSON, b'{"resource_logs":[]}', 400),
        (JSON, b'{"resourceLogs":["\xff"]}', 400),
        (JSON, b'{"resourceLogs":' + b"[" * 50 + b"]" * 50 + b"}", 400),
        (JSON, b'{"resourceLogs":' + b"[" * 100_000, 400),
    ],
)
def test_a_body_that_is_not_an_export_request_is_rejected(media_type, body, status):
    with pytest.raises(DecodeRefusal) as raised:
        parts(media_type, body)
    assert raised.value.status == status
    assert raised.value.detail.isprintable()


@pytest.mark.parametrize(("media_type", "body"), [(PROTOBUF, b""), (JSON, b"{}")])
@pytest.mark.parametrize("key", ["", "k" * 257])
def test_an_invalid_key_is_rejected_for_an_empty_request_too(media_type, body, key):
    with pytest.raises(DecodeRefusal) as raised:
        otlp_records("logs", media_type, body, limits=LIMITS, partition_key=key)
    assert (raised.value.status, raised.value.field) == (400, "X-Partition-Key")


@given(st.binary(max_size=100))
def test_everything_that_protobuf_parses_is_accepted_and_other_bytes_never_crash(body):
    try:
        parsed = ExportLogsServiceRequest.FromString(body)
    except Exception:  # noqa: BLE001 - whatever the oracle raises for no message
        parsed = None
    try:
        stored = parts(PROTOBUF, body)
    except DecodeRefusal:
        # Protobuf skips groups, deprecated since 2010. The gateway rejects them.
        assert parsed is None or not parsed.resource_logs or any(byte & 7 in {3, 4} for byte in body)
    else:
        assert bool(stored) or parsed is None or not parsed.resource_logs


def test_the_depth_of_a_request_with_too_many_resources_is_not_checked():
    with pytest.raises(DecodeRefusal) as raised:
        parts(JSON, b'{"resourceLogs":[' + b"{}," * 100 + b'{"a":' + b"[" * 30 + b"]" * 30 + b"}]}")
    assert (raised.value.status, raised.value.code) == (413, "too-many-records")
    assert raised.value.detail == "the request has the data of 101 resources; send at most 100 at once"
