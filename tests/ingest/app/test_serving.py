"""The gateway on a socket: slow, endless and disconnecting clients, and the shutdown."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from kpl_core.testing import ErrorAnswer, When
from kpl_integrations.ingest import IngestGateway
from kpl_integrations.ingest.serving import bound_socket
from kpl_integrations.ingest.tenants import Tenant
from tests.ingest.served import served, spoken
from tests.support.gateway_scene import STREAM, KnownTenants, gateway_of, kinesis, records

pytestmark = pytest.mark.anyio
PATH = f"/v1/streams/{STREAM}/records"
ONE = {"partition_key": "k", "data": "x"}


@pytest.fixture
def anyio_backend() -> str:
    """Sockets, in real time."""
    return "asyncio"


async def test_a_slow_head_is_answered_408_while_other_clients_are_served():
    async with served(gateway_of(kinesis(), header_seconds=0.3)) as server, httpx.AsyncClient() as client:
        slow = [asyncio.create_task(spoken(server, b"POST / HTTP/1.1\r\n", b"a: b\r\n", pause=0.1)) for _ in range(20)]
        silent = asyncio.create_task(spoken(server))
        assert (await client.post(server.url + PATH, json=ONE)).status_code == 202
        assert all(answer.startswith(b"HTTP/1.1 408") for answer in await asyncio.gather(*slow, silent))


async def test_an_endless_head_is_answered_431():
    head = b"GET /livez HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 500
    async with served(gateway_of(kinesis(), max_header_bytes=2_048)) as server:
        answer = await spoken(server, head)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 431")
        assert (await spoken(server, b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")).startswith(
            b"HTTP/1.1 200"
        )


async def test_many_pipelined_requests_are_not_one_long_head():
    body = b'{"partition_key":"k","data":"' + b"x" * 400 + b'"}'
    fields = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    last = b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    async with served(gateway_of(kinesis(), max_header_bytes=2_048)) as server:
        # The first piece ends inside a head.
        said = await spoken(server, (fields.encode() + body) * 10 + last[:9], last[9:], pause=0.1)
        assert said.count(b"HTTP/1.1 202") == 10
        assert b"HTTP/1.1 200" in said
        endless = await spoken(server, fields.encode() + body + last[:21], b"a: b\r\n" * 500, pause=0.1)
        assert endless == b"" or b"HTTP/1.1 431" in endless


async def test_a_slow_body_is_answered_408():
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n".encode()
    async with served(gateway_of(kinesis(), body_seconds=0.3)) as server:
        assert (await spoken(server, head, b"{", b'"', pause=0.1)).startswith(b"HTTP/1.1 408")


async def test_a_second_head_on_the_same_connection_is_bounded_like_the_first():
    async with served(gateway_of(kinesis(), header_seconds=0.3)) as server:
        answer = await spoken(server, b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n", b"GET /li", pause=0.1)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"HTTP/1.1 408" in answer


@pytest.mark.parametrize(
    ("asked", "status", "rest"),
    [
        (f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n", b"401", b"x"),
        ("GET /livez HTTP/1.1\r\nhost: x\r\n\r\n", b"200", b"\r\n"),
    ],
    ids=["an unread body", "empty lines"],
)
@pytest.mark.parametrize("times", [1, 600], ids=["once", "repeatedly"])
async def test_bytes_that_are_not_a_request_do_not_extend_an_idle_connection(asked, status, rest, times):
    gateway = gateway_of(kinesis(), KnownTenants(Tenant(id="t")), keep_alive_seconds=1)
    async with served(gateway) as server:
        host, _, port = server.url.rpartition("/")[2].partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(asked.encode())
            assert (await asyncio.wait_for(reader.readline(), 30)).split()[1] == status
            hung_up = asyncio.create_task(reader.read())
            for _ in range(times):
                writer.write(rest)
                if (await asyncio.wait({hung_up}, timeout=0.05))[0]:
                    break
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(hung_up, 30 if times == 1 else 0.0)
        finally:
            writer.close()


def answering_after(gateway: IngestGateway, told: asyncio.Event) -> None:
    """Delay the application's answers until the returned event is set."""
    application = type(gateway).__call__

    class Waiting(type(gateway)):  # type: ignore[misc] # a class that is an argument's
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                await told.wait()
            await application(self, scope, receive, send)

    gateway.__class__ = Waiting


