"""Rare HTTP: trailer fields, requests for an upgrade, HTTP/1.0, and clients that close their side."""

import asyncio
import json
from typing import Any

import pytest

from kpl_integrations.ingest.serving import GatewayServer
from kpl_integrations.ingest.tenants import CallableTenants, Tenant
from tests.ingest.served import connected, served, spoken
from tests.support.gateway_scene import JSON, STREAM, gateway_of, kinesis

pytestmark = pytest.mark.anyio
PATH = f"/v1/streams/{STREAM}/records"
ONE = b'{"partition_key":"k","data":"x"}'
ASKS = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAEAAEAAAAIAAAAAAAMAAAAA")
LAST = b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


@pytest.fixture
def anyio_backend() -> str:
    """Sockets, in real time."""
    return "asyncio"


def head(*fields: str, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {PATH} HTTP/1.1", "host: x", f"content-type: {JSON}", *fields, "", ""]).encode()


def chunks(body: bytes, *trailers: str) -> bytes:
    return b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, "".join(f"{each}\r\n" for each in trailers).encode())


def two_tenants() -> CallableTenants:
    both = {f"Bearer {name}": Tenant(id=name) for name in ("a", "b")}
    return CallableTenants(lambda shown: both.get(shown or ""), tenants=both.values())


@pytest.mark.parametrize("length", ["32 ", " 32", "32\t ", "  32  "])
async def test_blanks_around_the_length_of_a_body_are_no_part_of_it(length):
    async with served(gateway_of(kinesis())) as server:
        answers = await spoken(server, head(f"content-length:{length}") + ONE + LAST)
        assert answers.count(b"HTTP/1.1 202") == 1


@pytest.mark.parametrize(
    "trailer", ["authorization: Bearer b", "x-ack: delivered", "content-type: text/plain", "expect: 100-continue"]
)
async def test_a_trailer_field_replaces_no_field_of_the_head(trailer):
    gateway = gateway_of(kinesis(), two_tenants())
    async with served(gateway) as server:
        whole = head("authorization: Bearer a", "transfer-encoding: chunked") + chunks(ONE, trailer)
        answers = await spoken(server, whole + LAST)
        assert answers.count(b"HTTP/1.1 202") == 1
        assert {each.tenant.id: each.accepted_records for each in gateway.opened.accounts} == {"a": 1}


@pytest.mark.parametrize("flood", [b"x: " + b"a" * 80 + b"\r\n", b"a" * 80], ids=["many", "one without an end"])
@pytest.mark.parametrize("key", ["a", "nobody's"])
async def test_endless_trailer_fields_end_the_connection(flood, key):
    gateway = gateway_of(kinesis(), two_tenants(), max_header_bytes=2_048, body_seconds=600, keep_alive_seconds=600)
    async with served(gateway) as server:
        start = head(f"authorization: Bearer {key}", "transfer-encoding: chunked") + b"1\r\na\r\n0\r\nx: "
        with pytest.raises(ConnectionError):
            await poured(server, start, flood)


async def poured(server: GatewayServer, start: bytes, flood: bytes) -> None:
    """Send far more than socket buffers take; raises `ConnectionError` if the server closes the connection."""
    host, _, port = server.url.rpartition("/")[2].partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(start)
        for _ in range(1_000):
            writer.write(flood * 1_000)
            await asyncio.wait_for(writer.drain(), 30)
    finally:
        writer.close()


def pieces_of(whole: bytes, at: int) -> tuple[bytes, ...]:
    return (whole[:at], whole[at:]) if at else (whole,)


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("cut", ["nowhere", "in the head", "before the body", "in the body"])
async def test_a_request_for_an_upgrade_is_answered_as_a_normal_request(is_chunked, cut):
    gateway = gateway_of(kinesis())
    async with served(gateway) as server:
        length = "transfer-encoding: chunked" if is_chunked else f"content-length: {len(ONE)}"
        first = head(*ASKS, length)
        at = {"nowhere": 0, "in the head": 20, "before the body": len(first), "in the body": len(first) + 9}[cut]
        whole = first + (chunks(ONE) if is_chunked else ONE)
        answers = await spoken(server, *pieces_of(whole, at), whole + whole, LAST, pause=0.02)
        assert answers.count(b"HTTP/1.1 202") == 3
        assert answers.count(b"HTTP/1.1 200") == 1
        assert gateway.producer.report().accepted == 3


async def test_the_body_of_a_request_for_an_upgrade_is_never_a_request():
    gateway = gateway_of(kinesis(), two_tenants())
    async with served(gateway) as server:
        inner = head("authorization: Bearer b", f"content-length: {len(ONE)}") + ONE
        outer = head("authorization: Bearer a", *ASKS, f"content-length: {len(inner)}")
        answers = await spoken(server, outer, inner, LAST, pause=0.05)
        assert [answers.count(b"HTTP/1.1 %d" % status) for status in (202, 400, 200)] == [0, 1, 1]
        assert gateway.opened.accounts.find("b") is None


