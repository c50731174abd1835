"""The Kinesis API of the gateway with unmodified boto3 and aiobotocore; only endpoint_url is set.

100,000 records, the JavaScript SDK and async-kinesis are in tests/interop/test_ingest_clients.py.
"""

import json
import threading
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
import botocore.auth
import pytest
from aiobotocore.session import AioSession
from botocore.config import Config
from botocore.exceptions import ClientError

from kpl_core import BlockingProducer, Config as ProducerConfig, UserRecord, encode
from kpl_core.testing import ErrorAnswer, RecordError, When
from kpl_integrations.ingest.admission.refusals import REFUSALS, Refusal
from kpl_integrations.ingest.request.kinesis_wire import WIRE_ANSWERS
from kpl_integrations.ingest.streams.upstream import UNAVAILABLE, Upstream
from kpl_integrations.ingest.tenants import AccessKey, OpenTenants, Tenant
from kpl_integrations.kinesis_protocol.requests import RequestRefused
from kpl_integrations.kinesis_protocol.wire import Wire, wire_of
from kpl_integrations.local_kinesis import listener
from tests.support.running_gateway import RunningGateway, key_directory, running_gateway

SECRET = "a-secret-of-the-tenant"
STREAM = "orders"
ADA = Tenant(id="ada", streams=("orders", "none", "more-*"))
HELD = Tenant(id="held", records_per_second=400)
DIRECTORY = key_directory(
    AccessKey("ADA", SECRET, ADA),
    AccessKey("TEMP", SECRET, ADA, session_token="token", expires_at=4e9),
    AccessKey("OVER", SECRET, ADA, session_token="token", expires_at=1e9),
    AccessKey("ELSEWHERE", SECRET, Tenant(id="elsewhere", streams=("none",))),
    AccessKey("HELD", SECRET, HELD),
    AccessKey("SLOW", SECRET, Tenant(id="slow", records_per_second=0.001)),
    AccessKey("PLAIN", SECRET, Tenant(id="plain", aggregation=False)),
)


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    with running_gateway(DIRECTORY, {STREAM: 2, "secret-plans": 1}) as running:
        yield running
    assert running.report is not None
    assert running.report.complete


@pytest.fixture(scope="module")
def open_gateway() -> Iterator[RunningGateway]:
    with running_gateway(OpenTenants(Tenant(id="local")), {STREAM: 1}) as running:
        yield running


def client_for(url: str, key: str = "ADA", secret: str = SECRET, token: str | None = None, **options: Any) -> Any:
    return boto3.client(
        "kinesis",
        endpoint_url=url,
        region_name="eu-west-1",
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        aws_session_token=token,
        config=Config(retries={"total_max_attempts": 1}, **options),
    )


@pytest.fixture(scope="module")
def client(gateway: RunningGateway) -> Any:
    return client_for(gateway.url)


def refusal(call: Any, **arguments: Any) -> tuple[str, int, str]:
    with pytest.raises(ClientError) as raised:
        call(**arguments)
    response = raised.value.response
    assert SECRET not in str(response)
    error = response["Error"]
    return error["Code"], response["ResponseMetadata"]["HTTPStatusCode"], error["Message"]


def test_each_answer_names_the_kinesis_record_that_contains_the_user_record(gateway, client):
    # Until the gateway knows the shards, each record is sent alone.
    client.put_record(StreamName=STREAM, PartitionKey="k", Data=b"first")
    sent: dict[object, tuple[str, str]] = {}
    for start in range(0, 2000, 500):
        records = [{"PartitionKey": f"k-{n}", "Data": b"many-%d" % n} for n in range(start, start + 500)]
        answer = client.put_records(StreamName=STREAM, Records=records)
        assert answer["FailedRecordCount"] == 0
        for record, entry in zip(records, answer["Records"], strict=True):
            sent[record["Data"]] = (entry["ShardId"], entry["SequenceNumber"])
    found = {
        record.data: (record.shard_id, record.sequence_number)
        for record in gateway.user_records(STREAM)
        if record.data.startswith(b"many-")
    }
    assert found == sent
    # Aggregated: far fewer Kinesis records than user records.
    assert len(set(sent.values())) < 200


