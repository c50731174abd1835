"""Clients that send HTTP requests at a rate: `http_load.c`, compiled in a temporary folder."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from benchmarks.sink_process import REPOSITORY

_ORDERS: Final = ("own", "turns", "once")


class Manner(NamedTuple):
    """How clients send.

    Args:
        depth: the unanswered requests that a connection may have.
        order: `own`: each connection has one request and repeats it; `turns`: each sends all requests in turn; `once`:
            each request is sent once, by whichever connection is free, and the load ends with the last one.
        obeys: a connection that gets Retry-After waits so long.
        is_random: at random times, as those of many independent clients.
        addresses: the number of addresses that the connections come from; 0: all from one.
    """

    depth: int = 1
    order: Literal["own", "turns", "once"] = "own"
    obeys: bool = False
    is_random: bool = False
    addresses: int = 0


ONE_AT_A_TIME: Final = Manner()


class Clients(NamedTuple):
    """One running `http_load`."""

    process: "subprocess.Popen[str]"
    requests: Path

    def result(self) -> dict[str, Any]:
        """Return what it printed, and remove the file with its requests."""
        said, _ = self.process.communicate(timeout=120)
        self.requests.unlink()
        if self.process.returncode:
            message = f"http_load ended with {self.process.returncode}; its error is above"
            raise RuntimeError(message)
        found: dict[str, Any] = json.loads(said)
        return found


class HttpLoad:
    """The compiled generator, in a folder.

    Raises:
        RuntimeError: there is no C compiler.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._program = folder / "http_load"
        self._started = 0
        compiler = shutil.which("cc")
        if compiler is None:
            message = "cc is not on the path; install a C compiler, which builds the load generator"
            raise RuntimeError(message)
        source = REPOSITORY / "benchmarks" / "http_load.c"
        subprocess.run([compiler, "-O2", "-o", str(self._program), str(source), "-lm"], check=True)

    def start(
        self,
        port: int,
        requests: Sequence[bytes],
        *,
        connections: int,
        rate: float,
        seconds: float,
        manner: Manner = ONE_AT_A_TIME,
    ) -> Clients:
        """Start clients that send `rate` requests a second in total; 0: each connection sends when it is answered."""
        path = self._folder / f"{self._started}.requests"
        self._started += 1
        path.write_bytes(b"".join(b"%d\n%b" % (len(each), each) for each in requests))
        order = _ORDERS.index(manner.order)
        options = (manner.depth, order, int(manner.obeys), int(manner.is_random), manner.addresses)
        words = [str(each) for each in (port, connections, rate, seconds, *options, path)]
        return Clients(subprocess.Popen([str(self._program), *words], stdout=subprocess.PIPE, text=True), path)
