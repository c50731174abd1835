"""The HTTP connections, against servers on loopback sockets that misbehave."""

import asyncio
import logging
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import SplitResult, urlsplit

import pytest

from benchmarks.sink_process import make_certificate
from kpl_core.transport import http_answers, http_connections
from kpl_core.transport.http_answers import HttpAnswer
from kpl_core.transport.http_connections import PIECE_BYTES, HttpConnections
from tests.support.waiting import until

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
LARGE = bytes(64 * PIECE_BYTES)  # more than the buffers of a socket take

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request) -> Any:
    return "asyncio", {"use_uvloop": request.param}


def answer_of(body: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def request_head(body: bytes) -> bytes:
    return b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body)


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    return await reader.readexactly(int(head.partition(b"Content-Length: ")[2]))


class Client:
    """Posts to one server, whose `serve` handles each connection. Counts the connections."""

    def __init__(self, url: str, connections: HttpConnections) -> None:
        self.url = urlsplit(url)
        self.connections = connections
        self.accepted = 0
        self.ended = 0

    async def post(self, body: bytes = b"x", url: SplitResult | None = None) -> HttpAnswer:
        return await self.connections.post(url or self.url, request_head(body), body)


@asynccontextmanager
async def client_of(
    serve: Serve, *, host: str = "127.0.0.1", tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None
) -> AsyncIterator[Client]:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client.accepted += 1
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            client.ended += 1
            writer.close()

    server_tls, client_tls = tls or (None, None)
    listening = await asyncio.start_server(accept, host, 0, ssl=server_tls)
    port = listening.sockets[0].getsockname()[1]
    connections = HttpConnections(max_connections=4, connect_seconds=2, exchange_seconds=10, tls=client_tls)
    client = Client(
        f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}",
        connections,
    )
    others = asyncio.all_tasks()
    async with listening:
        yield client
        await connections.close()
        await until(lambda: client.ended == client.accepted)
    await until(lambda: asyncio.all_tasks() <= others)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(answer_of(await read_request(reader)))


async def test_at_the_level_debug_each_step_of_connection_and_request_is_logged_with_its_time(caplog):
    caplog.set_level(logging.DEBUG, logger="kpl_core")

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer_of(await read_request(reader)))
        await read_request(reader)

    async with client_of(answer_once) as client:
        _ = await client.post(b"secret")
        with pytest.raises(ConnectionError):
            _ = await client.post(b"secret")
    port = client.url.port
    steps = [re.sub(r"in \d+\.\d ms$", "in T ms", record.getMessage()) for record in caplog.records]
    failure = "ConnectionError('the server closed the connection before its answer was complete')"
    assert steps == [
        f"127.0.0.1:{port}: name resolved, addresses: 1 in T ms",
        f"127.0.0.1:{port}: connected to 127.0.0.1 in T ms",
        f"127.0.0.1:{port}: POST of 6 bytes, answer 200 of 6 bytes in T ms",
        f"127.0.0.1:{port}: POST of 6 bytes failed with {failure} in T ms",
    ]


# An answer that is sent twice


@pytest.mark.parametrize("pause", [None, 0.0, 0.02])
async def test_a_repeated_answer_is_not_taken_for_the_answer_of_the_next_request(pause):
    async def answer_twice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            answer = answer_of(await read_request(reader))
            if pause is None:
                writer.write(answer * 2)
                continue
            writer.write(answer)
            await asyncio.sleep(pause)
            writer.write(answer)

    async with client_of(answer_twice) as client:
        for number in range(5):
            body = b"%d" % number
            assert (await client.post(body)).body == body
            await asyncio.sleep(0.0 if pause is None else 0.05)
    assert client.accepted == 5


async def test_a_repeated_answer_that_the_loop_has_not_read_yet_is_noticed():
    loop = asyncio.get_running_loop()
    peers: list[socket.socket] = []

    async def answered(body: bytes) -> HttpAnswer:
        posting = asyncio.create_task(connections.post(url, request_head(body), body))
        peers.append((await asyncio.wait_for(loop.sock_accept(listening), 2))[0])
        await loop.sock_recv(peers[-1], 1000)
        await loop.sock_sendall(peers[-1], answer_of(body))
        return await posting

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        url = urlsplit(f"http://127.0.0.1:{listening.getsockname()[1]}")
        connections = HttpConnections(max_connections=1, connect_seconds=2, exchange_seconds=10, tls=None)
        for body in (b"1", b"2"):
            assert (await answered(body)).body == body
            peers[-1].send(answer_of(body))
        await connections.close()
        for peer in peers:
            peer.close()


