"""The Kinesis API of the gateway with unusual requests: chunked, in CBOR, presigned."""

import http.client
import json
import urllib.parse
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import cbor2
import pytest
from botocore.auth import SigV4Auth, SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from kpl_integrations.ingest.tenants import AccessKey, Tenant
from tests.support.running_gateway import RunningGateway, key_directory, running_gateway

SECRET = "a-secret-of-the-tenant"
JSON = "application/x-amz-json-1.1"
CBOR = "application/x-amz-cbor-1.1"
RECORD = {"StreamName": "orders", "PartitionKey": "k"}


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    with running_gateway(key_directory(AccessKey("ADA", SECRET, Tenant(id="ada"))), {"orders": 2}) as running:
        yield running


def posted(
    gateway: RunningGateway,
    operation: str,
    body: bytes,
    *,
    content_type: str = JSON,
    signer: type[SigV4Auth] = SigV4Auth,
    in_chunks: bool = False,
    more: Mapping[str, str] = MappingProxyType({}),
) -> tuple[int, bytes]:
    """Return status and body of the answer to a request that botocore signed."""
    headers = {"X-Amz-Target": f"Kinesis_20131202.{operation}", "Content-Type": content_type}
    headers |= more
    request = AWSRequest(method="POST", url=f"{gateway.url}/", data=body, headers=headers)
    signer(Credentials("ADA", SECRET), "kinesis", "eu-west-1").add_auth(request)
    url = urllib.parse.urlsplit(str(request.url))
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=30)
    try:
        sent = iter([body[:7], body[7:]]) if in_chunks else body
        path = f"/?{url.query}" if url.query else "/"
        connection.request("POST", path, sent, dict(request.headers.items()), encode_chunked=in_chunks)
        answered = connection.getresponse()
        return answered.status, answered.read()
    finally:
        connection.close()


def stored(gateway: RunningGateway) -> list[bytes]:
    return [record.data for record in gateway.user_records("orders")]


def test_a_signed_body_may_be_chunked(gateway):
    body = json.dumps({**RECORD, "Data": "aW4gY2h1bmtz"}).encode()
    assert posted(gateway, "PutRecord", body, in_chunks=True)[0] == 200
    assert b"in chunks" in stored(gateway)


def test_each_record_put_after_an_answer_has_the_higher_sequence_number(gateway):
    numbers: list[int] = []
    for number in range(30):
        before = {"SequenceNumberForOrdering": str(numbers[-1])} if numbers else {}
        record = {**RECORD, "Data": b"%d" % number, **before}
        # As the AWS SDK for Java 2 sends it.
        more = {"amz-sdk-invocation-id": "1", "amz-sdk-request": "attempt=1; max=4", "User-Agent": "aws-sdk-java/2.29"}
        status, answered = posted(gateway, "PutRecord", cbor2.dumps(record), content_type=CBOR, more=more)
        assert status == 200
        numbers.append(int(cbor2.loads(answered)["SequenceNumber"]))
    assert numbers == sorted(set(numbers))
    status, answered = posted(gateway, "PutRecord", b'{"SequenceNumberForOrdering": "one"}')
    assert (status, json.loads(answered)["__type"]) == (400, "ValidationException")


# Credentials in an unsupported place, and the error code for them.
@pytest.mark.parametrize(
    ("signer", "more", "code"),
    [
        (SigV4QueryAuth, {}, "MissingAuthenticationTokenException"),
        # A body outside the signature could be replaced in transit.
        (SigV4Auth, {"X-Amz-Content-Sha256": "UNSIGNED-PAYLOAD"}, "InvalidSignatureException"),
    ],
    ids=["presigned", "unsigned body"],
)
def test_only_a_signature_of_headers_and_body_is_accepted(gateway, signer, more, code):
    body = json.dumps({**RECORD, "Data": "cmVmdXNlZA=="}).encode()
    status, answered = posted(gateway, "PutRecord", body, signer=signer, more=more)
    assert (status, json.loads(answered)["__type"]) == (400, code)
    assert b"refused" not in stored(gateway)


@pytest.mark.parametrize(
    "operation",
    ["CreateStream", "DescribeLimits", "GetRecords", "ListStreams", "RegisterStreamConsumer", "SubscribeToShard"],
)
@pytest.mark.parametrize("content_type", [JSON, CBOR])
def test_an_unsupported_operation_is_rejected_with_the_supported_ones(gateway, operation, content_type):
    read, write = (json.loads, json.dumps) if content_type == JSON else (cbor2.loads, cbor2.dumps)
    body = write(RECORD)
    body = body.encode() if isinstance(body, str) else body
    status, answered = posted(gateway, operation, body, content_type=content_type)
    error = read(answered)
    assert (status, error["__type"]) == (400, "UnknownOperationException")
    offered = "{PutRecord, PutRecords, DescribeStream, DescribeStreamSummary, ListShards}"
    assert error["message"] == f"X-Amz-Target 'Kinesis_20131202.{operation}' is not one of Kinesis_20131202.{offered}."
