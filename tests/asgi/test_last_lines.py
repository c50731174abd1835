"""What a server prints of the producer when SIGTERM ends it: real processes, with a Kinesis that is dead or healthy.

No logging is configured unless a test says so: `logging` prints warnings on stderr then, and nothing else. So a loss
must be a warning, once for each process, and the last of our lines.
"""

import re
import signal
import socket
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

import httpx2 as httpx
import pytest

from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from tests.support.processes import free_port, refusing
from tests.support.running_program import Running, running
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long

ACCOUNT = {"AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local", "NO_PROXY": "127.0.0.1"}
UVICORN = ("uvicorn", "unlogged_app:app", "--port", "{port}")
GUNICORN = ("gunicorn", "--bind", "127.0.0.1:{port}", "--no-control-socket")
UVICORN_WORKER = (*GUNICORN, "unlogged_app:app", "--worker-class", "uvicorn_worker.UvicornWorker")
ASGI_SERVERS = {
    "uvicorn": UVICORN,
    "uvicorn --workers 2": (*UVICORN, "--workers", "2"),
    "gunicorn UvicornWorker": UVICORN_WORKER,
    "hypercorn": ("hypercorn", "unlogged_app:app", "--bind", "127.0.0.1:{port}"),
    # It sends SIGTERM to the worker that still closes when the other one, which had no request, has ended.
    "hypercorn --workers 2": ("hypercorn", "unlogged_app:app", "--bind", "127.0.0.1:{port}", "--workers", "2"),
    "granian": ("granian", "--interface", "asgi", "unlogged_app:app", "--port", "{port}"),
}
WSGI_SERVERS = {
    "gunicorn sync": (*GUNICORN, "unlogged_app:wsgi"),
    "gunicorn gthread": (*GUNICORN, "unlogged_app:wsgi", "--worker-class", "gthread", "--threads", "2"),
}
# What a worker without a request logs as information, unless the server ends before that worker has started.
IDLE = "the Kinesis producer is closed: 0 accepted: 0 delivered, 0 failed, 0 buffered"
# The lines that a server prints itself.
OF_SERVERS = re.compile(r"INFO: |\[INFO\]|\[[-\d: +]+\] \[\d+\] \[|127\.0\.0\.1")
CLOSED = "the Kinesis producer is closed: 10 accepted: "
LOST = f"{CLOSED}0 delivered, 10 failed (10 REASON), 0 buffered"
# With a request on its way at the end, what became of its records is unknown.
REASON = re.compile(r"\(10 (Shutdown|Unknown)\)")
NOT_CLOSED = (
    "the Kinesis producer is not closed at the end of the process: 10 accepted: 0 delivered, 0 failed, 10 buffered"
)


@pytest.fixture
def dead() -> Iterator[str]:
    with refusing() as url:
        yield url


@pytest.fixture
def healthy() -> Iterator[str]:
    with ThreadedLocalKinesis(LocalKinesis({"orders": 1})) as local:
        yield local.endpoint_url


class Served:
    """A server that has answered one request, whose ten records are on their way."""

    def __init__(self, server: Running, port: int, *, logs_idle_workers: bool) -> None:
        self.server = server
        self.port = port
        self._other_lines = {IDLE} if logs_idle_workers else set()

    def last_lines(self) -> list[str]:
        """End it by SIGTERM, and return its lines of ours about the producer, with REASON for that of a loss."""
        self.server.end(signal.SIGTERM, within=40)
        lines = [line for line in self.server.said().splitlines() if not OF_SERVERS.match(line)]
        lines = [line for line in lines if line not in self._other_lines]
        ours = [line for line in lines if "Kinesis producer" in line]
        assert not ours or lines[-1] == ours[-1], self.server.said()
        return [REASON.sub("(10 REASON)", line) for line in ours]