def test_put_record_answers_shard_and_sequence_number(gateway, client):
    answer = client.put_record(StreamName=STREAM, PartitionKey="one", Data=b"one", ExplicitHashKey="5")
    (found,) = [record for record in gateway.user_records(STREAM) if record.data == b"one"]
    assert found.partition_key == "one"
    assert (answer["ShardId"], answer["SequenceNumber"]) == (found.shard_id, found.sequence_number)
    assert found.shard_id == "shardId-000000000000"


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_aiobotocore_works_too(gateway, anyio_backend):
    keys = {"aws_access_key_id": "TEMP", "aws_secret_access_key": SECRET, "aws_session_token": "token"}
    async with AioSession().create_client("kinesis", endpoint_url=gateway.url, region_name="x-1", **keys) as aio_client:
        records = [{"PartitionKey": str(n), "Data": b"aio-%d" % n} for n in range(50)]
        answer = await aio_client.put_records(StreamName=STREAM, Records=records)
        assert answer["FailedRecordCount"] == 0
        shards = (await aio_client.list_shards(StreamName=STREAM))["Shards"]
    assert {entry["ShardId"] for entry in answer["Records"]} <= {shard["ShardId"] for shard in shards}


def test_read_only_operations_are_forwarded(gateway, client):
    summary = client.describe_stream_summary(StreamName=STREAM)["StreamDescriptionSummary"]
    assert (summary["StreamName"], summary["OpenShardCount"]) == (STREAM, 2)
    assert abs((datetime.now(UTC) - summary["StreamCreationTimestamp"]).total_seconds()) < 600
    page = client.list_shards(StreamName=STREAM, MaxResults=1, ShardFilter={"Type": "AT_LATEST"})
    assert len(page["Shards"]) == 1
    assert len(client.list_shards(NextToken=page["NextToken"])["Shards"]) == 1
    # A token stands for a stream, so it works only for tenants that may use the stream.
    other = client_for(gateway.url, key="ELSEWHERE")
    assert refusal(other.list_shards, NextToken=page["NextToken"])[0] == "AccessDeniedException"
    for invented in (page["NextToken"].partition("|")[2], "none", "|", f"{STREAM}|"):
        assert refusal(other.list_shards, NextToken=invented)[0] in {
            "InvalidArgumentException",
            "AccessDeniedException",
        }
    assert client.describe_stream(StreamName=STREAM)["StreamDescription"]["HasMoreShards"] is False


@pytest.mark.parametrize("wire_path", ["fast", "cbor", "stock"])
def test_forwarding_is_the_same_with_every_transport(wire_path):
    with running_gateway(DIRECTORY, {STREAM: 2}, wire_path=wire_path) as gateway:
        ada = client_for(gateway.url)
        described = ada.describe_stream(StreamName=STREAM, Limit=1)["StreamDescription"]
        assert (len(described["Shards"]), described["HasMoreShards"]) == (1, True)
        arn, created = described["StreamARN"], described["StreamCreationTimestamp"]
        assert ada.list_shards(StreamName=STREAM, StreamCreationTimestamp=created)["Shards"]
        assert ada.put_record(StreamARN=arn, PartitionKey="k", Data=b"x")["ShardId"]
        assert set(gateway.gateway.producer.statistics()) == {STREAM}
        assert refusal(ada.describe_stream, StreamName="none")[:2] == ("ResourceNotFoundException", 400)
        for code, answered in {"InternalFailure": 500, "ServiceUnavailable": 503}.items():
            once = When(operation="DescribeStream", times=1)
            gateway.kinesis.call(lambda fake, _: fake.faults.add(ErrorAnswer(code), once))  # noqa: B023 - runs here
            assert refusal(ada.describe_stream, StreamName=STREAM)[:2] == (code, answered)


