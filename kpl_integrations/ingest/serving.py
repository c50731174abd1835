"""Serve a gateway with uvicorn, and shut it down without losing records.

    SIGTERM  1. Readiness fails. Requests are still accepted until load balancers notice (`drain_delay_seconds`).
             2. Admission closes: new requests get 503, and long answers such as event streams end.
             3. Buffered records are delivered (`close_seconds`). The rest is spooled or dead-lettered, and reported.
             4. The server sends the answers of requests that waited for delivery, and ends.

A second SIGTERM skips the delay and the delivery. SIGINT skips the delay, and a third SIGINT skips the delivery.
"""

import contextlib
import ctypes
import gc
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from typing import Final

import anyio

from kpl_core import ProducerReport
from kpl_integrations.ingest.fast_path.protocol import GatewayConnection
from kpl_integrations.ingest.gateway import IngestGateway
from kpl_integrations.ingest.http.certificate import ServerCertificate
from kpl_integrations.ingest.http.listening import SpareSockets, bound_socket
from kpl_integrations.ingest.http.uvicorn_server import uvicorn_server

__all__ = ["GatewayServer", "bound_socket", "url_of"]

_log: Final = logging.getLogger(__name__)
# How many connections are accepted in one round of the loop, so that a late loop still lets new clients in.
_ACCEPTS: Final = 8
# Of <malloc.h>.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


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
        if settings.tls_certificate is not None and settings.tls_key is not None:
            protocols = ["h2", "http/1.1"] if settings.http2 else ["http/1.1"]
            gateway.certificate = ServerCertificate(settings.tls_certificate, settings.tls_key, protocols)
        connection = GatewayConnection.for_gateway(gateway, settings)
        self._server = uvicorn_server(gateway, connection, settings, gateway.certificate)
        self.url = url_of(listening, is_tls=settings.tls_certificate is not None)
        self._signals = 0
        self._signalled = anyio.Event()
        self._no_delay = anyio.Event()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Shut down; see the module. SIGINT comes from a person at a terminal, so it has no delay."""
        self._signals += 1
        self._signalled.set()
        if self._spares is not None:
            self._spares.close()
        if self._signals > 1 or number is signal.SIGINT:
            self._no_delay.set()
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
            _log.info("stopping: not ready, closing in %g s", 0.0 if self._no_delay.is_set() else delay)
            with anyio.move_on_after(delay):
                await self._no_delay.wait()
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
