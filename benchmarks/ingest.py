"""python -m benchmarks.ingest: measure the CPU of a gateway request, beside a bare server, boto3 and FastAPI.

An open loop: requests are due at random times, as those of many independent clients, at a rate that a slow server does
not lower, over 64, 256 or 1,000 connections. "saturated" is the exception: 1,000 clients that send when they are
answered. The unit is the CPU-second of the serving process, user and system, all its threads. Records count when the
sink, a separate process in place of Kinesis, has them: it decodes every aggregated record and checks each user record's
data, key and shard. Rounds are interleaved and each trial is a fresh process. A ratio is the median of the ratios
within a round, so a busy minute of the machine affects all rows alike. The ratios are similar on every machine:
requests beside those of a bare httptools protocol that answers a constant, under the same load; and records beside
those of raw boto3, which puts the same records to the same sink without a gateway, 500 in each call.
"""

import argparse
import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from benchmarks.compiled import DIRECTORY, why_not_built
from benchmarks.http_load import HttpLoad, Manner
from benchmarks.machine import cores, describe_machine, pin_to
from benchmarks.sink_process import REPOSITORY, running_sink
from benchmarks.trial import call_sink
from benchmarks.workload import STREAM_NAME, Workload

BOTO3: Final = "raw boto3"
MOST_SECONDS: Final = 30.0
_NDJSON: Final = "application/x-ndjson"
_DELIVERED: Final = "?ack=delivered"


class Load(NamedTuple):
    """Connections, and the requests a second over all of them; 0: each connection sends when it is answered."""

    connections: int
    rate: int

    def __str__(self) -> str:
        offered = f"{self.rate:,}/s" if self.rate else "saturated"
        return f"{self.connections:,} connections, {offered}"


_FEW, _SOME, _FULL = Load(64, 3_000), Load(256, 6_000), Load(1_000, 0)
# Each record waits up to 100 ms for others, and its connection with it.
_WAITING, _MANY_WAITING = Load(256, 1_500), Load(1_000, 6_000)
# Of 100 records each.
_BULK, _BULK_WAITING = Load(64, 600), Load(256, 600)
_SLOW: Final = Load(64, 1_500)
_SATURATED_REQUESTS_PER_SECOND: Final = 12_000


@dataclass(frozen=True)
class Row:
    """One subject with one kind of request."""

    name: str
    app: str
    records_per_request: int = 1
    load: Load = _FEW
    content_type: str = "application/json"
    query: str = ""
    #: The folder from which its server imports the packages.
    directory: Path = REPOSITORY
    #: The wire format to Kinesis.
    wire_path: str = "fast"

    def requests(self, seconds: float) -> int:
        """Return how many requests take about so many seconds."""
        return int(seconds * (self.load.rate or _SATURATED_REQUESTS_PER_SECOND))


def rows() -> list[Row]:
    """Return the rows; single records first, each beside its comparison."""
    compiled: Any = {"directory": DIRECTORY}
    ndjson: Any = {"records_per_request": 100, "load": _BULK, "content_type": _NDJSON}
    delivered: Any = ndjson | {"load": _BULK_WAITING, "query": _DELIVERED}
    loads = (_FEW, _SOME, _FULL)
    waiting = (_WAITING, _MANY_WAITING, _FULL)
    return [
        Row(BOTO3, BOTO3, 100, Load(1, 150)),
        *(Row("bare protocol", "protocol", load=load) for load in dict.fromkeys((*loads, *waiting, _SLOW, _BULK))),
        *(Row("bare protocol that puts", "putting", load=load) for load in loads),
        *(Row("gateway, 1 record, queued", "gateway", load=load) for load in loads),
        *(Row("gateway, 1 record, delivered", "gateway", load=load, query=_DELIVERED) for load in waiting),
        Row("bare ASGI, 1 record", "bare", load=_FEW),
        Row("gateway mounted in FastAPI, 1 record, queued", "mounted", load=_SLOW),
        Row("FastAPI + pydantic, 1 record", "fastapi", load=_SLOW),
        Row("gateway, NDJSON of 100, queued", "gateway", **ndjson),
        Row("gateway, NDJSON of 100, queued, CBOR", "gateway", wire_path="cbor", **ndjson),
        Row("gateway, NDJSON of 100, delivered", "gateway", **delivered),
        Row("gateway mounted in FastAPI, NDJSON of 100, queued", "mounted", **ndjson),
        Row("gateway, JSON of 100, queued", "gateway", 100, _BULK),
        Row("FastAPI + pydantic, JSON of 100", "fastapi", 100, Load(64, 300)),
        # The same with the compiled wheel (`benchmarks.compiled`).
        *(Row("bare protocol that puts, compiled", "putting", load=load, **compiled) for load in loads),
        *(Row("gateway compiled, 1 record, queued", "gateway", load=load, **compiled) for load in loads),
        Row("gateway compiled, NDJSON of 100, queued", "gateway", **ndjson, **compiled),
        Row("gateway compiled, NDJSON of 100, queued, CBOR", "gateway", wire_path="cbor", **ndjson, **compiled),
        Row("gateway compiled, NDJSON of 100, delivered", "gateway", **delivered, **compiled),
    ]


