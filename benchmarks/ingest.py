"""python -m benchmarks.ingest: measure the CPU of a gateway request, beside boto3, a bare ASGI application and FastAPI.

The unit is the CPU-second of the serving process, user and system, all its threads. Records count when the sink,
a separate process in place of Kinesis, has them: it decodes every aggregated record and checks each user record's
data, key and shard. Rounds are interleaved and each trial is a fresh process. A ratio is the median of the ratios
within a round, so a busy minute of the machine affects all rows alike. The ratios are similar on every machine:
requests beside bare ones of their size, records in the time of one bare request of one record, and records beside
those of raw boto3, which puts the same records to the same sink without a gateway, 500 in each call.
"""

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.compiled import DIRECTORY, why_not_built
from benchmarks.machine import cores, describe_machine, pin_to
from benchmarks.sink_process import REPOSITORY, running_sink
from benchmarks.trial import call_sink
from benchmarks.workload import STREAM_NAME, Workload

BOTO3: Final = "raw boto3"
MOST_SECONDS: Final = 30.0
TARGET_RECORDS_PER_CPU_SECOND: Final = 300_000
TARGET_SHARE_OF_BARE: Final = 0.6


@dataclass(frozen=True)
class Row:
    """One subject with one kind of request."""

    name: str
    app: str
    records_per_request: int
    requests: int
    content_type: str = "application/json"
    query: str = ""
    reaches_the_sink: bool = True
    #: The folder from which its server imports the packages.
    directory: Path = REPOSITORY
    #: The wire format to Kinesis.
    wire_path: str = "fast"
    #: Servers on the same core, each with as many of the connections.
    servers: int = 1
    #: Each waits for the answer to its request. So the answers of `delivered` come in bursts of so many.
    connections: int = 32


