"""At every end of a process, under every server, records that were put and not closed are delivered exactly once.

Each cell is a real process against a real local Kinesis on loopback. `python -m tests.background.test_process_end`
runs all cells and prints the matrix of ends, servers and senders.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from kpl_core.testing import FakeKinesis
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from tests.support.consumers import log_records, user_records
from tests.support.running_program import environment, running
from tests.support.telemetry import exported
from tests.support.waiting import wait_until

SENDERS = ("producer", "handler", "exporter")
REQUESTS = 10
WANTED = Counter(f"{number}-{part}" for number in range(REQUESTS) for part in range(5))
PROGRAM = Path(__file__).parent / "programs" / "ending_program.py"
ACCOUNT = {"AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local", "NO_PROXY": "127.0.0.1"}
# Bound of an end: 5 seconds for the senders, and what a busy machine and the server take.
END_SECONDS = 40.0
# A server is there within 3 seconds on a machine that does nothing else.
START_SECONDS = 90.0

GUNICORN = ("gunicorn", "--no-control-socket", "--graceful-timeout", "{grace}", "--bind", "127.0.0.1:{port}")
SERVERS = {
    "uvicorn": ("uvicorn", "--port", "{port}", "ending_app:app"),
    "uvicorn --workers 2": ("uvicorn", "--port", "{port}", "--workers", "2", "ending_app:app"),
    "gunicorn UvicornWorker": (*GUNICORN, "--worker-class", "uvicorn_worker.UvicornWorker", "ending_app:app"),
    "gunicorn sync": (*GUNICORN, "ending_app:wsgi"),
    "gunicorn gthread": (*GUNICORN, "--worker-class", "gthread", "--threads", "2", "ending_app:wsgi"),
    "hypercorn": ("hypercorn", "--bind", "127.0.0.1:{port}", "ending_app:app"),
    "granian": ("granian", "--interface", "asgi", "--port", "{port}", "ending_app:app"),
}
# How a plain program ends, and the exit status.
PROGRAM_ENDS = {
    "the end of the script": 0,
    "a thread goes on after the main thread": 0,
    "sys.exit": 3,
    "an exception": 1,
    "SIGTERM": -signal.SIGTERM,
    "SIGTERM with a handler": 4,
    "SIGINT": -signal.SIGINT,
}


class ServerEnd(NamedTuple):
    """A server, the signal that ends it, and whether the application has a `KinesisLifespan`."""

    server: str
    ending: signal.Signals
    has_lifespan: bool

    def __str__(self) -> str:
        return f"{self.server}, {self.ending.name}, {'with' if self.has_lifespan else 'without'} a lifespan"


SERVER_ENDS = [
    ServerEnd(server, ending, has_lifespan)
    for server, command in SERVERS.items()
    for ending in (signal.SIGTERM, signal.SIGINT)
    for has_lifespan in (False, True)
    if not has_lifespan or command[-1].endswith(":app")
]


@contextmanager
def local_kinesis() -> Iterator[ThreadedLocalKinesis]:
    with ThreadedLocalKinesis(LocalKinesis(dict.fromkeys(SENDERS, 2), enforce_limits=False)) as local:
        yield local


def variables(kinesis: ThreadedLocalKinesis, senders: str, **more: str) -> dict[str, str]:
    sdk = {"OTEL_BSP_SCHEDULE_DELAY": "60000"}
    return {**ACCOUNT, **sdk, "KPL_ENDPOINT_URL": kinesis.endpoint_url, "SENDERS": senders, **more}


def found(kinesis: ThreadedLocalKinesis, sender: str) -> Counter[str]:
    """Return how often each record is in the stream of a sender."""

    def read(fake: FakeKinesis, _now: float) -> Counter[str]:
        if sender == "producer":
            return Counter(record.data.decode() for record in user_records(fake, sender))
        if sender == "handler":
            return Counter(record["message"] for record in log_records(fake, sender))
        return Counter(span.name for _, span in exported(fake, sender, "traces"))

    return kinesis.call(read)


def run_program(how: str, senders: str, kinesis: ThreadedLocalKinesis) -> subprocess.CompletedProcess[str]:
    more = variables(kinesis, senders, FLUSH_ON_SIGTERM="1" if how == "SIGTERM" else "0")
    return subprocess.run(
        [sys.executable, PROGRAM, how],
        env=environment(more),
        capture_output=True,
        text=True,
        timeout=END_SECONDS,
        check=False,
    )


def run_server(end: ServerEnd, senders: str, kinesis: ThreadedLocalKinesis, output: Path) -> str:
    """Serve, put, end the server, and return what it printed."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    more = variables(kinesis, senders, LIFESPAN="1" if end.has_lifespan else "0")
    grace_seconds = 30
    if end.server == "gunicorn UvicornWorker" and end.ending == signal.SIGINT:
        # gunicorn sends SIGQUIT, which this worker ignores, and kills it after the graceful timeout. Until then the
        # senders go on.
        more |= {"LINGER_MS": "100", "OTEL_BSP_SCHEDULE_DELAY": "1000"}
        grace_seconds = 10
    command = [part.format(port=port, grace=grace_seconds) for part in SERVERS[end.server]]
    with running(command, output, more) as server:
        wait_until(lambda: answers(port, "GET", "/"), server.said, seconds=START_SECONDS)
        for number in range(REQUESTS):
            assert answers(port, "POST", f"/{number}"), server.said()
        if end.server == "gunicorn gthread":
            # Its signal handler waits for a lock that the main thread holds while it gives a connection to the pool,
            # also one that the client has closed. The worker then stands still until gunicorn kills it.
            time.sleep(0.3)
        server.end(end.ending, within=END_SECONDS)
        return server.said()