@dataclass(frozen=True)
class Figures:
    """One trial."""

    microseconds: float
    records_per_cpu_second: float
    requests_per_second: float
    p99_ms: float


class Trial(NamedTuple):
    """What all trials have: the generator, the sink, the cores, and for how long to send."""

    load: HttpLoad
    endpoint_url: str
    placed_on: tuple[int | None, int | None]
    seconds: float

    def measure(self, row: Row) -> Figures:
        """Run one trial; AssertionError if the sink does not have every record, whole and in its shard."""
        requests = row.requests(self.seconds)
        count = requests * row.records_per_request
        workload = Workload(data_bytes=200, record_count=count)
        call_sink(self.endpoint_url, "/open", {"workload": workload.fields()})
        if row.app == BOTO3:
            cpu, wall = raw_boto3(self.endpoint_url, workload, self.placed_on[0])
            return Figures(1e6 * cpu / requests, count / cpu, requests / wall, 0.0)
        with running_server(row, self.endpoint_url, self.placed_on[0]) as (port, pid):
            self._send(port, row, requests_of(row, workload, count, count + 200 * row.records_per_request))
            time.sleep(0.5)
            call_sink(self.endpoint_url, "/start", {})
            before = cpu_seconds(pid)
            result = self._send(port, row, requests_of(row, workload, 0, count))
            report = report_of(self.endpoint_url, count) if row.app not in {"protocol", "bare"} else None
            cpu = cpu_seconds(pid) - before
            if report is not None:
                assert report["user_records"] == count, report
                wrong = {name: report[name] for name in ("misrouted", "wrong_keys", "malformed", "duplicated", "lost")}
                assert not any(wrong.values()), (row.name, wrong)
        return Figures(1e6 * cpu / requests, count / cpu, requests / result["seconds"], result["p99_ms"])

    def _send(self, port: int, row: Row, requests: list[bytes]) -> dict[str, Any]:
        """Send each request once, and return what the clients printed."""
        manner = Manner(order="once", is_random=bool(row.load.rate))
        connections, rate = row.load
        clients = self.load.start(
            port, requests, connections=connections, rate=rate, seconds=MOST_SECONDS, manner=manner
        )
        result = clients.result()
        accepted = sum(result["answers"].get(status, 0) for status in ("200", "202"))
        assert accepted == result["sent"] == len(requests), (row.name, result)
        return result


def raw_boto3(endpoint_url: str, workload: Workload, cpu: int | None) -> tuple[float, float]:
    """Put the workload with boto3 alone; return the seconds of CPU and of wall time."""
    task: dict[str, Any] = {"endpoint_url": endpoint_url, "control_url": endpoint_url, "cpu": cpu, "options": {}}
    command = [sys.executable, "-m", "benchmarks.peer_programs.raw_boto3"]
    given = json.dumps({**task, "workload": workload.fields()})
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    finished = subprocess.run([*command, given], cwd=REPOSITORY, env=environment, capture_output=True, check=True)
    answer = json.loads(finished.stdout)
    assert answer["acknowledged"] == workload.record_count, answer
    return answer["cpu_seconds"], answer["wall_seconds"]


def report_of(endpoint_url: str, count: int) -> dict[str, Any]:
    """Return the sink's report once it has so many user records, or when the time is over."""
    deadline = time.monotonic() + MOST_SECONDS
    while True:
        # The last aggregated records wait 100 ms to be batched; a busy machine takes longer.
        time.sleep(0.4)
        report = call_sink(endpoint_url, "/report")
        if report["user_records"] >= count or time.monotonic() > deadline:
            return report