def rows(scale: float) -> list[Row]:
    """Return the rows; single records first, each beside its comparison."""
    singles, bulks = int(12_000 * scale), int(2_400 * scale)
    ndjson = "application/x-ndjson"
    compiled: Any = {"directory": DIRECTORY}
    delivered = "?ack=delivered"
    nd_100, nd_100_delivered = ("gateway", 100, bulks, ndjson), ("gateway", 100, bulks, ndjson, delivered)
    return [
        Row(BOTO3, "boto3", 100, bulks // 4),
        Row("bare ASGI, 1 record", "bare", 1, singles, reaches_the_sink=False),
        Row("gateway, 1 record, queued", "gateway", 1, singles),
        Row("gateway, 1 record, delivered", "gateway", 1, singles // 4, query=delivered),
        Row(
            "gateway, 1 record, delivered, 1,000 clients", "gateway", 1, 4 * singles, query=delivered, connections=1_000
        ),
        Row("FastAPI + pydantic, 1 record", "fastapi", 1, singles // 2),
        Row("bare ASGI, 100 records", "bare", 100, bulks, ndjson, reaches_the_sink=False),
        Row("gateway, NDJSON of 100, queued", *nd_100),
        Row("gateway, NDJSON of 100, queued, CBOR", *nd_100, wire_path="cbor"),
        Row("two gateways, NDJSON of 100, queued", *nd_100, servers=2),
        Row("gateway mounted in FastAPI, NDJSON of 100, queued", "mounted", *nd_100[1:]),
        Row("gateway mounted in FastAPI, 1 record, queued", "mounted", 1, singles // 2),
        Row("gateway, NDJSON of 100, delivered", *nd_100_delivered),
        Row("gateway, JSON of 100, queued", "gateway", 100, bulks),
        Row("FastAPI + pydantic, JSON of 100", "fastapi", 100, bulks // 4),
        # The same with the compiled wheel (`benchmarks.compiled`).
        Row("gateway compiled, 1 record, queued", "gateway", 1, singles, **compiled),
        Row("gateway compiled, NDJSON of 100, queued", *nd_100, **compiled),
        Row("gateway compiled, NDJSON of 100, queued, CBOR", *nd_100, wire_path="cbor", **compiled),
        Row("gateway compiled, NDJSON of 100, delivered", *nd_100_delivered, **compiled),
    ]


@dataclass(frozen=True)
class Figures:
    """One trial."""

    requests_per_cpu_second: float
    records_per_cpu_second: float
    requests_per_second: float


def measure(row: Row, endpoint_url: str, placed_on: tuple[int | None, int | None]) -> Figures:
    """Run one trial; AssertionError if the sink does not have every record, whole and in its shard."""
    count = row.requests * row.records_per_request
    workload = Workload(data_bytes=200, record_count=count)
    call_sink(endpoint_url, "/open", {"workload": workload.fields()})
    if row.app == "boto3":
        cpu, wall = raw_boto3(endpoint_url, workload, placed_on[0])
        return Figures(row.requests / cpu, count / cpu, row.requests / wall)
    warm_up = requests_of(row, workload, count, count + 200 * row.records_per_request)
    measured = requests_of(row, workload, 0, count)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(running_server(row, endpoint_url, placed_on[0])) for _ in range(row.servers)]
        ports = [port for port, _ in servers]
        asyncio.run(send(ports, warm_up, row.connections))
        time.sleep(0.5)
        call_sink(endpoint_url, "/start", {})
        started, before = time.perf_counter(), sum(cpu_seconds(pid) for _, pid in servers)
        asyncio.run(send(ports, measured, row.connections))
        wall = time.perf_counter() - started
        report = report_of(endpoint_url, count) if row.reaches_the_sink else None
        cpu = sum(cpu_seconds(pid) for _, pid in servers) - before
        if report is not None:
            assert report["user_records"] == count, report
            wrong = {name: report[name] for name in ("misrouted", "wrong_keys", "malformed", "duplicated", "lost")}
            assert not any(wrong.values()), (row.name, wrong)
    return Figures(row.requests / cpu, count / cpu, row.requests / wall)


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


async def send(ports: Sequence[int], requests: Sequence[bytes], count: int) -> None:
    """Send all requests over so many connections, in turn to each port. Each connection waits for its answer."""
    todo = iter(requests)
    connections = [Connection(todo) for _ in range(count)]
    loop = asyncio.get_running_loop()
    for connection, port in zip(connections, cycle(ports), strict=False):
        await loop.create_connection(lambda made=connection: made, "127.0.0.1", port)  # type: ignore[misc]
    await asyncio.gather(*(connection.done for connection in connections))


class Connection(asyncio.Protocol):
    """Sends a request when the previous one is answered with 200 or 202."""

    def __init__(self, todo: Iterator[bytes]) -> None:
        self._todo = todo
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport: Any = transport
        self._next()

    def data_received(self, data: bytes) -> None:
        """Receive an answer, complete or in pieces."""
        received = self._received = self._received + data if self._received else data
        head, separator, body = received.partition(b"\r\n\r\n")
        if not separator:
            return
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if len(body) < length:
            return
        self._received = b""
        if received[9:12] not in {b"200", b"202"}:
            self.done.set_exception(RuntimeError(received[:500].decode()))
            self._transport.close()
            return
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report that the server closed the connection."""
        if not self.done.done():
            self.done.set_exception(exc or RuntimeError("the server closed the connection"))

    def _next(self) -> None:
        request = next(self._todo, None)
        if request is None:
            self.done.set_result(None)
            self._transport.close()
        else:
            self._transport.write(request)


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
    parser.add_argument("--scale", type=float, default=1.0, help="factor for the number of requests")
    parser.add_argument("--only", default="", help="rows whose name contains the words")
    arguments = parser.parse_args()
    wanted = [row for row in rows(arguments.scale) if arguments.only.lower() in row.name.lower() or row.name == BOTO3]
    missing = why_not_built()
    if missing:
        print(f"The compiled gateway is not measured: {missing}.", file=sys.stderr)
        wanted = [row for row in wanted if row.directory == REPOSITORY]
    placed_on, placement = cores()
    pin_to(placed_on[1])
    figures: dict[str, list[Figures]] = {row.name: [] for row in wanted}
    with running_sink(placed_on[1]) as sink:
        for _ in range(arguments.rounds):
            for row in wanted:
                figures[row.name].append(measure(row, sink.url, placed_on))
    print(f"{describe_machine()}. {placement} {arguments.rounds} interleaved rounds, load {os.getloadavg()[0]:.1f}.")
    print("| what | records / CPU-s | requests / CPU-s | of bare | records per bare request | of boto3 |")
    print("|---|---|---|---|---|---|")
    boto3, smallest = figures[BOTO3], figures.get("bare ASGI, 1 record")
    for row in wanted:
        trials = figures[row.name]
        bare = figures.get(f"bare ASGI, {row.records_per_request} record{'s' * (row.records_per_request > 1)}")
        ratio = "" if bare is None else f"{median(_ratios(trials, bare)):.0%}"
        records = "" if smallest is None else f"{row.records_per_request * median(_ratios(trials, smallest)):.2f}"
        rates = [each.records_per_cpu_second for each in trials]
        of_boto3 = [rate / beside.records_per_cpu_second for rate, beside in zip(rates, boto3, strict=True)]
        requests = _spread([each.requests_per_cpu_second for each in trials])
        print(
            f"| {row.name} | {_spread(rates)} | {requests} | {ratio} | {records} | "
            f"{median(of_boto3):.2f} [{min(of_boto3):.2f} - {max(of_boto3):.2f}] |"
        )
    return 0


def _ratios(trials: list[Figures], bare: list[Figures]) -> list[float]:
    return [
        each.requests_per_cpu_second / beside.requests_per_cpu_second for each, beside in zip(trials, bare, strict=True)
    ]


def _spread(values: list[float]) -> str:
    return f"{median(values):,.0f} [{min(values):,.0f} - {max(values):,.0f}]"


if __name__ == "__main__":
    sys.exit(main())
