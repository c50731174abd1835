"""Answered requests leave no reference cycles: to collect those would stop the event loop for tens of milliseconds."""

import asyncio
import gc
import socket
import struct
from collections.abc import Iterator

import pytest

from kpl_integrations.ingest.http.connection import HttpConnection
from kpl_integrations.ingest.http.request_cycle import RequestCycle
from kpl_integrations.ingest.serving import GatewayServer
from kpl_integrations.ingest.tenants import Tenant
from tests.ingest.served import connected, served
from tests.support.gateway_scene import JSON, NDJSON, STREAM, KnownTenants, gateway_of, kinesis
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
PATH = f"/v1/streams/{STREAM}/records"
ONE = b'{"partition_key":"k","data":"x"}'
LINES = (ONE + b"\n") * 100
REQUESTS = 5


@pytest.fixture
def anyio_backend() -> str:
    """Sockets, in real time."""
    return "asyncio"


@pytest.fixture
def _no_collections() -> Iterator[None]:
    gc.disable()
    gc.collect()
    # A collection looks at new objects only.
    gc.freeze()
    yield
    gc.unfreeze()
    gc.enable()


def post(body: bytes, *fields: str, query: str = "", content_type: str = JSON) -> bytes:
    head = (f"POST {PATH}{query} HTTP/1.1", "host: x", "authorization: Bearer t", f"content-type: {content_type}")
    return "\r\n".join((*head, *fields, f"content-length: {len(body)}", "", "")).encode() + body


def protocols() -> list[HttpConnection]:
    return [each for each in gc.get_objects() if isinstance(each, HttpConnection)]


async def reset(server: GatewayServer, asked: bytes) -> None:
    """Send requests, wait until the first one is begun or answered, and reset the connection."""
    client = await connected(server)
    transport = client.writer.transport
    assert isinstance(transport, asyncio.Transport)
    transport.pause_reading()
    await until(protocols)
    answered = protocols()[0].server.answered()
    transport.write(asked)
    await until(lambda: protocols()[0].cycle is not None or protocols()[0].server.answered() > answered)
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer t\r\n\r\n".encode()


ASKED = {
    "queued": post(ONE),
    "delivered": post(ONE, query="?ack=delivered"),
    "queued lines": post(LINES, content_type=NDJSON),
    "delivered lines": post(LINES, content_type=NDJSON, query="?ack=delivered"),
    "with a hash key": post(b'{"partition_key":"k","data":"x","explicit_hash_key":"7"}', query="?ack=delivered"),
    "in part": post(ONE + b"\n{}", content_type=NDJSON, query="?partial=true&ack=delivered"),
    "once": post(ONE, "idempotency-key: a"),
    "large": post(LINES * 20, content_type=NDJSON, query="?ack=delivered"),
    "malformed": post(b"{"),
    "health": get("/livez"),
    "metrics": get("/metrics"),
    "statistics": get("/v1/stats"),
}


@pytest.mark.usefixtures("_no_collections")
async def test_an_answered_request_leaves_no_reference_cycles():
    gateway = gateway_of(kinesis(), KnownTenants(Tenant(id="t")), record_max_buffered_time_ms=1)
    found: dict[str, int] = {}
    async with served(gateway) as server:
        client = await connected(server)
        for name, asked in ASKED.items():
            await client.status(asked)
            gc.collect()
            for _ in range(REQUESTS):
                await client.status(asked)
            found[name] = gc.collect()
        client.writer.close()
    assert {name for name, objects in found.items() if objects >= REQUESTS} == set()


@pytest.mark.usefixtures("_no_collections")
@pytest.mark.parametrize("name", ASKED)
async def test_a_connection_that_is_reset_leaves_nothing_of_its_requests(name):
    """A client sends many requests at once, reads no answer and resets its connection."""
    gateway = gateway_of(kinesis(), KnownTenants(Tenant(id="t")), record_max_buffered_time_ms=1)
    async with served(gateway) as server:
        for _ in range(3):
            await reset(server, ASKED[name] * 50)
            # Nothing collects them.
            await until(lambda: not protocols())
        left = [each for each in gc.get_objects() if isinstance(each, RequestCycle)]
    assert not left
