"""Every fault of service and network, under load, in both modes of the spool: no acknowledged record is lost."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kpl_core import Producer
from kpl_core.options.reliability import BreakerPolicy, SpoolMode
from kpl_core.testing import (
    BadBody,
    Effect,
    ErrorAnswer,
    Hang,
    Latency,
    MergeDuringRequest,
    RecordError,
    ResetAfterCommit,
    ResetBeforeCommit,
    SplitDuringRequest,
    When,
    WrongCount,
)
from kpl_integrations.local_kinesis import LocalKinesis
from kpl_integrations.metrics.prometheus import PrometheusMetrics
from tests.chaos.conftest import SHORT
from tests.chaos.load import STREAM, Load, assert_recovers, config
from tests.support.tcp_proxy import TcpProxy, Weather

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]
PUT = "PutRecords"
CALM_SECONDS = 0.4
TROUBLE_SECONDS = 1.2


@dataclass
class World:
    kinesis: LocalKinesis
    network: TcpProxy


Trouble = Callable[[World], AbstractAsyncContextManager[None]]


def fault(*effects: Effect, operation: str | None = PUT, **when: Any) -> Trouble:
    @asynccontextmanager
    async def trouble(world: World) -> AsyncIterator[None]:
        armed = [world.kinesis.faults.add(effect, When(operation=operation, **when)) for effect in effects]
        yield
        for each in armed:
            world.kinesis.faults.remove(each)

    return trouble


def weather(to_service: Weather | None = None, to_client: Weather | None = None) -> Trouble:
    @asynccontextmanager
    async def trouble(world: World) -> AsyncIterator[None]:
        world.network.to_service = to_service or world.network.to_service
        world.network.to_client = to_client or world.network.to_client
        yield
        world.network.heal()

    return trouble


@asynccontextmanager
async def refused(world: World) -> AsyncIterator[None]:
    world.kinesis.refuse_connections()
    world.network.refusing = True
    yield
    await world.kinesis.accept_connections()
    world.network.heal()


@asynccontextmanager
async def no_name_resolves(world: World) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    patched: Any = loop
    known = loop.getaddrinfo

    async def unknown(*_arguments: object, **_options: object) -> object:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    patched.getaddrinfo = unknown
    # Connections that are open need no name lookup.
    world.network.to_service = Weather(reset_after_bytes=0)
    yield
    patched.getaddrinfo = known
    world.network.heal()


@asynccontextmanager
async def the_loop_stalls(world: World) -> AsyncIterator[None]:
    time.sleep(0.7)  # noqa: ASYNC251 - the fault itself
    yield
    time.sleep(0.7)  # noqa: ASYNC251


@asynccontextmanager
async def the_clock_jumps(world: World) -> AsyncIterator[None]:
    loop: Any = asyncio.get_running_loop()
    real = type(loop).time
    loop.time = lambda: real(loop) + 3_600.0
    yield


TROUBLES: dict[str, Trouble] = {
    "single records fail at random": fault(RecordError("InternalFailure"), operation=None, probability=0.3),
    "a storm of throttles": fault(RecordError(), operation=None),
    "half of the requests get a 500": fault(ErrorAnswer("InternalFailure"), probability=0.5),
    "every request gets a 503": fault(ErrorAnswer("ServiceUnavailable")),
    "no answer in time, but stored": fault(Latency(0.8, after_commit=True), probability=0.5),
    "slow answers": fault(Latency(0.2)),
    "requests hang": fault(Hang(), probability=0.5),
    "reset before the commit": fault(ResetBeforeCommit(), probability=0.5),
    "reset after the commit": fault(ResetAfterCommit(), probability=0.5),
    "answers of another length": fault(WrongCount(), probability=0.5),
    "unreadable answers": fault(BadBody(), probability=0.5),
    "expired credentials": fault(ErrorAnswer("ExpiredTokenException")),
    "no permission for a while": fault(ErrorAnswer("AccessDeniedException")),
    "shards split under way": fault(SplitDuringRequest(), times=2),
    "shards merge under way": fault(MergeDuringRequest(), times=1),
    "shards cannot be listed while one splits": fault(
        ErrorAnswer("AccessDeniedException"), SplitDuringRequest(), operation=None, every=5, times=4
    ),
    "connections are reset in the request": weather(to_service=Weather(reset_after_bytes=600)),
    "connections are reset in the answer": weather(to_client=Weather(reset_after_bytes=100)),
    "connections are half closed": weather(to_client=Weather(close_after_bytes=100)),
    "a black hole": weather(to_service=Weather(black_hole=True)),
    "the network stalls": weather(to_client=Weather(stalled=True)),
    "a narrow link": weather(to_service=Weather(bytes_per_second=20_000.0, latency_seconds=0.05)),
    "connections are refused": refused,
    "no name resolves": no_name_resolves,
    "the event loop stalls": the_loop_stalls,
    "the clock jumps an hour": the_clock_jumps,
}


MODES: tuple[SpoolMode, ...] = ("write_ahead", "overflow")
# The short version runs each fault once, in alternating modes.
CASES = [
    (name, mode) for number, name in enumerate(TROUBLES) for mode in MODES if not SHORT or mode == MODES[number % 2]
]


@pytest.mark.parametrize(("name", "mode"), CASES)
async def test_no_acknowledged_record_is_lost(name: str, mode: SpoolMode, tmp_path: Path) -> None:
    metrics = PrometheusMetrics()
    async with LocalKinesis({STREAM: 4}) as kinesis, TcpProxy(kinesis.endpoint_url) as network:
        endpoint_url = network.endpoint_url.replace("127.0.0.1", "localhost")
        options = config(endpoint_url, tmp_path / "spool.db", mode, breaker=BreakerPolicy())
        async with Producer(options, hooks=[metrics]) as producer:
            load = Load(producer)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(load.run())
                await asyncio.sleep(CALM_SECONDS)
                async with TROUBLES[name](World(kinesis, network)):
                    await asyncio.sleep(TROUBLE_SECONDS)
                await asyncio.sleep(CALM_SECONDS)
                load.ended = True
            await assert_recovers(load, kinesis, metrics)
            assert load.refused == 0
        assert producer.report().failed_total == 0
