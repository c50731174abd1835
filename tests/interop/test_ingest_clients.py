"""The gateway's Kinesis API with independent clients: boto3 with 100,000 records, JavaScript, async-kinesis.

Each record that an answer reports as stored must be in the Kinesis record that the answer names.
"""

import json
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3
import pytest
from aiobotocore.session import AioSession
from botocore.config import Config
from kinesis import Producer as AsyncKinesisProducer
from kinesis.processors import StringProcessor

from kpl_integrations.ingest.admission.refusals import Refusal
from kpl_integrations.ingest.tenants import AccessKey, Tenant
from tests.support.certificates import certificate_pair, days_from_now, needs_openssl
from tests.support.installation import INTEROP, Installed
from tests.support.running_gateway import RunningGateway, key_directory, running_gateway

SECRET = "of-the-tenant"
RECORDS = 100_000
THROTTLED_RECORDS = 10_000
JS_RECORDS = 100_000
JS_FEW_RECORDS = 10_000
JS_THROTTLED_RECORDS = 5_000
PER_REQUEST = 500
TENANT = Tenant(id="ada")
DIRECTORY = key_directory(
    AccessKey("ADA", SECRET, TENANT),
    AccessKey("OVER", SECRET, TENANT, session_token="token", expires_at=1e9),
    AccessKey("HELD", SECRET, Tenant(id="held", records_per_second=2_000)),
    # The last request fits at once only if all before it took 10 s.
    AccessKey("SLOW", SECRET, Tenant(id="slow", records_per_second=50, burst_seconds=90)),
)

Place = tuple[str, str]


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    streams = {"boto3": 8, "throttled": 4, "javascript": 2, "javascript-1.1": 2, "js-throttled": 2, "async-kinesis": 2}
    with running_gateway(DIRECTORY, streams, record_max_buffered_time_ms=50) as running:
        yield running
    assert running.report is not None
    assert running.report.complete


def boto3_client(gateway: RunningGateway, key: str) -> Any:
    return boto3.client(
        "kinesis",
        endpoint_url=gateway.url,
        region_name="eu-west-1",
        aws_access_key_id=key,
        aws_secret_access_key=SECRET,
        config=Config(max_pool_connections=16),
    )


def put_until_stored(client: Any, stream: str, numbers: range) -> tuple[dict[bytes, Place], int]:
    """Put, and retry the failed records as AWS documents; return where each record is, and the number of throttles."""
    places: dict[bytes, Place] = {}
    throttled = 0
    pause = threading.Event()
    waiting: list[dict[str, Any]] = [
        {"PartitionKey": f"key-{number % 5_000}", "Data": b"record-%d" % number} for number in numbers
    ]
    while waiting:
        answer = client.put_records(StreamName=stream, Records=waiting)
        again = []
        for record, entry in zip(waiting, answer["Records"], strict=True):
            if "ErrorCode" in entry:
                assert entry["ErrorCode"] == "ProvisionedThroughputExceededException"
                again.append(record)
            else:
                places[record["Data"]] = (entry["ShardId"], entry["SequenceNumber"])
        throttled += len(again)
        waiting = again
        if waiting:
            pause.wait(0.05)  # as a caller backs off
    return places, throttled


def put_all(gateway: RunningGateway, key: str, stream: str, count: int) -> tuple[dict[bytes, Place], int]:
    client = boto3_client(gateway, key)
    # Until the gateway knows the shards, each record travels alone.
    client.put_record(StreamName=stream, PartitionKey="first", Data=b"first")
    requests = [range(start, start + PER_REQUEST) for start in range(0, count, PER_REQUEST)]
    with ThreadPoolExecutor(8) as callers:
        answered = list(callers.map(lambda numbers: put_until_stored(client, stream, numbers), requests))
    places: dict[bytes, Place] = {}
    for each, _ in answered:
        places.update(each)
    return places, sum(throttled for _, throttled in answered)


def assert_true(gateway: RunningGateway, stream: str, places: Mapping[bytes, Place], count: int) -> None:
    """Assert that a consumer reads every record once, exactly where the answer said."""
    read = [record for record in gateway.user_records(stream) if record.data != b"first"]
    found = {record.data: (record.shard_id, record.sequence_number) for record in read}
    assert len(read) == len(found) == len(places) == count
    assert found == places


def test_boto3_with_only_the_endpoint_changed_puts_100_000_records_and_every_answer_is_true(
    gateway,
):
    places, _ = put_all(gateway, "ADA", "boto3", RECORDS)
    assert_true(gateway, "boto3", places, RECORDS)
    per_kinesis_record = Counter(places.values())
    print(f"{RECORDS:,} user records in {len(per_kinesis_record):,} Kinesis records, answers all true")  # noqa: T201
    assert len(per_kinesis_record) < RECORDS / 10


