"""The IAM policies of examples/deploy/iam contain exactly the actions that the product calls."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult
from uuid import uuid4

import boto3
import httpx
import pytest
from aiobotocore.client import AioBaseClient
from aiobotocore.session import get_session
from aws_schema_registry import SchemaRegistryClient
from aws_schema_registry.avro import AvroSchema
from botocore.client import BaseClient
from botocore.exceptions import ClientError

from kpl_core import Config, CoordinationOptions, Producer
from kpl_core.durability.dead_letters.aws_sinks import S3Sink, SqsSink
from kpl_core.transport.http_answers import HttpAnswer
from kpl_core.transport.http_connections import HttpConnections
from kpl_integrations.cli import main
from kpl_integrations.glue import GlueEncoder
from kpl_integrations.ingest.tenants import OpenTenants, Tenant
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from kpl_integrations.metrics.cloudwatch import CloudWatchMetrics
from kpl_integrations.metrics.cloudwatch_uploader import CloudWatchUploader
from tests.interop.emulators import Emulator
from tests.interop.test_dead_letter_sinks import LETTERS
from tests.support.metrics import finished
from tests.support.processes import CREDENTIALS
from tests.support.running_gateway import running_gateway

IAM = Path(__file__).parents[2] / "examples" / "deploy" / "iam"
REGION = "us-east-1"
# Operations whose action has another name (Service Authorization Reference).
ACTIONS = {"s3:ListObjectsV2": "s3:ListBucket", "sqs:SendMessageBatch": "sqs:SendMessage"}
ORDER = '{"type": "record", "name": "Order", "fields": [{"name": "customer", "type": "string"}]}'


class Calls:
    """The actions that the clients of one endpoint called; those of `denied` fail."""

    def __init__(self) -> None:
        self.endpoint_url = ""
        self.actions: set[str] = set()
        self.denied: set[str] = set()

    def note(self, endpoint_url: str, service: str, operation: str) -> None:
        if endpoint_url == self.endpoint_url:
            action = f"{service}:{operation}"
            action = ACTIONS.get(action, action)
            self.actions.add(action)
            if action in self.denied:
                error: Any = {
                    "Error": {"Code": "AccessDeniedException", "Message": f"not authorized to perform: {action}"}
                }
                raise ClientError(error, operation)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    classes: tuple[Any, ...] = (BaseClient, AioBaseClient)
    for cls in classes:

        def noted(self: Any, operation: str, parameters: Any, made: Any = cls._make_api_call) -> Any:
            calls.note(self.meta.endpoint_url, self.meta.service_model.service_name, operation)
            return made(self, operation, parameters)

        monkeypatch.setattr(cls, "_make_api_call", noted)
    post = HttpConnections.post

    async def noted_post(self: HttpConnections, url: SplitResult, head: bytes, body: bytes) -> HttpAnswer:
        target = re.search(rb"X-Amz-Target: Kinesis_20131202\.(\w+)", head)
        assert target is not None
        calls.note(url.geturl(), "kinesis", target[1].decode())
        return await post(self, url, head, body)

    monkeypatch.setattr(HttpConnections, "post", noted_post)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return calls


@pytest.fixture
def kinesis(calls: Calls) -> Iterator[str]:
    with ThreadedLocalKinesis(LocalKinesis({"orders": 1})) as running:
        calls.endpoint_url = running.endpoint_url
        yield running.endpoint_url


@pytest.fixture
def aws(calls: Calls, moto: Emulator) -> Callable[[str], Any]:
    calls.endpoint_url = moto.endpoint_url

    # Another spelling of the address, so that the calls of these clients do not count.
    return partial(boto3.client, endpoint_url=f"{moto.endpoint_url}/", region_name=REGION)


def allowed(role: str) -> set[str]:
    return {action for statement in statements(role) for action in statement["Action"]}


def statements(role: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((IAM / f"{role}.json").read_text())["Statement"]
    return found


def optional(role: str) -> set[str]:
    return {action for each in statements(role) if each["Sid"].startswith("Optional") for action in each["Action"]}


async def put(config: Config) -> None:
    async with Producer(config) as producer:
        assert (await (await producer.put("orders", partition_key="1", data=b"hello"))).successful


@pytest.mark.parametrize("denied", [set(), optional("producer")], ids=["all", "without-the-optional"])
def test_a_producer(calls: Calls, kinesis: str, denied: set[str]) -> None:
    calls.denied = denied
    asyncio.run(put(Config(region=REGION, endpoint_url=kinesis)))
    assert calls.actions == allowed("producer")


def test_a_gateway_delivers_without_the_optional_actions(calls: Calls) -> None:
    calls.denied = optional("gateway")
    with running_gateway(OpenTenants(Tenant(id="all")), {"orders": 1}) as gateway:
        calls.endpoint_url = gateway.kinesis.endpoint_url
        answer = httpx.post(f"{gateway.url}/v1/streams/orders/records?ack=delivered", json={"data": "hello"})
    assert answer.status_code == httpx.codes.OK, answer.text
    assert calls.actions >= allowed("gateway") - calls.denied


def test_a_gateway_whose_client_uses_an_aws_sdk(calls: Calls) -> None:
    with running_gateway(OpenTenants(Tenant(id="all")), {"orders": 1}) as gateway:
        calls.endpoint_url = gateway.kinesis.endpoint_url
        client = boto3.client("kinesis", endpoint_url=gateway.url, region_name=REGION)
        assert client.put_records(StreamName="orders", Records=[{"PartitionKey": "1", "Data": b"hello"}])
        client.list_shards(StreamName="orders")
        client.describe_stream(StreamName="orders")
        client.describe_stream_summary(StreamName="orders")
    assert calls.actions == allowed("gateway")


def test_an_operator_who_uses_the_commands(calls: Calls, kinesis: str, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_text("hello\n")
    arguments = ["orders", "--endpoint-url", kinesis]
    assert main(["doctor", *arguments]) == 0
    assert main(["put", *arguments, str(lines)]) == 0
    assert main(["tail", *arguments, "--from-start", "--no-follow"]) == 0
    assert calls.actions == allowed("operator")


@pytest.mark.parametrize("store", ["s3", "dynamodb"])
def test_a_coordination_store(calls: Calls, aws: Callable[[str], Any], moto: Emulator, store: str) -> None:
    place = f"iam-{uuid4().hex}"
    if store == "s3":
        aws("s3").create_bucket(Bucket=place)
    else:
        keys = {"group": "HASH", "name": "RANGE"}
        aws("dynamodb").create_table(
            TableName=place,
            KeySchema=[{"AttributeName": name, "KeyType": kind} for name, kind in keys.items()],
            AttributeDefinitions=[{"AttributeName": name, "AttributeType": "S"} for name in keys],
            BillingMode="PAY_PER_REQUEST",
        )
    url = f"{store}://{place}/coordination?endpoint_url={moto.endpoint_url}&region={REGION}"
    coordination = CoordinationOptions(store=url, max_workers=2, interval_seconds=0.5)
    needed = allowed(f"coordination-{store}")

    async def two_workers(config: Config) -> None:
        await put(config)
        async with Producer(config) as later, asyncio.timeout(20):
            # It removes the report of the worker that has left.
            while not calls.actions >= needed:
                assert (await (await later.put("orders", partition_key="1", data=b"hello"))).successful
                await asyncio.sleep(0.05)

    with ThreadedLocalKinesis(LocalKinesis({"orders": 1})) as running:
        asyncio.run(two_workers(Config(region=REGION, endpoint_url=running.endpoint_url, coordination=coordination)))
    assert calls.actions == needed


@pytest.mark.parametrize(
    ("sink", "denied"),
    [("s3", set()), ("sqs", set()), ("sqs", optional("dead-letters-sqs"))],
    ids=["s3", "sqs", "sqs-without-the-optional"],
)
def test_a_dead_letter_sink(
    calls: Calls, aws: Callable[[str], Any], moto: Emulator, sink: str, denied: set[str]
) -> None:
    calls.denied = denied
    name = f"iam-{uuid4().hex}"
    queue_url = ""
    if sink == "s3":
        aws("s3").create_bucket(Bucket=name)
    else:
        queue_url = aws("sqs").create_queue(QueueName=name)["QueueUrl"]

    async def send() -> None:
        async with get_session().create_client(sink, region_name=REGION, endpoint_url=moto.endpoint_url) as client:
            report = await (SqsSink(client, queue_url) if queue_url else S3Sink(client, name)).send(LETTERS)
            assert report.stored == len(LETTERS)

    asyncio.run(send())
    assert calls.actions == allowed(f"dead-letters-{sink}")


def test_the_upload_to_cloudwatch(calls: Calls, aws: Callable[[str], Any], moto: Emulator) -> None:
    metrics = CloudWatchMetrics()
    with CloudWatchUploader(metrics, region=REGION, endpoint_url=moto.endpoint_url):
        metrics(finished("orders", "shardId-0"))
    assert calls.actions == allowed("cloudwatch-metrics")


@pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated")  # the registry's client uses it
def test_the_schema_registry(calls: Calls, aws: Callable[[str], Any], moto: Emulator) -> None:
    name = f"iam-{uuid4().hex}"
    aws("glue").create_registry(RegistryName=name)
    registry = SchemaRegistryClient(
        boto3.client("glue", endpoint_url=moto.endpoint_url, region_name=REGION), registry_name=name
    )
    # The second schema is another version of the first.
    for schema in (ORDER, ORDER.replace('"string"', '["null", "string"]')):
        GlueEncoder(registry, AvroSchema(schema), "order", compatibility_mode="NONE")
    assert calls.actions == allowed("glue-schemas")


def test_terraform_allows_the_same_as_the_json_documents() -> None:
    text = (IAM / "main.tf").read_text()
    for file in IAM.glob("*.json"):
        name = file.stem.replace("-", "_")
        (block,) = re.findall(rf'^data "aws_iam_policy_document" "{name}" {{\n(.*?)^}}', text, re.MULTILINE | re.DOTALL)
        found = re.findall(r'sid += "(\w+)"\n +actions += (\[.*\])\n', block)
        assert {sid: json.loads(actions) for sid, actions in found} == {
            each["Sid"]: each["Action"] for each in statements(file.stem)
        }
        assert f"data.aws_iam_policy_document.{name}.json" in text