def requests_of(row: Row, workload: Workload, start: int, stop: int) -> list[bytes]:
    """Return complete HTTP requests."""
    made = []
    path = f"/v1/streams/{STREAM_NAME}/records{row.query}"
    for first in range(start, stop, row.records_per_request):
        records = [
            {"partition_key": key, "data": data.decode()}
            for key, data in workload.records(first, first + row.records_per_request)
        ]
        if row.content_type.endswith("ndjson"):
            body = b"\n".join(json.dumps(record).encode() for record in records)
        else:
            body = json.dumps(records[0] if row.records_per_request == 1 else {"records": records}).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nuser-agent: benchmark\r\naccept: */*\r\n"
            f"content-type: {row.content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        made.append(head.encode() + body)
    return made


@contextlib.contextmanager
def running_server(row: Row, endpoint_url: str, cpu: int | None) -> Iterator[tuple[int, int]]:
    """Run the server of a row on its core; yield its port and process id."""
    command = [sys.executable, "-m", "benchmarks.ingest_server", row.app, endpoint_url]
    if cpu is not None:
        command += ["--cpu", str(cpu)]
    with subprocess.Popen(
        command,
        cwd=row.directory,
        env={**os.environ, "KPL_INGEST_WIRE_PATH": row.wire_path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            port = server.stdout.readline().strip()
            if not port:
                message = f"the {row.app} server stopped before it listened; its error is above"
                raise RuntimeError(message)
            yield int(port), server.pid
        finally:
            server.stdin.close()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()


def cpu_seconds(pid: int) -> float:
    """Return user and system time of all threads of a process, more exact than one tick (clock_getcpuclockid(3))."""
    clock = ctypes.c_int()
    if ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)):
        message = f"process {pid} has ended; its error is above"
        raise RuntimeError(message)
    return time.clock_gettime(clock.value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of load in each trial")
    parser.add_argument("--only", default="", help="rows whose name contains the words, and their comparisons")
    parser.add_argument("--beside", type=Path, default=None, help="another checkout, whose gateway is measured too")
    arguments = parser.parse_args()
    wanted = wanted_rows(arguments.only, arguments.beside)
    placed_on, placement = cores()
    pin_to(placed_on[1])
    figures: dict[Row, list[Figures]] = {row: [] for row in wanted}
    with running_sink(placed_on[1]) as sink, tempfile.TemporaryDirectory() as folder:
        trial = Trial(HttpLoad(Path(folder)), sink.url, placed_on, arguments.seconds)
        for _ in range(arguments.rounds):
            for row in wanted:
                figures[row].append(trial.measure(row))
                print(row.name, row.load, figures[row][-1], file=sys.stderr, flush=True)
    print(f"{describe_machine()}. {placement} {arguments.rounds} interleaved rounds, load {os.getloadavg()[0]:.1f}.")
    print_table(figures)
    return 0


def wanted_rows(words: str, beside: Path | None) -> list[Row]:
    """Return the rows to measure."""
    found = [row for row in rows() if words.lower() in row.name.lower()]
    missing = why_not_built()
    if missing:
        print(f"The compiled gateway is not measured: {missing}.", file=sys.stderr)
        found = [row for row in found if row.directory == REPOSITORY]
    if beside is not None:
        found += [replace(row, name=f"beside: {row.name}", directory=beside) for row in found if row.app == "gateway"]
    loads = {row.load for row in found}
    compared = [row for row in rows() if row.app == BOTO3 or (row.app == "protocol" and row.load in loads)]
    return list(dict.fromkeys(compared + found))


def print_table(figures: dict[Row, list[Figures]]) -> None:
    """Print the median of each row's trials, and their range."""
    print(
        "| what | load | requests/s | p99, ms | us of CPU / request | of bare protocol | records / CPU-s | of boto3 |"
    )
    print("|---" * 8 + "|")
    boto3 = next(trials for row, trials in figures.items() if row.app == BOTO3)
    bare = {row.load: trials for row, trials in figures.items() if row.app == "protocol"}
    for row, trials in figures.items():
        beside = bare.get(row.load, []) if row.app != BOTO3 else []
        of_bare = [each.microseconds / other.microseconds for each, other in zip(trials, beside, strict=False)]
        of_boto3 = [
            each.records_per_cpu_second / other.records_per_cpu_second
            for each, other in zip(trials, boto3, strict=True)
        ]
        columns = [
            f"{median(each.requests_per_second for each in trials):,.0f}",
            # The clients count latencies from the second second on.
            f"{median(each.p99_ms for each in trials):,.1f}" if trials[0].p99_ms > 0.0 else "",
            _spread([each.microseconds for each in trials], 1),
            _spread(of_bare, 2) if of_bare else "",
            _spread([each.records_per_cpu_second for each in trials], 0),
            _spread(of_boto3, 2) if row.app not in {"protocol", "bare"} else "",
        ]
        print(f"| {row.name} | {row.load} | {' | '.join(columns)} |")


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{median(values):,.{digits}f} [{min(values):,.{digits}f} - {max(values):,.{digits}f}]"


if __name__ == "__main__":
    sys.exit(main())
