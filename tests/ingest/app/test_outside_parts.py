"""A gateway's settings send dead letters to SQS or S3, and metrics to OpenTelemetry."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from kpl_core.testing.faults import ErrorAnswer, When
from kpl_integrations.metrics import opentelemetry
from tests.support.gateway_scene import STREAM, Client, kinesis, open_gateway
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


class FakeSession:
    """A session whose clients keep what they are sent."""

    def __init__(self) -> None:
        self.created: tuple[str, str] | None = None
        self.sent: list[dict[str, Any]] = []

    @contextlib.asynccontextmanager
    async def create_client(self, service: str, *, region_name: str) -> AsyncIterator["FakeSession"]:
        self.created = (service, region_name)
        yield self

    async def put_object(self, **parameters: Any) -> dict[str, Any]:
        self.sent.append(parameters)
        return {}

    async def get_queue_attributes(self, **_: Any) -> dict[str, Any]:
        return {"Attributes": {"MaximumMessageSize": "262144"}}

    async def send_message_batch(self, **parameters: Any) -> dict[str, Any]:
        self.sent.append(parameters)
        return {"Successful": [{"Id": entry["Id"]} for entry in parameters["Entries"]], "Failed": []}


@pytest.mark.parametrize(
    ("setting", "place", "service", "expected"),
    [
        ("dead_letters_sqs", "https://sqs/letters", "sqs", ("QueueUrl", "https://sqs/letters")),
        ("dead_letters_s3", "letters/orders/", "s3", ("Bucket", "letters")),
    ],
)
async def test_a_record_that_failed_for_good_goes_to_the_place_of_the_settings(
    monkeypatch, setting, place, service, expected
):
    session = FakeSession()
    monkeypatch.setattr("aiobotocore.session.AioSession", lambda: session)
    denied = kinesis()
    denied.kinesis.faults.add(ErrorAnswer("AccessDeniedException"), When(operation="PutRecords"))
    async with open_gateway(denied, **{setting: place, "region": "eu-west-1"}) as gateway:
        await Client(gateway).post({"partition_key": "k", "data": "x"}, ack="delivered")
        await until(lambda: bool(session.sent))
    assert session.created == (service, "eu-west-1")
    assert session.sent[0][expected[0]] == expected[1]
    assert service == "sqs" or session.sent[0]["Key"].startswith("orders/")


async def test_the_producers_metrics_reach_opentelemetry_too(monkeypatch):
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(opentelemetry, "get_meter_provider", lambda: provider)
    async with open_gateway(opentelemetry_metrics=True) as gateway:
        await Client(gateway).post({"partition_key": "k", "data": "x"}, ack="delivered", stream=STREAM)
        data = reader.get_metrics_data()
    assert data is not None
    points = {
        metric.name: [point.value for point in metric.data.data_points if hasattr(point, "value")]
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert points["kinesis_producer_accepted_records"] == [1]
    provider.shutdown()
