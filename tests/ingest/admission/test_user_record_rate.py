"""A tenant's rate counts the user records in a KPL aggregate and in an OTLP body, whatever the request's form."""

import json
from typing import Any

import anyio
import pybase64
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kpl_core import UserRecord, encode
from kpl_core.testing import FakeKinesis, RecordError, When
from kpl_core.testing.fake_transport import FakeTransport
from kpl_integrations.ingest import IngestGateway
from kpl_integrations.ingest.admission.tenant_account import TenantAccount
from kpl_integrations.ingest.tenants import OpenTenants, Tenant, TenantQuota
from tests.support.gateway_scene import JSON, STREAM, Answer, Client, open_gateway

pytestmark = pytest.mark.anyio

RATE = 100
USER_RECORDS = 25
AGGREGATE = encode([UserRecord(f"k{n}", b"some data of a record") for n in range(USER_RECORDS)])
TRACES: dict[str, Any] = {"resource_spans": [{"scope_spans": [{"spans": [{"name": "GET /orders"}] * USER_RECORDS}]}]}
JSON_TRACES = {"resourceSpans": [{"scopeSpans": [{"spans": [{"name": "GET /orders"}] * USER_RECORDS}]}]}
ENTRY = {"PartitionKey": "k", "Data": pybase64.b64encode(AGGREGATE).decode()}
RECORDS = f"/v1/streams/{STREAM}/records"
# So large that it is decoded in steps.
PADDING = "x" * 10_000
FORMS: dict[str, tuple[str, bytes, dict[str, str]]] = {
    "octets": (RECORDS, AGGREGATE, {"content-type": "application/octet-stream"}),
    "json": (
        RECORDS,
        json.dumps({"partition_key": "k", "data_base64": ENTRY["Data"]}).encode(),
        {"content-type": JSON},
    ),
    "PutRecords": (
        "/",
        json.dumps({"StreamName": STREAM, "Records": [ENTRY]}).encode(),
        {"content-type": "application/x-amz-json-1.1", "x-amz-target": "Kinesis_20131202.PutRecords"},
    ),
    "OTLP in protobuf": (
        "/v1/traces",
        ExportTraceServiceRequest(**TRACES).SerializeToString(),
        {"content-type": "application/x-protobuf"},
    ),
    "OTLP in JSON": ("/v1/traces", json.dumps(JSON_TRACES).encode(), {"content-type": JSON}),
    "large OTLP in JSON": (
        "/v1/traces",
        json.dumps(JSON_TRACES).replace("GET", PADDING).encode(),
        {"content-type": JSON},
    ),
}


def directory(**rates: float | None) -> OpenTenants:
    return OpenTenants(Tenant(id="local", otlp_streams={"traces": STREAM}, **rates))  # type: ignore[arg-type]


async def send(gateway: IngestGateway, form: str, ack: str = "queued", *, count: int = 8) -> list[Answer]:
    """Send requests at the same time, and return their answers in the order in which they come."""
    path, body, headers = FORMS[form]
    answers: list[Answer] = []

    async def send_one() -> None:
        answers.append(await Client(gateway).call("POST", path, body, headers=headers | {"x-ack": ack}))

    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(send_one)
    return answers


def account_of(gateway: IngestGateway) -> tuple[TenantAccount, TenantQuota]:
    account = gateway.opened.accounts.find("local")
    assert account is not None
    assert account.quota is not None
    return account, account.quota


def is_throttled(answer: Answer) -> bool:
    return b"more than tenant local may send now" in answer.body


@pytest.mark.parametrize("form", FORMS)
async def test_the_burst_is_used_up_by_the_user_records_of_few_requests(form: str) -> None:
    async with open_gateway(directory=directory(records_per_second=RATE)) as gateway:
        sent = await send(gateway, form)
        answers = [is_throttled(answer) for answer in sent]
        assert {answer.status for answer in sent} <= {200, 202, 429}
        assert answers.count(False) == RATE / USER_RECORDS
        account, quota = account_of(gateway)
        assert quota.offered[0] == 8 * USER_RECORDS
        # Everything else counts what is put: one Kinesis record.
        assert account.accepted_records == answers.count(False) == gateway.producer.report().accepted


@pytest.mark.parametrize("form", FORMS)
async def test_without_a_rate_nothing_is_refused(form: str) -> None:
    async with open_gateway(directory=directory()) as gateway:
        assert not any(map(is_throttled, await send(gateway, form)))


@pytest.mark.parametrize("form", FORMS)
async def test_records_that_are_not_delivered_give_their_whole_cost_back(form: str) -> None:
    transport = FakeTransport(FakeKinesis({STREAM: 1}), latency_seconds=0.0)
    transport.kinesis.faults.add(RecordError("InternalFailure"), When(operation="PutRecords"))
    async with open_gateway(transport, directory(records_per_second=RATE), record_ttl_ms=100) as gateway:
        assert not any(map(is_throttled, await send(gateway, form, ack="delivered", count=4)))
        _, quota = account_of(gateway)
        assert quota.try_take(RATE, 0, gateway.opened.admission.now()) is None
        # So nothing was given back twice.
        assert quota.try_take(RATE, 0, gateway.opened.admission.now()) == pytest.approx(1.0, abs=0.01)
