"""Gateways in child processes, and what one request costs them: CPU time and peak memory, read from /proc."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final, NamedTuple

from tests.support.http2_attacks import LAST_STREAM
from tests.support.http2_frames import goaway_code, statuses
from tests.support.running_program import environment
from tests.support.waiting import wait_until

FACTORY: Final = Path(__file__).parent / "programs" / "gateway_factory.py"
REPOSITORY: Final = FACTORY.parents[3]
_ANSWER_SECONDS: Final = 120.0
LIVEZ: Final = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"


class Cost(NamedTuple):
    """What a request cost, and the status of its answer; 0: the connection was closed without one."""

    cpu_seconds: float
    peak_bytes: int
    status: int


class MeasuredGateway:
    """A gateway in a process of its own."""

    def __init__(self, pid: int, port: int, said: IO[str]) -> None:
        self.pid = pid
        self.port = port
        self._said = said

    def cost(self, request: bytes) -> Cost:
        """Send one complete request, and return what it cost until its answer."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5", encoding="ascii")
        before, resident = self.cpu_seconds(), self._memory("VmRSS")
        status = self.ask(request)
        # Answered after the work that the request left behind in the event loop.
        self.ask(LIVEZ)
        return Cost(self.cpu_seconds() - before, max(0, self._memory("VmHWM") - resident), status)

    def ask(self, request: bytes) -> int:
        """Send one request over a new connection. Return the status of its answer, or 0."""
        return ask(self.port, request)

    def terminate(self) -> str:
        """Send SIGTERM; return what the process says at its end: "complete" if every record was delivered."""
        os.kill(self.pid, signal.SIGTERM)
        return self._said.readline().strip()

    def cpu_seconds(self) -> float:
        """Return the CPU time of all its threads."""
        return self._scheduled(0)

    def waited_seconds(self) -> float:
        """Return how long its threads could have run, but other processes had the CPUs."""
        return self._scheduled(1)

    def _scheduled(self, column: int) -> float:
        nanoseconds = 0
        for schedule in Path(f"/proc/{self.pid}/task").glob("*/schedstat"):
            with suppress(FileNotFoundError):
                nanoseconds += int(schedule.read_text(encoding="ascii").split()[column])
        return nanoseconds / 1e9

    def _memory(self, name: str) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        return int(status.partition(f"{name}:")[2].split()[0]) * 1024


def ask(port: int, request: bytes) -> int:
    """Send one request to a port over a new connection. Return the status of its answer, or 0."""
    with socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_SECONDS) as connection:
        # A server may answer and close before it has read all.
        with suppress(ConnectionError):
            connection.sendall(request)
        return answered(connection)


def answered(connection: socket.socket) -> int:
    """Read one answer. Return its status, or 0 if there is none; over HTTP/2 that of an attack, or 1 for GOAWAY."""
    received = b""
    with suppress(ConnectionError):
        received = connection.recv(65_536)
        if received.startswith(b"\0"):
            return _answered_in_frames(connection, received)
        while b"\r\n\r\n" not in received and (piece := connection.recv(65_536)):
            received += piece
        head, _, rest = received.partition(b"\r\n\r\n")
        left = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0) - len(rest)
        while left > 0 and (piece := connection.recv(65_536)):
            left -= len(piece)
    return int(received.split(b" ", 2)[1]) if received.startswith(b"HTTP/") else 0


def _answered_in_frames(connection: socket.socket, received: bytes) -> int:
    while goaway_code(received) is None and LAST_STREAM not in statuses(received):
        piece = connection.recv(65_536)
        if not piece:
            return 0
        received += piece
    return statuses(received).get(LAST_STREAM, 1)


class GatewayFactory:
    """Starts gateways in child processes of one program, which has imported everything."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    @contextmanager
    def gateway(self, *, serves_unknown: bool = False, **settings: object) -> Iterator[MeasuredGateway]:
        """Run a gateway until the end of the block; it may serve clients without credentials."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(
            json.dumps({"settings": settings, "serves_unknown": serves_unknown}), file=self._process.stdin, flush=True
        )
        pid, port = map(int, self._process.stdout.readline().split())
        gateway = MeasuredGateway(pid, port, self._process.stdout)
        try:
            yield gateway
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not Path(f"/proc/{pid}").exists(), f"process {pid} has ended")


@contextmanager
def gateway_factory(repository: Path = REPOSITORY) -> Iterator[GatewayFactory]:
    """Run the program that starts gateways, with the packages of `repository`."""
    process = subprocess.Popen(
        [sys.executable, FACTORY],
        env=environment({"PYTHONPATH": str(repository)}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield GatewayFactory(process)
        finally:
            process.stdin and process.stdin.close()