def served(command: tuple[str, ...], url: str, folder: Path, more: Mapping[str, str]) -> Iterator[Served]:
    port = free_port()
    arguments = [part.format(port=port) for part in command]
    for marker in folder.glob("started-*"):
        marker.unlink()
    with running(arguments, folder / "output", {**ACCOUNT, "KPL_ENDPOINT_URL": url, **more}, folder=folder) as server:
        # One that starts prints more after the last line of the others, or hears no signal.
        wait_until(lambda: is_answered("GET", port) and has_workers(arguments, folder, server), server.said, seconds=60)
        assert is_answered("POST", port), server.said()
        yield Served(server, port, logs_idle_workers=more.get("LOG_LEVEL") == "INFO")


def has_workers(arguments: Sequence[str], folder: Path, server: Running) -> bool:
    """Return True if all workers have started. Those of granian hear signals a moment later, when they say so."""
    wanted = int(arguments[arguments.index("--workers") + 1]) if "--workers" in arguments else 1
    is_heard = server.said().count("Started worker-") >= server.said().count("Spawning worker-")
    return is_heard and ("wsgi" in " ".join(arguments) or len(list(folder.glob("started-*"))) == wanted)


def is_answered(method: str, port: int) -> bool:
    with suppress(httpx.TransportError):
        return httpx.request(method, f"http://127.0.0.1:{port}/1", timeout=20, trust_env=False).is_success
    return False


def last_lines(command: tuple[str, ...], url: str, folder: Path, **more: str) -> list[str]:
    """Serve, put ten records, end the server by SIGTERM, and return what it printed about the producer."""
    (ours,) = [each.last_lines() for each in served(command, url, folder, more)]
    return ours


@pytest.mark.parametrize("server", ASGI_SERVERS)
def test_a_loss_is_the_last_line_of_a_lifespan_without_any_logging(server, dead, tmp_path: Path):
    assert last_lines(ASGI_SERVERS[server], dead, tmp_path, PUTS="lifespan") == [LOST]


@pytest.mark.parametrize("server", ASGI_SERVERS)
def test_a_loss_is_printed_once_if_logging_is_configured(server, dead, tmp_path: Path):
    assert last_lines(ASGI_SERVERS[server], dead, tmp_path, PUTS="lifespan", LOG_LEVEL="INFO") == [LOST]


# Two workers need two files.
@pytest.mark.parametrize("server", [name for name in ASGI_SERVERS if "2" not in name])
def test_records_that_stay_in_the_spool_are_the_last_line_too(server, dead, tmp_path: Path):
    more = {"PUTS": "lifespan", "SPOOL": str(tmp_path / "spool")}
    lines = last_lines(ASGI_SERVERS[server], dead, tmp_path, **more)
    assert lines == [f"{CLOSED}0 delivered, 0 failed, 10 spooled, 0 buffered"]


@pytest.mark.parametrize("server", ASGI_SERVERS)
def test_the_report_of_a_healthy_lifespan_is_information(server, healthy, tmp_path: Path):
    assert last_lines(ASGI_SERVERS[server], healthy, tmp_path, PUTS="lifespan") == []
    lines = last_lines(ASGI_SERVERS[server], healthy, tmp_path, PUTS="lifespan", LOG_LEVEL="INFO")
    assert lines == [f"{CLOSED}10 delivered, 0 failed, 0 buffered"]


def test_one_line_of_gunicorns_configuration_shows_the_report(healthy, tmp_path: Path):
    (tmp_path / "gunicorn.conf.py").write_text('import logging\n\nlogging.basicConfig(level="INFO")\n')
    lines = last_lines(UVICORN_WORKER, healthy, tmp_path, PUTS="lifespan")
    assert lines == [f"INFO:kpl_integrations.asgi:{CLOSED}10 delivered, 0 failed, 0 buffered"]


