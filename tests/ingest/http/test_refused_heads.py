"""Requests that HTTP forbids are refused on both HTTP paths, and wrong admin keys are bounded. Over real sockets."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kpl_core.transport import RequestFailure
from kpl_integrations.ingest.serving import GatewayServer
from kpl_integrations.ingest.tenants import CallableTenants, OpenTenants, Tenant
from tests.ingest.served import connected, served, spoken
from tests.support.gateway_scene import JSON, STREAM, Client, gateway_of, kinesis, open_gateway
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
PATH = f"/v1/streams/{STREAM}/records"
ONE = b'{"partition_key":"k","data":"x"}'
ADMIN = "an-administrators-key"
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(ONE), ONE)


@pytest.fixture
def anyio_backend() -> str:
    """Sockets, in real time."""
    return "asyncio"


@pytest.fixture
async def server() -> AsyncIterator[GatewayServer]:
    known = {f"Bearer {name}": Tenant(id=name) for name in ("a", "b")}
    directory = CallableTenants(lambda shown: known.get(shown or ""), tenants=known.values())
    async with served(gateway_of(kinesis(), directory, admin_key=ADMIN)) as running:
        yield running


def head(*fields: str, version: str = " HTTP/1.1", method: str = "GET", path: str = "/livez") -> bytes:
    return "\r\n".join([f"{method} {path}{version}", *fields, "connection: close", "", ""]).encode()


def post(*fields: str) -> bytes:
    return head("host: x", "authorization: Bearer a", f"content-type: {JSON}", *fields, method="POST", path=PATH)


# What a client sends, and the status of the answer.
ROWS = [
    (head("host: x"), 200),
    (head(), 400),
    (head("host: x", "host: x"), 400),
    (head("host: x", "host: y"), 400),
    (head(version=" HTTP/1.0"), 200),
    (head("host: x", "host: x", version=" HTTP/1.0"), 400),
    (head(version=""), 505),
    (head("host: x", version=" HTTP/2.0"), 505),
    (post(f"content-length: {len(ONE)}") + ONE, 202),
    (post("transfer-encoding: chunked") + CHUNKED, 202),
    (post("transfer-encoding: Chunked") + CHUNKED, 202),
    (post("transfer-encoding: gzip, chunked") + CHUNKED, 501),
    (post("transfer-encoding: gzip", "transfer-encoding: chunked") + CHUNKED, 501),
    (post("host: x", f"content-length: {len(ONE)}") + ONE, 400),
]


@pytest.mark.parametrize(("sent", "status"), ROWS, ids=[f"{row}-{status}" for row, (_, status) in enumerate(ROWS)])
@pytest.mark.parametrize("cut", [0, 5, -3], ids=["whole", "cut in the first line", "cut at the end"])
async def test_a_request_that_http_forbids_is_refused(
    server: GatewayServer, sent: bytes, status: int, cut: int
) -> None:
    pieces = (sent[:cut], sent[cut:]) if cut else (sent,)
    said = await spoken(server, *pieces, pause=0.02 if cut else 0.0)
    assert said.startswith(b"HTTP/1.1 %d " % status)
    assert said.count(b"HTTP/1.1 ") == 1


async def test_a_refused_head_behind_an_answered_request_closes_the_connection(server: GatewayServer) -> None:
    first = post(f"content-length: {len(ONE)}").replace(b"connection: close\r\n", b"") + ONE
    client = await connected(server)
    assert await client.status(first) == 202
    client.writer.write(first + head() + first)
    said = await asyncio.wait_for(client.reader.read(), 10)
    client.writer.close()
    assert [each[:3] for each in said.split(b"HTTP/1.1 ")[1:]] == [b"202", b"400"]


async def answers(server: GatewayServer, count: int, request: bytes) -> list[int]:
    said = [await spoken(server, request) for _ in range(count)]
    return [int(each.split(b" ", 2)[1]) for each in said]


def stats(key: str, path: str = "/v1/stats") -> bytes:
    return head("host: x", f"authorization: Bearer {key}", path=path)


@pytest.mark.parametrize("path", ["/v1/stats", "/dashboard", "/dashboard/events"])
async def test_wrong_admin_keys_in_authorization_are_bounded_like_those_of_the_form(
    server: GatewayServer, path: str
) -> None:
    assert await answers(server, 6, stats("wrong", path)) == [401] * 5 + [429]
    # Also the right key waits, or an attacker would recognize it.
    assert await answers(server, 1, stats(ADMIN, path)) == [429]
    # A tenant's own key is no guess.
    assert await answers(server, 2, stats("a")) == [200] * 2


async def test_wrong_keys_of_one_address_do_not_lock_the_form_for_others() -> None:
    async def enter(address: str, key: str) -> int:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": f"key={key}".encode()}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/dashboard", "query_string": b"", "headers": []}
        await gateway({**scope, "client": (address, 1)}, receive, send)
        return int(sent[0]["status"])

    async def never() -> Any:
        await asyncio.Event().wait()

    async def guess(address: str) -> None:
        headers = [(b"authorization", b"Bearer wrong")]
        scope = {"type": "http", "method": "GET", "path": "/v1/stats", "query_string": b"", "headers": headers}

        async def ignore(_message: Any) -> None:
            pass

        await gateway({**scope, "client": (address, 1)}, never, ignore)

    directory = CallableTenants(lambda _: None)
    async with open_gateway(kinesis(), directory, admin_key=ADMIN) as gateway:
        for _ in range(67):
            await enter("192.0.2.1", "wrong")
            await guess("192.0.2.1")
        assert await enter("192.0.2.1", ADMIN) == 429
        assert await enter("192.0.2.2", ADMIN) == 303


async def test_clients_with_credentials_get_in_when_connections_run_out() -> None:
    directory = CallableTenants(lambda shown: Tenant(id="a") if shown == "Bearer a" else None)
    request = post(f"content-length: {len(ONE)}").replace(b"connection: close\r\n", b"") + ONE
    async with (
        served(gateway_of(kinesis(), directory, max_connections=20)) as running,
        contextlib.AsyncExitStack() as stack,
    ):

        async def connected() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            host, _, port = running.url.rpartition("/")[2].partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.close)
            return reader, writer

        async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
            writer.write(request)
            said = await asyncio.wait_for(reader.readuntil(b"}"), 10)
            return said[:12]

        kept = await connected()
        assert await ask(*kept) == b"HTTP/1.1 202"
        for _ in range(60):
            _, writer = await connected()
            writer.write(b"GET /livez HTTP/1.1\r\n")
        assert [await ask(*await connected()) for _ in range(5)] == [b"HTTP/1.1 202"] * 5
        assert await ask(*kept) == b"HTTP/1.1 202"


@pytest.mark.parametrize("verifies", [True, False])
async def test_a_connection_that_awaits_its_answer_is_not_closed_for_new_ones(verifies: bool) -> None:
    tenant = Tenant(id="a", default_ack="delivered")
    directory = CallableTenants(lambda _: tenant, unknown=tenant) if verifies else OpenTenants(tenant)
    gateway = gateway_of(kinesis(latency_seconds=0.6), directory, max_connections=20)
    async with served(gateway) as running, contextlib.AsyncExitStack() as stack:
        host, _, port = running.url.rpartition("/")[2].partition(":")

        async def connected() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.close)
            return reader, writer

        waiting = [await connected() for _ in range(18)]
        for _, writer in waiting:
            writer.write(post(f"content-length: {len(ONE)}") + ONE)
        await until(lambda: (account := gateway.opened.accounts.find("a")) and account.accepted_records == len(waiting))
        new = [await connected() for _ in range(30)]
        said = await asyncio.wait_for(asyncio.gather(*[reader.read() for reader, _ in waiting]), 10)
        assert [each[:12] for each in said] == [b"HTTP/1.1 200"] * len(waiting)
        assert len(new) == 30


async def test_an_idle_connection_stays_open_if_no_credentials_are_verified() -> None:
    async with served(gateway_of(kinesis(), max_connections=20)) as running, contextlib.AsyncExitStack() as stack:
        host, _, port = running.url.rpartition("/")[2].partition(":")
        connections = [await asyncio.open_connection(host, int(port)) for _ in range(30)]
        for _, writer in connections:
            stack.callback(writer.close)
        await asyncio.sleep(0.2)
        assert not any(reader.at_eof() for reader, _ in connections)


async def test_metrics_have_no_stream_names_with_control_characters() -> None:
    transport = kinesis()

    async def list_shards(stream: str) -> Any:
        return RequestFailure("AccessDeniedException", f"not authorized to list {stream}")

    transport.list_shards = list_shards  # type: ignore[method-assign]
    directory = CallableTenants(lambda _: Tenant(id="a", streams=("arn:*",)))
    async with open_gateway(transport, directory) as gateway:
        client = Client(gateway, "a")
        for character in "\x00\x1b\x7f\x85\u202e":
            stream = f"arn:aws:kinesis:us-east-1:123456789012:stream/a{character}b"
            assert (await client.post({"data": "x"}, stream=stream)).status == 404
        await asyncio.sleep(0.2)  # for a lookup, if one began
        metrics = (await client.get("/metrics")).body.decode()
        assert [each for each in metrics if not (each.isprintable() or each == "\n")] == []
        assert "stream/a" not in metrics


async def test_a_gateway_with_host_names_answers_only_to_these_and_to_loopback_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {
        "localhost": 202, "LOCALHOST:80": 202, "127.0.0.1:8080": 202, "127.1.2.3": 202, "[::1]:8080": 202, "[::1]": 202,
        "my.localhost": 202, "gateway.internal:1": 202, "GateWay.internal": 202, "evil.example": 421,
        "evil.example:8080": 421, "127.0.0.1.evil.example": 421, "10.0.0.1": 421, "localhost.evil.example": 421,
        "[2001:db8::1]": 421, "": 421,
    }  # fmt: skip
    monkeypatch.setenv("KPL_INGEST_ALLOWED_HOSTS", "gateway.internal, other")
    async with served(gateway_of(kinesis())) as running:
        found = {}
        for name in names:
            fields = (f"host: {name}", f"content-type: {JSON}", f"content-length: {len(ONE)}")
            said = await spoken(running, head(*fields, method="POST", path=PATH) + ONE)
            found[name] = int(said.split(b" ", 2)[1])
            if found[name] == 421:
                assert json.loads(said.partition(b"\r\n\r\n")[2])["code"] == "unknown-host"
        assert found == names
        assert (await spoken(running, head(version=" HTTP/1.0"))).startswith(b"HTTP/1.1 200")