@pytest.mark.long
async def test_a_slow_head_behind_a_pending_request_is_rejected_after_the_answer():
    told = asyncio.Event()
    gateway = gateway_of(kinesis(), header_seconds=1.0)
    answering_after(gateway, told)
    async with served(gateway) as server:
        asyncio.get_running_loop().call_later(1.5, told.set)
        said = await spoken(server, b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\nGET /livez HTTP/1.1\r\nhost: x\r\n")
        assert said.startswith(b"HTTP/1.1 200")
        assert b"HTTP/1.1 408" in said


async def test_a_large_head_behind_a_pending_request_does_not_replace_its_answer():
    told = asyncio.Event()
    gateway = gateway_of(kinesis(), max_header_bytes=2_048)
    answering_after(gateway, told)
    async with served(gateway) as server:
        try:
            begun = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\nGET /livez HTTP/1.1\r\nhost: x\r\n"
            large = (b"a: b\r\n" * 500, b"a: b\r\n" * 500)
            speaking = asyncio.create_task(spoken(server, begun, *large, pause=0.05))
            await asyncio.sleep(0.5)
            assert not speaking.done()
            told.set()
            said = await speaking
            assert (said.count(b"HTTP/1.1 "), said.count(b"HTTP/1.1 200 ")) == (1, 1)
        finally:
            told.set()


async def test_bytes_that_are_not_http_are_answered_400_and_affect_no_other_client():
    async with served(gateway_of(kinesis())) as server, httpx.AsyncClient() as client:
        for noise in (b"\x16\x03\x01\x02\x00\x01", b"\r\n\r\n\x00\x00", b"GET /\xff HTTP/1.1\r\n\r\n"):
            answer = await spoken(server, noise, b"\r\n\r\n")
            assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
        assert (await client.get(server.url + "/livez")).status_code == 200


async def test_chunked_and_fragmented_bodies_arrive_complete():
    transport = kinesis()

    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"partition_key": "k", '
        await asyncio.sleep(0.05)
        yield b'"data": "in chunks"}'

    async with served(gateway_of(transport)) as server, httpx.AsyncClient() as client:
        headers = {"content-type": "application/json"}
        answer = await client.post(server.url + PATH + "?ack=delivered", content=pieces(), headers=headers)
        assert answer.status_code == 200
        assert [record.data for record in transport.kinesis.records(STREAM)] == [b"in chunks"]


async def test_a_too_large_body_is_rejected_before_it_is_read():
    head = (
        f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 2000000\r\n\r\n".encode()
    )
    async with served(gateway_of(kinesis(), max_body_bytes=1_024)) as server:
        answer = await spoken(server, head)
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"connection: close" in answer


async def test_no_secret_and_no_line_of_a_client_is_logged(caplog):
    tenants = KnownTenants(Tenant(id="t"))
    with caplog.at_level(logging.DEBUG):
        async with served(gateway_of(kinesis(), tenants)) as server, httpx.AsyncClient() as client:
            for path in (PATH, "/v1/streams/a%0ainjected/records", "/%0d%0ainjected"):
                headers = {"authorization": "Bearer sesame", "idempotency-key": "sesame-too"}
                answer = await client.post(server.url + path, json=ONE, headers=headers)
                assert answer.status_code in {401, 404}
                assert "sesame" not in answer.text
                assert "injected" not in answer.text
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith(("http", "asyncio"))]
    assert not [line for line in ours if "sesame" in line or "injected" in line]


