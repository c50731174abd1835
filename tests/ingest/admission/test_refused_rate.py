"""A rejected request costs its tenant no rate: what was taken for it is given back (decision 24)."""

import dataclasses
import json
from pathlib import Path

import anyio
import pytest

from kpl_core import SpoolOptions
from kpl_core.hooks import BreakerChanged
from kpl_core.testing import ErrorAnswer, When
from kpl_integrations.ingest import IngestGateway, load_settings
from kpl_integrations.ingest.request.needs import Results
from kpl_integrations.ingest.tenants import Tenant
from tests.ingest.admission.test_admission import ROWS
from tests.support.gateway_scene import JSON, STREAM, Client, KnownTenants, kinesis, open_gateway, records

pytestmark = pytest.mark.anyio


def saved_up(tenant: Tenant, **rates: float) -> Tenant:
    """Return the tenant with rates that refill less than one record in hours, which are below a tenant's bounds.

    While a test waits for a disk, virtual time jumps ahead.
    """
    for name, rate in rates.items():
        object.__setattr__(tenant, name, rate)
    return tenant


SAVED_UP = (
    saved_up(
        Tenant(id="acme", streams=(STREAM, "nix-*")),
        records_per_second=1e-6,
        bytes_per_second=0.01,
        burst_seconds=1e10,
    ),
    saved_up(Tenant(id="slow"), records_per_second=1e-6, bytes_per_second=1e-4, burst_seconds=1e7),
)


def records_spent(gateway: IngestGateway) -> int:
    """Return how many records of their rates all tenants have spent."""
    spent = 0
    for account in gateway.opened.accounts:
        assert account.quota is not None
        state = account.quota.states(0, 0, gateway.admission.now())[0]
        spent += state.limit - state.remaining
    return spent


@pytest.mark.parametrize(
    ("refusal", "settings", "lead"), ROWS, ids=[f"{index}-{row[0].value}" for index, row in enumerate(ROWS)]
)
async def test_only_records_that_were_accepted_cost_a_tenant_its_rate(refusal, settings, lead, tmp_path: Path):
    config = None
    if "spool" in settings:
        settings = {**settings, "spool": tmp_path / settings["spool"]}
        small = SpoolOptions(path=settings["spool"], mode="write_ahead", max_bytes=1 << 20)
        config = dataclasses.replace(load_settings(**settings).producer_config(), spool=small)
    tenants = KnownTenants(*SAVED_UP)
    async with open_gateway(kinesis(), tenants, config=config, close_seconds=0.5, **settings) as gateway:
        await lead(gateway)
        report = gateway.producer.report()
        assert gateway.tally.refusals[refusal] >= 1
        assert records_spent(gateway) == report.accepted - report.failed_total


async def test_a_full_buffer_is_never_answered_with_the_tenants_rate():
    """The tenant may send 100 records a second and none is accepted, so each answer is 503 and none is 429."""
    other, tenant = Tenant(id="other"), Tenant(id="t", records_per_second=100)
    transport = kinesis()
    transport.kinesis.faults.add(ErrorAnswer("InternalFailure"), When(operation="PutRecords"))
    opened = open_gateway(transport, KnownTenants(other, tenant), close_seconds=0.0, max_outstanding_records=100)
    async with opened as gateway:
        assert (await Client(gateway, "other").post(records(80))).status == 202
        answers = [await Client(gateway, "t").post(records(40)) for _ in range(10)]
        assert [answer.json()["title"] for answer in answers] == ["Out of room"] * 10
        assert [answer.status for answer in answers] == [503] * 10


async def test_an_open_breaker_is_never_answered_with_the_tenants_rate():
    async with open_gateway(directory=KnownTenants(Tenant(id="t", records_per_second=100))) as gateway:
        gateway.admission(BreakerChanged(STREAM, "", "open"))
        answers = [await Client(gateway, "t").post(records(40)) for _ in range(10)]
        assert [each.json()["title"] for each in answers] == ["The stream does not answer"] * 10


