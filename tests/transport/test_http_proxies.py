"""HTTPS through an HTTP proxy: real tunnels to a server on loopback, and proxies that refuse or misbehave."""

import asyncio
import logging
import socket
import ssl
import struct
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from benchmarks.sink_process import make_certificate
from kpl_core import Config, Producer
from kpl_core.transport import RequestFailure
from kpl_core.transport.direct_transport import DirectTransport, resolved
from kpl_integrations.local_kinesis import LocalKinesis
from tests.transport.test_aiobotocore_transport import THREE, config, request_of

pytestmark = pytest.mark.anyio
# No proxy is asked for an address of this machine. The certificate is not verified: it is that of localhost.
ENDPOINT = "https://kinesis.example:8443"
PASSWORD = "hun/ter@2 %"


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return "asyncio", {"use_uvloop": request.param}


@pytest.fixture(autouse=True)
def _no_other_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


class Proxy:
    """Connects each CONNECT to one server, or answers with given bytes. Notes the heads."""

    def __init__(self, answer: bytes | None = None, to_port: int = 0) -> None:
        self.answer = answer
        self.to_port = to_port
        self.heads: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.heads.append(await reader.readuntil(b"\r\n\r\n"))
            if self.answer is not None:
                writer.write(self.answer)
                return
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self.to_port)
            # In two pieces.
            writer.write(b"HTTP/1.1 200 Connection est")
            await writer.drain()
            await asyncio.sleep(0.005)
            writer.write(b"ablished\r\nVia: a proxy\r\n\r\n")
            await asyncio.gather(_copy(reader, to_writer), _copy(to_reader, writer))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(65_536):
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def proxied(proxy: Proxy, monkeypatch: pytest.MonkeyPatch, user: str = "") -> AsyncIterator[str]:
    """Run a proxy that the environment names; yield its host and port."""
    async with await asyncio.start_server(proxy.serve, "127.0.0.1", 0) as listening:
        name = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        monkeypatch.setenv("HTTPS_PROXY", f"http://{user}{name}")
        yield name


def settings(**options: Any) -> Config:
    return config(ENDPOINT, verify_ssl=False, **options)


async def failure_over(proxy: Proxy, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[str, str]:
    """Return the proxy's name and the message of the failure of one request."""
    async with proxied(proxy, monkeypatch, f"someone:{quote(PASSWORD, safe='')}@") as name:
        found = resolved(settings(**options))
        assert not isinstance(found, str)
        transport = DirectTransport(settings(**options), found)
        async with transport.open():
            failure = await transport.put_records(request_of(*THREE))
    assert isinstance(failure, RequestFailure)
    assert failure.code == "Internal"
    assert PASSWORD not in failure.message
    assert quote(PASSWORD, safe="") not in failure.message
    assert CREDENTIAL.decode() not in failure.message
    return name, failure.message


@pytest.mark.parametrize("user", ["", "someone:" + quote(PASSWORD, safe="") + "@", "some%3Aone@"])
async def test_records_are_delivered_through_a_tunnel(
    user: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)
    certificate = tmp_path / "server.pem"
    if reason := make_certificate(certificate):
        pytest.skip(reason)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate)
    async with LocalKinesis({"orders": 2}, allow_hosts=["kinesis.example"]) as local:
        plain_port = int(local.endpoint_url.rpartition(":")[2])

        async def end_tls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", plain_port)
            await asyncio.gather(_copy(reader, to_writer), _copy(to_reader, writer))

        async with await asyncio.start_server(end_tls, "127.0.0.1", 0, ssl=tls) as secure:
            proxy = Proxy(to_port=secure.sockets[0].getsockname()[1])
            async with proxied(proxy, monkeypatch, user), Producer(settings()) as orders:
                deliveries = await orders.put_many("orders", [(str(number), bytes(1_000)) for number in range(2_000)])
                assert await deliveries.all_successful()
    shown = {"": "", "some%3Aone@": "some:one:"}.get(user, f"someone:{PASSWORD}")
    given = f"Proxy-Authorization: Basic {b64encode(shown.encode()).decode()}\r\n" if user else ""
    wanted = f"CONNECT kinesis.example:8443 HTTP/1.1\r\nHost: kinesis.example:8443\r\n{given}\r\n"
    assert {head.decode() for head in proxy.heads} == {wanted}
    assert "kinesis.example:8443: a tunnel of the proxy in " in caplog.text
    assert "kinesis.example:8443: TLSv1.3 in " in caplog.text
    assert PASSWORD not in caplog.text
    assert quote(PASSWORD, safe="") not in caplog.text