def test_a_stream_by_its_arn_is_the_same_stream(gateway, client):
    arn = client.describe_stream_summary(StreamName=STREAM)["StreamDescriptionSummary"]["StreamARN"]
    record = {"PartitionKey": "k", "Data": b"by its arn"}
    assert client.put_records(StreamARN=arn, Records=[record])["FailedRecordCount"] == 0
    assert client.put_record(StreamARN=arn, StreamName=STREAM, **record)["ShardId"]
    assert client.put_record(StreamName=STREAM, **record)["ShardId"]
    assert client.list_shards(StreamARN=arn)["Shards"]
    # One pipeline: two would each use the shards' whole limits.
    assert not [name for name in gateway.gateway.producer.statistics() if name.startswith("arn:")]
    foreign = arn.replace("000000000000", "111111111111")
    assert refusal(client.put_record, StreamARN=foreign, **record)[0] == "AccessDeniedException"


# Credentials, and the error code and status of AWS.
CREDENTIALS: list[tuple[str, dict[str, Any], str]] = [
    ("wrong secret", {"secret": "another"}, "InvalidSignatureException"),
    ("unknown key", {"key": "NOBODY"}, "UnrecognizedClientException"),
    ("expired token", {"key": "OVER", "token": "token"}, "ExpiredTokenException"),
    ("wrong token", {"key": "TEMP", "token": "other"}, "UnrecognizedClientException"),
    ("no token", {"key": "TEMP"}, "UnrecognizedClientException"),
]


@pytest.mark.parametrize(("given", "code"), [row[1:] for row in CREDENTIALS], ids=[row[0] for row in CREDENTIALS])
def test_invalid_credentials_are_answered_with_the_codes_of_aws(gateway, given, code):
    refused = client_for(gateway.url, **given)
    counted = gateway.gateway.tally.refusals[Refusal.BAD_CREDENTIALS]
    assert refusal(refused.put_record, StreamName=STREAM, PartitionKey="k", Data=b"refused")[:2] == (code, 400)
    assert b"refused" not in {record.data for record in gateway.user_records(STREAM)}
    assert gateway.gateway.tally.refusals[Refusal.BAD_CREDENTIALS] == counted + 1


@pytest.mark.parametrize("hours", [-3, 3])
def test_a_skewed_clock_is_answered_with_the_code_of_aws(gateway, client, hours, monkeypatch):
    skewed = datetime.now(UTC).replace(tzinfo=None) + timedelta(hours=hours)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: skewed)
    code, status, message = refusal(client.put_record, StreamName=STREAM, PartitionKey="k", Data=b"")
    assert (code, status) == ("InvalidSignatureException", 400)
    assert message.startswith("Signature expired" if hours < 0 else "Signature not yet current")


# A request, and the error code and status of AWS.
REQUESTS: list[tuple[str, str, dict[str, Any], str, int]] = [
    ("not its stream", "put_record", {"StreamName": "secret-plans"}, "AccessDeniedException", 400),
    ("no such stream", "put_record", {"StreamName": "none"}, "ResourceNotFoundException", 400),
    ("not its stream to look at", "list_shards", {"StreamName": "secret-plans"}, "AccessDeniedException", 400),
    ("an unknown operation", "list_streams", {}, "UnknownOperationException", 400),
    ("a record too large", "put_record", {"Data": b"x" * 1_048_577}, "ValidationException", 400),
    ("a key too long", "put_record", {"PartitionKey": "k" * 257}, "ValidationException", 400),
    ("a hash key out of range", "put_record", {"ExplicitHashKey": str(2**128)}, "InvalidArgumentException", 400),
    ("too many records", "put_records", {"Records": 501}, "ValidationException", 400),
    ("none", "put_records", {"Records": 0}, "ValidationException", 400),
]