async def test_a_signal_under_load_shuts_down_and_every_accepted_record_is_reported():
    """Readiness fails first while requests are accepted. Then admission closes and the buffer drains."""
    transport = kinesis(2, latency_seconds=0.02)
    gateway = gateway_of(transport, drain_delay_seconds=0.5, close_seconds=5.0)
    accepted = refused = 0
    seen: list[tuple[int, int]] = []
    async with served(gateway) as server, httpx.AsyncClient(timeout=20) as client:
        stopping = asyncio.Event()

        async def load(worker: int) -> None:
            nonlocal accepted, refused
            for number in range(10_000):
                body = {"records": records(20, first=number * 20)}
                try:
                    answer = await client.post(server.url + PATH, json=body)
                except httpx.TransportError:
                    return
                if answer.status_code == 202:
                    accepted += 20
                else:
                    assert answer.status_code == 503
                    assert "retry-after" in answer.headers
                    refused += 1
                    return
                if stopping.is_set() and worker == 0:
                    # The server may end between two requests.
                    with contextlib.suppress(httpx.TransportError):
                        ready = await client.get(server.url + "/readyz")
                        live = await client.get(server.url + "/livez")
                        seen.append((ready.status_code, live.status_code))

        workers = [asyncio.create_task(load(worker)) for worker in range(4)]
        await asyncio.sleep(0.3)
        server.stop()
        stopping.set()
        await asyncio.gather(*workers)
    assert set(seen) == {(503, 200)}
    assert refused >= 1
    report = gateway.report
    assert report is not None
    assert report.accepted == accepted == report.delivered
    assert report.complete


async def test_a_second_signal_stops_waiting_and_every_record_is_still_reported():
    transport = kinesis()
    transport.kinesis.faults.add(ErrorAnswer("InternalFailure"), When(operation="PutRecords"))
    gateway = gateway_of(transport, drain_delay_seconds=60.0, close_seconds=60.0)
    async with served(gateway) as server, httpx.AsyncClient() as client:
        assert (await client.post(server.url + PATH, json=ONE)).status_code == 202
        started = time.monotonic()
        server.stop()
        await asyncio.sleep(0.05)
        server.stop()
    assert time.monotonic() - started < 15
    assert gateway.report is not None
    # Waiting for a retry, or in flight.
    assert dict(gateway.report.failed) in ({"Shutdown": 1}, {"Unknown": 1})


@pytest.mark.parametrize("sent_before", [0, 30])
async def test_a_connection_whose_first_request_is_on_its_way_gets_an_answer_of_a_server_that_stops(sent_before):
    """It was closed at once, and a client that had just connected got a reset."""
    body = json.dumps(ONE).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    request = head.encode() + body
    async with served(gateway_of(kinesis(), drain_delay_seconds=0.0)) as server, httpx.AsyncClient() as client:
        reader, writer = await asyncio.open_connection(*server.url.removeprefix("http://").split(":"))
        writer.write(request[:sent_before])
        assert (await client.post(server.url + PATH, json=ONE)).status_code == 202
        server.stop()
        await asyncio.sleep(0.2)
        writer.write(request[sent_before:-10])
        await asyncio.sleep(0.05)
        writer.write(request[-10:])
        assert (await reader.readline()).split()[1] in {b"202", b"503"}
        began = time.monotonic()
        await reader.read()
        writer.close()
    assert time.monotonic() - began < 3.0


def test_a_taken_port_is_an_os_error():
    with bound_socket("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            _ = bound_socket("127.0.0.1", port)


async def test_the_lifespan_of_any_server_opens_and_closes_the_gateway():
    gateway = gateway_of(kinesis())
    incoming: list[Any] = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    sent: list[Any] = []

    async def receive() -> Any:
        return incoming.pop(0)

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if message["type"] == "lifespan.startup.complete":
            transport = httpx.ASGITransport(gateway)
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
                assert (await client.post(PATH, json=ONE)).status_code == 202

    await gateway({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert gateway.report is not None
    assert gateway.report.delivered == 1


async def test_a_mounted_gateway_answers_under_its_prefix():
    from starlette.applications import Starlette  # noqa: PLC0415
    from starlette.routing import Mount  # noqa: PLC0415

    async with gateway_of(kinesis()) as gateway:
        app = Starlette(routes=[Mount("/ingest", gateway)])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as client:
            assert (await client.post("/ingest" + PATH, json=ONE)).status_code == 202
            assert (await client.get("/ingest/livez")).status_code == 200


@pytest.mark.parametrize("libc", ["glibc", "musl"])
async def test_the_server_keeps_freed_memory_where_malloc_can(libc, monkeypatch):
    kept: list[tuple[int, int]] = []
    functions = {"mallopt": lambda *option: kept.append(option)} if libc == "glibc" else {}
    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace(**functions))
    async with served(gateway_of(kinesis())):
        pass
    assert kept == ([(-1, 32 * 1024 * 1024), (-3, 4 * 1024 * 1024)] if libc == "glibc" else [])
