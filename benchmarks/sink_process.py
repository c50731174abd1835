"""Start the sink on its core, and always stop it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["REPOSITORY", "running_sink"]

REPOSITORY = Path(__file__).parent.parent

_STOP_TIMEOUT_SECONDS = 10


@contextmanager
def running_sink(cpu: int | None) -> Iterator[str]:
    """Run a sink on core `cpu`; yield its endpoint URL.

    The sink stops when its standard input closes, so it cannot outlive this process.
    """
    command = [sys.executable, "-m", "benchmarks.sink"]
    if cpu is not None:
        command += ["--cpu", str(cpu)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sink:
        assert sink.stdin is not None
        assert sink.stdout is not None
        try:
            port = sink.stdout.readline().strip()
            if not port:
                message = "the sink stopped before it listened; its error is above"
                raise RuntimeError(message)
            yield f"http://127.0.0.1:{port}"
        finally:
            sink.stdin.close()
            try:
                sink.wait(_STOP_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                sink.kill()
