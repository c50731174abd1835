"""The HTTP side of a server that must also be able to be down: listen, refuse, listen again, stop promptly."""

import asyncio
from typing import Any, Final

from aiohttp import web

from kpl_core.testing import FakeKinesis
from kpl_integrations.local_kinesis.handler import LARGEST_BODY_BYTES, Clock, RequestHandler

__all__ = ["Listener"]

_KEEP_ALIVE_SECONDS: Final = 75.0
# What requests in progress may still take when the server stops.
_GRACE_SECONDS: Final = 0.5


class _Request(web.BaseRequest):
    """A request whose body may be as large as Kinesis takes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - aiohttp's own arguments, passed through
        super().__init__(*args, client_max_size=LARGEST_BODY_BYTES, **kwargs)


class Listener:
    """One server, running from `start` to `stop`."""

    def __init__(self, fake: FakeKinesis, clock: Clock, host: str, port: int) -> None:
        self.fake = fake
        self.clock = clock
        self.closing = asyncio.Event()
        self._host = host
        self._port = port
        loop = asyncio.get_running_loop()
        self._server = web.Server(
            RequestHandler(fake, clock=clock, closing=self.closing),
            request_factory=lambda *parts: _Request(*parts, loop),
            access_log=None,
            keepalive_timeout=_KEEP_ALIVE_SECONDS,
        )
        self._socket: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """Return the address it listens on, also while it refuses connections."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    async def listen(self) -> None:
        """Begin to listen, on the port it had before if there was one; OSError if that is taken."""
        if self._socket is None:
            loop = asyncio.get_running_loop()
            self._socket = await loop.create_server(self._server, self._host, self._port, backlog=1024)
            self._port = self._socket.sockets[0].getsockname()[1]

    def refuse(self) -> None:
        """Listen no more, and drop the connections there are, answered or not."""
        listening, self._socket = self._socket, None
        if listening is not None:
            listening.close()
        for connection in self._server.connections:
            if connection.transport is not None:
                connection.transport.abort()

    async def stop(self) -> None:
        """Listen no more, give requests in progress half a second, then drop them."""
        listening, self._socket = self._socket, None
        if listening is not None:
            listening.close()
        self.closing.set()
        # One turn of the loop, so that hanging requests see it.
        await asyncio.sleep(0)
        self._server.pre_shutdown()
        await self._server.shutdown(_GRACE_SECONDS)
        if listening is not None:
            await listening.wait_closed()
