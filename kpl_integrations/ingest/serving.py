"""Serve a gateway with uvicorn, and shut it down without losing records.

    SIGTERM  1. Readiness fails. Requests are still accepted until load balancers notice (`drain_delay_seconds`).
             2. Admission closes: new requests get 503, and long answers such as event streams end.
             3. Buffered records are delivered (`close_seconds`). The rest is spooled or dead-lettered, and reported.
             4. The server sends the answers of requests that waited for delivery, and ends.

A second SIGTERM skips the delay and the delivery. SIGINT skips the delay, and a third SIGINT skips the delivery.
"""

import asyncio
import contextlib
import ctypes
import gc
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Final

import anyio
import uvicorn

from kpl_core import ProducerReport
from kpl_integrations.ingest.fast_path.selection import server_protocol
from kpl_integrations.ingest.gateway import IngestGateway
from kpl_integrations.ingest.http.certificate import ServerCertificate
from kpl_integrations.ingest.http.listening import BACKLOG, SpareSockets, bound_socket, connection_limit

__all__ = ["GatewayServer", "bound_socket", "url_of"]

_log: Final = logging.getLogger(__name__)
# The time for the answers that are ready when the gateway is closed.
_LAST_ANSWERS_SECONDS: Final = 5
# How many connections are accepted in one round of the loop, so that a late loop still lets new clients in.
_ACCEPTS: Final = 8
# Of <malloc.h>.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


class _QuietServer(uvicorn.Server):
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
        protocol: Callable[[], asyncio.Protocol] = partial(
            config.http_protocol_class,
            config=config,  # type: ignore[call-arg] # as uvicorn's own server creates it
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        try:
            await self._loop.connect_accepted_socket(protocol, connection, ssl=config.ssl)
        except OSError as error:
            # The client is gone, or does not speak TLS.
            _log.debug("a connection could not be served: %s", error)
            connection.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


def url_of(listening: socket.socket, *, is_tls: bool) -> str:
    """Return the URL of a listening socket."""
    host, port = listening.getsockname()[:2]
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _tune_memory() -> None:
    """Keep up to 32 MiB of freed memory, where malloc is glibc's.

    By default it returns the memory of a PutRecords body of 1 MiB to the kernel each time. The page faults of the next
    body then cost as much as the rest of the request.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, 32 * 1024 * 1024)
        mallopt(_M_MMAP_THRESHOLD, 4 * 1024 * 1024)


def _tune_garbage_collection() -> None:
    """Exclude the long-lived objects from garbage collection, and collect less often.

    A request creates containers that reference counting frees. Searching the whole heap for cycles after every few
    thousand of them would cost more than the requests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


class GatewayServer:
    """Serve one gateway on one socket, from `run` to the last answer.

    `spares` are the sockets of other workers, from which it may accept too; it closes them.

    Raises:
        ConfigError: the TLS files of the settings cannot be used.
    """

    def __init__(self, gateway: IngestGateway, listening: socket.socket, spares: SpareSockets | None = None) -> None:
        self._gateway = gateway
        # The flag belongs to the socket, not to the descriptor. `dup` would clear it otherwise, and a worker that
        # accepts from the same socket would block.
        listening.settimeout(0)
        self._socket = listening
        self._spares = spares
        settings = gateway.settings
        protocol = server_protocol(gateway, settings)
        gateway.plain_receive = protocol.is_fast
        if settings.tls_certificate is not None and settings.tls_key is not None:
            gateway.certificate = ServerCertificate(settings.tls_certificate, settings.tls_key)
        self._server = _QuietServer(
            uvicorn.Config(
                gateway,
                http=protocol.http,
                h11_max_incomplete_event_size=settings.max_header_bytes,
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
            ),
            gateway.certificate,
        )
        self.url = url_of(listening, is_tls=settings.tls_certificate is not None)
        self._signals = 0
        self._signalled = anyio.Event()
        self._hurry = anyio.Event()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Shut down; see the module. SIGINT comes from a person at a terminal, so it has no delay."""
        self._signals += 1
        self._signalled.set()
        if self._spares is not None:
            self._spares.close()
        if self._signals > 1 or number is signal.SIGINT:
            self._hurry.set()
        if self._signals > (2 if number is signal.SIGINT else 1):
            self._gateway.give_up()

    def reload(self) -> None:
        """Read the tenants file and the certificate again now."""
        self._gateway.reload()

    async def run(self, *, started: Callable[[], object] = lambda: None) -> ProducerReport:
        """Serve until `stop`. Return the report of all records."""
        async with self._gateway as gateway, self._serving():
            _tune_garbage_collection()
            _tune_memory()
            started()
            await self._signalled.wait()
            gateway.drain()
            delay = gateway.settings.drain_delay_seconds
            _log.info("stopping: not ready, closing in %g s", 0.0 if self._hurry.is_set() else delay)
            with anyio.move_on_after(delay):
                await self._hurry.wait()
            return await gateway.close()

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        """Run the server during the block, and let it finish its answers afterwards."""
        with contextlib.ExitStack() as copies:
            # libuv accepts one connection of a socket in each round of the loop. The server closes its listeners and
            # the copies, unless it is cancelled because the producer has failed.
            sockets = [self._socket, *(copies.enter_context(self._socket.dup()) for _ in range(_ACCEPTS - 1))]
            copies.callback(self._server.close_listeners)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._server.serve, sockets)
                await self._server.listening.wait()
                if self._spares is not None:
                    self._spares.start(self._server.serve_connection)
                try:
                    yield
                finally:
                    self._server.should_exit = True
