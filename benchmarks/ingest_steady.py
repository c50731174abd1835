"""python -m benchmarks.ingest_steady: a gateway below its capacity: how late it answers, and what workers cost.

*Latency.* Requests of one record arrive at random times, as those of many independent clients, at the rate that takes
70 % of the CPU time of the gateway's core. That rate is found first, by requests at random times too: a gateway with
less to do costs more for each request. Latency counts from the instant at which a request was due. The rows: requests
with ack=queued; a few with ack=delivered beside them; and ack=delivered alone, at 70 % again. "Waited" is the part of
the time in which the gateway could have run and other processes had its core.

*Workers.* `kpl serve` with one worker, with one at half the rate, with two at the same rate, and with two at twice the
rate, gets NDJSON of 100 records. The unit is the CPU time of all its processes for a record. They share one core, so
that two of them do not slow each other down as two cores of one machine may. A worker with less to do costs more for
each record: the second row says how much of the third that is. The shards have their real limits.

The load is sent by `http_load.c`. Rounds are interleaved, and each trial is a fresh gateway. `--beside DIRECTORY`
measures another checkout in the same rounds.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from benchmarks.http_load import HttpLoad, Manner
from benchmarks.ingest import Row, cpu_seconds, running_server
from benchmarks.ingest_floods import BUFFERED_MS, Flood, request
from benchmarks.large_bodies import Gateway
from benchmarks.machine import cores, describe_machine, pin_to
from benchmarks.sink_process import REPOSITORY, running_sink
from benchmarks.trial import call_sink
from benchmarks.workload import STREAM_NAME, Workload

LOAD: Final = 0.7
_KEYS: Final = 1_000
_AT_RANDOM: Final = Manner(order="turns", is_random=True)
_ONE: Final = Flood(name="one")
_DELIVERED: Final = "?ack=delivered"
# Enough connections that one is free when a request is due.
_CONNECTIONS: Final = {"": 256, _DELIVERED: 2_000}
_BESIDE_PER_SECOND: Final = 40
_SHARDS: Final = 32
_WARM_UP_SECONDS: Final = 6.0
_RECORDS: Final = 100
# Goals: queued p99, delivered p50, and the cost of a record with two workers beside that with one.
_MOST_QUEUED_P99_MS: Final = 15
_MOST_DELIVERED_P50_MS: Final = BUFFERED_MS + 15
_MOST_WORKERS_RATIO: Final = 1.15
_NAMES: Final = ("queued", "delivered, beside these", "delivered alone")
_GOALS: Final = (
    f"p99 <= {_MOST_QUEUED_P99_MS}",
    f"p50 <= {_MOST_DELIVERED_P50_MS}",
    f"p50 <= {_MOST_DELIVERED_P50_MS}",
)


class Workers(NamedTuple):
    """A row of the workers' table."""

    processes: int
    records_per_second: int


class Latency(NamedTuple):
    """One row of one trial; milliseconds."""

    per_second: float
    core_share: float
    waited_share: float
    p50: float
    p99: float
    longest: float