@pytest.mark.parametrize(
    "what",
    [
        b"CONNECT a:1 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
    ],
)
async def test_a_connect_request_is_rejected(what: Any):
    async with served(gateway_of(kinesis())) as server:
        assert (await spoken(server, what)).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("size", [1_900, 3_000, 100_000])
@pytest.mark.parametrize("method", ["POST", "GET"])
@pytest.mark.parametrize("cut", [0, 60, 1_500], ids=["in one read", "at its start", "in its middle"])
async def test_the_bound_of_a_head_holds_however_it_arrives(size, method, cut):
    gateway = gateway_of(kinesis(), max_header_bytes=2_048)
    async with served(gateway) as server:
        length = len(ONE) if method == "POST" else 0
        whole = head("x: " + "a" * size, f"content-length: {length}", method=method) + ONE[:length]
        expected = b"HTTP/1.1 431" if size > 2_048 else b"HTTP/1.1 202" if method == "POST" else b"HTTP/1.1 405"
        # As the first request of a connection, and behind another one in the same read.
        answers = await spoken(server, *pieces_of(whole, cut), LAST, pause=0.02 if cut else 0.0)
        assert answers.startswith(expected)
        before = head(f"content-length: {len(ONE)}") + ONE
        answers = await spoken(server, *pieces_of(before + whole, cut), LAST, pause=0.02 if cut else 0.0)
        # The client may get no answer to the first one, because its connection is closed.
        is_accepted = expected.endswith(b"202")
        assert answers.count(b"HTTP/1.1 202") <= 1 + is_accepted
        assert gateway.producer.report().accepted in ({3} if is_accepted else {1} if size < 2_048 else {0, 1})


@pytest.mark.parametrize(("version", "is_chunked"), [("1.1", True), ("1.0", False)])
async def test_an_answer_of_unknown_length_ends_with_the_connection_over_http_1_0(version, is_chunked):
    gateway = gateway_of(kinesis(), close_seconds=0.5)
    async with served(gateway) as server:
        client = await connected(server)
        client.writer.write(f"GET /dashboard/events HTTP/{version}\r\nhost: x\r\n\r\n".encode())
        answer = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), 10)
        assert (b"transfer-encoding: chunked" in answer) is is_chunked
        assert (b"connection: close" in answer) is not is_chunked
        first = b"event: history\ndata: "
        assert (await asyncio.wait_for(client.reader.readuntil(first), 10) == first) is not is_chunked
    rest = await asyncio.wait_for(client.reader.read(), 10)
    client.writer.close()
    assert rest.endswith(b"event: closed\ndata: {}\n\n" + (b"\r\n0\r\n\r\n" if is_chunked else b""))


@pytest.mark.parametrize(("version", "is_asked"), [("1.1", True), ("1.0", False)])
async def test_only_a_client_of_http_1_1_is_asked_to_continue(version, is_asked):
    async with served(gateway_of(kinesis())) as server:
        sent = head(f"content-length: {len(ONE)}", "expect: 100-continue", "connection: close") + ONE
        said = await spoken(server, sent.replace(b"HTTP/1.1", b"HTTP/" + version.encode()))
        assert said.startswith(b"HTTP/1.1 100 ") is is_asked
        assert said.count(b"HTTP/1.1 202") == 1


@pytest.mark.parametrize("ack", ["queued", "delivered"])
@pytest.mark.parametrize("size", [10, 70_000, 300_000])
@pytest.mark.parametrize("before", [0, 2])
async def test_a_client_that_sends_no_more_gets_its_answers(ack, size, before):
    body = json.dumps({"partition_key": "k", "data": "x" * size}).encode()
    request = head(f"content-length: {len(body)}", f"x-ack: {ack}") + body
    gateway = gateway_of(kinesis(latency_seconds=0.1))
    async with served(gateway) as server:
        client = await connected(server)
        client.writer.write(request * (before + 1))
        client.writer.write_eof()
        said = await asyncio.wait_for(client.reader.read(), 10)
        client.writer.close()
        status = b"HTTP/1.1 202" if ack == "queued" else b"HTTP/1.1 200"
        assert said.count(status) == said.count(b"HTTP/1.1 ") == before + 1
        assert gateway.producer.report().accepted == before + 1


async def test_a_client_that_breaks_off_a_body_gets_no_answer():
    gateway = gateway_of(kinesis())
    async with served(gateway) as server:
        client = await connected(server)
        client.writer.write(head("content-length: 200000") + b"{" * 100_000)
        client.writer.write_eof()
        assert await asyncio.wait_for(client.reader.read(), 10) == b""
        client.writer.close()
        assert gateway.producer.report().accepted == 0