@pytest.mark.parametrize(
    ("operation", "given", "code", "status"), [row[1:] for row in REQUESTS], ids=[row[0] for row in REQUESTS]
)
def test_requests_that_kinesis_rejects_have_its_error_codes(gateway, operation, given, code, status):
    unchecked = client_for(gateway.url, parameter_validation=False)
    record = {"PartitionKey": "k", "Data": b"x"}
    arguments: dict[str, Any] = {
        "put_record": {"StreamName": STREAM, **record},
        "put_records": {"StreamName": STREAM},
        "list_shards": {},
        "list_streams": {},
    }[operation] | given
    if "Records" in arguments:
        arguments["Records"] = [record] * arguments["Records"]
    assert refusal(getattr(unchecked, operation), **arguments)[:2] == (code, status)


def test_a_tenant_over_its_rate_is_throttled_record_by_record_until_all_are_in(gateway):
    held = client_for(gateway.url, key="HELD")
    waiting = [{"PartitionKey": str(n), "Data": b"held-%d" % n} for n in range(1000)]
    throttled = 0
    wait = threading.Event()
    while waiting:
        answer = held.put_records(StreamName=STREAM, Records=waiting[:200])
        results = list(zip(waiting[:200], answer["Records"], strict=True))
        again = [record for record, entry in results if "ErrorCode" in entry]
        assert {entry["ErrorCode"] for _, entry in results if "ErrorCode" in entry} <= {
            "ProvisionedThroughputExceededException"
        }
        assert answer["FailedRecordCount"] == len(again)
        throttled += len(again)
        waiting = again + waiting[200:]
        if again:
            wait.wait(0.05)  # as a client backs off
    stored = [record.data for record in gateway.user_records(STREAM) if record.data.startswith(b"held-")]
    assert sorted(stored) == sorted(b"held-%d" % n for n in range(1000))
    assert throttled


def test_put_record_over_the_rate_is_an_error_that_every_client_retries(gateway):
    slow = client_for(gateway.url, key="SLOW")
    assert slow.put_record(StreamName=STREAM, PartitionKey="k", Data=b"x")["ShardId"]
    code, status, _ = refusal(slow.put_record, StreamName=STREAM, PartitionKey="k", Data=b"x")
    assert (code, status) == ("ProvisionedThroughputExceededException", 400)


def test_a_gateway_that_shuts_down_is_503_which_every_sdk_retries(gateway, client, monkeypatch):
    monkeypatch.setattr(gateway.gateway.admission, "state", "closed")
    with pytest.raises(ClientError) as raised:
        client.put_record(StreamName=STREAM, PartitionKey="k", Data=b"x")
    answered = raised.value.response
    assert (answered["Error"]["Code"], answered["ResponseMetadata"]["HTTPStatusCode"]) == ("ServiceUnavailable", 503)
    assert answered["ResponseMetadata"]["HTTPHeaders"]["retry-after"] == "1"


def test_a_forwarded_call_without_kinesis_is_answered_with_retry_after(client, monkeypatch):
    async def call(*_: object, **__: object) -> None:
        raise RequestRefused(UNAVAILABLE, "Kinesis could not be asked", status=503)

    monkeypatch.setattr(Upstream, "call", call)
    with pytest.raises(ClientError) as raised:
        client.list_shards(StreamName=STREAM)
    answered = raised.value.response["ResponseMetadata"]
    assert (answered["HTTPStatusCode"], answered["HTTPHeaders"]["retry-after"]) == (503, "1")


