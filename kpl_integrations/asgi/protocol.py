"""ASGI 3.0 (asgi.readthedocs.io) without a framework: its types, JSON responses, and a connection's producer."""

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final

from kpl_core import KplError, Producer

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
# Any, because frameworks name different types for the scope and the two functions.
ASGIApp = Callable[[Any, Any, Any], Awaitable[None]]

# Keys in the lifespan's state.
STATE_KEY: Final = "kinesis"
HEALTH_KEY: Final = "kinesis_health"

Header = tuple[bytes, bytes]

_JSON: Final = b"application/json"
# RFC 9457, Problem Details for HTTP APIs.
PROBLEM_JSON: Final = b"application/problem+json"


class MissingProducer(KplError, RuntimeError):  # noqa: N818 - reads as a sentence where it is raised
    """The application has no producer, because no KinesisLifespan ran; the message explains the cause."""


def producer_of(scope: Mapping[str, Any]) -> Producer:
    """Return the producer of an HTTP or WebSocket scope.

    Raises:
        MissingProducer: the application has no producer.
    """
    producer: Producer | None = (scope.get("state") or {}).get(STATE_KEY)
    if producer is None:
        raise MissingProducer(_why_it_is_missing(scope))
    return producer


def _why_it_is_missing(scope: Mapping[str, Any]) -> str:
    root_path = scope.get("root_path", "")
    # Starlette's Mount changes the root path and keeps the server's own under another name.
    if root_path != scope.get("app_root_path", root_path):
        return (
            f"this connection has no state[{STATE_KEY!r}]; it belongs to an app mounted at {root_path!r}, and "
            f"a mounted app's lifespan never runs: give KinesisLifespan to the outermost app, whose state the mounted "
            f"apps share, or wrap the outermost app in KinesisASGI"
        )
    return (
        f"this connection has no state[{STATE_KEY!r}], so no KinesisLifespan ran: give it to the outermost app "
        f"(`lifespan=KinesisLifespan(config)`), and use a server that runs lifespans (uvicorn: not `--lifespan off`; "
        f"daphne runs none). In a test enter the client (`with TestClient(app)`); httpx's ASGITransport runs no "
        f"lifespan: wrap the app in asgi_lifespan's LifespanManager, or use TestClient"
    )


def whole_seconds(seconds: float) -> int:
    """Return `seconds` rounded up, at least 1: never ask a client to come back before there is capacity."""
    return max(1, math.ceil(seconds))


def retry_after_header(seconds: float) -> Header:
    """Return the Retry-After field (RFC 9110, section 10.2.3)."""
    return b"retry-after", b"%d" % whole_seconds(seconds)


def adding(headers: Iterable[Header], send: Send) -> Send:
    """Return a `send` that adds these header fields to the answer."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *headers]}
        await send(message)

    return sent


async def send_json(
    send: Send, status: int, body: bytes, *, content_type: bytes = _JSON, headers: Iterable[Header] = ()
) -> None:
    """Send a response with this body; the server drops the body of a HEAD request."""
    start = {
        "type": "http.response.start",
        "status": status,
        "headers": [
            (b"content-type", content_type),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", b"no-store"),
            *headers,
        ],
    }
    await send(start)
    await send({"type": "http.response.body", "body": body})
