"""Real servers and real signals; the records are read back from a local Kinesis."""

import asyncio
import math
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from websockets.sync.client import connect

from kpl_integrations.asgi.lifespan import LIFESPAN_CLOSE_SECONDS
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from tests.support.consumers import log_records, user_records
from tests.support.processes import free_port
from tests.support.running_program import Running, running
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long
REPORT = re.compile(r"the Kinesis producer is closed: ([\d,]+) accepted: ([\d,]+) delivered, ([\d,]+) failed")


@pytest.fixture
def kinesis() -> Iterator[ThreadedLocalKinesis]:
    with ThreadedLocalKinesis(LocalKinesis({"orders": 4, "logs": 2}, enforce_limits=False)) as local:
        yield local


@pytest.fixture
def port() -> int:
    return free_port()


def uvicorn(port: int, *options: str) -> list[str]:
    return ["uvicorn", "orders_app:app", "--port", str(port), *options]


def gunicorn(port: int, *options: str) -> list[str]:
    worker = "uvicorn_worker.UvicornWorker"
    return ["gunicorn", "orders_app:app", "--bind", f"127.0.0.1:{port}", "--worker-class", worker, *options]


def stored(kinesis: ThreadedLocalKinesis) -> list[bytes]:
    return kinesis.call(lambda fake, now: [record.data for record in user_records(fake, "orders")])


def expected_of(numbers: list[int]) -> set[bytes]:
    return {b"%d-%d" % (number, part) for number in numbers for part in range(10)}


async def post_orders(
    port: int, count: int, *, connections: int, half_way: Callable[[], None] = lambda: None
) -> list[int]:
    """Post orders from many connections, call `half_way` in the middle, and return the answered ones."""
    answered: list[int] = []
    numbers = iter(range(count))
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=20) as client:

        async def work() -> None:
            for number in numbers:
                try:
                    response = await client.post(f"/orders/{number}")
                except httpx.TransportError:
                    return
                if response.status_code != 202:
                    return
                answered.append(number)
                if len(answered) == count // 2:
                    half_way()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(connections):
                tasks.create_task(work())
    return answered


def reports(said: str) -> list[tuple[int, ...]]:
    return [tuple(int(count.replace(",", "")) for count in each) for each in REPORT.findall(said)]


def test_sigterm_loses_no_record_of_an_answered_request(kinesis, port, tmp_path: Path):
    with running(uvicorn(port), tmp_path / "output", {"KPL_ENDPOINT_URL": kinesis.endpoint_url}) as server:
        server.wait_until_said("Application startup complete")
        asked_at = math.inf

        def ask_to_end() -> None:
            nonlocal asked_at
            asked_at = time.monotonic()
            server.process.send_signal(signal.SIGTERM)

        answered = asyncio.run(post_orders(port, 2_000, connections=50, half_way=ask_to_end))
        status = server.process.wait(30)
        took = time.monotonic() - asked_at
    assert 1_000 <= len(answered) < 2_000
    found = stored(kinesis)
    assert expected_of(answered) <= set(found)
    assert len(found) == len(set(found))
    ((accepted, delivered, failed),) = reports(server.said())
    assert (accepted, failed) == (delivered, 0)
    assert delivered == len(found)
    assert took < LIFESPAN_CLOSE_SECONDS
    assert status in {0, -signal.SIGTERM}


def test_each_uvicorn_worker_has_its_own_producer(kinesis, port, tmp_path: Path):
    command = uvicorn(port, "--workers", "2")
    with running(command, tmp_path / "output", {"KPL_ENDPOINT_URL": kinesis.endpoint_url}) as server:
        server.wait_until_said("Uvicorn running")
        _wait_until_complete(server, workers=2)
        answered = asyncio.run(post_orders(port, 300, connections=20))
        server.end(signal.SIGTERM)
    assert len(answered) == 300
    assert sorted(stored(kinesis)) == sorted(expected_of(answered))
    assert len(reports(server.said())) == 2
    assert sum(accepted for accepted, _, _ in reports(server.said())) == 3_000


def test_gunicorn_with_preload_delivers_each_record_once(kinesis, port, tmp_path: Path):
    command = gunicorn(port, "--preload", "--no-control-socket", "--workers", "2")
    more = {"KPL_ENDPOINT_URL": kinesis.endpoint_url, "LOG_STREAM": "logs"}
    with running(command, tmp_path / "output", more) as server:
        server.wait_until_said("Booting worker")
        _wait_until_complete(server, workers=2)
        answered = asyncio.run(post_orders(port, 300, connections=20))
        server.end(signal.SIGTERM)
    assert len(answered) == 300
    assert sorted(stored(kinesis)) == sorted(expected_of(answered))
    assert sum(accepted for accepted, _, _ in reports(server.said())) == 3_000
    logged = [record["message"] for record in kinesis.call(lambda fake, now: log_records(fake, "logs"))]
    assert sum(message.startswith("loaded by") for message in logged) == 1
    orders = [message.split(" by ")[0] for message in logged if message.startswith("order ")]
    assert sorted(orders) == sorted(f"order {number}" for number in answered), server.said()


def _wait_until_complete(server: Running, *, workers: int) -> None:
    wait_until(lambda: server.said().count("Application startup complete") >= workers, server.said)


def test_websocket_and_outbox_work_under_a_real_server(kinesis, port, tmp_path: Path):
    more = {"KPL_ENDPOINT_URL": kinesis.endpoint_url, "OUTBOX": "1"}
    with running(uvicorn(port), tmp_path / "output", more) as server:
        server.wait_until_said("Application startup complete")
        url = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{url}/readyz").json()["status"] == "ready"
        assert httpx.post(f"{url}/orders/1").status_code == 202
        assert httpx.post(f"{url}/orders/2?status=500").status_code == 500
        with connect(f"ws://127.0.0.1:{port}/orders") as websocket:
            websocket.send("from a socket")
            assert websocket.recv() == '{"successful":true}'
        _post_and_go_away(port, 3, 202)
        _post_and_go_away(port, 4, 500)
        server.wait_until_said("order 3", "order 4")
        server.end(signal.SIGTERM)
    assert set(stored(kinesis)) == expected_of([1, 3]) | {b"from a socket"}


def _post_and_go_away(port: int, number: int, status: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"POST /orders/%d?status=%d HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n" % (number, status))
