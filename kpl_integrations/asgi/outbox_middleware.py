"""The status rule: what a request put is published if its response is below 500, and discarded otherwise.

The response's first message decides, before it leaves. No response, by an exception or a cancellation,
counts as 500. A client that went away changes nothing: the app answers all the same, and its status rules.
"""

from typing import Final

from kpl_integrations.asgi.connection_state import STATE_KEY, producer_of
from kpl_integrations.asgi.outbox import OutboxProducer
from kpl_integrations.asgi.protocol import ASGIApp, Message, Receive, Scope, Send

__all__ = ["RequestOutboxMiddleware"]

_SERVER_ERROR: Final = 500


class RequestOutboxMiddleware:
    """Gives each HTTP request an outbox in the producer's place. WebSockets have no status: they keep the producer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on with an outbox."""
        if scope["type"] != "http" or STATE_KEY not in (scope.get("state") or {}):
            await self._app(scope, receive, send)
            return
        producer = producer_of(scope)
        outbox = OutboxProducer(producer)

        async def deciding_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                if message["status"] < _SERVER_ERROR:
                    outbox.publish()
                elif outbox.discard():
                    await producer.flush(timeout=0.0)
            await send(message)

        try:
            # A copy: the state of a request may be shared with the server's.
            await self._app({**scope, "state": {**scope["state"], STATE_KEY: outbox}}, receive, deciding_send)
        finally:
            if len(outbox) and outbox.discard():
                # The flush looks at every stream, and so at who waits for room.
                await producer.flush(timeout=0.0)
