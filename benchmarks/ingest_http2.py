"""Compare what a request costs the gateway over HTTP/2 and over HTTP/1.1, with h2load (nghttp2) as the client.

    python -m benchmarks.ingest_http2

Both go to one gateway in turn, over the same number of connections: HTTP/1.1 with one request at a time on each, HTTP/2
with one and with sixteen. Shown are requests for each second of CPU of the gateway's process, the median of the rounds.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from benchmarks.ingest import Row, cpu_seconds, running_server
from benchmarks.ingest_forms import body
from benchmarks.machine import cores, describe_machine
from benchmarks.sink_process import running_sink
from benchmarks.workload import STREAM_NAME

CONNECTIONS: Final = 32
_ONE: Final = body("text").partition(b"\n")[0]
BODIES: Final = {"json": "application/json", "ndjson of 100": "application/x-ndjson"}


class Way(NamedTuple):
    """A protocol, and how many requests each connection has in progress."""

    name: str
    options: tuple[str, ...]
    streams: int = 1


WAYS: Final = (
    Way("HTTP/1.1", ("--h1",)),
    Way("HTTP/2, one at a time", ("--no-tls-proto=h2c",)),
    Way("HTTP/2, 16 at a time", ("--no-tls-proto=h2c",), 16),
)


def requests_per_cpu_second(port: int, pid: int, way: Way, path: Path, content_type: str, count: int) -> float:
    """Send so many requests, all of which must be accepted."""
    command = ["h2load", *way.options, f"-n{count}", f"-c{CONNECTIONS}", f"-m{way.streams}", f"-d{path}"]
    url = f"http://127.0.0.1:{port}/v1/streams/{STREAM_NAME}/records"
    before = cpu_seconds(pid)
    command += ["-H", f"content-type: {content_type}", url]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    used = cpu_seconds(pid) - before
    if f"{count} succeeded" not in said.stdout:
        raise RuntimeError(said.stdout + said.stderr)
    return count / used


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=20_000)
    arguments = parser.parse_args()
    if shutil.which("h2load") is None:
        print("There is no h2load on the PATH (Debian, Ubuntu: nghttp2-client).", file=sys.stderr)
        return 2
    (cpu, sink_cpu), placement = cores()
    found: dict[tuple[str, str], list[float]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        running_sink(sink_cpu) as sink,
        running_server(Row("gateway", "gateway"), sink.url, cpu) as (port, pid),
    ):
        for number in range(arguments.rounds + 1):
            for form, content_type in BODIES.items():
                path = Path(folder) / form.replace(" ", "-")
                path.write_bytes(_ONE if form == "json" else body("text"))
                count = arguments.requests if form == "json" else arguments.requests // 20
                for way in WAYS:
                    measured = requests_per_cpu_second(port, pid, way, path, content_type, count)
                    if number:  # the first round looks up the stream and warms up
                        found.setdefault((form, way.name), []).append(measured)
            print(f"round {number} done at {time.strftime('%H:%M:%S')}", file=sys.stderr)
    print(f"{'':16}{'':24}{'requests per CPU-second':>24}{'of HTTP/1.1':>14}")
    for (form, way_name), values in found.items():
        ratio = median(values) / median(found[form, WAYS[0].name])
        print(f"{form:16}{way_name:24}{median(values):>24,.0f}{ratio:>14.2f}")
    print(f"{CONNECTIONS} connections, {arguments.rounds} rounds. {placement} {describe_machine()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
