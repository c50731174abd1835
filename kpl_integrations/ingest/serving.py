"""Serve a gateway with uvicorn, and end it in the order that loses nothing.

    SIGTERM  readiness says no; requests are still taken, until load balancers have noticed (`drain_delay_seconds`)
             the intake closes: 503 for whatever still comes, and long answers end (`gateway.closing`)
             what is there is delivered (`close_seconds`), the rest is spooled or dead-lettered, and reported
             the server ends, with the answers to those who waited for their delivery

A second signal takes the waiting out of it: the delay, then the delivering.
"""

import contextlib
import gc
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

import anyio
import uvicorn

from kpl_core import ProducerReport
from kpl_integrations.ingest.fast_path.at_once_protocol import AtOnceProtocol
from kpl_integrations.ingest.gateway import IngestGateway
from kpl_integrations.ingest.http.listening import BACKLOG, bound_socket

__all__ = ["GatewayServer", "bound_socket", "url_of"]

_log: Final = logging.getLogger(__name__)
# Answers on their way when everything is decided.
_LAST_ANSWERS_SECONDS: Final = 5


class _QuietServer(uvicorn.Server):
    """uvicorn's server without its signal handlers: it ends when it is told to, and says when it has begun."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = anyio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


def url_of(listening: socket.socket, *, is_tls: bool) -> str:
    """Return where a socket can be reached."""
    host, port = listening.getsockname()[:2]
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _spare_the_collector() -> None:
    """Leave what lives as long as the process out of every collection, and collect less often.

    A request makes containers that reference counting frees; looking through the whole heap for cycles every few
    thousand of them would cost more than the requests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


class GatewayServer:
    """One gateway on one socket, from `run` to the last answer."""

    def __init__(self, gateway: IngestGateway, listening: socket.socket) -> None:
        self._gateway = gateway
        self._socket = listening
        settings = gateway.settings
        gateway.plain_receive = True
        self._server = _QuietServer(
            uvicorn.Config(
                gateway,
                http=AtOnceProtocol.asking(gateway).with_bounds(
                    header_seconds=settings.header_seconds, max_header_bytes=settings.max_header_bytes
                ),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                # Nobody's word is taken for who a client is and whether it speaks TLS, unless the settings name whose.
                proxy_headers=settings.forwarded_allow_ips is not None,
                forwarded_allow_ips=settings.forwarded_allow_ips or "",
                backlog=BACKLOG,
                limit_concurrency=settings.max_connections,
                timeout_keep_alive=settings.keep_alive_seconds,
                timeout_graceful_shutdown=_LAST_ANSWERS_SECONDS,
                ssl_certfile=settings.tls_certificate,
                ssl_keyfile=settings.tls_key,
            )
        )
        # Where it listens.
        self.url = url_of(listening, is_tls=settings.tls_certificate is not None)
        self._signals = 0
        self._signalled = anyio.Event()
        self._hurry = anyio.Event()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End in order; called again, without waiting. SIGINT is somebody at a terminal: no delay."""
        self._signals += 1
        self._signalled.set()
        if self._signals > 1 or number is signal.SIGINT:
            self._hurry.set()
        if self._signals > (2 if number is signal.SIGINT else 1):
            self._gateway.give_up()

    async def run(self, *, started: Callable[[], object] = lambda: None) -> ProducerReport:
        """Serve until `stop`; return what became of all records."""
        async with self._gateway as gateway, self._serving():
            _spare_the_collector()
            started()
            await self._signalled.wait()
            gateway.drain()
            delay = gateway.settings.drain_delay_seconds
            _log.info("stopping: not ready any more, and closing in %g s", 0.0 if self._hurry.is_set() else delay)
            with anyio.move_on_after(delay):
                await self._hurry.wait()
            return await gateway.close()

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        """Run the server beside the block, and let it finish its answers after it."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._serve)
            await self._server.listening.wait()
            try:
                yield
            finally:
                self._server.should_exit = True

    async def _serve(self) -> None:
        await self._server.serve(sockets=[self._socket])