def test_an_answer_is_true_for_each_record_when_kinesis_fails_some(gateway):
    plain = client_for(gateway.url, key="PLAIN")
    effect, when = RecordError("ValidationException", "not this one"), When(every=3)
    fault = gateway.kinesis.call(lambda fake, _: fake.faults.add(effect, when))
    try:
        records = [{"PartitionKey": f"f-{n}", "Data": b"some-%d" % n} for n in range(200)]
        answer = plain.put_records(StreamName=STREAM, Records=records)
    finally:
        gateway.kinesis.call(lambda fake, _: fake.faults.remove(fault))
    stored = {r.data: (r.shard_id, r.sequence_number) for r in gateway.user_records(STREAM)}
    failed = 0
    for record, entry in zip(records, answer["Records"], strict=True):
        if "ErrorCode" in entry:
            failed += 1
            assert (entry["ErrorCode"], entry["ErrorMessage"]) == (
                "InternalFailure",
                "ValidationException: not this one",
            )
            assert record["Data"] not in stored
        else:
            assert stored[record["Data"]] == (entry["ShardId"], entry["SequenceNumber"])
    assert answer["FailedRecordCount"] == failed
    assert 60 <= failed <= 70


@pytest.mark.long
@pytest.mark.parametrize("default_ack", ["queued", "spooled", "delivered"])
def test_a_record_answered_with_an_error_is_not_kept_so_that_a_retry_does_not_duplicate_it(tmp_path, default_ack):
    tenant = Tenant(id="ada", default_ack=default_ack)
    paths = {"spool": tmp_path / "spool.db"}
    with running_gateway(
        key_directory(AccessKey("ADA", SECRET, tenant)), {STREAM: 1}, record_ttl_ms=700, **paths
    ) as running:
        ada = client_for(running.url)
        outage = running.kinesis.call(lambda fake, _: fake.faults.add(RecordError()))
        records = [{"PartitionKey": f"k-{n}", "Data": b"kept-%d" % n} for n in range(20)]
        answer = ada.put_records(StreamName=STREAM, Records=records)
        assert answer["FailedRecordCount"] == 20
        assert {entry["ErrorCode"] for entry in answer["Records"]} == {"ProvisionedThroughputExceededException"}
        code, _, _ = refusal(ada.put_record, StreamName=STREAM, PartitionKey="k-20", Data=b"kept-20")
        assert code in {"ProvisionedThroughputExceededException", "ServiceUnavailable"}
        running.kinesis.call(lambda fake, _: fake.faults.remove(outage))
        waiting = [*records, {"PartitionKey": "k-20", "Data": b"kept-20"}]
        pause = threading.Event()
        for _ in range(300):
            try:
                entries = ada.put_records(StreamName=STREAM, Records=waiting)["Records"]
            except ClientError as error:
                # The breaker is open a little longer than the outage.
                assert error.response["Error"]["Code"] == "ServiceUnavailable"  # noqa: PT017 - one of many tries
                entries = [{"ErrorCode": "ServiceUnavailable"}] * len(waiting)
            waiting = [record for record, entry in zip(waiting, entries, strict=True) if "ErrorCode" in entry]
            if not waiting:
                break
            pause.wait(0.1)
        assert not waiting
        # A kept record would be delivered now.
        report = running.gateway.producer.report()
        for _ in range(300):
            report = running.gateway.producer.report()
            if not report.spooled and not report.buffered:
                break
            pause.wait(0.1)
        assert (report.spooled, report.dead_lettered) == (0, 0)
        stored = sorted(record.data for record in running.user_records(STREAM))
    assert stored == sorted(b"kept-%d" % n for n in range(21))


LIST = {"X-Amz-Target": "Kinesis_20131202.ListShards"}


@pytest.mark.parametrize(
    ("headers", "body", "code"),
    [
        ({"X-Amz-Target": "Kinesis_20131202.PutRecord"}, b"{", "SerializationException"),
        ({"X-Amz-Target": "Kinesis_20131202.Nonsense"}, b"{}", "UnknownOperationException"),
        ({}, b"{}", "UnknownOperationException"),
        ({"X-Amz-Target": "Kinesis_20131202.PutRecord"}, b'{"Data":"!"}', "SerializationException"),
        # No date: an AWS client cannot pass it on.
        (LIST, b'{"StreamName":"orders","StreamCreationTimestamp":1e300}', "SerializationException"),
        (
            LIST,
            b'{"StreamName":"orders","ShardFilter":{"Type":"AT_TIMESTAMP","Timestamp":-1e300}}',
            "SerializationException",
        ),
    ],
)
def test_a_malformed_body_is_answered_with_the_code_of_aws(open_gateway, headers, body, code):
    request = urllib.request.Request(open_gateway.url + "/", data=body, headers=headers, method="POST")  # noqa: S310
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request)  # noqa: S310 - loopback
    with raised.value as answered:
        assert answered.status == 400
        assert answered.headers["Content-Type"] == "application/x-amz-json-1.1"
        assert answered.headers["x-amzn-RequestId"]
        assert json.loads(answered.read())["__type"] == code