def answers(port: int, method: str, path: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.request(method, f"http://127.0.0.1:{port}{path}", timeout=20).is_success
    return False


@pytest.mark.long
@pytest.mark.parametrize("how", PROGRAM_ENDS)
def test_a_program_delivers_what_it_put_however_it_ends(how: str) -> None:
    with local_kinesis() as kinesis:
        ended = run_program(how, ",".join(SENDERS), kinesis)
        assert ended.returncode == PROGRAM_ENDS[how], ended.stderr
        assert {sender: found(kinesis, sender) for sender in SENDERS} == dict.fromkeys(SENDERS, WANTED), ended.stderr


@pytest.mark.long
@pytest.mark.timeout(3 * START_SECONDS)
@pytest.mark.parametrize("end", SERVER_ENDS, ids=str)
def test_a_server_delivers_what_its_application_put_however_it_ends(end: ServerEnd, tmp_path: Path) -> None:
    """All senders are in one process here; `python -m tests.background.test_process_end` has a process for each."""
    with local_kinesis() as kinesis:
        printed = run_server(end, ",".join(SENDERS), kinesis, tmp_path / "output")
        assert {sender: found(kinesis, sender) for sender in SENDERS} == dict.fromkeys(SENDERS, WANTED), printed


def main(only: str = "", *, together: bool = False) -> None:
    """Run every cell whose end contains `only`, and print how many of the records arrived in each.

    With `together` one process uses all three senders; otherwise each sender has a process of its own.
    """
    os.environ.update(ACCOUNT)
    wanted = WANTED.total()
    sys.stdout.write(f"| end | {' | '.join(SENDERS)} | seconds |\n| --- | {'--- | ' * (len(SENDERS) + 1)}\n")
    ends: list[str | ServerEnd] = [*PROGRAM_ENDS, *SERVER_ENDS]
    for end in ends:
        if only not in str(end):
            continue
        cells = []
        began = time.monotonic()
        for group in (SENDERS,) if together else ((sender,) for sender in SENDERS):
            with local_kinesis() as kinesis, tempfile.TemporaryDirectory() as folder:
                failure = ""
                try:
                    if isinstance(end, ServerEnd):
                        run_server(end, ",".join(group), kinesis, Path(folder) / "output")
                    else:
                        run_program(end, ",".join(group), kinesis)
                except (AssertionError, subprocess.TimeoutExpired) as error:
                    failure = f", {type(error).__name__}"
                cells += [f"{(found(kinesis, sender) & WANTED).total()} of {wanted}{failure}" for sender in group]
        sys.stdout.write(f"| {end} | {' | '.join(cells)} | {time.monotonic() - began:.1f} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(next(iter(sys.argv[1:]), ""), together="together" in sys.argv)
