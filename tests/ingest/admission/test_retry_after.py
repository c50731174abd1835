"""Clients that wait for Retry-After succeed at the first retry."""

from collections import Counter
from functools import partial
from typing import Any

import anyio
import http_sf
import pytest

from kpl_core import Config, FairnessPolicy
from kpl_integrations.ingest.tenants import Tenant
from tests.support.gateway_scene import JSON, STREAM, Client, KnownTenants, kinesis, open_gateway, records
from tests.support.virtual_time import virtual_time_backend as backend_in_virtual_time

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", [backend_in_virtual_time("asyncio")], ids=["asyncio"]),
]
BODY = b'{"records":[' + b",".join([b'{"partition_key":"k","data":"x"}'] * 20) + b"]}"


async def obeying_client(client: Client, number: int, seen: Counter[str], *, seconds: float) -> None:
    """Post as fast as possible. After a rejection, wait for Retry-After and count the result of the retry."""
    deadline = anyio.current_time() + seconds
    await anyio.sleep(0.0113 * number)
    is_return = False
    while anyio.current_time() < deadline:
        answer = await client.call("POST", f"/v1/streams/{STREAM}/records", BODY, headers={"content-type": JSON})
        if is_return:
            seen["taken" if answer.status == 202 else "refused again"] += 1
        is_return = answer.status != 202
        if is_return:
            assert answer.status in {429, 503}
            seen[str(answer.status)] += 1
            wait = int(answer.headers["retry-after"])
            if "ratelimit" in answer.headers:
                fields: Any = http_sf.parse(answer.headers["ratelimit"].encode(), tltype="list")
                assert wait >= max(parameters.get("t", 0) for _, parameters in fields)
            await anyio.sleep(wait + 0.002 * (number % 7))
        else:
            seen["records"] += 20
            await anyio.sleep(0.5)


async def run(tenant: Tenant, *, clients: int, seconds: float, **settings: Any) -> Counter[str]:
    seen: Counter[str] = Counter()
    opened = open_gateway(kinesis(), KnownTenants(tenant), close_seconds=0.0, **settings)
    async with opened as gateway, anyio.create_task_group() as tasks:
        for number in range(clients):
            client = Client(gateway, tenant.id)
            tasks.start_soon(partial(obeying_client, client, number, seen, seconds=seconds))
    return seen


async def test_clients_over_a_quota_that_wait_for_retry_after_succeed_at_the_first_retry():
    """Thirty clients of one tenant send twelve times its rate."""
    seen = await run(Tenant(id="t", records_per_second=100), clients=30, seconds=120)
    assert seen["429"] > 300
    assert seen["taken"] / (seen["taken"] + seen["refused again"]) >= 0.95
    # The tenant still gets at least 90 % of its rate.
    assert seen["records"] >= 0.9 * 100 * 120


async def test_clients_over_a_queue_share_that_wait_for_retry_after_succeed_at_the_first_retry():
    """One tenant alone fills its share of a slow stream's queue."""
    options: dict[str, Any] = {"rate_limit_records_per_sec_per_shard": 200, "aggregation_enabled": False}
    config = Config(fairness=FairnessPolicy(), max_outstanding_records=700, record_ttl_ms=60_000, **options)
    seen = await run(Tenant(id="t"), clients=20, seconds=40, config=config)
    assert seen["429"] + seen["503"] > 20
    assert seen["taken"] / (seen["taken"] + seen["refused again"]) >= 0.95


async def test_retry_after_of_a_tenant_in_debt_covers_the_whole_debt():
    """A request larger than the whole burst passes, and later requests wait until its debt is gone."""
    directory = KnownTenants(Tenant(id="t", records_per_second=1))
    async with open_gateway(kinesis(), directory) as gateway:
        client = Client(gateway, "t")
        assert (await client.post(records(500))).status == 202
        refused = await client.post(records(1))
        wait = int(refused.headers["retry-after"])
        assert refused.status == 429
        assert 500 <= wait <= 626
        fields: Any = http_sf.parse(refused.headers["ratelimit"].encode(), tltype="list")
        [(_, parameters)] = fields
        assert parameters["t"] == wait
        await anyio.sleep(wait)
        assert (await client.post(records(1))).status == 202


async def test_a_request_that_can_never_fit_is_too_large_and_has_no_retry_after():
    directory = KnownTenants(Tenant(id="t"), Tenant(id="b", tier="bulk"), Tenant(id="c", tier="critical"))
    async with open_gateway(kinesis(), directory, max_outstanding_records=100) as gateway:
        for tenant, most in (("b", 45), ("t", 90), ("c", 100)):
            client = Client(gateway, tenant)
            refused = await client.post(records(most + 1))
            assert (refused.status, "retry-after" in refused.headers) == (413, False)
            assert (await client.post(records(most), ack="delivered")).status == 200


async def test_a_byte_quota_counts_the_bytes_of_a_key_not_its_characters():
    async with open_gateway(kinesis(), KnownTenants(Tenant(id="t", bytes_per_second=1_000))) as gateway:
        client = Client(gateway, "t")
        for data in ("x", {"not": "plain"}):
            assert (await client.post({"partition_key": "\U0001f600" * 250, "data": data})).status == 202
            assert (await client.post({"partition_key": "k", "data": "x"})).status == 429
            await anyio.sleep(120)
