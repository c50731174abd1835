"""A gateway and one HTTP/2 connection to it, in virtual time and without sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from kpl_integrations.asgi.protocol import Receive, Scope, Send
from kpl_integrations.ingest import IngestGateway
from kpl_integrations.ingest.fast_path.protocol import GatewayConnection
from kpl_integrations.ingest.http.places import ConnectionPlaces
from kpl_integrations.ingest.http2.connection import Http2Connection
from kpl_integrations.ingest.settings_sources import load_settings
from kpl_integrations.ingest.tenants import OpenTenants, Tenant
from tests.ingest.wire import Wire
from tests.support.gateway_scene import JSON, STREAM, gateway_of, kinesis
from tests.support.http2_frames import Http2Client
from tests.support.producer_scene import stored
from tests.support.virtual_time import run_in_virtual_time

PATH = f"/v1/streams/{STREAM}/records"
ONE = b'{"partition_key":"k","data":"x"}'
AS_JSON = [("content-type", JSON)]


class Http2Scene:
    """A gateway, and what makes its connections. `application` takes the place of the gateway."""

    def __init__(self, application: Any = None, **settings: Any) -> None:
        self.transport = kinesis()
        directory = OpenTenants(Tenant(id="local", otlp_streams={"logs": STREAM}))
        self.gateway: IngestGateway = gateway_of(self.transport, directory, record_max_buffered_time_ms=5)
        connection: Any = GatewayConnection.for_gateway(self.gateway, load_settings(**settings))
        self._class = connection
        self.places: ConnectionPlaces = connection.places
        self._config = uvicorn.Config(
            application or self.gateway,
            http=connection,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            timeout_keep_alive=75,
            limit_concurrency=1_000,
        )
        self._config.load()
        self.server: Any = ServerState()

    def connection(self) -> Any:
        return self._class(config=self._config, server_state=self.server, app_state={})

    def stored(self) -> list[bytes]:
        return sorted(data for _, data in stored(self.transport, STREAM))


class Talk:
    """One connection between the library's client and a gateway."""

    def __init__(self, scene: Http2Scene) -> None:
        self.wire = Wire()
        self.client = Http2Client()
        self.connection = scene.connection()
        self.connection.connection_made(self.wire)
        self.heard = 0

    @property
    def http2(self) -> Http2Connection:
        assert isinstance(self.wire.protocol, Http2Connection)
        return self.wire.protocol

    def write(self, data: bytes) -> None:
        """Give bytes to the connection as an event loop does."""
        while data and not self.wire.closed:
            if self.wire.protocol is None:
                self.connection.data_received(data)
                return
            buffer = self.http2.get_buffer(len(data))
            size = min(len(data), len(buffer))
            buffer[:size] = data[:size]
            self.http2.buffer_updated(size)
            data = data[size:]

    async def exchange(self, seconds: float = 0.1) -> None:
        """Let both say what they have to say, for some seconds."""
        until = asyncio.get_running_loop().time() + seconds
        while True:
            self.write(self.client.say())
            await asyncio.sleep(0)
            said, self.heard = self.wire.said[self.heard :], len(self.wire.said)
            if said:
                self.client.hear(said)
            elif asyncio.get_running_loop().time() >= until:
                return
            else:
                await asyncio.sleep(0.01)

    async def ask(
        self, method: str, path: str, fields: list[tuple[str, str]] | None = None, body: bytes = b""
    ) -> tuple[int, dict[str, str], bytes]:
        stream = self.client.ask(method, path, fields, body)
        await self.exchange()
        assert stream in self.client.ended
        return self.client.answers[stream]

    async def close(self) -> None:
        protocol: Any = self.wire.protocol or self.connection
        protocol.connection_lost(None)
        await asyncio.sleep(0.05)


@asynccontextmanager
async def talking(application: Any = None, **settings: Any) -> AsyncIterator[tuple[Http2Scene, Talk]]:
    """Open a gateway and one connection to it."""
    scene = Http2Scene(application, **settings)
    async with scene.gateway:
        talk = Talk(scene)
        try:
            yield scene, talk
        finally:
            await talk.close()


def answers_after(event: asyncio.Event) -> Any:
    """Return an application that answers 204 to all requests once the event is set."""

    async def application(_scope: Scope, _receive: Receive, send: Send) -> None:
        await event.wait()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    return application


def in_virtual_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test on a loop with a virtual clock."""

    def run() -> None:
        run_in_virtual_time(test, backend="asyncio")

    run.__name__ = test.__name__
    return run
