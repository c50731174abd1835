"""python -m benchmarks.large_bodies: how long a small request waits beside each large body.

A gateway runs in a process of its own, with uvloop and a transport that answers at once. A probe sends small POSTs over
one connection, one every 2 ms, while other connections send one large body after the other. For each kind of body the
table has the longest wait of a small request, without the time in which other processes had the gateway's core. It is
the least of some repetitions, because a busy machine only adds to it. `--packages DIR` measures the packages of another
checkout.
"""

import argparse
import asyncio
import base64
import contextlib
import dataclasses
import gzip
import importlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

RECORDS: Final = "/v1/streams/orders/records"
JSON, NDJSON, EVENTS = "application/json", "application/x-ndjson", "application/cloudevents-batch+json"
PROTOBUF: Final = "application/x-protobuf"
COUNT: Final = 9_900
MOST_MS: Final = 25
_EVERY_SECONDS: Final = 0.002
# The start of a request, with its header fields.
_HEAD_BYTES: Final = 1_024
_REPOSITORY: Final = Path(__file__).resolve().parents[1]
_SETTINGS: Final = {"region": "us-east-1", "max_outstanding_records": 1_000_000, "max_outstanding_bytes": 1 << 30}


class Large(NamedTuple):
    """A kind of large body: how to make it, and the answer that it gets."""

    name: str
    make: Callable[[], bytes]
    status: int = 202


def post(path: str, content_type: str, body: bytes, *fields: str) -> bytes:
    """Return a request of the tenant `busy`."""
    head = [f"POST {path} HTTP/1.1", "Host: x", "Authorization: Bearer busy", f"Content-Type: {content_type}", *fields]
    return "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body