# Addresses


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_an_address_of_either_family_is_connected_to(host):
    async with client_of(echo, host=host) as client:
        assert (await client.post(b"1")).body == b"1"


async def test_a_name_is_resolved_and_verified(tmp_path):
    certificate = tmp_path / "server.pem"
    if reason := make_certificate(certificate):
        pytest.skip(reason)
    server_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_tls.load_cert_chain(certificate)
    tls = server_tls, ssl.create_default_context(cafile=certificate)
    async with client_of(echo, tls=tls) as client:
        localhost = urlsplit(f"https://localhost:{client.url.port}")
        for url in (client.url, client.url, localhost):
            assert (await client.post(LARGE[: 4 * PIECE_BYTES], url)).body == LARGE[: 4 * PIECE_BYTES]
    assert client.accepted == 2
    async with client_of(echo, host="::1", tls=tls) as client:
        with pytest.raises(ssl.SSLCertVerificationError):
            await client.post()


@pytest.mark.parametrize("anyio_backend", [("asyncio", {})])
async def test_the_next_address_is_tried_while_the_first_does_not_answer(monkeypatch):
    monkeypatch.setattr(http_connections, "_NEXT_ADDRESS_SECONDS", 0.02)
    loop = asyncio.get_running_loop()
    resolve = loop.getaddrinfo
    async with client_of(echo) as client:
        with dead_address() as dead:

            async def two_addresses(host: str, port: int, **options: Any) -> Any:
                assert host == "kinesis.example"
                return [*await resolve(*dead, **options), *await resolve("127.0.0.1", port, **options)]

            monkeypatch.setattr(loop, "getaddrinfo", two_addresses)
            url = urlsplit(f"http://kinesis.example:{client.url.port}")
            assert (await client.post(b"1", url=url)).body == b"1"


@pytest.mark.parametrize("anyio_backend", [("asyncio", {})])
async def test_every_address_is_tried_before_the_time_to_connect_is_over(monkeypatch):
    """Here the usual wait for the next address is longer than all of that time."""
    monkeypatch.setattr(http_connections, "_NEXT_ADDRESS_SECONDS", 60.0)
    loop = asyncio.get_running_loop()
    resolve = loop.getaddrinfo
    async with client_of(echo) as client:
        client.connections = HttpConnections(max_connections=1, connect_seconds=1, exchange_seconds=10, tls=None)
        with dead_address() as dead:

            async def two_addresses(host: str, port: int, **options: Any) -> Any:
                return [*await resolve(*dead, **options), *await resolve("127.0.0.1", port, **options)]

            monkeypatch.setattr(loop, "getaddrinfo", two_addresses)
            url = urlsplit(f"http://kinesis.example:{client.url.port}")
            assert (await client.post(b"1", url=url)).body == b"1"
        await client.connections.close()


@contextmanager
def dead_address() -> Iterator[tuple[str, int]]:
    """Give an address that drops attempts to connect: nothing accepts, and its backlog is full."""
    with socket.socket() as listening, ExitStack() as stack:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        yield listening.getsockname()


# Answers before the end of the request


async def test_an_answer_before_a_reset_is_returned():
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1000)
        writer.write(answer_of(b"too large", 400))
        await asyncio.sleep(0.02)
        writer.transport.abort()

    async with client_of(refuse) as client:
        for _ in range(2):
            assert (await client.post(LARGE))[::2] == (400, b"too large")
    assert client.accepted == 2


@pytest.mark.parametrize("size", [PIECE_BYTES * 64, PIECE_BYTES])
async def test_an_answer_ends_the_request_though_the_server_reads_no_more(size):
    is_done = asyncio.Event()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.write(answer_of(b"too large", 400))
        await is_done.wait()

    async with client_of(refuse) as client:
        async with asyncio.timeout(1):
            assert (await client.post(LARGE[:size]))[::2] == (400, b"too large")
        # The kernel may have taken all of a small body.
        assert connections_kept(client) == 0 or size == PIECE_BYTES
        is_done.set()


