"""Real processes that share one limit through a real store, in real time: a table of case, goal and figure.

python -m benchmarks.fleet_processes                    folder, Redis, S3, DynamoDB: 5 to 8 minutes each
python -m benchmarks.fleet_processes file redis         only these stores

Eight processes run the library's worker and its stores, with an interval of 2 seconds, or 5 with S3 and DynamoDB, which
moto serves. Each sends units through a token bucket at the rate that its lease allows, to a server on loopback that
refuses what is above the limit of 1,000 units a second, as a shard does. Two more resources have a small load, or none.
The cases follow each other in one fleet. 1 is the limit.
"""

import argparse
import asyncio
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from benchmarks.coordination_fleet import Flow
from kpl_core.coordination import CoordinationStore, Listing, Reading, StoreFailed, Usage, Written
from kpl_core.coordination.stores import open_store
from kpl_core.coordination.worker import CoordinationWorker
from kpl_core.options.coordination_options import CoordinationOptions
from kpl_core.pipeline.token_bucket import TokenBucket

WORKERS: Final = 8
LIMIT: Final = 1_000.0
SHARD_BURST_SECONDS: Final = 0.25
# Seconds. HTTP's clock shows whole seconds, so the stores on AWS need longer intervals.
INTERVALS: Final = {"file": 2.0, "redis": 2.0, "s3": 5.0, "dynamodb": 5.0}
STEP_SECONDS: Final = 0.02
HOT: Final = 5_000.0
IDLE: Final = 0.5
RESOURCE, SMALL, UNUSED = (f"orders/shard-{number}" for number in range(3))
CREDENTIALS: Final = {"AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local", "AWS_DEFAULT_REGION": "us-east-1"}
SLOW_SECONDS: Final = 2.0
CLOCK_STEP_SECONDS: Final = 60.0


