"""Measure what a gateway request costs between `data_received` and `transport.write`, without a socket.

    python -m benchmarks.request_cost                      calls, files and CPU time by form
    python -m benchmarks.request_cost --beside DIRECTORY   and the ratios to another checkout, in interleaved pairs

*Calls* are those of Python functions of `kpl_core` and `kpl_integrations` for one warm request that is alone in its
iteration of the event loop, and *files* are the files that these functions are in. "new head" is the first request of a
connection. *us* is CPU time with requests of 32 connections in each iteration, the lowest of several repeats; the
sending of the records to a transport that answers at once is included. A ratio is the median over the pairs.
"""

import argparse
import asyncio
import gc
import gzip
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, Final, NamedTuple

import uvicorn
from uvicorn.server import ServerState

from benchmarks.instant_transport import InstantTransport
from benchmarks.machine import cores, pin_to
from kpl_integrations.ingest import IngestGateway, load_settings
from kpl_integrations.ingest.fast_path.protocol import GatewayConnection
from kpl_integrations.ingest.tenants import OpenTenants, Tenant

REPOSITORY: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = (str(REPOSITORY / "kpl_core"), str(REPOSITORY / "kpl_integrations"))
CONNECTIONS: Final = 32
PAIRS: Final = 9
REPEATS: Final = 15
RECORDS: Final = "/v1/streams/orders/records"
_TEXT: Final = "order " * 33
_ONE: Final = json.dumps({"partition_key": "customer-42", "data": _TEXT}).encode()
_MANY: Final = b"\n".join(
    json.dumps({"partition_key": f"customer-{number}", "data": _TEXT}).encode() for number in range(100)
)
_EVENT: Final = json.dumps({"specversion": "1.0", "id": "1", "source": "s", "type": "t", "data": {"t": _TEXT}}).encode()
_LOGS: Final = json.dumps(
    {"resourceLogs": [{"resource": {}, "scopeLogs": [{"logRecords": [{"body": {"stringValue": _TEXT}}]}]}]}
).encode()
_PUT: Final = json.dumps({"StreamName": "orders", "PartitionKey": "customer-42", "Data": "b3JkZXIg" * 25}).encode()


def post(target: str, content_type: str, body: bytes, *fields: str) -> bytes:
    """Return a request."""
    head = [f"POST {target} HTTP/1.1", "host: x", f"content-type: {content_type}", *fields]
    return "\r\n".join([*head, f"content-length: {len(body)}", "", ""]).encode() + body


class Form(NamedTuple):
    """A request, how often each connection sends it in a repeat, and whether its key has to be new."""

    request: bytes
    times: int = 20
    is_keyed: bool = False

    def requests(self) -> Iterator[bytes]:
        """Return requests without end."""
        number = 0
        while True:
            number += 1
            key = hashlib.md5(b"%d" % number, usedforsecurity=False).hexdigest().encode() if self.is_keyed else b""
            yield self.request.replace(b"0" * 32, key) if key else self.request


FORMS: Final = {
    "JSON, queued": Form(post(RECORDS, "application/json", _ONE)),
    "JSON, queued, gzip": Form(post(RECORDS, "application/json", gzip.compress(_ONE), "content-encoding: gzip")),
    "JSON, delivered": Form(post(RECORDS + "?ack=delivered", "application/json", _ONE)),
    "JSON, idempotency key": Form(
        post(RECORDS, "application/json", _ONE, "idempotency-key: " + "0" * 32), is_keyed=True
    ),
    "NDJSON of 100, queued": Form(post(RECORDS, "application/x-ndjson", _MANY), 5),
    "NDJSON of 100, delivered": Form(post(RECORDS + "?ack=delivered", "application/x-ndjson", _MANY), 5),
    "CloudEvent, queued": Form(post(RECORDS, "application/cloudevents+json", _EVENT)),
    "octets, queued": Form(post(RECORDS, "application/octet-stream", _TEXT.encode(), "x-partition-key: k")),
    "OTLP logs": Form(post("/v1/logs", "application/json", _LOGS)),
    "Kinesis PutRecord": Form(
        post("/", "application/x-amz-json-1.1", _PUT, "x-amz-target: Kinesis_20131202.PutRecord")
    ),
    "JSON, refused (400)": Form(post(RECORDS, "application/json", b"{")),
    "200 KB of NDJSON, queued": Form(post(RECORDS, "application/x-ndjson", b"\n".join([_MANY] * 8)), 1),
}


class Wire(asyncio.Transport):
    """Counts the answers of a server."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = 0
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Count an answer."""
        sys.setprofile(None)
        self.answers += bytes(data[:9]) == b"HTTP/1.1 "

    def is_closing(self) -> bool:
        """Return False until the server closes the connection."""
        return self.is_closed

    def close(self) -> None:
        """Close."""
        self.is_closed = True

    def pause_reading(self) -> None:
        """Do nothing."""

    resume_reading = pause_reading