async def test_a_retry_time_is_not_used_up_by_a_request_that_kinesis_cannot_take():
    tenant = Tenant(id="t", records_per_second=10)
    async with open_gateway(kinesis(), KnownTenants(tenant)) as gateway:
        client = Client(gateway, "t")
        assert (await client.post(records(10))).status == 202
        refused = await client.post(records(10))
        assert refused.status == 429
        await anyio.sleep(int(refused.headers["retry-after"]))
        gateway.admission(BreakerChanged(STREAM, "", "open"))
        (schedule,) = [each.quota_schedule for each in gateway.opened.accounts]
        assert [(await client.post(records(10))).status for _ in range(3)] == [503] * 3
        assert len(schedule.slots) == 1
        gateway.admission(BreakerChanged(STREAM, "", "closed"))
        assert (await client.post(records(10))).status == 202
        assert not schedule.slots


ONE = {"partition_key": "k", "data": "x"}
LOGS = b'{"resourceLogs": [{"schemaUrl": "one"}]}'
PUT_RECORD = b'{"StreamName": "orders", "PartitionKey": "k", "Data": "eA=="}'
PUT_RECORDS = b'{"StreamName": "orders", "Records": [{"PartitionKey": "k", "Data": "eA=="}]}'


def kinesis_api(operation: str) -> dict[str, str]:
    return {"content-type": "application/x-amz-json-1.1", "x-amz-target": f"Kinesis_20131202.{operation}"}


# For each route: the request, its header fields, and the status if Kinesis takes no record.
NOT_DELIVERED: list[tuple[str, bytes, dict[str, str], int]] = [
    (f"/v1/streams/{STREAM}/records?ack=delivered", json.dumps(ONE).encode(), {"content-type": JSON}, 502),
    ("/v1/logs", LOGS, {"content-type": JSON, "x-ack": "delivered"}, 502),
    ("/", PUT_RECORD, kinesis_api("PutRecord"), 500),
    ("/", PUT_RECORDS, kinesis_api("PutRecords"), 200),
]


@pytest.mark.parametrize(("path", "body", "headers", "status"), NOT_DELIVERED)
async def test_a_request_of_which_kinesis_took_no_record_costs_no_rate_on_any_route(path, body, headers, status):
    tenant = Tenant(id="t", records_per_second=0.01, burst_seconds=1e3, otlp_streams={"logs": STREAM})
    transport = kinesis()
    fault = transport.kinesis.faults.add(ErrorAnswer("AccessDeniedException"), When(operation="PutRecords"))
    async with open_gateway(transport, KnownTenants(unknown=tenant)) as gateway:
        for _ in range(3):
            assert (await Client(gateway).call("POST", path, body, headers=headers)).status == status
        assert gateway.producer.report().failed_total == 3
        assert records_spent(gateway) == 0
        transport.kinesis.faults.remove(fault)
        assert (await Client(gateway).call("POST", path, body, headers=headers)).status == 200
        assert records_spent(gateway) == 1


async def test_the_fast_path_gives_the_rate_back_too():
    tenant = Tenant(id="t", records_per_second=0.01, burst_seconds=1e3)
    transport = kinesis()
    transport.kinesis.faults.add(ErrorAnswer("AccessDeniedException"), When(operation="PutRecords"))
    async with open_gateway(transport, KnownTenants(tenant)) as gateway:
        assert (await Client(gateway, "t").post(ONE)).status == 202
        headers = [(b"authorization", b"Bearer t"), (b"content-type", JSON.encode()), (b"content-length", b"33")]
        head = gateway.head_of(f"/v1/streams/{STREAM}/records?ack=delivered".encode(), headers)
        assert head is not None
        request = gateway.begin(head, json.dumps(ONE).encode(), "", None)
        assert request is not None
        steps = request.run()
        need = next(steps)
        assert isinstance(need, Results)
        assert records_spent(gateway) == 2
        await need.deliveries.results()
        with pytest.raises(StopIteration) as end:
            next(steps)
        assert end.value.value.status == 502
        assert records_spent(gateway) == 1
