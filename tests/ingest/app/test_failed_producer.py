"""A gateway whose producer has failed, in an application that goes on: it says so until it is restarted."""

import asyncio
from typing import Any

import anyio
import httpx
import pytest

from kpl_core.testing import FakeKinesis, FakeTransport
from kpl_integrations.ingest.serving import GatewayServer, bound_socket
from tests.support.gateway_scene import STREAM, Client, gateway_of, open_gateway, records
from tests.support.producer_scene import EndOfTheDriver

pytestmark = pytest.mark.anyio
ONE = {"partition_key": "k", "data": "x"}


class Ending(FakeTransport):
    has_ended = False

    async def put_records(self, request: Any) -> Any:
        if self.has_ended:
            raise EndOfTheDriver
        return await super().put_records(request)


async def test_a_gateway_with_a_failed_producer_refuses_records_and_is_not_ready() -> None:
    transport = Ending(FakeKinesis({STREAM: 1}))

    async def use() -> None:
        async with open_gateway(transport) as gateway:
            client = Client(gateway)
            assert (await client.post(records(1), ack="delivered")).status == 200
            assert b"kinesis_ingest_open 1.0" in (await client.get("/metrics")).body
            transport.has_ended = True
            with anyio.CancelScope(shield=True):
                lost = (await client.post(records(1), ack="delivered")).json()
                assert [each["error_code"] for each in lost["records"]] == ["Unknown"]
                refused = await client.post(records(1), ack="queued")
                assert refused.status == 503
                assert "the gateway has failed and must be restarted" in refused.body.decode()
                ready = await client.get("/readyz")
                assert ready.status == 503
                assert "the producer has failed with EndOfTheDriver" in ready.body.decode()
                await anyio.sleep(10.0)
                assert b"kinesis_ingest_open 0.0" in (await client.get("/metrics")).body

    with pytest.raises(BaseExceptionGroup) as raised:
        await use()
    assert raised.group_contains(EndOfTheDriver)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_server_ends_with_the_cause_when_its_producer_fails() -> None:
    """So the process ends with an error, and its supervisor starts another."""
    transport = Ending(FakeKinesis({STREAM: 1}))
    with bound_socket("127.0.0.1", 0) as listening, listening.dup() as kept:
        server, started = GatewayServer(gateway_of(transport), listening), asyncio.Event()
        serving = asyncio.create_task(server.run(started=started.set))
        await asyncio.wait_for(started.wait(), 20)
        async with httpx.AsyncClient() as client:
            url = f"{server.url}/v1/streams/{STREAM}/records"
            assert (await client.post(f"{url}?ack=delivered", json=ONE)).status_code == 200
            transport.has_ended = True
            assert (await client.post(url, json=ONE)).status_code == 202
        with pytest.raises(BaseExceptionGroup) as raised:
            await asyncio.wait_for(serving, 20)
        # Its supervisor still has the socket. The loop does not watch it any more.
        errors: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        _, writer = await asyncio.open_connection(*kept.getsockname())
        await asyncio.sleep(0.01)
        writer.close()
    assert not errors
    assert raised.group_contains(EndOfTheDriver)