# Without several workers of hypercorn, which sends SIGTERM twice: the second may end the process before its line.
@pytest.mark.parametrize("server", [name for name in ASGI_SERVERS | WSGI_SERVERS if name != "hypercorn --workers 2"])
def test_a_loss_is_the_last_line_of_a_blocking_producer_without_any_logging(server, dead, tmp_path: Path):
    """Under uvicorn and gunicorn's UvicornWorker it was silent: the signal ends the process without a close."""
    lines = last_lines((ASGI_SERVERS | WSGI_SERVERS)[server], dead, tmp_path, PUTS="blocking")
    assert lines == [NOT_CLOSED if "vicorn" in server else LOST]


@pytest.mark.parametrize("server", [*ASGI_SERVERS, *WSGI_SERVERS])
def test_a_healthy_blocking_producer_says_nothing_at_the_end(server, healthy, tmp_path: Path):
    assert last_lines((ASGI_SERVERS | WSGI_SERVERS)[server], healthy, tmp_path, PUTS="blocking") == []


@pytest.mark.parametrize("server", ["uvicorn", "gunicorn UvicornWorker", "hypercorn"])
def test_a_blocking_producer_stores_in_its_spool_what_a_server_has_no_time_for(server, dead, tmp_path: Path):
    """Under uvicorn it was lost: nothing closed the producer, which has it in memory."""
    spool = tmp_path / "spool"
    lines = last_lines(ASGI_SERVERS[server], dead, tmp_path, PUTS="blocking", SPOOL=str(spool))
    assert lines == [f"{CLOSED}0 delivered, 0 failed, 10 spooled, 0 buffered"]
    with closing(sqlite3.connect(spool)) as file:
        assert file.execute("SELECT count(*) FROM spooled").fetchone() == (10,)


PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "fastapi.md").read_text(encoding="utf-8")
(WORKERS,) = re.findall(r"```python\n(# workers\.py\n.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"^(?:uvicorn|gunicorn|hypercorn|granian) .*app:app .*timeout.*$", PAGE, re.MULTILINE)
BINDS = {"gunicorn": ("--bind", "127.0.0.1:{port}", "--no-control-socket"), "hypercorn": ("--bind", "127.0.0.1:{port}")}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[0])
def test_the_commands_of_the_page_end_with_the_loss(command, dead, tmp_path: Path):
    (tmp_path / "app.py").write_text("from unlogged_app import app as app\n")
    (tmp_path / "workers.py").write_text(WORKERS)
    name, *arguments = command.split()
    arguments += BINDS.get(name, ("--port", "{port}"))
    assert last_lines((name, *arguments), dead, tmp_path, PUTS="lifespan") == [LOST]


def test_an_open_request_does_not_keep_the_worker_of_the_page_from_its_close(dead, tmp_path: Path):
    """With `UvicornWorker` itself, gunicorn kills the worker while uvicorn waits for it, and nothing is printed."""
    (tmp_path / "workers.py").write_text(WORKERS.replace('shutdown": 10', 'shutdown": 1'))
    command = (*GUNICORN, "unlogged_app:app", "--worker-class", "workers.Worker", "--graceful-timeout", "15")
    for each in served(command, dead, tmp_path, {"PUTS": "lifespan"}):
        with socket.create_connection(("127.0.0.1", each.port)) as client:
            client.sendall(b"GET /open HTTP/1.1\r\nHost: x\r\n\r\n")
            # The worker answers this request after it has begun the other one.
            assert is_answered("GET", each.port)
            assert each.last_lines() == [LOST]


def test_a_close_that_gunicorn_cuts_off_has_said_what_is_left(dead, tmp_path: Path):
    """gunicorn kills a worker after its graceful timeout, and prints nothing."""
    command = (*UVICORN_WORKER, "--graceful-timeout", "6")
    counts = "10 accepted: 0 delivered, 0 failed, 10 buffered"
    for each in served(command, dead, tmp_path, {"PUTS": "lifespan", "CLOSE_SECONDS": "30"}):
        began = time.monotonic()
        assert each.last_lines() == [f"the Kinesis producer is closing and still sends, for up to 27 s: {counts}"]
        assert time.monotonic() - began < 30
