"""python -m benchmarks.ingest_floods: twenty quiet tenants beside each flood, through one gateway with two shards.

Each quiet tenant sends 5 records a second, half of them with ack=queued and half with ack=delivered. The load is
sent by `http_load.c`, which this program compiles with cc. The gateway has a core to itself; the clients and the sink
share the other one. Rounds are interleaved, and each trial is a fresh gateway. `--beside DIRECTORY` measures another
checkout in the same rounds.

A row passes if no quiet request is refused, queued p99 <= 50 ms, delivered p99 <= buffered time + 150 ms, and every
probe of /livez, /readyz and /metrics is answered within 1 s.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import zstandard

from benchmarks.http_load import ONE_AT_A_TIME, Clients, HttpLoad, Manner
from benchmarks.ingest import cpu_seconds
from benchmarks.machine import cores, describe_machine, pin_to
from benchmarks.sink_process import REPOSITORY, running_sink
from benchmarks.trial import call_sink
from benchmarks.workload import STREAM_NAME, Workload

QUIET_TENANTS: Final = 20
RECORDS_PER_SECOND: Final = 5
BUFFERED_MS: Final = 100
MOST_QUEUED_MS: Final = 50
MOST_DELIVERED_MS: Final = BUFFERED_MS + 150
MOST_PROBE_MS: Final = 1_000
# The flood begins this much earlier than the quiet tenants, less the time in which all of them end.
_FLOOD_SECONDS_MORE: Final = 2.5
_NDJSON: Final = "application/x-ndjson"
_JSON: Final = "application/json"


@dataclass(frozen=True, kw_only=True)
class Flood:
    """What one noisy client sends."""

    name: str
    # The tenant "wrong" has no valid key.
    tenants: Sequence[str] = ("flood",)
    connections: int = 20
    requests_per_second: int = 0
    manner: Manner = ONE_AT_A_TIME
    records: int = 1
    data_bytes: int = 200
    key: str | None = None
    encoding: str | None = None
    # Requests for this resource instead of records.
    path: str | None = None
    # Each request has a connection of its own.
    is_new: bool = False


# Two shards of 1 MiB a second accept about 10,000 records of 200 bytes a second.
FLOODS: Final = (
    Flood(name="none", tenants=()),
    Flood(name="NDJSON, 10 times the shards' rate", records=100, requests_per_second=1_000, manner=Manner(depth=100)),
    Flood(
        name="20,000 single POST/s, 1,000 connections",
        connections=1_000,
        requests_per_second=20_000,
        manner=Manner(depth=4_096),
    ),
    Flood(name="one hot key", records=100, requests_per_second=1_000, manner=Manner(depth=100), key="hot"),
    Flood(name="unaggregated", tenants=("single",), records=100, requests_per_second=1_000, manner=Manner(depth=100)),
    Flood(
        name="ten bodies of 16 MB in zstd at a time", connections=10, records=9_900, data_bytes=1_600, encoding="zstd"
    ),
    Flood(name="obeys Retry-After, 1,000 connections", connections=1_000, manner=Manner(obeys=True)),
    Flood(
        name="one connection of a proxy",
        tenants=(*["flood"] * 15, "quiet-0"),
        connections=1,
        requests_per_second=20_000,
        manner=Manner(depth=64, order="turns"),
    ),
    Flood(name="pipelined, 500 deep, 200 connections", connections=200, manner=Manner(depth=500)),
    Flood(
        name="wrong keys from 1,000 addresses", tenants=("wrong",), connections=1_000, manner=Manner(addresses=1_000)
    ),
    Flood(name="wrong keys from one address, 1,000 connections", tenants=("wrong",), connections=1_000),
    Flood(
        name="1,000 new connections a second from 1,000 addresses",
        tenants=("wrong",),
        connections=1_000,
        requests_per_second=1_000,
        manner=Manner(addresses=1_000),
        is_new=True,
    ),
    Flood(name="GET /metrics, 5,000/s", connections=100, requests_per_second=5_000, path="/metrics"),
    Flood(name="GET /livez, 10,000/s", connections=100, requests_per_second=10_000, path="/livez"),
)


@dataclass(frozen=True)
class Figures:
    """One trial. Latencies are in milliseconds."""

    quiet_refused: int
    queued_p50: float
    queued_p99: float
    delivered_p99: float
    worst_probe: float
    flood_answered_per_second: float
    flood_accepted: int
    gateway_cpu_share: float

    def passes(self) -> bool:
        """Return True if the bounds hold."""
        return (
            not self.quiet_refused
            and self.queued_p99 <= MOST_QUEUED_MS
            and self.delivered_p99 <= MOST_DELIVERED_MS
            and 0 <= self.worst_probe <= MOST_PROBE_MS
        )


def request(tenant: str, flood: Flood, query: str = "", first: int = 0) -> bytes:
    """Return one POST with the workload's records from number `first` on."""
    if flood.path is not None:
        return f"GET {flood.path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode()
    workload = Workload(data_bytes=flood.data_bytes)
    lines = [
        json.dumps({"partition_key": flood.key or key, "data": data.decode()}).encode()
        for key, data in workload.records(first, first + flood.records)
    ]
    body = b"\n".join(lines)
    fields = "connection: close\r\n" if flood.is_new else ""
    if flood.encoding is not None:
        body, fields = zstandard.compress(body), f"{fields}content-encoding: {flood.encoding}\r\n"
    head = (
        f"POST /v1/streams/{STREAM_NAME}/records{query} HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        f"authorization: Bearer {tenant}\r\ncontent-type: {_JSON if flood.records == 1 else _NDJSON}\r\n{fields}"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def quiet(load: HttpLoad, port: int, query: str, seconds: float) -> Clients:
    """Start the quiet tenants, each on a connection of its own."""
    sent = [request(f"quiet-{number}", Flood(name="quiet"), query) for number in range(QUIET_TENANTS)]
    rate = QUIET_TENANTS * RECORDS_PER_SECOND / 2
    return load.start(port, sent, connections=QUIET_TENANTS, rate=rate, seconds=seconds)


def measure(
    flood: Flood,
    load: HttpLoad,
    seconds: float,
    endpoint_url: str,
    gateway: "Gateway",
    placed_on: tuple[int | None, int | None],
) -> Figures:
    """Run one trial, in which the quiet tenants send for so many seconds."""
    call_sink(endpoint_url, "/open", {"workload": Workload(data_bytes=200, shard_count=2).fields()})
    with gateway.running(endpoint_url, placed_on[0]) as (port, pid):
        # One request each, so that the gateway knows the stream.
        load.start(port, [request("quiet-0", FLOODS[0])], connections=1, rate=1, seconds=0.5).result()
        noisy = None
        if flood.tenants:
            sent = [request(tenant, flood) for tenant in flood.tenants]
            noisy = load.start(
                port,
                sent,
                connections=flood.connections,
                rate=flood.requests_per_second,
                seconds=seconds + _FLOOD_SECONDS_MORE,
                manner=flood.manner,
            )
        # The flood has begun and the gateway has had time to react.
        time.sleep(_FLOOD_SECONDS_MORE - 0.5)
        before, started = cpu_seconds(pid), time.monotonic()
        probes = [
            f"GET /{path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
            for path in ("livez", "readyz", "metrics")
        ]
        clients = [
            quiet(load, port, "", seconds),
            quiet(load, port, "?ack=delivered", seconds),
            load.start(port, probes, connections=3, rate=10, seconds=seconds),
        ]
        queued, delivered, probed = [each.result() for each in clients]
        busy = (cpu_seconds(pid) - before) / (time.monotonic() - started)
        said = {"answers": {}} if noisy is None else noisy.result()
    call_sink(endpoint_url, "/start", {})
    refused = sum(
        count for each in (queued, delivered) for status, count in each["answers"].items() if int(status) > 299
    )
    refused += sum(each["unanswered"] + each["closed"] for each in (queued, delivered))
    answers = said["answers"]
    return Figures(
        refused,
        queued["p50_ms"],
        queued["p99_ms"],
        delivered["p99_ms"],
        probed["max_ms"] if not probed["unanswered"] else 1e9,
        sum(answers.values()) / (seconds + _FLOOD_SECONDS_MORE),
        answers.get("202", 0),
        busy,
    )


class Gateway(NamedTuple):
    """A checkout, and the interpreter that has its packages."""

    name: str
    directory: Path
    python: str

    @contextlib.contextmanager
    def running(self, endpoint_url: str, cpu: int | None) -> Iterator[tuple[int, int]]:
        """Run its gateway; yield port and process id."""
        command = [self.python, str(REPOSITORY / "benchmarks" / "flood_server.py"), endpoint_url]
        if cpu is not None:
            command += ["--cpu", str(cpu)]
        keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
        environment = os.environ | keys | {"PYTHONPATH": str(self.directory)}
        with subprocess.Popen(
            command, cwd=self.directory, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            try:
                port = server.stdout.readline().strip()
                if not port:
                    message = f"the gateway of {self.directory} stopped before it listened; its error is above"
                    raise RuntimeError(message)
                yield int(port), server.pid
            finally:
                server.stdin.close()
                try:
                    server.wait(30)
                except subprocess.TimeoutExpired:
                    server.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--only", default="", help="floods whose name contains the words")
    parser.add_argument("--beside", type=Path, default=None, help="another checkout with its own .venv")
    arguments = parser.parse_args()
    floods = [flood for flood in FLOODS if arguments.only.lower() in flood.name.lower()]
    gateways = [Gateway("this", REPOSITORY, sys.executable)]
    if arguments.beside is not None:
        gateways.insert(0, Gateway("beside", arguments.beside, str(arguments.beside / ".venv" / "bin" / "python")))
    placed_on, placement = cores()
    pin_to(placed_on[1])
    found: dict[tuple[str, str], list[Figures]] = {}
    with running_sink(placed_on[1]) as sink, tempfile.TemporaryDirectory() as folder:
        load = HttpLoad(Path(folder))
        for _ in range(arguments.rounds):
            for flood in floods:
                for gateway in gateways:
                    figures = measure(flood, load, arguments.seconds, sink.url, gateway, placed_on)
                    found.setdefault((flood.name, gateway.name), []).append(figures)
                    print(
                        flood.name, gateway.name, figures, f"load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True
                    )
    print(f"{describe_machine()}. {placement} {arguments.rounds} interleaved rounds, load {os.getloadavg()[0]:.1f}.")
    columns = ("queued p50", "queued p99", "delivered p99", "worst probe", "flood answers/s", "passes")
    print(f"| flood | gateway | quiet refused | {' | '.join(columns)} |")
    goals = f"0 | | <= {MOST_QUEUED_MS} ms | <= {MOST_DELIVERED_MS} ms | <= {MOST_PROBE_MS:,} ms"
    print(f"|---|---|---|---|---|---|---|---|---|\n| *goal* | | {goals} | | |")
    for (flood_name, gateway_name), trials in found.items():
        found_columns = [
            f"{sum(each.quiet_refused for each in trials)}",
            _ms([each.queued_p50 for each in trials]),
            _ms([each.queued_p99 for each in trials]),
            _ms([each.delivered_p99 for each in trials]),
            _ms([each.worst_probe for each in trials]),
            f"{median(each.flood_answered_per_second for each in trials):,.0f}",
            f"{sum(each.passes() for each in trials)} of {len(trials)}",
        ]
        print(f"| {flood_name} | {gateway_name} | {' | '.join(found_columns)} |")
    return 0


def _ms(values: list[float]) -> str:
    return f"{median(values):,.1f} ms [{min(values):,.1f} - {max(values):,.1f}]"


if __name__ == "__main__":
    sys.exit(main())
