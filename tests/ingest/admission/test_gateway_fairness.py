"""Tenants that share a hot shard through the gateway: a flood delays and rejects only its own tenant."""

import json
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import pytest

from kpl_core import decode
from kpl_core.testing import FakeTransport
from kpl_integrations.ingest import IngestGateway
from kpl_integrations.ingest.tenants import OpenTenants, Tenant, TenantDirectory
from tests.support.gateway_scene import JSON, STREAM, Client, KnownTenants, kinesis, open_gateway
from tests.support.material import even_shards, keys_in
from tests.support.virtual_time import virtual_time_backend as backend_in_virtual_time

pytestmark = [
    pytest.mark.anyio,
    # Thousands of requests in virtual time; the other backend runs the same code.
    pytest.mark.parametrize("anyio_backend", [backend_in_virtual_time("asyncio")], ids=["asyncio"]),
]

QUIET = [f"quiet-{number}" for number in range(10)]
PATH = f"/v1/streams/{STREAM}/records"
SECONDS = 2.5


def body(count: int, *, key: str, size: int = 100) -> bytes:
    return json.dumps({"records": [{"partition_key": key, "data": "x" * size}] * count}).encode()


@dataclass
class Load:
    """The results of quiet tenants: seconds from request to delivery, and rejections."""

    gateway: IngestGateway
    seconds: list[float] = field(default_factory=list)
    refused: int = 0
    noise_refused: int = 0

    async def noise(self, per_second: int, *, key: str = "noise", size: int = 100) -> None:
        """Fifty records a request, without waiting for anything."""
        client, request = Client(self.gateway, "noisy"), body(50, key=key, size=size)
        while True:
            answer = await client.call("POST", PATH, request, headers={"content-type": JSON})
            self.noise_refused += answer.status == 429
            assert answer.status in {202, 429}
            await anyio.sleep(50 / per_second)

    async def quiet(self, tenant: str, *, key: str, per_second: float = 20.0) -> None:
        """One record per request, at times that differ from those of other tenants."""
        client, request = Client(self.gateway, tenant), body(1, key=key)
        await anyio.sleep(0.0037 * QUIET.index(tenant))
        async with anyio.create_task_group() as requests:
            for _ in range(int(SECONDS * per_second)):
                requests.start_soon(self._one, client, request)
                await anyio.sleep(1 / per_second)

    async def _one(self, client: Client, request: bytes) -> None:
        started = anyio.current_time()
        answer = await client.call("POST", f"{PATH}?ack=delivered", request, headers={"content-type": JSON})
        if answer.status == 200:
            self.seconds.append(anyio.current_time() - started)
        else:
            self.refused += 1

    def p99(self) -> float:
        return sorted(self.seconds)[int(len(self.seconds) * 0.99)]


async def quiet_beside_noise(
    noise_per_second: int,
    *,
    directory: TenantDirectory | None = None,
    transport: FakeTransport | None = None,
    keys: tuple[str, str] = ("quiet", "noise"),
    **settings: Any,
) -> Load:
    """Every record is one Kinesis record, so a shard accepts 1,000 of them a second."""
    tenants = KnownTenants(Tenant(id="noisy"), *(Tenant(id=name) for name in QUIET))
    # Room for the burst of an idle shard, and for as many waiting records.
    options = {"aggregation_enabled": False, "max_outstanding_records": 2_500, "close_seconds": 1.0, **settings}
    async with open_gateway(transport or kinesis(), directory or tenants, **options) as gateway:
        load = Load(gateway)
        assert (await Client(gateway, QUIET[0]).call("POST", f"{PATH}?ack=delivered", body(1, key="warm"),
                                                     headers={"content-type": JSON})).status == 200  # fmt: skip
        async with anyio.create_task_group() as noise:
            if noise_per_second:
                noise.start_soon(partial(load.noise, noise_per_second, key=keys[1]))
                # After the burst of an idle shard.
                await anyio.sleep(1.0)
            async with anyio.create_task_group() as quiet:
                for name in QUIET:
                    quiet.start_soon(partial(load.quiet, name, key=keys[0]))
            noise.cancel_scope.cancel()
    return load


async def test_a_noisy_tenant_costs_ten_quiet_ones_no_request_and_little_time():
    unloaded = await quiet_beside_noise(0)
    beside = await quiet_beside_noise(5_000)
    one_for_all = await quiet_beside_noise(5_000, directory=OpenTenants(Tenant(id="all")))
    assert (unloaded.refused, beside.refused) == (0, 0)
    assert len(beside.seconds) == len(unloaded.seconds) == len(QUIET) * SECONDS * 20
    assert beside.p99() <= 2 * unloaded.p99() + 0.025
    assert beside.noise_refused > 100
    # The same gateway with one queue for all tenants rejects most of the quiet tenants' requests.
    assert one_for_all.refused / (one_for_all.refused + len(one_for_all.seconds)) > 0.5


