"""Connections are read in turns while the event loop is late. Real sockets; only the delay of the loop is staged."""

import asyncio
import json
import logging
import select
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from kpl_core.fairness import cpu_turns
from kpl_integrations.ingest import IngestGateway
from kpl_integrations.ingest.http import read_turns, uvicorn_server
from kpl_integrations.ingest.http.connection import HttpConnection
from kpl_integrations.ingest.http.read_turns import LONGEST_PAUSE_SECONDS, UNVERIFIED, ConnectionReader
from kpl_integrations.ingest.routes import resources
from kpl_integrations.ingest.serving import GatewayServer
from kpl_integrations.ingest.tenants import Tenant
from tests.ingest.served import Connection, connected, served
from tests.support.gateway_scene import STREAM, Client, KnownTenants, gateway_of, kinesis
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
PATH = f"/v1/streams/{STREAM}/records"
ONE = b'{"partition_key":"k","data":"x"}'
PROBE = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
LATE = 2.0


@pytest.fixture
def anyio_backend() -> str:
    """Sockets, in real time."""
    return "asyncio"


@pytest.fixture(autouse=True)
def _turns_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a busy machine delay the test by seconds: the turns do not end meanwhile."""
    monkeypatch.setattr(cpu_turns, "_CALM_SECONDS", 60.0)


def post(tenant: str, body: bytes = ONE, query: str = "") -> bytes:
    return (
        f"POST {PATH}{query} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {tenant}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body


class Scene:
    """A gateway and its server, whose loop is late at will."""

    def __init__(self, gateway: IngestGateway, server: GatewayServer) -> None:
        self.gateway = gateway
        self.server = server
        self.turns = gateway.read_turns
        self.connections: list[Connection] = []

    async def connect(self, *requests: bytes) -> Connection:
        """Open a connection, and send requests that are answered."""
        self.connections.append(connection := await connected(self.server))
        for request in requests:
            assert await connection.status(request) in {200, 202}
        return connection

    async def make_late(self, *, used_seconds: float = 1e4) -> None:
        """Block the loop until its delay stands. The tenant "flood" has then used far more than its share."""
        while not self.turns.is_active:
            # The delay is measured only while requests come, and the last one may be too long ago.
            self.turns.wake(count().__next__)
            started = time.thread_time()
            while time.thread_time() - started < 0.03:
                pass
            await asyncio.sleep(0)
        self.turns.charges.add("flood", 1.0, used_seconds)

    async def paused(self, connection: Connection, data: bytes) -> None:
        """Send bytes on a connection, and wait until it has been paused."""
        before = self.turns.pauses
        connection.writer.write(data)
        await until(lambda: self.turns.pauses > before)


@asynccontextmanager
async def scene(**settings: Any) -> AsyncIterator[Scene]:
    gateway = gateway_of(kinesis(), KnownTenants(Tenant(id="flood"), Tenant(id="quiet")), **settings)
    async with served(gateway) as server:
        staged = Scene(gateway, server)
        await staged.connect(post("quiet", query="?ack=delivered"))
        yield staged
        for connection in staged.connections:
            connection.writer.close()


async def test_a_tenant_above_its_share_waits_while_others_are_served():
    async with scene() as staged:
        flood, quiet = await staged.connect(post("flood")), await staged.connect(post("quiet"))
        await staged.make_late()
        started = time.monotonic()
        await staged.paused(flood, post("flood"))
        assert await quiet.status(post("quiet")) == 202
        assert time.monotonic() - started < LATE
        assert (staged.turns.paused_connections, staged.turns.pauses) == (1, 1)
        # It waits for the longest pause, and is then refused.
        assert (await flood.answer())[0] == 429
        assert LONGEST_PAUSE_SECONDS / 2 <= time.monotonic() - started < LONGEST_PAUSE_SECONDS + LATE
        assert staged.turns.paused_bytes == 0
        answer = await Client(staged.gateway, "flood").call("GET", "/v1/stats")
        assert answer.json()["tenants"]["flood"]["cpu_seconds"] > 0


async def test_a_tenant_that_waits_is_served_as_soon_as_there_is_time():
    async with scene() as staged:
        flood = await staged.connect(post("flood"))
        await staged.make_late(used_seconds=0.1)
        started = time.monotonic()
        await staged.paused(flood, post("flood"))
        assert (await flood.answer())[0] == 202
        assert time.monotonic() - started < LATE


async def test_requests_of_a_connection_with_two_tenants_are_refused_one_by_one():
    async with scene() as staged:
        proxy = await staged.connect(post("flood"), post("quiet"))
        await staged.make_late()
        proxy.writer.write(post("flood") + post("quiet") + post("flood") + post("quiet"))
        answers = [await proxy.answer() for _ in range(4)]
        assert [status for status, _ in answers] == [429, 202, 429, 202]
        assert json.loads(answers[0][1])["code"] == "quota-exceeded"
        assert "flood has used more than its share" in json.loads(answers[0][1])["detail"]
        assert staged.turns.pauses == 0
        stats = await Client(staged.gateway, "flood").call("GET", "/v1/stats")
        assert sum(stats.json()["tenants"]["flood"]["refused"].values()) in {0, 2}


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/metrics"])
async def test_a_probe_never_waits(path):
    async with scene() as staged:
        flood = await staged.connect(post("flood"))
        await staged.make_late()
        assert await flood.status(PROBE.replace(b"/livez", path.encode())) == 200
        assert staged.turns.pauses == 0
        # A probe with requests behind it is no probe.
        await staged.paused(flood, PROBE + post("flood"))


async def test_a_flood_of_probes_waits_as_other_requests():
    async with scene() as staged:
        probes = [await staged.connect() for _ in range(20)]
        await staged.make_late()
        staged.turns.charges.add(UNVERIFIED, 1.0, 1e4)
        for each in probes:
            each.writer.write(PROBE)
        assert [(await each.answer())[0] for each in probes] == [200] * 20
        assert 0 < staged.turns.pauses < 20


async def test_a_new_connection_waits_with_its_tenant_and_not_with_clients_that_are_not_verified():
    async with scene() as staged:
        await staged.make_late()
        staged.turns.charges.add(UNVERIFIED, 1.0, 1e4)
        quiet, flood = await staged.connect(post("quiet")), await staged.connect()
        assert staged.turns.pauses == 0
        await staged.paused(flood, post("flood"))
        anonymous = await staged.connect()
        staged.turns.charges.add(UNVERIFIED, 1.0, 1e5)
        await staged.paused(anonymous, post("nobody"))
        # Its tenant is unknown, so it is not refused for one.
        assert (await anonymous.answer())[0] == 401
        assert await quiet.status(post("quiet")) == 202


@pytest.mark.long
async def test_pauses_do_not_count_towards_time_limits():
    async with scene(header_seconds=3.5, body_seconds=3.5, keep_alive_seconds=3) as staged:
        head, body, idle = [await staged.connect(post("flood")) for _ in range(3)]
        request = post("flood", query="?ack=delivered")
        for connection, sent in ((head, request[:20]), (body, request[:-10])):
            connection.writer.write(sent)
        await asyncio.sleep(0.05)
        await staged.make_late()
        for number in range(4):
            # Each of these pieces waits for the longest pause, so that all of them take longer than the limits.
            staged.turns.charges.add("flood", 1.0, 1e4)
            await staged.paused(head, request[20 + number : 21 + number])
            await staged.paused(body, request[number - 10 : number - 9])
            await staged.paused(idle, b"\r\n")
            await until(lambda: not staged.turns.paused_connections)
        staged.turns.end()
        head.writer.write(request[24:])
        body.writer.write(request[-6:])
        assert (await head.answer())[0] == (await body.answer())[0] == 200
        assert await idle.status(post("flood")) == 202


async def test_pauses_end_when_the_gateway_drains():
    async with scene(drain_delay_seconds=1) as staged:
        connections = [await staged.connect(post("flood")) for _ in range(20)]
        await staged.make_late()
        for connection in connections:
            await staged.paused(connection, post("flood") * 3)
        started = time.monotonic()
        staged.server.stop(signal.SIGTERM)
        for connection in connections:
            assert [(await connection.answer())[0] for _ in range(3)] == [202] * 3
        assert time.monotonic() - started < LATE
        assert staged.turns.paused_connections == 0
        # Nothing is paused from now on.
        assert await connections[0].status(post("flood")) == 202
    report = staged.gateway.report
    assert report is not None
    assert report.complete
    assert report.delivered == 82


@pytest.mark.skipif(not hasattr(select, "poll"), reason="this platform cannot tell")
async def test_a_client_that_resets_a_paused_connection_is_noticed():
    async with scene() as staged:
        flood = await staged.connect(post("flood"))
        await staged.make_late()
        await staged.paused(flood, post("flood"))
        sock = flood.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        started = time.monotonic()
        flood.writer.transport.abort()
        await until(lambda: not staged.turns.paused_connections)
        assert time.monotonic() - started < LONGEST_PAUSE_SECONDS / 2 + LATE
        assert staged.turns.paused_bytes == 0


async def test_a_half_open_client_gets_its_answer_after_the_pause():
    async with scene() as staged:
        flood = await staged.connect(post("flood"))
        await staged.make_late()
        await staged.paused(flood, post("flood"))
        flood.writer.write_eof()
        assert (await flood.answer())[0] == 429
        assert await flood.reader.read() == b""
        assert staged.turns.paused_connections == 0


@pytest.mark.parametrize("cut", [20, -10], ids=["head", "body"])
async def test_half_a_request_of_a_half_open_client_ends_with_the_pause(cut):
    async with scene() as staged:
        flood = await staged.connect(post("flood"))
        await staged.make_late(used_seconds=0.1)
        await staged.paused(flood, post("flood")[:cut])
        flood.writer.write_eof()
        assert await asyncio.wait_for(flood.reader.read(), 10) == b""
        await until(lambda: not staged.turns.paused_connections)
        assert staged.turns.paused_bytes == 0
        assert staged.gateway.producer.report().accepted == 2


async def test_slow_clients_that_are_paused_do_not_delay_the_shutdown(monkeypatch):
    """One does not read its answers, one never sends the rest of its body, and one has closed its side."""
    monkeypatch.setattr(uvicorn_server, "_LAST_ANSWERS_SECONDS", 0.2)
    async with scene() as staged:
        deaf, slow, half_open = [await staged.connect(post("flood")) for _ in range(3)]
        await staged.make_late()
        sent = post("flood")
        for connection, request in ((deaf, post("flood", b"{") * 20_000), (slow, sent[:-10]), (half_open, sent)):
            await staged.paused(connection, request)
        half_open.writer.write_eof()
        started = time.monotonic()
        staged.server.stop(signal.SIGTERM)
        assert (await half_open.answer())[0] == 202
    assert time.monotonic() - started < LATE
    assert staged.turns.paused_connections == staged.turns.paused_bytes == 0
    report = staged.gateway.report
    assert report is not None
    assert report.complete
    assert report.delivered == 5


@pytest.mark.long
async def test_a_slow_reader_is_paused_by_its_answers_and_by_its_share():
    async with scene() as staged:
        flood, quiet = await staged.connect(post("flood")), await staged.connect(post("quiet"))
        await staged.make_late(used_seconds=0.1)
        # Answers of some MB fill the buffers of a client that does not read.
        flood.writer.write(post("flood", b"{") * 20_000)
        for _ in range(20):
            started = time.monotonic()
            assert await quiet.status(post("quiet")) == 202
            assert time.monotonic() - started < LATE
            await asyncio.sleep(0.02)
        flood.writer.transport.abort()
        await until(lambda: not (staged.turns.paused_connections or staged.turns.paused_bytes))
        assert await quiet.status(post("quiet")) == 202


async def test_a_connection_is_closed_if_paused_ones_have_too_many_bytes(monkeypatch):
    monkeypatch.setattr(read_turns, "MOST_PAUSED_BYTES", 1_000)
    async with scene() as staged:
        first, second = [await staged.connect(post("flood")) for _ in range(2)]
        await staged.make_late()
        await staged.paused(first, post("flood") * 3)
        assert await second.status(post("flood") * 10) == 503
        assert await second.reader.read() == b""
        assert (await first.answer())[0] == 429


async def test_metrics_are_sent_again_instead_of_collected_at_each_request(monkeypatch):
    async with scene() as staged:
        client, probe = await staged.connect(post("quiet")), PROBE.replace(b"/livez", b"/metrics")
        monkeypatch.setattr(resources, "_REUSE_FACTOR", 1e6)
        monkeypatch.setattr(resources, "_MOST_REUSE_SECONDS", 1e6)
        client.writer.write(probe)
        collected = await client.answer()
        assert await client.status(post("quiet")) == 202
        client.writer.write(probe)
        assert await client.answer() == collected


async def test_metrics_are_at_most_a_second_old_if_other_work_runs_while_they_are_collected(monkeypatch):
    async with scene() as staged:
        client, now, used_seconds = Client(staged.gateway, "quiet"), [100.0], count(step=2)
        clock = SimpleNamespace(monotonic=lambda: now[0], thread_time=lambda: next(used_seconds))
        monkeypatch.setattr(resources, "time", clock)
        collected = (await client.get("/metrics")).body
        assert (await client.post({"partition_key": "k", "data": "x"})).status == 202
        now[0] += 0.9
        assert (await client.get("/metrics")).body == collected
        now[0] += 0.2
        assert (await client.get("/metrics")).body != collected


async def test_many_pipelined_requests_are_answered_in_order_over_several_turns():
    bodies = [ONE, b"{", b'{"partition_key":"k","data":"' + b"x" * 6_000 + b'"}']
    async with scene() as staged:
        flood = await staged.connect(post("flood"))
        await staged.make_late(used_seconds=0.1)
        flood.writer.write(b"".join(post("flood", body) for body in bodies * 40))
        assert [(await flood.answer())[0] for _ in range(120)] == [202, 400, 202] * 40


async def test_pipelined_requests_are_divided_over_iterations_also_if_the_loop_is_not_late(monkeypatch):
    pieces: list[int] = []
    run = ConnectionReader._run  # noqa: SLF001 - its part of each iteration is what is tested

    def counted(reader: ConnectionReader, waiting: deque[bytes], seconds: float) -> None:
        before = sum(map(len, waiting))
        run(reader, waiting, seconds)
        pieces.append(before - sum(map(len, waiting)))

    monkeypatch.setattr(ConnectionReader, "_run", counted)
    monkeypatch.setattr(read_turns, "_TURN_SECONDS", 0.0)
    async with scene() as staged:
        flood = await staged.connect(post("flood"))
        assert not staged.turns.is_active
        flood.writer.write(post("flood") * 200)
        assert [(await flood.answer())[0] for _ in range(200)] == [202] * 200
        assert staged.turns.pauses > 0
        assert max(pieces) <= read_turns.SLICE_BYTES < sum(pieces)
        assert staged.turns.paused_connections == staged.turns.paused_bytes == 0
        # On a busy machine the last answer may be read so late that the measuring of the delay has fallen asleep.
        staged.turns.wake(count().__next__)
        assert not staged.turns.is_attentive


@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/1.0", "RTSP/1.1"])
async def test_pipelined_requests_of_each_version_are_cut(version):
    asked = f"GET /livez {version}\r\nhost: x\r\nconnection: keep-alive\r\n\r\n".encode()
    async with scene() as staged:
        client = await staged.connect()
        client.writer.write(asked * 200)
        assert (await client.answer())[0] == 200
        assert staged.turns.pauses > 0


async def test_the_lines_of_an_access_log_are_no_requests():
    lines = b"\n".join([b'{"partition_key":"k","data":"\\"GET / HTTP/1.1\\" 200"}'] * 200)
    async with scene() as staged:
        await staged.connect(post("quiet", lines).replace(b"/json", b"/x-ndjson"))
        assert staged.turns.pauses == 0


async def test_one_whole_request_with_the_cached_head_is_not_cut(monkeypatch):
    parsed: list[int] = []
    feed = HttpConnection.feed

    def counted(connection: HttpConnection, data: bytes) -> None:
        parsed.append(len(data))
        feed(connection, data)

    def asked(times: int) -> bytes:
        line = b"content-type: application/octet-stream\r\nx-partition-key: k"
        return post("quiet", b"GET / HTTP/1.1\r\n\r\n" * times).replace(b"content-type: application/json", line)

    async with scene() as staged:
        client = await staged.connect(asked(1))
        await staged.make_late()
        monkeypatch.setattr(HttpConnection, "feed", counted)
        assert await client.status(asked(400)) == 202
        assert parsed == []


async def test_long_iterations_are_late_even_if_no_timer_is():
    async with scene() as staged:
        turns, loop = staged.turns, asyncio.get_running_loop()

        def block() -> None:
            turns.wake(count().__next__)
            # 10 ms of CPU, or until the timer is due: then it is not late.
            started = time.thread_time()
            while time.thread_time() - started < 0.01 or time.perf_counter() < turns._due:  # noqa: SLF001 - see above
                pass
            if not turns.is_active:
                loop.call_later(0.0, block)

        block()
        await until(lambda: turns.is_active)


async def test_a_refusal_for_cpu_time_is_in_the_access_log(caplog):
    caplog.set_level(logging.INFO, "kpl_integrations.ingest.access")
    async with scene(access_log=1.0) as staged:
        flood = await staged.connect(post("flood"))
        await staged.make_late()
        await staged.paused(flood, post("flood"))
        assert (await flood.answer())[0] == 429
    assert [record.fields["status"] for record in caplog.records if record.name.endswith("access")][-1] == 429


async def test_the_metrics_count_pauses():
    async with scene() as staged:
        flood = await staged.connect(post("flood"))
        await staged.make_late()
        await staged.paused(flood, post("flood"))
        metrics = (await Client(staged.gateway).call("GET", "/metrics")).body.decode()
        assert "\nkinesis_ingest_paused_connections 1.0\n" in metrics
        assert "\nkinesis_ingest_read_pauses_total 1.0\n" in metrics
        assert (await flood.answer())[0] == 429
        metrics = (await Client(staged.gateway).call("GET", "/metrics")).body.decode()
        assert 'kinesis_ingest_rejected_total{reason="cpu_share"} 1.0\n' in metrics
