"""Third-party servers in process groups of their own, always ended, and ports for what a test starts."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

END_WITH_PARENT = Path(__file__).parent / "programs" / "end_with_parent.py"
READY_SECONDS = 40.0  # an emulator needs less than one; a loaded machine is not a fault
LOOPBACK = "127.0.0.1"
# For port 0 the system gives out higher ones (32768 and up on Linux), so no server on port 0 can get one of these.
_PORTS = range(10_000, 32_000)

# The environment variables of the programs: no proxy, no credentials, no Python path.
INHERITED = ("PATH", "HOME", "TMPDIR", "JAVA_HOME")
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "interop",
    "AWS_SECRET_ACCESS_KEY": "interop",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class ProcessFailed(Exception):  # noqa: N818 - reads as a sentence where it is raised
    """A third-party program ended or never answered; the text ends with its log."""


class OwnProcess:
    """One running program and its log."""

    def __init__(self, name: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def last_lines(self, count: int = 40) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([f"--- the last lines of {self.log}", *lines[-count:]])

    def wait_until(self, is_ready: Callable[[], bool], *, what: str, seconds: float = READY_SECONDS) -> None:
        """Wait for `is_ready()`, at most `seconds`.

        Raises:
            ProcessFailed: it ended, or the time limit passed.
        """
        deadline = time.monotonic() + seconds
        while not is_ready():
            if not self.running:
                message = f"{self.name} ended while waiting for {what}\n{self.last_lines()}"
                raise ProcessFailed(message)
            if time.monotonic() > deadline:
                message = f"{self.name}: no {what} within {seconds} s\n{self.last_lines()}"
                raise ProcessFailed(message)
            time.sleep(0.05)

    def end(self) -> None:
        """End the whole process group; return when no process of it is left."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10.0)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10.0)


@contextmanager
def own_process(
    name: str, command: Sequence[str], *, logs: Path, environment: Mapping[str, str] | None = None
) -> Iterator[OwnProcess]:
    """Run `command` while the context lasts, its output in `logs/<name>.log`."""
    log = logs / f"{name}.log"
    inherited = {variable: os.environ[variable] for variable in INHERITED if variable in os.environ}
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", str(END_WITH_PARENT), *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**inherited, **CREDENTIALS, "LC_ALL": "C.UTF-8", **(environment or {})},
            cwd=logs,
            start_new_session=True,
        )
    running = OwnProcess(name, process, log)
    try:
        yield running
    finally:
        running.end()


def answers(port: int) -> bool:
    """Return True if a process accepts connections on a loopback port."""
    with suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=1.0):
        return True
    return False


def listens_only_on_loopback(port: int) -> bool:
    """Return True if no socket of this machine listens on `port` at an address other than loopback.

    Read from Linux' socket tables; elsewhere there are none and the answer is True.
    """
    listening = "0A"
    loopback = {"0100007F", "00000000000000000000000001000000"}
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        rows = table.read_text().splitlines()[1:] if table.exists() else []
        for row in rows:
            _, local, _, state, *_ = row.split()
            address, _, hexadecimal_port = local.partition(":")
            if state == listening and int(hexadecimal_port, 16) == port and address not in loopback:
                return False
    return True


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now, for a program that cannot choose one itself."""
    (port,) = free_ports(1)
    return port


def free_ports(count: int) -> tuple[int, ...]:
    """Return different ports of 127.0.0.1 that are free now."""
    chance = random.SystemRandom()  # not the shared generator: a seed would give two processes the same ports
    found: set[int] = set()
    while len(found) < count:
        port = chance.choice(_PORTS)
        with socket.socket() as tried, suppress(OSError):
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((LOOPBACK, port))
            found.add(port)
    return tuple(found)


@contextmanager
def black_hole() -> Iterator[str]:
    """Yield the URL of a port whose connections the kernel accepts and no process reads."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen(128)
        yield f"http://{LOOPBACK}:{listener.getsockname()[1]}"


@contextmanager
def refusing() -> Iterator[str]:
    """Yield the URL of a port that refuses connections."""
    with socket.socket() as bound:
        bound.bind((LOOPBACK, 0))
        yield f"http://{LOOPBACK}:{bound.getsockname()[1]}"
