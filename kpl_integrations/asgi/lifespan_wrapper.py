"""The lifespan around any ASGI application, in ASGI's own words.

The producer opens before the application starts and closes after it has shut down, in the one task that
the server gives to the lifespan. The application need not know lifespans: then its part is skipped.
"""

from kpl_integrations.asgi.lifespan import KinesisLifespan
from kpl_integrations.asgi.protocol import ASGIApp, Message, Receive, Scope, Send

__all__ = ["KinesisASGI"]

_ENDS = frozenset({"lifespan.shutdown.complete", "lifespan.shutdown.failed", "lifespan.startup.failed"})


class KinesisASGI:
    """`app` with a producer in every scope's state, also for servers that share no state."""

    def __init__(self, app: ASGIApp, lifespan: KinesisLifespan) -> None:
        self._app = app
        self._lifespan = lifespan
        self._state: dict[str, object] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Open and close with the lifespan; give everything else its producer."""
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
            return
        if self._state:
            scope = {**scope, "state": {**self._state, **(scope.get("state") or {})}}
        await self._app(scope, receive, send)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        startup = await receive()
        inner = _InnerLifespan(self._app, startup, receive, send)
        try:
            async with self._lifespan.open_producer() as state:
                self._state = state
                try:
                    await inner.run({**scope, "state": scope.setdefault("state", {})}, state)
                finally:
                    self._state = {}
        except Exception as error:
            # A server waits for this answer; without it, it would serve without a producer.
            if not inner.has_started:
                await send({"type": "lifespan.startup.failed", "message": str(error)})
            else:
                await send({"type": "lifespan.shutdown.failed", "message": str(error)})
            raise
        await send(inner.last_word)


class _InnerLifespan:
    """The application's own lifespan, whose last word is kept back until the producer is closed."""

    def __init__(self, app: ASGIApp, startup: Message, receive: Receive, send: Send) -> None:
        self._app = app
        self._startup: Message | None = startup
        self._receive_from_server = receive
        self._send_to_server = send
        self._shutdown_was_seen = False
        self.has_started = False
        self.last_word: Message = {"type": "lifespan.shutdown.complete"}

    async def run(self, scope: Scope, state: dict[str, object]) -> None:
        """Run it to its end, or wait for the shutdown in its place where it knows no lifespans."""
        scope["state"].update(state)
        try:
            await self._app(scope, self._receive, self._send)
        except Exception:
            if self.has_started or self.last_word["type"] == "lifespan.startup.failed":
                raise
            # ASGI: an application that raises on the lifespan scope supports none.
        if self.last_word["type"] == "lifespan.startup.failed":
            return
        if not self.has_started:
            await self._send({"type": "lifespan.startup.complete"})
        if not self._shutdown_was_seen:
            await self._receive()

    async def _receive(self) -> Message:
        if self._startup is not None:
            startup, self._startup = self._startup, None
            return startup
        message = await self._receive_from_server()
        self._shutdown_was_seen = True
        return message

    async def _send(self, message: Message) -> None:
        if message["type"] in _ENDS:
            self.last_word = message
            return
        self.has_started = True
        await self._send_to_server(message)