def test_without_verification_any_keys_are_accepted(open_gateway):
    anybody = client_for(open_gateway.url, key="any", secret="thing")
    assert anybody.put_record(StreamName=STREAM, PartitionKey="k", Data=b"x")["ShardId"]


@pytest.mark.parametrize("wire_path", ["fast", "cbor"])
def test_this_projects_producer_puts_in_json_and_in_cbor(gateway, wire_path):
    options = ProducerConfig(
        region="eu-west-1",
        endpoint_url=gateway.url,
        aws_access_key_id="ADA",
        aws_secret_access_key=SECRET,
        wire_path=wire_path,
        botocore={"proxies": {}},
    )
    sent = [b"%s-%d" % (wire_path.encode(), number) for number in range(1000)]
    with BlockingProducer(options) as producer:
        deliveries = [producer.put(STREAM, partition_key=f"k-{n}", data=data) for n, data in enumerate(sent)]
        results = [delivery.result(timeout=30) for delivery in deliveries]
    found = {r.data: (r.shard_id, r.sequence_number) for r in gateway.user_records(STREAM)}
    assert [found[data] for data in sent] == [(result.shard_id, result.sequence_number) for result in results]


@pytest.mark.parametrize(("wire_path", "content_type"), [("fast", "json"), ("cbor", "cbor")])
def test_the_gateway_sends_in_the_format_of_its_wire_path(monkeypatch, wire_path, content_type):
    content_types: list[str | None] = []

    def noted(content_type: str | None) -> Wire:
        content_types.append(content_type)
        return wire_of(content_type)

    monkeypatch.setattr(listener, "wire_of", noted)
    with running_gateway(DIRECTORY, {STREAM: 1}, wire_path=wire_path) as gateway:
        client_for(gateway.url).put_record(StreamName=STREAM, PartitionKey="k", Data=bytes(range(256)))
        assert [each.data for each in gateway.user_records(STREAM)] == [bytes(range(256))]
    assert f"application/x-amz-{content_type}-1.1" in content_types


def test_records_that_a_client_aggregated_are_sent_unchanged(gateway, client):
    client.put_record(StreamName=STREAM, PartitionKey="k", Data=b"first")
    blobs = [encode([UserRecord(f"own-{n}", b"own-%d-%d" % (n, each)) for each in range(3)]) for n in range(40)]
    records = [{"PartitionKey": f"own-{n}", "Data": blob} for n, blob in enumerate(blobs)]
    assert client.put_records(StreamName=STREAM, Records=records)["FailedRecordCount"] == 0
    # `user_records` takes apart once, as a consumer does: within an aggregate of ours theirs would stay closed.
    found = [record.data for record in gateway.user_records(STREAM) if record.data.startswith(b"own-")]
    assert sorted(found) == sorted(b"own-%d-%d" % (n, each) for n in range(40) for each in range(3))


def test_every_refusal_of_admission_has_an_answer_of_kinesis():
    for refused in (Refusal.QUOTA, Refusal.QUEUE_SHARE, Refusal.NO_ROOM):
        assert WIRE_ANSWERS[refused] == ("ProvisionedThroughputExceededException", 400, True)
    for refused, answer in WIRE_ANSWERS.items():
        # A refusal that is retryable on the native route is retryable here.
        comes_again = answer.per_record or answer.status == 503
        assert comes_again == (REFUSALS[refused].retry_after_seconds is not None), refused
