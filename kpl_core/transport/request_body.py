"""A request's body on its way to the socket, in pieces.

aiohttp takes raw bytes too, but above 1 MiB it warns that they may block the
loop, and hands them to the transport in one go, which then copies what the
socket does not take at once. In pieces, with a pause for the socket between
them, neither happens.
"""

from typing import Any, Final

from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload

__all__ = ["RequestBody", "send_in_pieces"]

PIECE_BYTES: Final = 256 * 1024


class RequestBody(Payload):
    """Bytes that are already signed."""

    _autoclose = True

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        self._size = len(body)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return the body as text."""
        return bytes(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write the body, waiting for the socket after each piece."""
        body = memoryview(self._value)
        for start in range(0, len(body), PIECE_BYTES):
            await writer.write(body[start : start + PIECE_BYTES])


def send_in_pieces(request: Any, **_: object) -> None:  # noqa: ANN401 - botocore has no types
    """Replace the body of a signed request: a handler of botocore's `before-send` event."""
    request.body = RequestBody(request.body)