class Line(NamedTuple):
    """One connection."""

    wire: Wire
    protocol: Any

    async def answered(self, count: int) -> None:
        """Wait until so many answers are written."""
        rounds = 0
        while self.wire.answers < count:
            # Results need the time that records may wait for others.
            await asyncio.sleep(0 if rounds < 50 else 0.001)
            rounds += 1


@asynccontextmanager
async def open_lines(count: int, *, buffered_ms: int = 1) -> AsyncIterator[list[Line]]:
    """Return so many connections to a gateway."""
    settings = load_settings(record_max_buffered_time_ms=buffered_ms, max_outstanding_records=10**6)
    tenants = OpenTenants(Tenant(id="local", otlp_streams={"logs": "orders"}))
    gateway = IngestGateway(settings, tenants, transport=InstantTransport(4))
    kind: Any = GatewayConnection.for_gateway(gateway, settings)
    config = uvicorn.Config(gateway, http=kind, lifespan="off", ws="none", log_config=None, access_log=False)
    config.load()
    state = ServerState()
    async with gateway:
        lines = [Line(Wire(), kind(config=config, server_state=state, app_state={})) for _ in range(count)]
        for line in lines:
            line.protocol.connection_made(line.wire)
        yield lines
        for line in lines:
            line.protocol.connection_lost(None)


class Calls:
    """Counts calls of Python functions, and the files that they are in."""

    def __init__(self) -> None:
        self.count = 0
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Note an event of the profiler."""
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGES):
            self.count += 1
            self.files.add(frame.f_code.co_filename)


async def counted(form: Form, *, is_warm: bool) -> Calls:
    """Count the calls of one request."""
    calls, requests = Calls(), form.requests()
    async with open_lines(2, buffered_ms=100) as (warm, new):
        for number in range(12):
            # The shards are known after the first requests, and those are sent.
            if number == 6:
                await asyncio.sleep(0.3)
            warm.protocol.data_received(next(requests))
            await warm.answered(number + 1)
        line = warm if is_warm else new
        wanted = line.wire.answers + 1
        sys.setprofile(calls)
        line.protocol.data_received(next(requests))
        await line.answered(wanted)
    return calls


async def seconds_of(form: Form) -> float:
    """Return the CPU seconds of a request, the lowest of all repeats."""
    requests, lowest = form.requests(), float("inf")
    async with open_lines(CONNECTIONS) as lines:
        for repeat in range(REPEATS + 2):
            gc.collect()
            started = time.process_time()
            for _ in range(form.times):
                wanted = lines[0].wire.answers + 1
                for line in lines:
                    line.protocol.data_received(next(requests))
                for line in lines:
                    await line.answered(wanted)
            seconds = (time.process_time() - started) / form.times / len(lines)
            # The first repeats learn heads and keys.
            lowest = min(lowest, seconds) if repeat > 1 else lowest
    return lowest


def measure(names: list[str]) -> dict[str, float]:
    """Return the CPU seconds by form."""
    pin_to(cores()[0][0])
    # As `kpl serve`.
    gc.set_threshold(50_000, 20, 20)
    return {name: asyncio.run(seconds_of(FORMS[name])) for name in names}


def measured_in(directory: Path, names: list[str]) -> dict[str, float]:
    """Measure a checkout in a new process, with this program."""
    command = [sys.executable, str(Path(__file__).resolve()), "--json", "--forms", ";".join(names)]
    environment = {**os.environ, "PYTHONPATH": f"{directory}:{REPOSITORY}"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, cwd=directory)
    return json.loads(ran.stdout)  # type: ignore[no-any-return] # as --json prints it


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, default=None, help="another checkout")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--forms", default=";".join(FORMS), help="names, with semicolons between them")
    parser.add_argument("--json", action="store_true", help="print the CPU seconds by form as JSON")
    parser.add_argument("--calls", action="store_true", help="print only calls and files")
    arguments = parser.parse_args()
    names = arguments.forms.split(";")
    if arguments.json:
        print(json.dumps(measure(names)))
        return
    print("| form | calls | files | new head: calls | files |\n| --- | --- | --- | --- | --- |")
    for name in names:
        warm, new = (asyncio.run(counted(FORMS[name], is_warm=is_warm)) for is_warm in (True, False))
        print(f"| {name} | {warm.count} | {len(warm.files)} | {new.count} | {len(new.files)} |", flush=True)
    if arguments.calls:
        return
    beside = arguments.beside
    found: list[tuple[dict[str, float], dict[str, float]]] = []
    for _ in range(arguments.pairs):
        other = {} if beside is None else measured_in(beside, names)
        found.append((measured_in(REPOSITORY, names), other))
    print("\n| form | us | us beside | ratio | lowest and highest |\n| --- | --- | --- | --- | --- |")
    for name in names:
        own = median(mine[name] for mine, _ in found) * 1e6
        if beside is None:
            print(f"| {name} | {own:.1f} | | | |")
            continue
        ratios = sorted(mine[name] / other[name] for mine, other in found)
        past = median(other[name] for _, other in found) * 1e6
        print(f"| {name} | {own:.1f} | {past:.1f} | {median(ratios):.3f} | {ratios[0]:.2f} to {ratios[-1]:.2f} |")


if __name__ == "__main__":
    main()
