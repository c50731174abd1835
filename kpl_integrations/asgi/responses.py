"""Whole JSON answers in the words of ASGI."""

from collections.abc import Iterable
from typing import Final

from kpl_integrations.asgi.protocol import Send

__all__ = ["JSON", "PROBLEM_JSON", "send_json"]

JSON: Final = b"application/json"
# RFC 9457, Problem Details for HTTP APIs.
PROBLEM_JSON: Final = b"application/problem+json"


async def send_json(
    send: Send, status: int, body: bytes, *, content_type: bytes = JSON, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """Send a response with this body; the server drops the body where the method was HEAD."""
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