async def test_a_cancelled_request_leaves_no_task_and_no_connection():
    is_done = asyncio.Event()

    async def stall(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await is_done.wait()

    async with client_of(stall) as client:
        before = asyncio.all_tasks()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.post(LARGE)
        accepting = 1
        assert len(asyncio.all_tasks() - before) <= accepting
        assert connections_kept(client) == 0
        is_done.set()


async def test_a_large_body_arrives_whole_and_its_connection_is_used_again():
    async with client_of(echo) as client:
        for _ in range(3):
            assert (await client.post(LARGE[: 4 * PIECE_BYTES + 7])).body == LARGE[: 4 * PIECE_BYTES + 7]
    assert client.accepted == 1


# Idle connections


def connections_kept(client: Client) -> int:
    return sum(map(len, client.connections._idle.values()))  # noqa: SLF001


async def test_connections_are_closed_when_they_have_been_idle(monkeypatch):
    monkeypatch.setattr(http_connections, "IDLE_SECONDS", 0.1)
    async with client_of(echo) as client:
        await asyncio.gather(*[client.post() for _ in range(3)])
        await asyncio.sleep(0.06)
        await client.post()
        last_used = asyncio.get_running_loop().time()
        assert (client.accepted, connections_kept(client)) == (3, 3)
        await until(lambda: client.ended == 3)
        assert 0.09 < asyncio.get_running_loop().time() - last_used < 1
        assert client.connections._idle_timer is None  # noqa: SLF001
        assert (await client.post(b"1")).body == b"1"


async def test_after_close_no_connection_is_kept_and_no_timer_runs():
    may_answer = asyncio.Event()

    async def answer_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while body := await read_request(reader):
            if body == b"late":
                await may_answer.wait()
            writer.write(answer_of(body))

    async with client_of(answer_late) as client:
        posting = asyncio.create_task(client.post(b"late"))
        await client.post(b"1")
        timer = client.connections._idle_timer  # noqa: SLF001
        assert timer is not None
        await client.connections.close()
        assert timer.cancelled()
        may_answer.set()
        assert (await posting).body == b"late"
        assert connections_kept(client) == 0
        assert client.connections._idle_timer in {None, timer}  # noqa: SLF001
        await until(lambda: client.ended == 2)


# Framing


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 10001\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + (b"64\r\n" + bytes(100) + b"\r\n") * 101,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFF\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + bytes(10_001),
    ],
)
async def test_a_body_above_the_limit_is_refused(answer, monkeypatch):
    monkeypatch.setattr(http_answers, "MAX_BODY_BYTES", 10_000)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer)
        await read_request(reader)

    async with client_of(serve) as client:
        with pytest.raises(ValueError, match="at most 10000 are allowed"):
            await client.post()


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_that_can_have_no_body_is_complete_after_its_head(status):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await read_request(reader):
            writer.write(b"HTTP/1.1 %d X\r\nContent-Length: 5\r\n\r\n" % status)

    async with client_of(serve) as client:
        for _ in range(2):
            assert (await client.post())[::2] == (status, b"")
    assert client.accepted == 1


async def test_the_next_request_does_not_use_the_connection_of_an_answer_that_was_refused():
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        first = client.accepted == 1
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab" if first else answer_of(b"2")
        )
        await read_request(reader)

    async with client_of(serve) as client:
        with pytest.raises(ValueError, match="Content-Length '1, 2'"):
            await client.post()
        assert (await client.post()).body == b"2"
    assert client.accepted == 2


@pytest.mark.parametrize("anyio_backend", [("asyncio", {})])
async def test_a_name_without_an_address_is_an_error_that_names_it(monkeypatch):
    async def nothing(*_: Any, **__: Any) -> list[Any]:
        return []

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", nothing)
    connections = HttpConnections(max_connections=1, connect_seconds=2, exchange_seconds=10, tls=None)
    with pytest.raises(OSError, match="has no address"):
        await connections.post(urlsplit("http://kinesis.example"), request_head(b""), b"")
    await connections.close()
