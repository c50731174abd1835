"""OTLP without room, or without Kinesis: 503 for the whole request, with a Retry-After that is true."""

import anyio
import pytest
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from kpl_core import UserRecord
from kpl_core.testing import ErrorAnswer, FakeKinesis, When
from kpl_core.testing.fake_transport import FakeTransport
from kpl_integrations.ingest import IngestGateway
from kpl_integrations.ingest.admission.refusals import Refusal
from kpl_integrations.ingest.tenants import OpenTenants, Tenant
from tests.support.gateway_scene import JSON, STREAM, Answer, Client, open_gateway, records

pytestmark = pytest.mark.anyio

PROTOBUF = "application/x-protobuf"
# Overload is never answered with "partial_success", because a client would drop the rest.
BODIES = {
    PROTOBUF: ExportLogsServiceRequest(resource_logs=[{"schema_url": "one"}]).SerializeToString(),  # type: ignore[list-item]
    JSON: b'{"resourceLogs": [{"schemaUrl": "one"}]}',
}
DIRECTORY = OpenTenants(Tenant(id="local", otlp_streams={"logs": STREAM}))


async def export(gateway: IngestGateway, content_type: str, ack: str = "queued") -> Answer:
    headers = {"content-type": content_type, "x-ack": ack}
    return await Client(gateway).call("POST", "/v1/logs", BODIES[content_type], headers=headers)


def assert_comes_again(answer: Answer, content_type: str) -> float:
    assert (answer.status, answer.headers["content-type"]) == (503, content_type)
    assert b"artial" not in answer.body
    if content_type == PROTOBUF:
        assert Status.FromString(answer.body).code == 14
    else:
        assert answer.json()["code"] == 14
    seconds = int(answer.headers["retry-after"])
    assert seconds >= 1
    return seconds


@pytest.mark.parametrize("content_type", BODIES)
async def test_without_room_it_is_503_and_a_retry_after_the_given_time_succeeds(content_type: str) -> None:
    transport = FakeTransport(FakeKinesis({STREAM: 1}), latency_seconds=0.5)
    async with open_gateway(transport, DIRECTORY, max_outstanding_records=100) as gateway:
        # Other tenants' records fill the buffer.
        held = gateway.producer.internal.put_together_nowait(
            STREAM, [UserRecord(f"k{n}", b"x") for n in range(90)], flow="others"
        )
        answer = await export(gateway, content_type)
        assert gateway.tally.refusals[Refusal.NO_ROOM] == 1
        await anyio.sleep(assert_comes_again(answer, content_type))
        assert (await export(gateway, content_type)).status == 200
        assert all([(await delivery).successful for delivery in held])


@pytest.mark.parametrize("ack", ["queued", "delivered"])
@pytest.mark.parametrize("content_type", BODIES)
async def test_with_the_breaker_open_it_is_503_until_kinesis_answers_again(content_type: str, ack: str) -> None:
    transport = FakeTransport(FakeKinesis({STREAM: 1}), latency_seconds=0.01)
    async with open_gateway(transport, DIRECTORY, record_ttl_ms=2_000, aggregation_enabled=False) as gateway:
        outage = transport.kinesis.faults.add(ErrorAnswer("InternalFailure"), When(operation="PutRecords"))
        while (await Client(gateway).post(records(20))).status == 202:  # noqa: ASYNC110 - what it polls is under test
            await anyio.sleep(0.1)
        answer = await export(gateway, content_type, ack)
        assert gateway.tally.refusals[Refusal.BREAKER_OPEN] == 2
        assert_comes_again(answer, content_type)
        transport.kinesis.faults.remove(outage)
        for _ in range(10):
            if (answer := await export(gateway, content_type, ack)).status == 200:
                break
            await anyio.sleep(assert_comes_again(answer, content_type))
        assert answer.status == 200
