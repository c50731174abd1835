"""The network of the other tests, tested."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.tcp_proxy import FINE, TcpProxy, Weather
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
LOTS = bytes(range(256)) * 4_000


class Echo:
    """Sends back what it gets, and notes it; ends its side when the other ended theirs."""

    def __init__(self) -> None:
        self.received: list[bytearray] = []
        self.ended: list[str] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received = bytearray()
        self.received.append(received)
        try:
            while chunk := await reader.read(65_536):
                received += chunk
                writer.write(chunk)
                await writer.drain()
            self.ended.append("eof")
        except ConnectionError:
            self.ended.append("reset")
        finally:
            writer.close()


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def echo_behind_proxy() -> AsyncIterator[tuple[Echo, TcpProxy]]:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    async with server, TcpProxy(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as network:
        yield echo, network


async def connect(network: TcpProxy) -> Streams:
    return await asyncio.open_connection("127.0.0.1", int(network.endpoint_url.rpartition(":")[2]))


async def exchange(network: TcpProxy, data: bytes) -> bytes:
    """Send, end, and read all that comes back."""
    reader, writer = await connect(network)

    async def send() -> None:
        writer.write(data)
        await writer.drain()
        writer.write_eof()

    try:
        _, answer = await asyncio.gather(send(), reader.read(-1))
        return answer
    finally:
        writer.transport.abort()


async def test_in_fine_weather_every_byte_arrives_and_so_does_the_end() -> None:
    async with echo_behind_proxy() as (echo, network):
        assert await exchange(network, LOTS) == LOTS
        assert echo.received == [LOTS]
        assert echo.ended == ["eof"]
        assert (network.connections, network.resets) == (1, 0)


@pytest.mark.parametrize("passing", [0, 1, 1_000])
async def test_a_reset_lets_exactly_so_many_bytes_pass(passing: int) -> None:
    async with echo_behind_proxy() as (echo, network):
        network.to_service = Weather(reset_after_bytes=passing)
        reader, writer = await connect(network)
        writer.write(LOTS)
        with pytest.raises(ConnectionError):
            await reader.read(-1)
        writer.transport.abort()
        assert network.resets == 1
        await until(lambda: echo.ended)
        assert echo.ended == ["reset"]
        assert LOTS[:passing].startswith(echo.received[0])


async def test_an_answer_can_be_cut_off_too_and_the_request_has_arrived() -> None:
    async with echo_behind_proxy() as (echo, network):
        network.to_client = Weather(reset_after_bytes=2)
        with pytest.raises(ConnectionError):
            await exchange(network, b"question")
        assert echo.received == [b"question"]


async def test_only_so_many_connections_are_cut_off() -> None:
    async with echo_behind_proxy() as (_, network):
        network.to_service = Weather(reset_after_bytes=0, times=2)
        for _ in range(2):
            with pytest.raises(ConnectionError):
                await exchange(network, b"question")
        assert await exchange(network, b"question") == b"question"


async def test_one_direction_can_end_while_the_other_goes_on() -> None:
    async with echo_behind_proxy() as (echo, network):
        network.to_client = Weather(close_after_bytes=3)
        assert await exchange(network, b"question") == b"que"
        assert echo.received == [b"question"]
        assert echo.ended == ["eof"]
        assert network.resets == 0


async def test_a_stall_holds_everything_and_loses_nothing() -> None:
    async with echo_behind_proxy() as (echo, network):
        network.to_service = Weather(stalled=True)
        answer = asyncio.create_task(exchange(network, b"question"))
        await asyncio.sleep(0.05)
        assert not answer.done()
        assert echo.received in ([], [b""])
        network.to_service = FINE
        assert await answer == b"question"


async def test_a_black_hole_swallows_and_the_connection_stays() -> None:
    async with echo_behind_proxy() as (echo, network):
        reader, writer = await connect(network)
        writer.write(b"before ")
        assert await reader.readexactly(7) == b"before "
        network.to_service = Weather(black_hole=True)
        writer.write(b"lost ")
        await until(lambda: network.swallowed_bytes == len(b"lost "))
        network.heal()
        writer.write(b"after")
        assert await reader.readexactly(5) == b"after"
        assert echo.received == [b"before after"]
        writer.transport.abort()


async def test_latency_and_width_take_their_time() -> None:
    async with echo_behind_proxy() as (_, network):
        loop = asyncio.get_running_loop()
        network.to_service = network.to_client = Weather(latency_seconds=0.05)
        began_at = loop.time()
        assert await exchange(network, b"question") == b"question"
        assert loop.time() - began_at >= 0.1
        network.heal()
        network.to_service = Weather(bytes_per_second=100_000)
        began_at = loop.time()
        assert await exchange(network, bytes(20_000)) == bytes(20_000)
        assert loop.time() - began_at >= 0.19


async def test_connections_can_be_reset_at_once() -> None:
    async with echo_behind_proxy() as (echo, network):
        network.refusing = True
        with pytest.raises(ConnectionError):
            await exchange(network, b"question")
        assert not echo.received
        network.heal()
        assert await exchange(network, b"question") == b"question"
