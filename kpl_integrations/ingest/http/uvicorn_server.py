"""uvicorn, as far as the gateway uses it. No other module of the gateway imports it.

    uvicorn.Config          made with public options; `load`, `loaded_app` (with the middleware of trusted proxies),
                            `ssl`, `limit_concurrency`, `timeout_keep_alive`, `root_path`
    uvicorn.Server          `startup`, `serve`, `should_exit`, `servers`, `server_state`, `lifespan.state`,
                            `capture_signals`
    server_state            `connections`, `tasks`, `total_requests`, `default_headers`
    the connection's class  called with `config`, `server_state`, `app_state` and `_loop`; `shutdown()` at the end

tests/ingest/http/test_uvicorn_server.py starts, drains and ends a gateway; `make test-lowest` runs it on 0.32.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Final

import anyio
import uvicorn
from uvicorn.server import ServerState

from kpl_integrations.ingest.http.certificate import ServerCertificate
from kpl_integrations.ingest.http.listening import BACKLOG, connection_limit
from kpl_integrations.ingest.settings import IngestSettings

_log: Final = logging.getLogger(__name__)
# The time for the answers that are ready when the gateway is closed.
_LAST_ANSWERS_SECONDS: Final = 5


class ServerPort:
    """What a connection uses of the server that has accepted it."""

    __slots__ = ("_is_surplus", "app_state", "application", "keep_alive_seconds", "most_connections", "root_path",
                 "shared")  # fmt: skip

    def __init__(
        self,
        *,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if not config.loaded:
            config.load()
        self.application: Any = config.loaded_app
        self.root_path: str = config.root_path
        self.keep_alive_seconds: float = config.timeout_keep_alive
        # None: as many as there are.
        self.most_connections: int | None = config.limit_concurrency
        self.app_state = app_state
        # Of all connections: the open ones, whose `shutdown` is called at the end; the tasks that the server then waits
        # for; how many answers were sent; and the server's header fields, a new list once a second.
        self.shared: Any = server_state
        self._is_surplus = False

    def add(self, connection: object) -> None:
        """Count a connection, which has just been made. One above the limit does not take the place of another."""
        connections = self.shared.connections
        connections.add(connection)
        self._is_surplus = self.most_connections is not None and len(connections) > self.most_connections

    def answered(self) -> int:
        """Return how many answers all connections have sent."""
        return int(self.shared.total_requests)

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run this in a task for which the server waits at its end."""
        task = asyncio.get_running_loop().create_task(work)
        self.shared.tasks.add(task)
        task.add_done_callback(self.shared.tasks.discard)
        return task

    def is_full(self, http_2_requests: int) -> bool:
        """Return True if this connection is above the limit, or if as many requests of HTTP/1.1 run as there may be.

        `http_2_requests` is how many tasks are those of HTTP/2, which have bounds of their own.
        """
        most, shared = self.most_connections, self.shared
        return most is not None and (
            (self._is_surplus and len(shared.connections) > most) or len(shared.tasks) - http_2_requests >= most
        )


class QuietServer(uvicorn.Server):
    """uvicorn's server without signal handlers. It stops when `should_exit` is set, and sets `listening`."""

    def __init__(self, config: uvicorn.Config, certificate: ServerCertificate | None) -> None:
        super().__init__(config)
        self._certificate = certificate
        self.listening = anyio.Event()
        self._connecting: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen."""
        if self._certificate is not None and self.config.ssl is not None:
            self._certificate.serve(self.config.ssl)
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self.listening.set()

    def close_listeners(self) -> None:
        """Accept no more connections. A loop that watches a closed socket gets what opens next under its number."""
        for listener in getattr(self, "servers", ()):
            listener.close()

    def serve_connection(self, connection: socket.socket) -> None:
        """Serve a connection that was accepted elsewhere, as one of the server's own sockets."""
        task = self._loop.create_task(self._serve_connection(connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _serve_connection(self, connection: socket.socket) -> None:
        config = self.config
        make: Callable[[], asyncio.BaseProtocol] = partial(
            config.http_protocol_class,
            config=config,  # type: ignore[call-arg] # as uvicorn's own server creates it
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        try:
            await self._loop.connect_accepted_socket(make, connection, ssl=config.ssl)
        except OSError as error:
            # The client has disconnected, or does not speak TLS.
            _log.debug("a connection could not be served: %s", error)
            connection.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


def uvicorn_server(
    application: Any,  # noqa: ANN401 - an ASGI application
    connection: type[asyncio.BaseProtocol],
    settings: IngestSettings,
    certificate: ServerCertificate | None,
) -> QuietServer:
    """Return a server that makes a `connection` for each client."""
    config = uvicorn.Config(
        application,
        http=connection,  # type: ignore[arg-type] # uvicorn names a Protocol, and gives it to the loop as it is
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        # X-Forwarded-For and -Proto are ignored unless the settings name trusted proxies.
        proxy_headers=settings.forwarded_allow_ips is not None,
        forwarded_allow_ips=settings.forwarded_allow_ips or "",
        backlog=BACKLOG,
        limit_concurrency=connection_limit(settings.max_connections),
        timeout_keep_alive=settings.keep_alive_seconds,
        timeout_graceful_shutdown=_LAST_ANSWERS_SECONDS,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
    )
    return QuietServer(config, certificate)