async def test_a_hot_shard_does_not_slow_the_tenants_of_the_others():
    hot, cool = (keys_in(shard, 1)[0] for shard in even_shards(2))
    unloaded = await quiet_beside_noise(0, transport=kinesis(2), keys=(cool, hot))
    beside = await quiet_beside_noise(5_000, transport=kinesis(2), keys=(cool, hot))
    assert beside.refused == 0
    assert beside.p99() <= unloaded.p99() + 0.005


async def test_shares_of_a_hot_shard_follow_the_tenants_weights_within_two_hundredths():
    transport = kinesis()
    tenants = KnownTenants(Tenant(id="gold", weight=3), Tenant(id="tin"))
    async with open_gateway(transport, tenants, max_outstanding_records=4_000, close_seconds=0.0) as gateway:

        async def fill(tenant: str) -> None:
            client, request = Client(gateway, tenant), body(20, key=tenant, size=1_000)
            while True:
                answer = await client.call("POST", PATH, request, headers={"content-type": JSON})
                await anyio.sleep(0.005 if answer.status == 202 else 0.02)

        with anyio.move_on_after(8):
            async with anyio.create_task_group() as filling:
                filling.start_soon(fill, "gold")
                filling.start_soon(fill, "tin")
    stored = [record for blob in transport.kinesis.records(STREAM) for record in decode(blob.data) or ()]
    # Without the first second: its burst passed without waiting.
    competing = Counter(record.partition_key for record in stored[2_000:])
    assert competing.total() > 5_000
    assert competing["gold"] / competing.total() == pytest.approx(0.75, abs=0.02)


async def test_a_changed_weight_takes_effect_at_once():
    tenants = KnownTenants(Tenant(id="a"), Tenant(id="b"))
    async with open_gateway(directory=tenants) as gateway:
        policy = gateway.producer.config.fairness
        assert policy is not None
        assert policy.weight_of("a") == 1
        tenants.change(Tenant(id="a", weight=5))
        assert (policy.weight_of("a"), policy.weight_of("gone")) == (5, 1)


async def test_a_full_buffer_never_rejects_a_quiet_tenant():
    """Kinesis accepts nothing, and 100 tenants send as much as they can. A new tenant is still admitted."""
    transport = kinesis(latency_seconds=1_000.0)
    noisy = [Tenant(id=f"noisy-{number}") for number in range(100)]
    tenants = KnownTenants(*noisy, Tenant(id="quiet"), Tenant(id="alarm", tier="critical"))
    settings: dict[str, Any] = {"max_outstanding_records": 20_000, "record_ttl_ms": 600_000, "close_seconds": 0.0}
    async with open_gateway(transport, tenants, **settings) as gateway:
        transport.latency_seconds = 0.0
        gateway.opened.streams.known.add(STREAM)
        refused = dict.fromkeys((tenant.id for tenant in noisy), 0)
        for _ in range(10):
            for tenant in refused:
                answer = await Client(gateway, tenant).call(
                    "POST", PATH, body(50, key=tenant, size=1_000), headers={"content-type": JSON}
                )
                refused[tenant] += answer.status != 202
            await anyio.sleep(0.01)
        assert min(refused.values()) > 0
        for tenant in ("quiet", "alarm"):
            answer = await Client(gateway, tenant).call("POST", PATH, body(5, key="q"), headers={"content-type": JSON})
            assert answer.status == 202, answer.body


async def test_records_of_one_tenant_on_their_way_to_many_shards_leave_room_for_another():
    """No shard is slow, so nothing waits in the fair queue. Records behind it fill the buffer."""
    transport = kinesis(16, latency_seconds=30.0)
    tenants = KnownTenants(Tenant(id="noisy"), Tenant(id="quiet"))
    async with open_gateway(transport, tenants, max_outstanding_records=2_000, close_seconds=0.0) as gateway:
        gateway.opened.streams.known.add(STREAM)
        noisy, refused = Client(gateway, "noisy"), None
        for number in range(200):
            request = body(20, key=f"key-{number}")
            refused = await noisy.call("POST", PATH, request, headers={"content-type": JSON})
            await anyio.sleep(0.01)
            if refused.status != 202:
                break
        assert refused is not None
        assert refused.status == 429
        for _ in range(3):
            request = body(5, key="q")
            answer = await Client(gateway, "quiet").call("POST", PATH, request, headers={"content-type": JSON})
            assert answer.status == 202, answer.body


async def test_unknown_tenants_share_one_bounded_flow():
    stranger = Tenant(id="unknown", records_per_second=50)
    tenants = KnownTenants(Tenant(id="known"), unknown=stranger)
    async with open_gateway(directory=tenants) as gateway:
        answers = [await Client(gateway).post([{"partition_key": "k", "data": "x"}] * 30) for _ in range(3)]
        assert [answer.status for answer in answers] == [202, 429, 429]
        assert (await Client(gateway, "known").post([{"partition_key": "k", "data": "x"}] * 500)).status == 202
