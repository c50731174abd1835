"""Where the event loop writes what connections receive, and how much of it in one iteration.

A loop reads each readable connection once in an iteration, up to 256 KiB. Beside 200 connections with pipelined
requests that is 30 MB, and up to 80 ms in which nothing else runs. So a connection whose last piece had several
requests is read in small pieces. If all were, no body of some size would be complete at once, which costs three times
as much.
"""

from typing import Final

USUAL_BYTES: Final = 262_144
PIPELINED_BYTES: Final = 16_384


class ReceiveBuffers:
    """The buffers of all connections of one loop, which takes what it has written out at once."""

    __slots__ = ("_pipelined", "_usual")

    def __init__(self) -> None:
        self._usual = memoryview(bytearray(USUAL_BYTES))
        self._pipelined = memoryview(bytearray(PIPELINED_BYTES))

    def of(self, *, is_pipelining: bool) -> memoryview:
        """Return the buffer for the next bytes of a connection."""
        return self._pipelined if is_pipelining else self._usual
