"""Small requests that once cost seconds or hundreds of megabytes. Each is measured in a gateway process of its own."""

import re
import sys
from collections.abc import Iterator

import cbor2
import pytest

from tests.support.expensive_requests import AMZ_CBOR, AMZ_JSON, JSON, RECORDS, get, post, repeated, signed
from tests.support.measured_gateway import Cost, GatewayFactory, MeasuredGateway, gateway_factory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measures with /proc")
MIB = 1 << 20
MAIL = "Content-Type: multipart/mixed; boundary=a\n\n"


@pytest.fixture(scope="module")
def factory() -> Iterator[GatewayFactory]:
    with gateway_factory() as made:
        yield made


@pytest.fixture
def gateway(factory: GatewayFactory) -> Iterator[MeasuredGateway]:
    with factory.gateway() as running:
        assert running.ask(post(RECORDS, JSON, b'{"data":1}').content) == 202
        yield running


def cbor_cost(gateway: MeasuredGateway, operation: str, body: bytes) -> Cost:
    record = {"StreamName": "orders", "PartitionKey": "k", "Data": b""}
    assert gateway.ask(signed("PutRecord", AMZ_CBOR, cbor2.dumps(record)).content) == 200
    return gateway.cost(signed(operation, AMZ_CBOR, body).content)


def test_a_signed_arn_of_128_kib_is_refused_by_its_length(gateway):
    arn = "arn:aws" + ":kinesis:" * (131_072 // 9)
    body = b'{"StreamARN":"%b","PartitionKey":"k","Data":""}' % arn.encode()
    cost = gateway.cost(signed("PutRecord", AMZ_JSON, body).content)
    assert cost.status == 400
    assert cost.cpu_seconds < 0.5  # it took 3.6 s


@pytest.mark.parametrize("key", ["busy", "none"])
def test_a_path_of_60_kb_is_refused_by_its_length(gateway, key):
    path = f"/v1/streams/arn:aws{':kinesis:' * 6_600}/records"
    cost = gateway.cost(post(path, JSON, b'{"data":1}').content.replace(b"busy", key.encode()))
    assert cost.status == 431
    assert cost.cpu_seconds < 0.2  # it took 0.7 s


@pytest.mark.parametrize(("parts", "status"), [(6_600, 431), (3_000, 404)])
def test_a_long_path_without_credentials_is_refused_by_its_length(factory, parts, status):
    path = f"/v1/streams/arn:aws{':kinesis:' * parts}/records"
    request = post(path, JSON, b'{"data":1}').content.replace(b"Authorization: Bearer busy\r\n", b"")
    with factory.gateway(serves_unknown=True) as gateway:
        assert gateway.ask(post(RECORDS, JSON, b'{"data":1}').content) == 202
        cost = gateway.cost(request)
    assert cost.status == status
    assert cost.cpu_seconds < 0.2  # it took 0.7 s


def test_an_arn_that_fits_into_a_head_is_matched_in_linear_time(gateway):
    cost = gateway.cost(post(f"/v1/streams/arn:aws{':kinesis:' * 3_000}/records", JSON, b'{"data":1}').content)
    assert cost.status == 404
    assert cost.cpu_seconds < 0.05  # it took 0.2 s


@pytest.mark.parametrize("size", [MIB, 4 * MIB])
def test_a_million_empty_maps_are_refused_before_they_are_decoded(gateway, size):
    body = cbor2.dumps({"StreamName": "orders"})
    body = b"\xa2" + body[1:] + cbor2.dumps("Records") + b"\x9a" + size.to_bytes(4, "big") + b"\xa0" * size
    cost = cbor_cost(gateway, "PutRecords", body)
    assert cost.status == 400
    assert cost.cpu_seconds < 0.5  # 1 MiB took 3.4 s
    assert cost.peak_bytes < 40 * MIB  # and 400 MB


def test_only_ten_violations_of_500_records_are_made(gateway):
    records = b",".join([b'{"PartitionKey":""}'] * 100_000)
    cost = gateway.cost(signed("PutRecords", AMZ_JSON, b'{"StreamName":"orders","Records":[%b]}' % records).content)
    assert cost.status == 400
    assert cost.cpu_seconds < 0.2  # it took 0.6 s


@pytest.mark.parametrize("size", [25_000, 100_000])
def test_a_cookie_of_backslashes_is_read_in_linear_time(gateway, size):
    cost = gateway.cost(get("/dashboard", 'Cookie: a="' + "\\" * size + '"').content)
    assert cost.status == (401 if size < 32_768 else 431)
    assert cost.cpu_seconds < 0.2  # 31 kB took 1.1 s, 100 kB in one read 22 s


@pytest.mark.parametrize(
    "body",
    [
        cbor2.dumps({"StreamName": "orders", "Limit": cbor2.CBORTag(2, b"\xff" * 100_000)}),
        cbor2.dumps({"StreamName": "orders", "Limit": cbor2.CBORTag(35, "a|" * 200_000)}),
        cbor2.dumps({"StreamName": "orders", "Limit": cbor2.CBORTag(36, MAIL + "--a\n\n" * 100_000)}),
    ],
    ids=["a bignum", "a regular expression", "a mail"],
)
def test_a_tag_other_than_1_is_a_serialization_error(gateway, body):
    cost = cbor_cost(gateway, "DescribeStream", body)
    assert cost.status == 400
    assert cost.cpu_seconds < 0.1


def test_shared_references_do_not_multiply_a_blob(gateway):
    record = cbor2.CBORTag(28, {"PartitionKey": "k", "Data": b"x" * 200_000})
    body = cbor2.dumps({"StreamName": "orders", "Records": [record, *[cbor2.CBORTag(29, 0)] * 300]})
    cost = cbor_cost(gateway, "PutRecords", body)
    assert cost.status == 400
    assert cost.peak_bytes < 12 * MIB  # 201 kB became 60 MB of records


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        (JSON, repeated(b"{},", b'{"records":[', b"{}]}")),
        ("application/x-ndjson", repeated(b"{}")),
        ("application/x-ndjson", repeated(b"11\n")),
        ("application/cloudevents-batch+json", repeated(b"1,", b"[", b"1]")),
    ],
    ids=["records", "lines", "bad lines", "events"],
)
def test_elements_are_counted_before_they_are_decoded(gateway, content_type, body):
    cost = gateway.cost(post(RECORDS, content_type, body(8_000_000)).content)
    assert cost.status in {400, 413}
    assert cost.peak_bytes < 128 * MIB  # it took 300 MB and more


def test_a_signature_names_each_header_once(gateway):
    request = signed("PutRecord", AMZ_JSON, b"{}", {"A": "x" * 25_000}).content.decode()
    content = re.sub("SignedHeaders=", lambda found: found.group() + "a;" * 1_800, request).encode()
    cost = gateway.cost(content)
    assert cost.status == 400
    assert cost.cpu_seconds < 0.05  # it hashed 45 MB
