"""Repeated header fields: lists are joined, and other fields are rejected if their values differ."""

import gzip
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from kpl_integrations.ingest import IngestGateway, Refusal
from kpl_integrations.ingest.admission.refusals import Refused
from kpl_integrations.ingest.http.request_head import header_fields
from kpl_integrations.ingest.tenants import OpenTenants, Tenant
from tests.support.gateway_scene import STREAM, KnownTenants, open_gateway

Fields = list[tuple[bytes, bytes]]

LOGS = ExportLogsServiceRequest(resource_logs=[{"schema_url": "one"}])  # type: ignore[list-item]
PROTOBUF = (b"content-type", b"application/x-protobuf")


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ([(b"a", b"1"), (b"b", b"2")], {b"a": b"1", b"b": b"2"}),
        ([(b"accept", b"x"), (b"b", b"2"), (b"accept", b"y, z")], {b"accept": b"x, y, z", b"b": b"2"}),
        ([(b"content-encoding", b"gzip")] * 2, {b"content-encoding": b"gzip, gzip"}),
        ([(b"content-type", b"text/plain")] * 3, {b"content-type": b"text/plain"}),
        ([(b"ce-id", b"1")] * 2, {b"ce-id": b"1"}),
        ([], {}),
    ],
)
def test_repeated_lists_are_joined_and_equal_values_are_one_value(headers, fields):
    assert header_fields(headers) == fields


@pytest.mark.parametrize(
    "name",
    [
        "authorization",
        "content-length",
        "content-type",
        "host",
        "idempotency-key",
        "x-ack",
        "x-amz-date",
        "x-amz-security-token",
        "x-amz-target",
        "x-explicit-hash-key",
        "x-partition-key",
        "ce-type",
    ],
)
def test_two_values_of_a_single_field_are_rejected_without_repeating_them(name):
    with pytest.raises(Refused) as raised:
        header_fields([(name.encode(), b"secret-1"), (b"accept", b"x"), (name.encode(), b"secret-2")])
    assert raised.value.refusal is Refusal.BAD_PARAMETER
    assert raised.value.detail == f"the header field {name} is repeated with different values; send it once"
    assert "secret" not in str(raised.value)


async def answered(
    gateway: IngestGateway, path: str, body: bytes, *headers: tuple[bytes, bytes], method: str = "POST"
) -> tuple[int, bytes]:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    fields: Fields = [(b"host", b"x"), *headers]
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": fields}
    await gateway(scope, receive, send)
    return sent[0]["status"], sent[1]["body"]


@pytest.mark.anyio
async def test_otlp_rejects_two_content_encodings_and_two_partition_keys():
    directory = OpenTenants(Tenant(id="local", otlp_streams={"logs": STREAM}))
    body = LOGS.SerializeToString()
    packed = (b"content-encoding", b"gzip")
    async with open_gateway(directory=directory) as gateway:
        twice = gzip.compress(gzip.compress(body))
        assert (await answered(gateway, "/v1/logs", twice, PROTOBUF, packed, packed))[0] == 415
        none = (b"content-encoding", b"identity")
        assert (await answered(gateway, "/v1/logs", gzip.compress(body), PROTOBUF, packed, none))[0] == 200
        keys = [(b"x-partition-key", b"a"), (b"x-partition-key", b"b")]
        status, said = await answered(gateway, "/v1/logs", body, PROTOBUF, *keys)
        assert (status, b"x-partition-key" in said) == (400, True)
        status, said = await answered(gateway, "/v1/logs", body, PROTOBUF, (b"content-type", b"application/json"))
        assert (status, said[:1]) == (400, b"{")
        assert gateway.producer.report().accepted == 1


@pytest.mark.anyio
async def test_the_kinesis_api_rejects_two_values_of_a_single_field():
    body = b'{"StreamName":"orders","PartitionKey":"k","Data":"eA=="}'
    wire = (b"content-type", b"application/x-amz-json-1.1")
    targets = [(b"x-amz-target", b"Kinesis_20131202." + name) for name in (b"PutRecord", b"ListShards")]
    async with open_gateway() as gateway:
        assert (await answered(gateway, "/", body, wire, targets[0], targets[0]))[0] == 200
        status, said = await answered(gateway, "/", body, wire, *targets)
        assert (status, b"SerializationException" in said) == (400, True)
        assert gateway.producer.report().accepted == 1


@pytest.mark.anyio
async def test_two_credentials_get_no_statistics():
    async with open_gateway(directory=KnownTenants(Tenant(id="a"), Tenant(id="b"))) as gateway:
        a, b = ((b"authorization", b"Bearer " + name) for name in (b"a", b"b"))
        assert (await answered(gateway, "/v1/stats", b"", a, a, method="GET"))[0] == 200
        assert (await answered(gateway, "/v1/stats", b"", a, b, method="GET"))[0] == 400


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "values"),
    [
        (b"content-encoding", (b"gzip", b"gzip")),
        (b"content-type", (b"application/json", b"application/x-ndjson")),
        (b"x-ack", (b"queued", b"delivered")),
        (b"authorization", (b"Bearer one", b"Bearer two")),
        (b"idempotency-key", (b'"one"', b'"two"')),
    ],
)
async def test_records_are_not_accepted_by_the_last_of_two_fields(name, values):
    body = b'{"partition_key": "k", "data": "d"}'
    fields = [(name, value) for value in values]
    async with open_gateway(directory=OpenTenants(Tenant(id="local"))) as gateway:
        length = (b"content-length", str(len(body)).encode())
        target = f"/v1/streams/{STREAM}/records"
        assert gateway.head_of(target.encode(), [(b"host", b"x"), length, *fields]) is None
        status, answer = await answered(gateway, target, body, length, *fields)
        report = gateway.producer.report()
    assert status == (415 if name == b"content-encoding" else 400), answer
    assert report.accepted == 0
    assert b"Bearer" not in answer
