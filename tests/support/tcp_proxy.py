"""A TCP proxy on loopback whose connections fail as the test sets.

    async with TcpProxy(service.endpoint_url) as network:
        config = Config(endpoint_url=network.endpoint_url, ...)
        network.to_client = Weather(reset_after_bytes=100, times=3)

There is weather for each direction. It may change at any time, and meets connections already open
as well as new ones; what counts bytes counts them for each connection, from its beginning.
"""

import asyncio
import math
import socket
import struct
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Self
from urllib.parse import urlsplit

__all__ = ["FINE", "TcpProxy", "Weather"]

_CHUNK_BYTES: Final = 64 * 1024
_LINGER_ZERO: Final = struct.pack("ii", 1, 0)  # close with RST instead of FIN
# How finely a narrow link doles out its bytes.
_DOLE_SECONDS: Final = 0.02


@dataclass(frozen=True, kw_only=True)
class Weather:
    """What happens to the bytes of one direction.

    Attributes:
        latency_seconds: each byte arrives so much later; the order stays.
        bytes_per_second: the width of the link, of each connection's own.
        stalled: nothing passes until the weather changes; nothing is lost either.
        black_hole: bytes are taken and dropped silently.
        reset_after_bytes: when so many have passed, reset both sides; 0: at the first byte, which does not pass.
        close_after_bytes: when so many have passed, end this direction (FIN) and forget the rest; the other goes on.
        times: cut off only so many connections; None is every one.
    """

    latency_seconds: float = 0.0
    bytes_per_second: float = math.inf
    stalled: bool = False
    black_hole: bool = False
    reset_after_bytes: int | None = None
    close_after_bytes: int | None = None
    times: int | None = None


FINE: Final = Weather()


class _CutOff(Exception):  # noqa: N818 - never leaves this file
    """The weather resets this connection."""


class _Link:
    """One direction of all connections: its weather, how often it cut one off, and what came to nothing in it."""

    def __init__(self) -> None:
        self.weather = FINE
        self.cuts = 0
        self.swallowed_bytes = 0
        self._changed = asyncio.Event()

    def change(self, weather: Weather) -> None:
        self.weather = weather
        self.cuts = 0
        self._changed.set()
        self._changed = asyncio.Event()

    async def clear(self) -> None:
        """Return when nothing is stalled."""
        while self.weather.stalled:
            await self._changed.wait()

    def left(self, limit: int | None, passed: int) -> float:
        """Return how many bytes may still pass before the cut at `limit`."""
        if limit is None or (self.weather.times is not None and self.cuts >= self.weather.times):
            return math.inf
        return max(0, limit - passed)


class TcpProxy:
    """Forwards connections to `target_url`; counts `connections` accepted and `resets` made."""

    def __init__(self, target_url: str) -> None:
        target = urlsplit(target_url)
        assert target.hostname is not None
        self._host, self._port = target.hostname, target.port
        self._to_service = _Link()
        self._to_client = _Link()
        self._connections: set[asyncio.Task[None]] = set()
        self.refusing = False
        self.connections = 0
        self.resets = 0
        self.endpoint_url = ""

    @property
    def to_service(self) -> Weather:
        """The weather on the way to the service."""
        return self._to_service.weather

    @to_service.setter
    def to_service(self, weather: Weather) -> None:
        self._to_service.change(weather)

    @property
    def to_client(self) -> Weather:
        """The weather on the way back."""
        return self._to_client.weather

    @to_client.setter
    def to_client(self, weather: Weather) -> None:
        self._to_client.change(weather)

    @property
    def swallowed_bytes(self) -> int:
        """What was on the way to the service and came to nothing."""
        return self._to_service.swallowed_bytes

    def heal(self) -> None:
        """Fine weather, both ways, and connections are accepted."""
        self.to_service = self.to_client = FINE
        self.refusing = False

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.endpoint_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._connection(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        writers = [writer]
        try:
            await self._forward(reader, writers)
        except (_CutOff, OSError):
            # One side is gone without a FIN, or was sent away so; then so is the other.
            self.resets += 1
            for each in writers:
                _linger_zero(each)
        finally:
            for each in writers:
                each.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writers: list[asyncio.StreamWriter]) -> None:
        if self.refusing:
            raise _CutOff
        service_reader, service_writer = await asyncio.open_connection(self._host, self._port)
        (writer,) = writers
        writers.append(service_writer)
        await _until_both_end(
            _pump(reader, service_writer, self._to_service), _pump(service_reader, writer, self._to_client)
        )


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: _Link) -> None:
    """Carry one direction to its end; raises _CutOff where the weather resets."""
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=64)
    loop = asyncio.get_running_loop()

    async def take() -> None:
        chunk = b"begin"
        while chunk:
            chunk = await reader.read(_CHUNK_BYTES)
            await under_way.put((loop.time() + link.weather.latency_seconds, chunk))

    async def deliver() -> None:
        passed = 0
        closed = False
        while True:
            arrives_at, chunk = await under_way.get()
            await asyncio.sleep(arrives_at - loop.time())
            await link.clear()
            if not chunk:
                break
            if closed or link.weather.black_hole:
                link.swallowed_bytes += len(chunk)
                continue
            until_reset = link.left(link.weather.reset_after_bytes, passed)
            until_close = link.left(link.weather.close_after_bytes, passed)
            passing = chunk[: int(min(len(chunk), until_reset, until_close))]
            await _dole(writer, passing, link.weather.bytes_per_second)
            passed += len(passing)
            if len(passing) < len(chunk):
                link.cuts += 1
                if until_reset <= until_close:
                    raise _CutOff
                closed = True
                writer.write_eof()
        if not closed:
            writer.write_eof()

    await _until_both_end(take(), deliver())


def _linger_zero(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket | None = writer.get_extra_info("socket")
    if connection is not None:
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)


async def _dole(writer: asyncio.StreamWriter, data: bytes, bytes_per_second: float) -> None:
    """Write at the width of the link."""
    if bytes_per_second == math.inf:
        writer.write(data)
        await writer.drain()
        return
    dole = max(1, int(bytes_per_second * _DOLE_SECONDS))
    for start in range(0, len(data), dole):
        piece = data[start : start + dole]
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(len(piece) / bytes_per_second)


async def _until_both_end(first: Coroutine[Any, Any, None], second: Coroutine[Any, Any, None]) -> None:
    """Run both until both end or one fails, and leave none behind."""
    tasks = [asyncio.ensure_future(first), asyncio.ensure_future(second)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
