"""python -m benchmarks.ingest_wire: measure boto3 through the gateway's Kinesis API, beside boto3 straight to a sink.

The units are records per CPU-second of the gateway's process and of the client's. The gateway verifies every
signature and answers after the sink has stored the record; its answers are counted. The sink, a separate process in
place of Kinesis, decodes every aggregated record and checks each user record's data, key and shard. Rounds are
interleaved; a row is the median of its rounds.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, Final

import anyio
import boto3
from botocore.config import Config

from benchmarks.machine import cores, describe_machine, pin_to
from benchmarks.sink_process import REPOSITORY, running_sink
from benchmarks.trial import call_sink
from benchmarks.workload import STREAM_NAME, Workload

KEY, SECRET = "BENCHMARK", "a-secret-of-the-benchmark"
PER_REQUEST: Final = 500
CALLERS: Final = 8
_UNLIMITED: Final[dict[str, Any]] = {
    "rate_limit_records_per_sec_per_shard": 1e12,
    "rate_limit_bytes_per_sec_per_shard": 1e15,
    "max_outstanding_records": 1_000_000,
    "max_outstanding_bytes": 1 << 30,
    "aws_access_key_id": "x",
    "aws_secret_access_key": "x",
}


@dataclasses.dataclass(frozen=True)
class Figures:
    """One trial."""

    per_gateway_cpu_second: float | None
    per_client_cpu_second: float


def serve(endpoint_url: str) -> None:
    """Run the gateway until standard input closes."""
    from kpl_integrations.ingest import IngestGateway, load_settings  # noqa: PLC0415 - only this process serves
    from kpl_integrations.ingest.admission.tenant_account import TenantFairness  # noqa: PLC0415
    from kpl_integrations.ingest.serving import GatewayServer, bound_socket  # noqa: PLC0415
    from kpl_integrations.ingest.tenants import AccessKey, CallableTenants, Tenant  # noqa: PLC0415

    tenant = Tenant(id="benchmark")
    directory = CallableTenants(lambda _: None, tenants=[tenant], access_keys={KEY: AccessKey(KEY, SECRET, tenant)})
    settings = load_settings(region="us-east-1", endpoint_url=endpoint_url)
    config = dataclasses.replace(settings.producer_config(TenantFairness(directory)), **_UNLIMITED)
    gateway = IngestGateway(settings, directory, config=config)

    async def run() -> None:
        listening = bound_socket("127.0.0.1", 0)
        parent_gone = anyio.Event()
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), parent_gone.set)
        async with anyio.create_task_group() as tasks:
            server = GatewayServer(gateway, listening)
            tasks.start_soon(lambda: server.run(started=lambda: print(listening.getsockname()[1], flush=True)))
            await parent_gone.wait()
            tasks.cancel_scope.cancel()

    anyio.run(run, backend_options={"use_uvloop": True})


@contextlib.contextmanager
def running_gateway(endpoint_url: str, cpu: int | None) -> Iterator[tuple[str, int]]:
    """Run a gateway in front of the sink; yield its URL and process id."""
    command = [sys.executable, "-m", "benchmarks.ingest_wire", "--serve", endpoint_url]
    if cpu is not None:
        command += ["--cpu", str(cpu)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            port = process.stdout.readline().strip()
            assert port, "the gateway stopped before it listened; its error is above"
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time a process has used, user and system, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def own_cpu_seconds() -> float:
    """Return this process' own CPU time, all its threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def put_all(url: str, requests: list[list[dict[str, Any]]]) -> None:
    """Put all requests over some threads; AssertionError if a record was not stored."""
    client = boto3.client(
        "kinesis",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        config=Config(max_pool_connections=CALLERS, proxies={}),
    )

    def put(records: list[dict[str, Any]]) -> int:
        return int(client.put_records(StreamName=STREAM_NAME, Records=records)["FailedRecordCount"])  # type: ignore[arg-type]

    with ThreadPoolExecutor(CALLERS) as callers:
        assert not any(callers.map(put, requests))


def measure(endpoint_url: str, count: int, *, through_gateway: bool, cpu: int | None) -> Figures:
    """Run one trial; AssertionError if the sink does not have every record, whole and in its shard."""
    workload = Workload(data_bytes=200, record_count=count)
    call_sink(endpoint_url, "/open", {"workload": workload.fields()})

    def requests(first: int, last: int) -> list[list[dict[str, Any]]]:
        records = [{"PartitionKey": key, "Data": data} for key, data in workload.records(first, last)]
        return [records[start : start + PER_REQUEST] for start in range(0, len(records), PER_REQUEST)]

    warm_up, measured = requests(count, count + 10 * PER_REQUEST), requests(0, count)
    with contextlib.ExitStack() as stack:
        url, pid = stack.enter_context(running_gateway(endpoint_url, cpu)) if through_gateway else (endpoint_url, None)
        put_all(url, warm_up)
        call_sink(endpoint_url, "/start", {})
        before = own_cpu_seconds(), cpu_seconds(pid) if pid else 0.0
        put_all(url, measured)
        client = own_cpu_seconds() - before[0]
        gateway = cpu_seconds(pid) - before[1] if pid else None
        report = call_sink(endpoint_url, "/report")
    assert report["user_records"] == count, report
    wrong = {name: report[name] for name in ("misrouted", "wrong_keys", "malformed", "duplicated", "lost")}
    assert not any(wrong.values()), wrong
    return Figures(None if gateway is None else count / gateway, count / client)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", metavar="ENDPOINT_URL", help=argparse.SUPPRESS)
    parser.add_argument("--cpu", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--records", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    pin_to(arguments.cpu)
    if arguments.serve:
        serve(arguments.serve)
        return
    (cpu, sink_cpu), placement = cores()
    figures: dict[bool, list[Figures]] = {False: [], True: []}
    with running_sink(sink_cpu) as sink:
        for number in range(arguments.rounds):
            for through_gateway in (False, True):
                figures[through_gateway].append(
                    measure(sink.url, arguments.records, through_gateway=through_gateway, cpu=cpu)
                )
            print(f"round {number + 1} of {arguments.rounds} done at {time.strftime('%H:%M:%S')}", file=sys.stderr)
    print(f"{'':28}{'records per gateway CPU-second':>32}{'records per client CPU-second':>32}")
    for through_gateway, name in ((False, "boto3 straight to the sink"), (True, "boto3 through the gateway")):
        trials = figures[through_gateway]
        gateway = [trial.per_gateway_cpu_second for trial in trials if trial.per_gateway_cpu_second]
        shown = f"{median(gateway):,.0f}" if gateway else "-"
        print(f"{name:28}{shown:>32}{median(trial.per_client_cpu_second for trial in trials):>32,.0f}")
    print(f"{arguments.records:,} records of 200 B, {PER_REQUEST} a request, {CALLERS} threads")
    print(f"{placement} {describe_machine()}")


if __name__ == "__main__":
    main()
