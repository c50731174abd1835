"""Start the sink on its core, and always stop it."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.reason import reason_in

__all__ = ["REPOSITORY", "RunningSink", "running_sink"]

REPOSITORY = Path(__file__).parent.parent

_STOP_TIMEOUT_SECONDS = 10
_CERTIFICATE = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 "
    "-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
)


class RunningSink(NamedTuple):
    """A sink's addresses, its certificate for TLS, and why it has none."""

    url: str
    tls_url: str = ""
    certificate: str = ""
    no_tls: str = ""


def make_certificate(path: Path) -> str:
    """Write a key and its certificate for 127.0.0.1 to `path`; return an empty string, or the reason of the failure."""
    if shutil.which("openssl") is None:
        return "no openssl here"
    key = path.with_suffix(".key")
    command = [*_CERTIFICATE.split(), "-keyout", str(key), "-out", str(path)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        return reason_in(made.stderr) or f"openssl ended with exit code {made.returncode}"
    path.write_text(key.read_text() + path.read_text())
    return ""


@contextmanager
def running_sink(cpu: int | None, *, over_tls: bool = False) -> Iterator[RunningSink]:
    """Run a sink on core `cpu`, with a TLS port too if `over_tls` is set; yield its addresses.

    The sink stops when its standard input closes, so it cannot outlive this process.
    """
    command = [sys.executable, "-m", "benchmarks.sink"]
    if cpu is not None:
        command += ["--cpu", str(cpu)]
    with tempfile.TemporaryDirectory() as folder:
        certificate = Path(folder, "sink.pem")
        no_tls = make_certificate(certificate) if over_tls else "not asked for"
        if not no_tls:
            command += ["--certificate", str(certificate)]
        with subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as sink:
            assert sink.stdin is not None
            assert sink.stdout is not None
            try:
                ports = sink.stdout.readline().split()
                if not ports:
                    message = "the sink stopped before it listened; its error is above"
                    raise RuntimeError(message)
                tls_url = "" if no_tls else f"https://127.0.0.1:{ports[1]}"
                yield RunningSink(f"http://127.0.0.1:{ports[0]}", tls_url, str(certificate), no_tls)
            finally:
                sink.stdin.close()
                try:
                    sink.wait(_STOP_TIMEOUT_SECONDS)
                except subprocess.TimeoutExpired:
                    sink.kill()