def lines(data_bytes: int, form: str = "text", count: int = COUNT) -> list[bytes]:
    """Return records in one of the forms of JSON."""
    text = ("order " * (data_bytes // 6 + 1))[:data_bytes]
    members: dict[str, Callable[[int], dict[str, Any]]] = {
        "text": lambda _: {"data": text},
        "umlauts": lambda _: {"data": text.replace("e", "ü")},
        "escapes": lambda _: {"data": text.replace("o", '"')},
        "object": lambda _: {"data": {"text": text, "nested": [{"a": [1, {"b": 2}]}]}},
        "base64": lambda _: {"data_base64": base64.b64encode(text.encode()).decode()},
        "hash key": lambda number: {"data": text, "explicit_hash_key": str((number * 7919 % 10_000) << 114)},
        "bad": lambda number: {"data": text, "x": 1} if number % 10 == 0 else {"data": text},
    }
    made = members[form]
    return [
        json.dumps({"partition_key": f"customer-{number % 1_000}", **made(number)}, ensure_ascii=False).encode()
        for number in range(count)
    ]


def ndjson(data_bytes: int, form: str = "text") -> bytes:
    """Return a body of NDJSON."""
    return b"\n".join(lines(data_bytes, form))


def envelope(data_bytes: int, form: str = "text") -> bytes:
    """Return a JSON body of many records."""
    return b'{"records":[' + b",".join(lines(data_bytes, form)) + b"]}"


def otlp_protobuf() -> bytes:
    """Return an export request of 4,000 resources."""
    field = b"\x0a\xa0\x1f" + b"\x0a\x9d\x1f" + b"x" * 3_997
    return field * 4_000


def otlp_json() -> bytes:
    """Return the same in JSON."""
    record = {"timeUnixNano": "1", "body": {"stringValue": "x" * 900}, "attributes": [{"key": "a", "value": {}}]}
    resource = json.dumps({"resource": {}, "scopeLogs": [{"scope": {}, "logRecords": [record] * 4}]}).encode()
    return b'{"resourceLogs":[' + b",".join([resource] * 3_900) + b"]}"


def events() -> bytes:
    """Return a batch of CloudEvents."""
    event = {"specversion": "1.0", "id": "1", "source": "s", "type": "t", "data": {"text": "x" * 1_500}}
    return b"[" + b",".join([json.dumps(event).encode()] * COUNT) + b"]"


def with_array(text: bytes, piece: bytes, size: int = 1_040_000) -> bytes:
    """Return a body with a JSON array of about so many bytes, which repeats a piece, in place of its `%b`."""
    return text % (b"[" + (piece + b",") * (size // (len(piece) + 1) - 1) + piece + b"]")


def put_records(wire: str) -> bytes:
    """Return a signed PutRecords request with 500 records of 20 KB."""
    import cbor2  # noqa: PLC0415 - only the client needs these
    from botocore.auth import SigV4Auth  # noqa: PLC0415
    from botocore.awsrequest import AWSRequest  # noqa: PLC0415
    from botocore.credentials import Credentials  # noqa: PLC0415

    data = os.urandom(20_000)
    shown = data if wire == "cbor" else base64.b64encode(data).decode()
    request = {"StreamName": "orders", "Records": [{"PartitionKey": f"k{n}", "Data": shown} for n in range(500)]}
    body = cbor2.dumps(request) if wire == "cbor" else json.dumps(request).encode()
    headers = {
        "X-Amz-Target": "Kinesis_20131202.PutRecords",
        "Content-Type": f"application/x-amz-{wire}-1.1",
        "Host": "x",
    }
    made = AWSRequest(method="POST", url="http://x/", data=body, headers=headers)
    SigV4Auth(Credentials("BUSY", "secret-busy"), "kinesis", "us-east-1").add_auth(made)
    fields = [f"{name}: {value}" for name, value in made.headers.items()]
    return "\r\n".join(["POST / HTTP/1.1", *fields, f"Content-Length: {len(body)}", "", ""]).encode() + body


def zstd(body: bytes) -> bytes:
    """Compress with zstd."""
    import zstandard  # noqa: PLC0415 - only the client needs it

    return zstandard.compress(body)


def kinds() -> list[Large]:
    """Return all kinds of large bodies, most of nearly 16 MiB."""
    size = 1_600
    return [
        Large("NDJSON, text", lambda: post(RECORDS, NDJSON, ndjson(size))),
        Large("NDJSON, object", lambda: post(RECORDS, NDJSON, ndjson(size, "object"))),
        Large("NDJSON, escapes", lambda: post(RECORDS, NDJSON, ndjson(1_300, "escapes"))),
        Large("NDJSON, umlauts", lambda: post(RECORDS, NDJSON, ndjson(1_400, "umlauts"))),
        Large("NDJSON, base64", lambda: post(RECORDS, NDJSON, ndjson(1_150, "base64"))),
        Large("NDJSON, hash keys", lambda: post(RECORDS, NDJSON, ndjson(1_500, "hash key"))),
        Large("NDJSON, 9,900 small records", lambda: post(RECORDS, NDJSON, ndjson(20))),
        Large("NDJSON, small, hash keys", lambda: post(RECORDS, NDJSON, ndjson(20, "hash key"))),
        Large("NDJSON, 990 bad records", lambda: post(RECORDS, NDJSON, ndjson(size, "bad")), 400),
        Large("NDJSON, delivered", lambda: post(RECORDS + "?ack=delivered", NDJSON, ndjson(size)), 200),
        Large("NDJSON, idempotency key", lambda: post(RECORDS, NDJSON, ndjson(size), 'Idempotency-Key: "1"')),
        Large("JSON, text", lambda: post(RECORDS, JSON, envelope(size))),
        Large("JSON, object", lambda: post(RECORDS, JSON, envelope(size, "object"))),
        Large("JSON, 990 bad records", lambda: post(RECORDS, JSON, envelope(size, "bad")), 400),
        Large("NDJSON, gzip", lambda: post(RECORDS, NDJSON, gzip.compress(ndjson(size), 1), "Content-Encoding: gzip")),
        Large("NDJSON, zstd", lambda: post(RECORDS, NDJSON, zstd(ndjson(size)), "Content-Encoding: zstd")),
        Large("JSON, zstd", lambda: post(RECORDS, JSON, zstd(envelope(size)), "Content-Encoding: zstd")),
        Large("CloudEvents batch", lambda: post(RECORDS, EVENTS, events())),
        Large("OTLP, protobuf", lambda: post("/v1/logs", PROTOBUF, otlp_protobuf()), 200),
        Large("OTLP, JSON", lambda: post("/v1/logs", JSON, otlp_json()), 200),
        Large(
            "OTLP, protobuf, zstd",
            lambda: post("/v1/logs", PROTOBUF, zstd(otlp_protobuf()), "Content-Encoding: zstd"),
            200,
        ),
        Large("PutRecords, JSON", lambda: put_records("json"), 200),
        Large("PutRecords, CBOR", lambda: put_records("cbor"), 200),
        *hostile_kinds(),
    ]


def hostile_kinds() -> list[Large]:
    """Return texts that cost much to decode. A record has at most 1 MiB, and what cannot be cut 2 MiB."""
    record, line, event = (
        b'{"data":%b}',
        b'{"data":%b}\n',
        b'{"specversion":"1.0","id":"1","source":"s","type":"t","data":%b}',
    )
    chain, resource = b"[" * 50 + b"]" * 50, b'{"resourceLogs":[{"a":%b}]}'
    logs, two, one_event = "/v1/logs", 2_090_000, "application/cloudevents+json"
    escapes = b'"%b"' % (b"\\n" * 1_000_000)
    return [
        Large("a record of empty arrays", lambda: post(RECORDS, JSON, with_array(record, b"[]"))),
        Large("a record of nested arrays", lambda: post(RECORDS, JSON, with_array(record, chain))),
        Large("a record of 2 MB of arrays", lambda: post(RECORDS, JSON, with_array(record, b"[]", two)), 400),
        Large("15 lines of empty arrays", lambda: post(RECORDS, NDJSON, with_array(line, b"[]") * 15)),
        Large("15 lines of nested arrays", lambda: post(RECORDS, NDJSON, with_array(line, chain) * 15)),
        Large("15 lines of numbers", lambda: post(RECORDS, NDJSON, with_array(line, b"0") * 15)),
        Large("15 lines of escapes", lambda: post(RECORDS, NDJSON, (line % (b'"' + b"\\n" * 500_000 + b'"')) * 15)),
        Large("7 lines of 2 MB of escapes", lambda: post(RECORDS, NDJSON, (line % escapes) * 7)),
        Large("a record of 2 MB of escapes", lambda: post(RECORDS, JSON, record % escapes)),
        Large(
            "7 records of 2 MB of escapes",
            lambda: post(RECORDS, JSON, b'{"records":[%b]}' % b",".join([record % escapes] * 7)),
        ),
        Large(
            "7 lines with long names", lambda: post(RECORDS, NDJSON, (b'{"%b":1}\n' % (b"\\n" * 1_000_000)) * 7), 400
        ),
        Large(
            "15 records of arrays",
            lambda: post(RECORDS, JSON, b'{"records":[%b]}' % b",".join([with_array(record, b"[]")] * 15)),
        ),
        Large("an event of empty arrays", lambda: post(RECORDS, one_event, with_array(event, b"[]", 1_030_000))),
        Large(
            "15 events of nested arrays",
            lambda: post(RECORDS, EVENTS, b"[%b]" % b",".join([with_array(event, chain, 1_030_000)] * 15)),
        ),
        Large("OTLP, JSON, a resource of arrays", lambda: post(logs, JSON, with_array(resource, b"[]")), 200),
        Large("OTLP, JSON, nested arrays", lambda: post(logs, JSON, with_array(resource, chain)), 200),
        Large("OTLP, JSON, 2 MB of arrays", lambda: post(logs, JSON, with_array(resource, b"[]", two)), 413),
        Large("OTLP, JSON, 2 MB of nested arrays", lambda: post(logs, JSON, with_array(resource, chain, two)), 413),
        Large(
            "OTLP, JSON, 2 MB in another member",
            lambda: post(logs, JSON, with_array(b'{"a":%b,"resourceLogs":[]}', chain, two)),
            200,
        ),
    ]


class Gateway(NamedTuple):
    """The process under measurement."""

    pid: int
    port: int

    def waited_seconds(self) -> float:
        """Return how long its threads could have run, but other processes had the core."""
        nanoseconds = 0
        for schedule in Path(f"/proc/{self.pid}/task").glob("*/schedstat"):
            with suppress(FileNotFoundError):
                nanoseconds += int(schedule.read_text().split()[1])
        return nanoseconds / 1e9


def exchange(connection: socket.socket, request: bytes | memoryview) -> int:
    """Send a request, read its answer, and return the status."""
    connection.sendall(request)
    return answered(connection)


def answered(connection: socket.socket) -> int:
    """Read an answer and return its status."""
    received = b""
    while b"\r\n\r\n" not in received:
        piece = connection.recv(65_536)
        if not piece:
            return 0
        received += piece
    head, _, rest = received.partition(b"\r\n\r\n")
    left = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0) - len(rest)
    while left > 0:
        left -= len(connection.recv(65_536))
    return int(received.split(b" ", 2)[1])


def longest_wait(gateway: Gateway, large: Large, request: bytes, bodies: int, senders: int) -> float:
    """Send large bodies over some connections; return the longest wait of a small request in seconds."""
    address = ("127.0.0.1", gateway.port)
    sending = [threading.Thread(target=_send_all, args=(address, large, request, bodies)) for _ in range(senders)]
    body = b'{"partition_key":"k","data":"x"}'
    probe = post(RECORDS, JSON, body).replace(b"busy", b"quiet")
    waits: list[float] = []
    with socket.create_connection(address) as connection:
        for _ in range(20):
            exchange(connection, probe)
        for thread in sending:
            thread.start()
        while any(thread.is_alive() for thread in sending):
            stolen, began = gateway.waited_seconds(), time.perf_counter()
            status = exchange(connection, probe)
            taken = time.perf_counter() - began
            assert status == 202, status
            waits.append(taken - min(taken, gateway.waited_seconds() - stolen))
            time.sleep(_EVERY_SECONDS)
    return max(waits)


def _send_all(address: tuple[str, int], large: Large, request: bytes, bodies: int) -> None:
    with socket.create_connection(address) as connection:
        for number in range(bodies):
            key = f'Idempotency-Key: "{time.time_ns()}-{number}"'.encode()
            # Not in all of it: that holds the GIL, for which the probe waits too.
            connection.sendall(request[:_HEAD_BYTES].replace(b'Idempotency-Key: "1"', key, 1))
            status = exchange(connection, memoryview(request)[_HEAD_BYTES:])
            if status != large.status:
                print(f"{large.name}: answered {status}, not {large.status}", file=sys.stderr)
                return


@contextlib.contextmanager
def running_gateway(packages: Path, cpu: int | None, shards: int = 100) -> Iterator[Gateway]:
    """Run a gateway with the packages of this folder."""
    command = [sys.executable, str(Path(__file__).resolve()), "--serve", str(shards)]
    if cpu is not None:
        command += ["--cpu", str(cpu)]
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    with subprocess.Popen(
        command, cwd=packages, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield Gateway(process.pid, int(process.stdout.readline()))
        finally:
            process.stdin.close()
            process.wait(20)


async def _serve(shards: int) -> None:
    from benchmarks.ingest_server import TenantFairness  # type: ignore[attr-defined]  # noqa: PLC0415 - of old packages too
    from benchmarks.instant_transport import InstantTransport  # noqa: PLC0415 - only this process serves
    from kpl_integrations.ingest import IngestGateway, load_settings  # noqa: PLC0415
    from kpl_integrations.ingest.serving import GatewayServer, bound_socket  # noqa: PLC0415
    from kpl_integrations.ingest.tenants import AccessKey, CallableTenants, Tenant  # noqa: PLC0415

    importlib.import_module("cbor2")
    logging.disable()
    streams: Any = dict.fromkeys(("logs", "traces", "metrics"), "orders")
    tenants = {name: Tenant(id=name, streams=("orders",), otlp_streams=streams) for name in ("busy", "quiet")}
    keys = {name.upper(): AccessKey(name.upper(), f"secret-{name}", tenant) for name, tenant in tenants.items()}
    directory = CallableTenants(
        lambda shown: tenants.get((shown or "").removeprefix("Bearer ")),
        tenants=list(tenants.values()),
        access_keys=keys,
    )
    settings = load_settings(port=0, **_SETTINGS)
    # Not limited by the rate of a shard.
    unlimited: Any = dict.fromkeys(("rate_limit_records_per_sec_per_shard", "rate_limit_bytes_per_sec_per_shard"), 1e12)
    config = dataclasses.replace(settings.producer_config(TenantFairness(directory)), **unlimited)
    gateway = IngestGateway(settings, directory, transport=InstantTransport(shards), config=config)
    with bound_socket("127.0.0.1", 0) as listening:
        server = GatewayServer(gateway, listening)
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), server.stop, signal.SIGINT)
        await server.run(started=lambda: print(listening.getsockname()[1], flush=True))


def main() -> int:
    from benchmarks.machine import cores, describe_machine, pin_to  # noqa: PLC0415 - of the measured packages

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, default=_REPOSITORY, help="the checkout to measure")
    parser.add_argument("--only", default="", help="kinds whose name contains the words")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bodies", type=int, default=3, help="large bodies of a connection in a round")
    parser.add_argument("--senders", type=int, default=1, help="connections that send large bodies")
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--cpu", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        import uvloop  # noqa: PLC0415 - only this process serves

        pin_to(options.cpu)
        uvloop.run(_serve(options.serve))
        return 0
    (gateway_cpu, client_cpu), placement = cores()
    pin_to(client_cpu)
    wanted = [large for large in kinds() if options.only.lower() in large.name.lower()]
    waits: dict[str, list[float]] = {large.name: [] for large in wanted}
    sizes: dict[str, int] = {}
    for _ in range(options.rounds):
        for large in wanted:
            request = large.make()
            sizes[large.name] = len(request)
            with running_gateway(options.packages, gateway_cpu) as gateway:
                waits[large.name].append(1e3 * longest_wait(gateway, large, request, options.bodies, options.senders))
            print(large.name, f"{waits[large.name][-1]:.1f} ms", file=sys.stderr, flush=True)
    print(f"{describe_machine()}. {placement} {options.rounds} interleaved rounds, load {os.getloadavg()[0]:.1f}.")
    print(f"Packages of {options.packages.name}. Goal: <= {MOST_MS} ms.")
    print("| body | bytes sent | longest wait of a small request, ms, median [range] | passes |\n|---|---|---|---|")
    for name, found in waits.items():
        spread = f"{median(found):.1f} [{min(found):.1f} - {max(found):.1f}]"
        print(f"| {name} | {sizes[name]:,} | {spread} | {'yes' if max(found) <= MOST_MS else 'NO'} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
