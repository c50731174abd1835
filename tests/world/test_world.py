"""The world itself: its clock jumps, a seed repeats a run, and a law that is false is found."""

import asyncio
import itertools
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

import pytest

from tests.support.gateway_scene import Answer
from tests.world.connections.connection import HIGH_WATER_BYTES, ConnectionLost, WorldConnection
from tests.world.fleet import Fleet
from tests.world.kinds_of_faults import KINDS
from tests.world.lease_law import run_law
from tests.world.network import StoreLink, Weather, World
from tests.world.world_loop import WorldStopped, run_in_world


def test_an_hour_in_the_world_takes_no_time():
    async def sleeper() -> float:
        await asyncio.sleep(3_600.0)
        return World.now()

    began = time.monotonic()
    assert run_in_world(sleeper) == pytest.approx(3_600.0)
    assert time.monotonic() - began < 60.0


def test_a_world_in_which_nothing_can_happen_says_so():
    async def waiter() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(WorldStopped, match="no timer is left"):
        run_in_world(waiter)


@pytest.mark.parametrize("pause", [0.0, 60.0])
def test_a_world_in_which_a_task_waits_forever_beside_others_says_so(pause):
    async def ticks() -> None:
        for _ in itertools.count():
            await asyncio.sleep(pause)

    async def waiter() -> None:
        ticking = asyncio.create_task(ticks())
        await asyncio.get_running_loop().create_future()
        ticking.cancel()

    with pytest.raises(WorldStopped, match="the run does not end"):
        run_in_world(waiter)


class Alarm(BaseException):
    """What a handler of an alarm raises."""


@pytest.fixture
def profiling_alarm() -> Iterator[None]:
    """Raise `Alarm` on SIGPROF."""

    def handle(_number: int, _frame: FrameType | None) -> NoReturn:
        raise Alarm

    before = signal.signal(signal.SIGPROF, handle)
    yield
    _ = signal.signal(signal.SIGPROF, before)


@pytest.mark.usefixtures("profiling_alarm")
def test_an_alarm_ends_a_run_also_if_it_is_raised_in_a_callback():
    """asyncio logs what a callback raises, so the run went on after pytest's alarm."""

    async def story() -> None:
        asyncio.get_running_loop().call_later(1.0, signal.raise_signal, signal.SIGPROF)
        await asyncio.sleep(3_600.0)

    with pytest.raises(Alarm):
        run_in_world(story)


def test_a_seed_repeats_a_run():
    assert run_law("late calls", 7) == run_law("late calls", 7)


def test_a_request_takes_effect_although_its_caller_has_given_up():
    async def story() -> None:
        fleet = Fleet(World(1), resources=1, max_workers=1, interval_seconds=1.0)
        link = StoreLink(fleet.world, fleet.store, Weather(fastest=0.5, slowest=0.5))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await link.write("a", b"late")
        assert (await fleet.store.read("a")).body is None
        await asyncio.sleep(0.5)
        assert (await fleet.store.read("a")).body == b"late"

    run_in_world(story)


def test_the_law_sees_a_worker_that_applies_its_shares_after_it_has_reported(monkeypatch):
    """So did the releases before this law: 1.4 times the limit was in force without any fault."""
    monkeypatch.setitem(KINDS, "late", KINDS["no fault"]._replace(start=lambda fleet: fleet.start(applies_late=True)))
    outcomes = [run_law("late", seed) for seed in range(4, 9)]
    assert max(outcome.worst_rate for outcome in outcomes) > 1.05
    assert any("rate in force" in sentence for each in outcomes for sentence in each.broken(KINDS["late"]))


class AnsweringProtocol:
    """A server in the place of the gateway: it answers whenever it is told to."""

    def __init__(self) -> None:
        self.lost: list[Exception | None] = []
        self.is_paused = False
        # Whether it has something to say to a client that has closed its side.
        self.keeps_open = False
        self._buffer = bytearray(65_536)

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    def get_buffer(self, _: int) -> memoryview:
        return memoryview(self._buffer)

    def buffer_updated(self, _: int) -> None:
        pass

    def eof_received(self) -> bool:
        return self.keeps_open

    def pause_writing(self) -> None:
        self.is_paused = True

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.append(error)

    def answer(self, size: int = 0) -> None:
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (size, bytes(size)))


async def with_unread_requests(connection: WorldConnection, requests: int) -> list[asyncio.Task[Answer]]:
    """Send requests that the gateway does not read yet."""
    connection.end.pause_reading()
    asking = [asyncio.create_task(connection.ask(b"GET / HTTP/1.1\r\n\r\n")) for _ in range(requests)]
    await asyncio.sleep(1.0)
    return asking


def test_an_answer_to_a_client_that_has_closed_its_end_comes_back_as_a_reset():
    """Its other requests were answered for minutes, so that the producer was never empty (seed 198448)."""

    async def story() -> None:
        protocol = AnsweringProtocol()
        connection = WorldConnection(lambda: protocol, seconds=0.1)
        asking = await with_unread_requests(connection, 3)
        connection.leave(reset=False)
        assert {type(each) for each in await asyncio.gather(*asking, return_exceptions=True)} == {ConnectionLost}
        await asyncio.sleep(1.0)
        assert protocol.lost == []
        protocol.answer()
        await asyncio.sleep(1.0)
        assert [type(each) for each in protocol.lost] == [ConnectionResetError]

    run_in_world(story)


@pytest.mark.parametrize("keeps_open", [True, False])
def test_a_connection_whose_client_has_closed_its_side_stays_open_if_the_gateway_says_so(keeps_open):
    """As in asyncio: it was closed at once, so no such client was answered."""

    async def story() -> None:
        protocol = AnsweringProtocol()
        protocol.keeps_open = keeps_open
        connection = WorldConnection(lambda: protocol, seconds=0.1)
        connection.leave(reset=False)
        await asyncio.sleep(1.0)
        assert connection.end.is_closing() is not keeps_open

    run_in_world(story)


def test_a_black_hole_acknowledges_nothing_so_answers_stay_in_the_gateways_buffer():
    """They left it at once, so all requests before the hole were answered (seed 198549)."""

    async def story() -> None:
        protocol = AnsweringProtocol()
        connection = WorldConnection(lambda: protocol, seconds=0.1)
        asking = await with_unread_requests(connection, 1)
        connection.is_black_hole = True
        connection.leave(reset=True)
        assert [type(each) for each in await asyncio.gather(*asking, return_exceptions=True)] == [ConnectionLost]
        for _ in range(20):
            protocol.answer(5_000)
        await asyncio.sleep(3_600.0)
        assert protocol.is_paused
        assert connection.end.unsent_bytes > HIGH_WATER_BYTES
        assert protocol.lost == []

    run_in_world(story)