class Shard:
    """Counts what arrives, and refuses what is above the limit."""

    def __init__(self) -> None:
        self.bucket = TokenBucket([(LIMIT, LIMIT * SHARD_BURST_SECONDS)], now=time.monotonic())
        self.arrived: list[tuple[float, int, int]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer each count with how many of it are accepted, until the worker is killed or the benchmark ends."""
        with suppress(ConnectionResetError, asyncio.CancelledError):
            while line := await reader.readline():
                count, now = int(line), time.monotonic()
                accepted = int(max(0.0, min(count, self.bucket.tokens(now)[0])))
                self.bucket.charge((accepted,), now)
                self.arrived.append((now, count, accepted))
                writer.write(b"%d\n" % accepted)
        writer.close()

    def sent(self, start: float, end: float) -> float:
        """Return the units between two instants, as a share of the limit."""
        return sum(count for at, count, _ in self.arrived if start <= at < end) / ((end - start) * LIMIT)

    def windows(self, start: float, end: float) -> list[float]:
        """Return the shares in windows of one second, a quarter of a second apart."""
        steps = max(1, int((end - start - 1.0) * 4) + 1)
        return [self.sent(start + step / 4, start + step / 4 + 1.0) for step in range(steps)]

    def throttled(self, start: float, end: float) -> float:
        """Return the refused part of the units between two instants."""
        found = [(count, accepted) for at, count, accepted in self.arrived if start <= at < end]
        sent = sum(count for count, _ in found)
        return (sent - sum(accepted for _, accepted in found)) / max(1, sent)


class FaultyStore:
    """A store that is cut off or slow on command."""

    def __init__(self, store: CoordinationStore) -> None:
        self._store = store
        self.is_cut_off = False
        self.delay_seconds = 0.0

    async def _turn(self) -> None:
        await asyncio.sleep(self.delay_seconds)
        if self.is_cut_off:
            message = "cut off by the benchmark"
            raise StoreFailed(message, reason="down")

    async def read(self, name: str) -> Reading:
        """Return one object."""
        await self._turn()
        return await self._store.read(name)

    async def write(self, name: str, body: bytes, *, expected: str | None = None) -> Written:
        """Write an object."""
        await self._turn()
        return await self._store.write(name, body, expected=expected)

    async def read_all(self, prefix: str) -> Listing:
        """Return all objects of a prefix."""
        await self._turn()
        return await self._store.read_all(prefix)

    async def delete(self, name: str) -> None:
        """Delete an object."""
        await self._turn()
        await self._store.delete(name)

    async def aclose(self) -> None:
        """Close the store."""
        await self._store.aclose()


class _Load:
    """The load of one worker process, which commands on its standard input change."""

    def __init__(self, store: FaultyStore) -> None:
        now = time.monotonic()
        self.store = store
        self.offered = 0.0
        self.clock_offset = 0.0
        self.flow = Flow(lambda _: self.offered, float("inf"), LIMIT / WORKERS / 6, now)
        self.began_at = now

    def usages(self) -> dict[str, Usage]:
        limit, small = (LIMIT, LIMIT), 5.0 * (time.monotonic() - self.began_at)
        return {
            RESOURCE: self.flow.usage(LIMIT),
            SMALL: Usage(limit, (small, small)),
            UNUSED: Usage(limit, (0.0, 0.0)),
        }

    def apply_shares(self, shares: Any) -> None:  # noqa: ANN401 - a mapping of pairs
        self.flow.use_rate(shares[RESOURCE][0], time.monotonic())

    def wall_clock(self) -> float:
        return time.time() + self.clock_offset

    def obey(self, name: str, value: float) -> None:
        match name:
            case "offered":
                self.offered = value
            case "clock":
                self.clock_offset = value
            case "cut":
                self.store.is_cut_off = bool(value)
            case "slow":
                self.store.delay_seconds = value


async def _work(port: int, url: str, worker_id: str) -> None:
    store = FaultyStore(await open_store(url))
    load = _Load(store)
    options = CoordinationOptions(
        store=url, max_workers=WORKERS, interval_seconds=INTERVALS[urlsplit(url).scheme], worker_id=worker_id
    )
    worker = CoordinationWorker(
        store, options, usages=load.usages, apply_shares=load.apply_shares, wall_clock=load.wall_clock
    )
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    print("ready", flush=True)
    _ = await commands.readline()
    load.began_at = time.monotonic()
    running = asyncio.create_task(worker.run())

    async def send() -> None:
        while True:
            await asyncio.sleep(STEP_SECONDS)
            now = time.monotonic()
            count = load.flow.send(now)
            if load.flow.backlog >= 1.0:
                worker.units_wait()
            if count:
                writer.write(b"%d\n" % count)
                accepted = int(await reader.readline())
                load.flow.answered(count, count - accepted, time.monotonic())

    sending = asyncio.create_task(send())
    while line := await commands.readline():
        load.obey(*json.loads(line))
    for task in (sending, running):
        task.cancel()
    await worker.leave()
    await store.aclose()


class Place(NamedTuple):
    """A store that runs: its URL, the process group of its server, and what deletes its contents."""

    url: str
    group: int | None
    flush: Callable[[], object]


class Fleet:
    """The worker processes and their shard."""

    def __init__(self, place: Place, stack: AsyncExitStack) -> None:
        self.place = place
        self.shard = Shard()
        self._stack = stack
        self.workers: list[asyncio.subprocess.Process] = []
        self._count = 0

    async def start(self, count: int) -> list[asyncio.subprocess.Process]:
        """Start processes, which wait until `begin`."""
        if not self._count:
            server = await asyncio.start_server(self.shard.serve, "127.0.0.1", 0)
            self._stack.callback(server.close)
            self._port = str(server.sockets[0].getsockname()[1])
        started = []
        for _ in range(count):
            name = f"worker-{self._count}"
            self._count += 1
            command = ["-m", "benchmarks.fleet_processes", "--worker", self._port, self.place.url, name]
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
            self._stack.push_async_callback(_kill, process)
            started.append(process)
        for process in started:
            assert process.stdout is not None
            if await process.stdout.readline() != b"ready\n":
                message = "a worker process did not start; run it by hand to see why"
                raise RuntimeError(message)
        return started

    def begin(self, processes: list[asyncio.subprocess.Process]) -> None:
        """Let processes work."""
        self.workers += processes
        for process in processes:
            _write(process, "begin")

    def tell(self, name: str, value: float, processes: list[asyncio.subprocess.Process] | None = None) -> None:
        """Send a command to processes, all by default."""
        for process in self.workers if processes is None else processes:
            _write(process, [name, value])

    async def run(self, seconds: float) -> tuple[float, float]:
        """Let time pass; return its two ends."""
        start = time.monotonic()
        await asyncio.sleep(seconds)
        return start, time.monotonic()


def _write(process: asyncio.subprocess.Process, command: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(command).encode() + b"\n")


async def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.communicate()


class Figure(NamedTuple):
    """One figure: what it is, its bounds, its value."""

    name: str
    least: float
    most: float
    value: float

    @property
    def cell(self) -> str:
        """Return the figure, marked if it is out of its bounds."""
        return f"{self.value:.3f}" + ("" if self.least <= self.value <= self.most else " (missed)")

    @property
    def goal(self) -> str:
        """Return the bounds in words."""
        if not self.least:
            return f"at most {self.most:g}"
        return f"at least {self.least:g}" if self.most == float("inf") else f"{self.least:g} to {self.most:g}"


class Cases:
    """Plays the cases with one fleet, and keeps the figures."""

    def __init__(self, fleet: Fleet, show: Callable[[Figure], None]) -> None:
        self.figures: list[Figure] = []
        self._fleet = fleet
        self._interval = INTERVALS[urlsplit(fleet.place.url).scheme]
        self._show = show

    def _most(self, name: str, start: float, end: float, bound: float) -> None:
        self._add(Figure(f"{name}: most in a second", 0.0, bound, max(self._fleet.shard.windows(start, end))))

    def _used(self, name: str, start: float, end: float, least: float, most: float = math.inf) -> None:
        self._add(Figure(f"{name}: mean", least, most, self._fleet.shard.sent(start, end)))

    def _add(self, figure: Figure) -> None:
        self.figures.append(figure)
        self._show(figure)

    async def play(self) -> None:
        """Play all cases, one after the other."""
        self._eight = await self._fleet.start(WORKERS)
        self._fleet.begin(self._eight)
        await self._start_and_burst()
        await self._store_faults()
        await self._worker_faults()
        await self._kill_and_join()

    async def _start_and_burst(self) -> None:
        fleet = self._fleet
        fleet.tell("offered", HOT)
        start, end = await fleet.run(3 * self._interval)
        self._most("cold start", start, end, 1.1)
        start, end = await fleet.run(10.0)
        self._used("steady", start, end, 0.95, 1.05)
        self._add(Figure("steady: throttled", 0.0, 0.005, fleet.shard.throttled(start, end)))
        fleet.tell("offered", IDLE)
        await fleet.run(10 * self._interval)
        fleet.tell("offered", HOT)
        start, end = await fleet.run(8.0)
        self._most("burst after idle", start, end, 1.1)
        self._used("burst, second second", start + 1.0, start + 2.0, 0.8)

    async def _store_faults(self) -> None:
        fleet = self._fleet
        self._pause(signal.SIGSTOP)
        start, end = await fleet.run(20.0)
        self._pause(signal.SIGCONT)
        self._used("store paused 20 s", start, end, 0.8, 1.05)
        start, end = await fleet.run(4 * self._interval)
        self._most("store is back", start, end, 1.1)
        for name, spoil in (("store flushed", self._flush), ("garbage in the store", self._write_garbage)):
            await spoil()
            start, end = await fleet.run(5 * self._interval)
            self._most(name, start, end, 1.1)
            self._used(f"{name}, after 3 intervals", start + 3 * self._interval, end, 0.95)
        fleet.tell("slow", SLOW_SECONDS)
        start, end = await fleet.run(20.0)
        self._used("store latency 2 s", start, end, 0.8, 1.05)
        fleet.tell("slow", 0.0)
        start, end = await fleet.run(4 * self._interval)
        self._most("latency is over", start, end, 1.1)

    def _pause(self, number: signal.Signals) -> None:
        if self._fleet.place.group is None:
            self._fleet.tell("cut", number == signal.SIGSTOP)
        else:
            os.killpg(self._fleet.place.group, number)

    async def _flush(self) -> None:
        await asyncio.to_thread(self._fleet.place.flush)

    async def _write_garbage(self) -> None:
        store = await open_store(self._fleet.place.url)
        for name in ("leases.json", "report-worker-1.json", "report-unknown.json"):
            await store.write(name, b"\xff{garbage")
        await store.aclose()

    async def _worker_faults(self) -> None:
        fleet, eight = self._fleet, self._eight
        eight[0].send_signal(signal.SIGSTOP)
        start, end = await fleet.run(30.0)
        self._used("one stopped 30 s, after 3 intervals", start + 3 * self._interval, end, 0.95)
        eight[0].send_signal(signal.SIGCONT)
        start, end = await fleet.run(4 * self._interval)
        # It has its old eighth until it has synced.
        self._most("it continues", start, end, 1.3)
        self._used("it continues, after 2 intervals", start + 2 * self._interval, end, 0.95, 1.05)
        fleet.tell("cut", 1, eight[4:])
        start, end = await fleet.run(15 * self._interval)
        self._used("half cut off, after 3 intervals", start + 3 * self._interval, end, 0.8, 1.1)
        fleet.tell("cut", 0)
        start, end = await fleet.run(4 * self._interval)
        self._used("half is back, after 3 intervals", start + 3 * self._interval, end, 0.95, 1.05)
        fleet.tell("clock", CLOCK_STEP_SECONDS, eight[:3])
        fleet.tell("clock", -CLOCK_STEP_SECONDS, eight[3:6])
        start, end = await fleet.run(6 * self._interval)
        self._used("clocks 60 s off, both ways", start, end, 0.95, 1.05)

    async def _kill_and_join(self) -> None:
        fleet, eight = self._fleet, self._eight
        joining = await fleet.start(4)
        for process in eight[4:]:
            process.kill()
        fleet.workers = eight[:4]
        start, end = await fleet.run(6 * self._interval)
        self._most("4 of 8 killed", start, end, 1.1)
        self._used("killed, after 3 intervals", start + 3 * self._interval, end, 0.95)
        fleet.begin(joining)
        fleet.tell("offered", HOT)
        start, end = await fleet.run(6 * self._interval)
        self._most("4 join", start, end, 1.1)
        self._used("joined, after 3 intervals", start + 3 * self._interval, end, 0.95)


@asynccontextmanager
async def place(kind: str) -> AsyncIterator[Place]:
    """Run a store."""
    from tests.support.installation import install_all  # noqa: PLC0415 - installs programs
    from tests.support.processes import LOOPBACK, answers, free_ports, own_process  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if kind == "file":
            store = folder / "store"
            yield Place(f"file://{store}", None, lambda: shutil.rmtree(store))
            return
        installed = await asyncio.to_thread(install_all)
        (port,) = free_ports(1)
        if kind == "redis":
            import redis  # noqa: PLC0415

            assert installed.redis_server is not None
            command = [installed.redis_server, "--port", str(port), "--bind", LOOPBACK, "--save", ""]
            with own_process("redis-server", command, logs=folder) as process:
                process.wait_until(lambda: answers(port), what="answer")
                client = redis.Redis(port=port)
                yield Place(f"redis://{LOOPBACK}:{port}/0", process.pid, client.flushall)
            return
        import boto3  # noqa: PLC0415

        server = Path(__file__).parents[1] / "tests/interop/moto_server.py"
        with own_process("moto", [str(installed.moto_python), str(server), str(port)], logs=folder) as process:
            process.wait_until(lambda: answers(port), what="answer")
            endpoint = f"http://{LOOPBACK}:{port}"
            session = boto3.Session("local", "local", region_name="us-east-1")
            query = f"endpoint_url={endpoint}&region=us-east-1"
            if kind == "s3":
                bucket = session.resource("s3", endpoint_url=endpoint).create_bucket(Bucket="fleet")
                yield Place(f"s3://fleet/workers/?{query}", process.pid, bucket.objects.delete)
                return
            table = session.resource("dynamodb", endpoint_url=endpoint).create_table(
                TableName="fleet",
                KeySchema=[
                    {"AttributeName": "group", "KeyType": "HASH"},
                    {"AttributeName": "name", "KeyType": "RANGE"},
                ],
                AttributeDefinitions=[{"AttributeName": each, "AttributeType": "S"} for each in ("group", "name")],
                BillingMode="PAY_PER_REQUEST",
            )

            def flush() -> None:
                for item in table.scan()["Items"]:
                    table.delete_item(Key={"group": item["group"], "name": item["name"]})

            yield Place(f"dynamodb://fleet/workers?{query}", process.pid, flush)


async def measure(kind: str) -> list[Figure]:
    """Play all cases with one store."""

    def show(figure: Figure) -> None:
        print(f"{kind}: {figure.name}: {figure.cell} ({figure.goal})", file=sys.stderr, flush=True)

    async with place(kind) as running, AsyncExitStack() as stack:
        cases = Cases(Fleet(running, stack), show)
        await cases.play()
    return cases.figures


STORES: Final = {"file": "folder", "redis": "Redis", "s3": "S3 (moto)", "dynamodb": "DynamoDB (moto)"}


def main() -> int:
    parser = argparse.ArgumentParser("fleet_processes", description=__doc__)
    parser.add_argument("stores", nargs="*", help=f"some of {', '.join(STORES)}")
    parser.add_argument("--worker", nargs=3, metavar=("PORT", "URL", "ID"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        port, url, worker_id = arguments.worker
        asyncio.run(_work(int(port), url, worker_id))
        return 0
    os.environ.update(CREDENTIALS)
    columns = {kind: asyncio.run(measure(kind)) for kind in arguments.stores or STORES}
    print(f"| case | goal | {' | '.join(STORES[kind] for kind in columns)} |")
    print(f"| --- | --- |{' --- |' * len(columns)}")
    for row in zip(*columns.values(), strict=True):
        print(f"| {row[0].name} | {row[0].goal} | {' | '.join(each.cell for each in row)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
