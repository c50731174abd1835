"""Backpressure, told to the client: 503, when to come again, and why (RFC 9110 10.2.3, RFC 9457).

The core says no by an exception; here it becomes an answer. Nothing is decided.
"""

import time
from collections.abc import Callable
from typing import Final

import msgspec

from kpl_core import BufferFull, ConfigError, ProducerClosed
from kpl_core.limits import RejectionMonitor
from kpl_integrations.asgi.protocol import ASGIApp, Message, Receive, Scope, Send
from kpl_integrations.asgi.responses import PROBLEM_JSON, send_json

__all__ = ["REFUSALS", "BackpressureMiddleware"]

# What the core raises: the problem's code, and its detail for the client. What the request had put before is not
# known here.
REFUSALS: Final = {
    BufferFull: ("buffer-full", "The service holds as many records as it may; send this request again later."),
    ProducerClosed: ("shutting-down", "The service is shutting down; send this request again later."),
}
_SERVICE_UNAVAILABLE: Final = 503
# RFC 6455's registry: Try Again Later.
_TRY_AGAIN_LATER: Final = 1013
# ASGI's extension for a handshake that is refused with an answer; to close instead means 403, which is no backpressure.
_DENIAL: Final = "websocket.http.response"
# After these there is nothing left to say.
_BEGINNINGS: Final = frozenset({"http.response.start", "websocket.http.response.start", "websocket.close"})


class BackpressureMiddleware:
    """Turns `BufferFull` and `ProducerClosed` that leave the app into 503, for an open WebSocket into close code 1013.

    `retry_after_seconds` is what `Retry-After` says. `rejections` is told of every request, refused or not, at
    `clock()`. Once a response has begun, the exception goes on to the server. Put it outside
    `RequestOutboxMiddleware` (in Starlette: add it after).

    Raises:
        ConfigError: `retry_after_seconds` is no whole number of seconds.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        retry_after_seconds: int = 1,
        rejections: RejectionMonitor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        if not str(retry_after_seconds).isdecimal():
            message = f"retry_after_seconds is {retry_after_seconds!r}; it must be a whole number of seconds, 0 or more"
            raise ConfigError(message)
        self._retry_after = str(retry_after_seconds).encode()
        self._rejections = rejections
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and answer for the app where it could not."""
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        has_begun = is_refused = is_accepted = False

        async def watched_send(message: Message) -> None:
            nonlocal has_begun, is_accepted
            has_begun = has_begun or message["type"] in _BEGINNINGS
            is_accepted = is_accepted or message["type"] == "websocket.accept"
            await send(message)

        async def send_denial(message: Message) -> None:
            await send({**message, "type": f"websocket.{message['type']}"})

        try:
            await self._app(scope, receive, watched_send)
        except (BufferFull, ProducerClosed) as refusal:
            is_refused = True
            if has_begun:
                raise
            code, detail = REFUSALS[type(refusal)]
            if scope["type"] == "http":
                await self._answer(send, code, detail)
            elif not is_accepted and _DENIAL in (scope.get("extensions") or {}):
                await self._answer(send_denial, code, detail)
            else:
                await send({"type": "websocket.close", "code": _TRY_AGAIN_LATER, "reason": code})
        finally:
            if self._rejections is not None:
                self._rejections.record(not is_refused, self._clock())

    async def _answer(self, send: Send, code: str, detail: str) -> None:
        problem = {
            "type": "about:blank",
            "title": "Service Unavailable",
            "status": _SERVICE_UNAVAILABLE,
            "detail": detail,
            "code": code,
        }
        body = msgspec.json.encode(problem)
        retry_after = (b"retry-after", self._retry_after)
        await send_json(send, _SERVICE_UNAVAILABLE, body, content_type=PROBLEM_JSON, headers=[retry_after])