def test_boto3_retries_throttled_records_until_all_are_stored(gateway):
    places, throttled = put_all(gateway, "HELD", "throttled", THROTTLED_RECORDS)
    assert throttled
    assert_true(gateway, "throttled", places, THROTTLED_RECORDS)


def javascript(
    installed: Installed, gateway: RunningGateway, *arguments: object, stream: str = "javascript", **more: str
) -> list[dict[str, Any]]:
    """Run the program with these arguments, and with more variables of the environment."""
    command = [
        installed.node.executable,
        str(INTEROP / "npm" / "put_through_gateway.cjs"),
        gateway.url,
        stream,
    ]
    finished = subprocess.run(
        [*command, *map(str, arguments)],
        env={"NODE_PATH": str(installed.node_modules), "NODE_NO_WARNINGS": "1", **more},
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr.decode(errors="replace")
    return [json.loads(line) for line in finished.stdout.decode().splitlines()]


def places_of(answers: list[dict[str, Any]]) -> dict[bytes, Place]:
    return {b"js-%d" % number: (each["shardId"], each["sequenceNumber"]) for number, each in enumerate(answers)}


def test_the_javascript_sdk_puts_records_and_every_answer_is_true(installed, gateway):
    answers = javascript(installed, gateway, "ADA", SECRET, "", 0, JS_RECORDS)
    assert_true(gateway, "javascript", places_of(answers), JS_RECORDS)


def test_the_javascript_sdk_may_speak_http_1_1(installed, gateway):
    answers = javascript(
        installed, gateway, "ADA", SECRET, "", 0, JS_FEW_RECORDS, stream="javascript-1.1", HTTP_VERSION="1.1"
    )
    assert_true(gateway, "javascript-1.1", places_of(answers), JS_FEW_RECORDS)


@needs_openssl
def test_the_javascript_sdk_chooses_http_2_in_the_tls_handshake(installed, tmp_path):
    certificate, key = certificate_pair(tmp_path, "gateway", days_from_now(-1), days_from_now(90))
    with running_gateway(DIRECTORY, {"javascript": 2}, tls_certificate=certificate, tls_key=key) as gateway:
        answers = javascript(
            installed, gateway, "ADA", SECRET, "", 0, JS_FEW_RECORDS, NODE_EXTRA_CA_CERTS=str(certificate)
        )
        assert_true(gateway, "javascript", places_of(answers), JS_FEW_RECORDS)


def test_the_javascript_sdk_retries_throttled_records_until_all_are_stored(installed, gateway):
    before = gateway.gateway.tally.refusals[Refusal.QUOTA]
    answers = javascript(installed, gateway, "SLOW", SECRET, "", 0, JS_THROTTLED_RECORDS, stream="js-throttled")
    assert gateway.gateway.tally.refusals[Refusal.QUOTA] > before
    assert_true(gateway, "js-throttled", places_of(answers), JS_THROTTLED_RECORDS)


@pytest.mark.parametrize(
    ("key", "secret", "token", "skew_seconds", "code"),
    [
        ("ADA", "another", "", 0, "InvalidSignatureException"),
        ("NOBODY", SECRET, "", 0, "UnrecognizedClientException"),
        ("ADA", SECRET, "", -600, "InvalidSignatureException"),
        ("ADA", SECRET, "", 600, "InvalidSignatureException"),
        ("OVER", SECRET, "token", 0, "ExpiredTokenException"),
    ],
)
def test_the_javascript_sdk_reads_aws_own_codes(installed, gateway, key, secret, token, skew_seconds, code):
    (refused,) = javascript(installed, gateway, key, secret, token, skew_seconds, 1)
    assert refused == {"code": code, "status": 400}


@pytest.mark.anyio
async def test_async_kinesis_puts_through_the_gateway(gateway):
    session = AioSession()
    session.set_credentials("ADA", SECRET)
    options: dict[str, Any] = {
        "session": session,
        "endpoint_url": gateway.url,
        "region_name": "eu-west-1",
    }
    async with AsyncKinesisProducer("async-kinesis", processor=StringProcessor(), **options) as producer:
        for number in range(2_000):
            await producer.put(f"async-{number}")
        await producer.flush()
    stored = Counter(record.data for record in gateway.user_records("async-kinesis"))
    assert stored == Counter(b"async-%d" % number for number in range(2_000))