def latencies(load: HttpLoad, seconds: float, endpoint_url: str, directory: Path, cpu: int | None) -> list[Latency]:
    """Run one trial of so many seconds, and return the figures of each of `_NAMES`."""
    call_sink(endpoint_url, "/open", {"workload": Workload(data_bytes=200, shard_count=16).fields()})
    found: list[Latency] = []
    with running_server(Row("", "gateway", directory=directory), endpoint_url, cpu) as (port, pid):
        gateway = Gateway(pid, port)
        for query, connections in _CONNECTIONS.items():
            sent = [request("local", _ONE, query, first=number) for number in range(_KEYS)]
            full = load.start(port, sent, connections=connections // 4, rate=0, seconds=1.0).result()
            rate = LOAD / 2 * _accepted(full)
            for _ in range(2):
                before, started = cpu_seconds(pid), time.monotonic()
                _accepted(
                    load.start(port, sent, connections=connections, rate=rate, seconds=2.0, manner=_AT_RANDOM).result()
                )
                rate *= LOAD * (time.monotonic() - started) / (cpu_seconds(pid) - before)
            before, waited, started = cpu_seconds(pid), gateway.waited_seconds(), time.monotonic()
            sent_with: Any = {"seconds": seconds, "manner": _AT_RANDOM}
            clients = [load.start(port, sent, connections=connections, rate=rate, **sent_with)]
            if not query:
                beside = [request("local", _ONE, _DELIVERED)]
                clients.append(load.start(port, beside, connections=50, rate=_BESIDE_PER_SECOND, **sent_with))
            results = [each.result() for each in clients]
            took = time.monotonic() - started
            shares = (cpu_seconds(pid) - before) / took, (gateway.waited_seconds() - waited) / took
            for result in results:
                accepted = _accepted(result) / seconds
                found.append(Latency(accepted, *shares, result["p50_ms"], result["p99_ms"], result["max_ms"]))
            call_sink(endpoint_url, "/start", {})
    return found


def _accepted(result: dict[str, Any]) -> int:
    """Return how many requests were accepted: all of them."""
    accepted = sum(count for status, count in result["answers"].items() if status in {"200", "202"})
    if not accepted or accepted != result["sent"]:
        message = f"not all requests were accepted: {result}"
        raise RuntimeError(message)
    return int(accepted)


def cost_of_a_record(
    load: HttpLoad, seconds: float, endpoint_url: str, directory: Path, workers: Workers, cpu: int | None
) -> float:
    """Return the microseconds of CPU time of all processes for a record."""
    call_sink(endpoint_url, "/open", {"workload": Workload(data_bytes=200, shard_count=_SHARDS).fields()})
    sent = [request("local", Flood(name="many", records=_RECORDS), first=_RECORDS * number) for number in range(_KEYS)]
    with serving(endpoint_url, directory, workers.processes, cpu) as (port, pid):
        connections, rate = 16 * workers.processes, workers.records_per_second / _RECORDS
        # The workers learn of each other and of their shares of the shards' limits.
        load.start(port, sent, connections=connections, rate=rate, seconds=_WARM_UP_SECONDS).result()
        processes = [pid, *_children(pid)]
        before = sum(map(cpu_seconds, processes))
        accepted = _accepted(
            load.start(port, sent, connections=connections, rate=rate, seconds=seconds, manner=_AT_RANDOM).result()
        )
        time.sleep(0.5)
        used = sum(map(cpu_seconds, processes)) - before
    call_sink(endpoint_url, "/start", {})
    return 1e6 * used / (accepted * _RECORDS)


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def serving(endpoint_url: str, directory: Path, workers: int, cpu: int | None = None) -> Iterator[tuple[int, int]]:
    """Run `kpl serve` on its core; yield its port and process id."""
    options = [
        "--local",
        "--port",
        "0",
        "--endpoint-url",
        endpoint_url,
        "--stream",
        STREAM_NAME,
        "--region",
        "us-east-1",
    ]
    command = [sys.executable, "-m", "kpl_integrations.cli", "serve", *options, "--workers", str(workers)]
    environment = os.environ | {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        if cpu is not None:
            # The workers start later.
            os.sched_setaffinity(server.pid, {cpu})
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            if not line:
                message = f"kpl serve --workers {workers} stopped before it listened"
                raise RuntimeError(message)
            yield int(line.rpartition(":")[2]), server.pid
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                server.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--only", choices=["latency", "workers"], default=None)
    parser.add_argument("--records-per-second", type=int, default=40_000, help="of one worker")
    parser.add_argument("--beside", type=Path, default=None, help="another checkout")
    arguments = parser.parse_args()
    directories = [REPOSITORY] if arguments.beside is None else [arguments.beside, REPOSITORY]
    placed_on, placement = cores()
    pin_to(placed_on[1])
    rate = arguments.records_per_second
    late: dict[tuple[str, str], list[Latency]] = {}
    costs: dict[tuple[str, Workers], list[float]] = {}
    with running_sink(placed_on[1]) as sink, tempfile.TemporaryDirectory() as folder:
        load, seconds = HttpLoad(Path(folder)), arguments.seconds
        for _ in range(arguments.rounds):
            for directory in directories:
                if arguments.only != "workers":
                    for name, found in zip(
                        _NAMES, latencies(load, seconds, sink.url, directory, placed_on[0]), strict=True
                    ):
                        late.setdefault((directory.name, name), []).append(found)
                        print(directory.name, name, found, file=sys.stderr, flush=True)
                if arguments.only != "latency":
                    for workers in (Workers(1, rate), Workers(1, rate // 2), Workers(2, rate), Workers(2, 2 * rate)):
                        cost = cost_of_a_record(load, seconds, sink.url, directory, workers, placed_on[0])
                        costs.setdefault((directory.name, workers), []).append(cost)
                        print(directory.name, workers, f"{cost:.2f} us", file=sys.stderr, flush=True)
    print(f"{describe_machine()}. {placement} {arguments.rounds} interleaved rounds, load {os.getloadavg()[0]:.1f}.")
    print_latencies(late)
    print_costs(costs)
    return 0


def print_latencies(late: dict[tuple[str, str], list[Latency]]) -> None:
    """Print the median of each row's trials, and their range."""
    if late:
        print("| checkout | requests | a second | of the core | waited | p50, ms | p99, ms | longest, ms | goal |")
        print("|---" * 9 + "|")
    for (checkout, name), trials in late.items():
        columns = zip(zip(*trials, strict=True), (0, 2, 2, 1, 1, 1), strict=True)
        figures = " | ".join(_spread(values, digits) for values, digits in columns)
        print(f"| {checkout} | {name} | {figures} | {_GOALS[_NAMES.index(name)]} |")


def print_costs(costs: dict[tuple[str, Workers], list[float]]) -> None:
    """Print the cost of a record, and its ratio to that of one worker in the same round."""
    if costs:
        print("| checkout | workers | records a second | us of CPU a record | beside one worker | goal |")
        print("|---" * 6 + "|")
    # The first row of a checkout is that of one worker.
    ones: dict[str, list[float]] = {}
    for (checkout, workers), found in costs.items():
        ratios = [cost / one for cost, one in zip(found, ones.setdefault(checkout, found), strict=True)]
        figures = f"{workers.records_per_second:,} | {_spread(found, 2)} | {_spread(ratios, 2)}"
        goal = "" if workers.processes == 1 else f"<= {_MOST_WORKERS_RATIO}"
        print(f"| {checkout} | {workers.processes} | {figures} | {goal} |")


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{median(values):,.{digits}f} [{min(values):,.{digits}f} - {max(values):,.{digits}f}]"


if __name__ == "__main__":
    sys.exit(main())
