"""What the gateway uses of uvicorn, with the real one: it starts, drains, and ends connections by force.

`make test-lowest` and `make test-newest` run this with the lowest and the newest version that pyproject.toml allows.
"""

import ast
import asyncio
import contextlib
import logging
import signal
from pathlib import Path

import pytest

import kpl_integrations.ingest
from kpl_integrations.ingest.http import uvicorn_server
from kpl_integrations.ingest.settings_sources import load_settings
from tests.ingest.served import connected, served, spoken
from tests.support.gateway_scene import JSON, STREAM, gateway_of, kinesis
from tests.support.producer_scene import stored
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
PATH = f"/v1/streams/{STREAM}/records"
ONE = b'{"partition_key":"k","data":"x"}'
LIVE = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture
def anyio_backend() -> str:
    """Sockets, in real time."""
    return "asyncio"


def post(query: str = "", length: int = len(ONE)) -> bytes:
    head = (f"POST {PATH}{query} HTTP/1.1", "host: x", f"content-type: {JSON}", f"content-length: {length}", "", "")
    return "\r\n".join(head).encode() + ONE


def test_one_file_imports_uvicorn():
    package = Path(next(iter(kpl_integrations.ingest.__path__)))
    found = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if any(name.partition(".")[0] == "uvicorn" for name in names):
                found.add(file.name)
    assert found == {"uvicorn_server.py"}


async def test_every_answer_has_the_date_of_the_server_and_is_counted():
    async with served(gateway_of(kinesis())) as server:
        client = await connected(server)
        state = server._server.server_state  # noqa: SLF001 - what the gateway uses of it
        assert await client.status(LIVE) == 200
        for query in ("", "", "?ack=delivered"):
            client.writer.write(post(query))
            said = await client.reader.readuntil(b"}")
            assert said.startswith((b"HTTP/1.1 202", b"HTTP/1.1 200"))
            assert said.count(b"\r\ndate: ") == 1
        assert state.total_requests == 4
        assert len(state.connections) == 1
        client.writer.close()
        await until(lambda: not state.connections)


async def test_a_drain_ends_idle_connections_and_lets_requests_finish():
    transport = kinesis(latency_seconds=0.5)
    async with served(gateway_of(transport)) as server:
        idle, busy = await connected(server), await connected(server)
        assert [await each.status(LIVE) for each in (idle, busy)] == [200, 200]
        busy.writer.write(post("?ack=delivered"))
        await until(lambda: stored(transport, STREAM))
        server.stop(signal.SIGINT)
        assert (await busy.answer())[0] == 200
        for each in (idle, busy):
            assert await asyncio.wait_for(each.reader.read(), 10) == b""
            each.writer.close()


async def test_a_request_whose_body_does_not_come_is_asked_to_come_back_at_the_end(monkeypatch, caplog):
    monkeypatch.setattr(uvicorn_server, "_LAST_ANSWERS_SECONDS", 0.2)
    async with served(gateway_of(kinesis(), body_seconds=600)) as server:
        await spoken(server, post(), LIVE.replace(b"host: x", b"host: x\r\nconnection: close"))
        slow = await connected(server)
        slow.writer.write(post(length=100).replace(b"host: x", b"host: x\r\nx-request-id: mine"))
        state = server._server.server_state  # noqa: SLF001 - what the gateway uses of it
        await until(lambda: state.tasks)
    said = await asyncio.wait_for(slow.reader.read(), 10)
    assert said.startswith(b"HTTP/1.1 503")
    for field in (b"x-request-id: mine", b"retry-after: 1", b"connection: close"):
        assert said.count(b"\r\n%b\r\n" % field) == 1
    slow.writer.close()
    assert not state.connections
    assert [each for each in caplog.records if each.levelno >= logging.ERROR and each.name.startswith("kpl")] == []


async def test_connections_and_requests_above_the_limit_are_answered_503():
    async with served(gateway_of(kinesis(), max_connections=2)) as server, contextlib.AsyncExitStack() as stack:
        first = await connected(server)
        stack.callback(first.writer.close)
        last = LIVE.replace(b"host: x", b"host: x\r\nconnection: close")
        assert (await spoken(server, last)).startswith(b"HTTP/1.1 200")
        stack.callback((await connected(server)).writer.close)
        third = await connected(server)
        stack.callback(third.writer.close)
        # The third one does not take the place of another.
        assert await first.status(LIVE) == 200
        third.writer.write(LIVE)
        said = await asyncio.wait_for(third.reader.read(), 10)
        assert said.startswith(b"HTTP/1.1 503")
        assert b"connection: close" in said


@pytest.mark.parametrize("value", ["true", "false"])
def test_the_setting_of_earlier_versions_does_nothing_and_says_so(monkeypatch, caplog, value):
    assert load_settings(fast_path=value) == load_settings()
    monkeypatch.setenv("KPL_INGEST_FAST_PATH", value)
    load_settings()
    said = "does nothing any more; remove it"
    assert [each.getMessage() for each in caplog.records] == [f"fast_path {said}", f"KPL_INGEST_FAST_PATH {said}"]
