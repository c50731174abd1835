"""A gateway on a socket, and clients that write bytes to it."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kpl_integrations.ingest import IngestGateway
from kpl_integrations.ingest.http.listening import SpareSockets
from kpl_integrations.ingest.serving import GatewayServer, bound_socket


@asynccontextmanager
async def served(gateway: IngestGateway, spares: SpareSockets | None = None) -> AsyncIterator[GatewayServer]:
    with bound_socket("127.0.0.1", 0) as listening:
        server = GatewayServer(gateway, listening, spares)
        started = asyncio.Event()
        running = asyncio.create_task(server.run(started=started.set))
        starting = asyncio.create_task(started.wait())
        await asyncio.wait([running, starting], return_when=asyncio.FIRST_COMPLETED)
        starting.cancel()
        try:
            yield server
        finally:
            server.stop(signal.SIGINT)
            await asyncio.wait_for(running, 20)


async def connected(server: GatewayServer) -> "Connection":
    host, _, port = server.url.rpartition("/")[2].partition(":")
    return Connection(*await asyncio.open_connection(host, int(port)))


async def spoken(server: GatewayServer, *pieces: bytes, pause: float = 0.0) -> bytes:
    """Return what the server sends for these bytes before it closes the connection."""
    connection = await connected(server)
    reader, writer = connection.reader, connection.writer
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionError:
        return b""
    finally:
        writer.close()


class Connection:
    """A client's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def answer(self) -> tuple[int, bytes]:
        """Return status and body of the next answer."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 10)
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return int(head[9:12]), await self.reader.readexactly(int(length.partition(b":")[2]))

    async def status(self, request: bytes) -> int:
        """Send a request and return the status of its answer."""
        self.writer.write(request)
        return (await self.answer())[0]