CREDENTIAL = b64encode(f"someone:{PASSWORD}".encode())
HOSTILE: dict[str, tuple[bytes, str]] = {
    "407": (
        b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 5\r\n\r\nlogin",
        "the proxy {} refuses to connect to kinesis.example:8443 with status 407; check user and password in HTTPS",
    ),
    "403": (b"HTTP/1.1 403 Forbidden\r\n\r\n", "with status 403; let it connect there, or set NO_PROXY"),
    "502": (b"HTTP/1.1 502 Bad Gateway\r\n\r\n<html>", "with status 502;"),
    "302": (b"HTTP/1.1 302 Found\r\nLocation: /\r\n\r\n", "with status 302;"),
    "nothing": (b"", "the proxy {} closed the connection, or sent too much, instead of an answer to CONNECT"),
    "cut": (b"HTTP/1.1 200 OK\r\n", "the proxy {} closed the connection, or sent too much"),
    "endless": (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000, "the proxy {} closed the connection, or sent too much"),
    "SSH": (b"SSH-2.0-OpenSSH\r\n\r\n", "the proxy {} gave no answer to CONNECT: the answer begins with b'SSH-2.0"),
    "more": (b"HTTP/1.1 200 OK\r\n\r\nmore", "the proxy {} sent 4 bytes after its answer to CONNECT"),
    "101": (
        b"HTTP/1.1 101 Switching\r\n\r\n",
        "the proxy {} gave no answer to CONNECT: the answer switches to another protocol",
    ),
    "100": (b"HTTP/1.1 100 Continue\r\n\r\n" * 3_000, "with status 100;"),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", "through the proxy {} closed the connection during the TLS handshake"),
    "length": (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nmore", "the proxy {} sent 4 bytes after"),
    "chunks": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nmore\r\n0\r\n\r\n",
        "the proxy {} sent 14 bytes after",
    ),
    "2000": (
        b"HTTP/1.1 2000 OK\r\n\r\n",
        "the proxy {} gave no answer to CONNECT: the answer begins with b'HTTP/1.1 2000",
    ),
    "no status": (
        b"HTTP/1.1 OK\r\n\r\n",
        "the proxy {} gave no answer to CONNECT: the answer begins with b'HTTP/1.1 OK",
    ),
    "no colon": (
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        "the proxy {} gave no answer to CONNECT: the answer has the line b'no colon",
    ),
    "NUL": (
        b"HTTP/1.1 200 OK\r\nX: \x00\r\n\r\n",
        "the proxy {} gave no answer to CONNECT: the answer has the line b'X",
    ),
    "9.9": (b"HTTP/9.9 200 OK\r\n\r\n", "the proxy {} gave no answer to CONNECT: the answer begins with b'HTTP/9.9"),
    "echo": (
        b"Proxy-Authorization: Basic " + CREDENTIAL + b"\r\n\r\n",
        "the proxy {} gave no answer to CONNECT: the answer begins with b'Proxy-Authorization: Basic ***'",
    ),
    "TLS": (b"\x15\x03\x01\x00\x02\x02\x28", "the proxy {} closed the connection, or sent too much"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_tunnel_that_is_refused_names_the_proxy_without_its_password(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    answer, words = HOSTILE[name]
    proxy, message = await failure_over(Proxy(answer), monkeypatch)
    assert words.format(proxy) in message


class ResettingProxy(Proxy):
    """Resets the connection, before or after its answer to CONNECT."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heads.append(await reader.readuntil(b"\r\n\r\n"))
        if self.answer:
            writer.write(self.answer)
            # The TLS handshake has begun.
            await reader.read(1)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\n\r\n"])
async def test_a_connection_that_is_reset_names_the_proxy(answer: bytes, monkeypatch: pytest.MonkeyPatch):
    name, message = await failure_over(ResettingProxy(answer), monkeypatch)
    assert f"no connection to kinesis.example:8443 through the proxy {name}: [Errno " in message


async def test_a_handshake_that_fails_names_the_proxy(monkeypatch: pytest.MonkeyPatch):
    class WithoutTls(Proxy):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            # The TLS handshake has begun.
            await reader.read(1)
            writer.write(b"HTTP/1.1 403 Forbidden\r\n\r\n")
            await reader.read()
            writer.close()

    name, message = await failure_over(WithoutTls(b""), monkeypatch)
    assert f"no connection to kinesis.example:8443 through the proxy {name}: [SSL" in message


async def test_a_proxy_that_does_not_answer_fails_the_request_in_time(monkeypatch: pytest.MonkeyPatch):
    class Silent(Proxy):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

    name, message = await failure_over(Silent(), monkeypatch, connect_timeout_ms=50)
    assert message == f"no connection to kinesis.example:8443 through the proxy {name} within 0.05 s"


async def test_a_proxy_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://someone:hunter2@127.0.0.1:9")
    found = resolved(settings())
    assert not isinstance(found, str)
    transport = DirectTransport(settings(), found)
    async with transport.open():
        failure = await transport.put_records(request_of(*THREE))
    assert isinstance(failure, RequestFailure)
    assert failure.message.startswith("the proxy 127.0.0.1:9 cannot be reached: ")
    assert "hunter2" not in failure.message


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"HTTPS_PROXY": "127.0.0.1:9"}, None),
        ({"HTTPS_PROXY": "http://[::1]:9"}, None),
        ({"https_proxy": "//127.0.0.1:9"}, None),
        ({"HTTPS_PROXY": "https://127.0.0.1:9"}, "a proxy is configured that is not an HTTP proxy for https"),
        ({"HTTPS_PROXY": "https://127.0.0.1:9", "NO_PROXY": "kinesis.example"}, None),
        ({"HTTPS_PROXY": "socks5://127.0.0.1:9"}, "a proxy is configured that is not an HTTP proxy for https"),
        ({"HTTP_PROXY": "http://127.0.0.1:9"}, None),
    ],
)
def test_which_proxies_need_botocores_client(environment: dict[str, str], reason: str | None, monkeypatch):
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    found = resolved(settings())
    assert (found if isinstance(found, str) else None) == reason
