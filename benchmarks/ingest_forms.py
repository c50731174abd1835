"""python -m benchmarks.ingest_forms: the CPU of a gateway request in each ordinary form, beside the plainest one.

The gateway of `benchmarks.large_bodies` answers requests of some connections. The forms take turns in slices of a few
hundred requests, and the unit is the CPU time of the gateway's process alone. A ratio is the median over the rounds of
a form's time to that of text (100 records), or of the repeated request (1 record), in the same round. The sending of
the records is included. Records of 100 different keys, 200 bytes of data.
"""

import argparse
import base64
import gzip
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.ingest import cpu_seconds
from benchmarks.large_bodies import JSON, NDJSON, RECORDS, answered, post, running_gateway
from benchmarks.machine import cores, describe_machine, pin_to

RECORDS_PER_REQUEST: Final = 100
CONNECTIONS: Final = 16
TEXT: Final = "order " * 33
# At most, as ratios.
GOALS: Final = {"object": 1.15, "no keys": 1.15, "chunked": 1.15, "base64": 1.35, "gzip": 1.35, "hash key": 1.3}
CHANGING_GOAL: Final = 1.3


def body(form: str, first: int = 0) -> bytes:
    """Return NDJSON of 100 records in one of the forms."""
    members: dict[str, Callable[[int], dict[str, Any]]] = {
        "text": lambda _: {"data": TEXT},
        "object": lambda _: {"data": {"order": 42, "text": TEXT[:170]}},
        "base64": lambda _: {"data_base64": base64.b64encode(TEXT.encode()).decode()},
        "hash key": lambda number: {
            "data": TEXT,
            "explicit_hash_key": str((first + number) * 0x9E3779B97F4A7C15F39CC0605CEDC834 % (1 << 128)),
        },
    }
    made = members.get(form, members["text"])
    numbers = range(RECORDS_PER_REQUEST)
    keys = [{} if form == "no keys" else {"partition_key": f"customer-{number}"} for number in numbers]
    return b"\n".join(json.dumps({**keys[number], **made(number)}).encode() for number in numbers)


def bulk_requests() -> dict[str, list[bytes]]:
    """Return requests of 100 records by form; text comes first."""
    made = {form: [post(RECORDS, NDJSON, body(form))] for form in ("text", "object", "base64", "no keys")}
    made["hash key"] = [post(RECORDS, NDJSON, body("hash key", 100 * number)) for number in range(20)]
    made["gzip"] = [post(RECORDS, NDJSON, gzip.compress(body("text"), 6), "Content-Encoding: gzip")]
    head, _, text = made["text"][0].partition(b"\r\n\r\n")
    head = head[: head.rindex(b"\r\n")] + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
    made["chunked"] = [head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(text), text)]
    return made


def single_requests() -> dict[str, list[bytes]]:
    """Return requests of 1 record by what changes in their heads; nothing comes first."""
    record = b'{"partition_key":"customer-42","data":"%b"}' % TEXT.encode()
    traced = [f"traceparent: 00-{number:032x}-{number:016x}-01" for number in range(1, 500)]
    plain = post(RECORDS, JSON, record, traced[0])
    return {
        "repeated": [plain],
        "traceparent": [post(RECORDS, JSON, record, each) for each in traced],
        "tenants": [plain, plain.replace(b"busy", b"quiet")],
    }


def slice_seconds(connections: list[socket.socket], pid: int, requests: Iterator[bytes], count: int) -> float:
    """Send so many requests over each connection; return the CPU seconds of the gateway for each request."""
    before = cpu_seconds(pid)
    for request in islice(requests, count):
        for connection in connections:
            connection.sendall(request)
        statuses = {answered(connection) for connection in connections}
        assert statuses == {202}, f"{statuses}; 429 means that the loop was late: run this on a quieter machine"
    return (cpu_seconds(pid) - before) / count / len(connections)


def measured(pid: int, port: int, forms: dict[str, list[bytes]], rounds: int, count: int) -> None:
    """Print a line for each form."""
    taken: dict[str, list[float]] = {form: [] for form in forms}
    requests = {form: cycle(each) for form, each in forms.items()}
    with ExitStack() as stack:
        opened = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(CONNECTIONS)]
        for number in range(rounds + 1):
            for form in forms:
                seconds = slice_seconds(opened, pid, requests[form], count)
                if number:
                    taken[form].append(seconds)
            time.sleep(0.2)
    first = next(iter(taken.values()))
    for form, times in taken.items():
        ratio = median(each / beside for each, beside in zip(times, first, strict=True))
        goal = GOALS.get(form, CHANGING_GOAL if form in {"traceparent", "tenants"} else 1.0)
        print(f"| {form} | {1e6 * median(times):,.1f} | {ratio:.2f} | {goal:.2f} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    (gateway_cpu, client_cpu), placement = cores()
    pin_to(client_cpu)
    print(f"{describe_machine()}. {placement} Packages of {options.packages.name}.")
    print("| form | us of CPU a request | ratio | goal |\n|---|---|---|---|")
    with running_gateway(options.packages, gateway_cpu, shards=4) as gateway:
        measured(gateway.pid, gateway.port, bulk_requests(), options.rounds, 20)
        measured(gateway.pid, gateway.port, single_requests(), options.rounds, 200)
    return 0


if __name__ == "__main__":
    sys.exit(main())
