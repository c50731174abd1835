"""How a connection is read and written: when it is not read, how much at a time, and whether its client reads.

A loop reads each readable connection once in an iteration, up to 256 KiB. Beside 200 connections with pipelined
requests that is 30 MB, and up to 80 ms in which nothing else runs. So a connection whose last piece had several
requests is read in small pieces. If all were, no body of some size would be complete at once, which costs three times
as much.
"""

import asyncio
from typing import Final

USUAL_BYTES: Final = 262_144
PIPELINED_BYTES: Final = 16_384
LINGER_SECONDS: Final = 30.0
"""How long a closed connection stays for a client that does not take what was written."""


class ConnectionFlow:
    """The transport reads if neither a request nor a turn pauses it."""

    __slots__ = ("_transport", "_writable", "is_held", "read_paused", "write_paused")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.is_held = self.read_paused = self.write_paused = False
        self._writable = asyncio.Event()
        self._writable.set()

    def pause_reading(self) -> None:
        """Pause for a request: it has bytes enough, or waits for the answer to another."""
        if not self.read_paused:
            self.read_paused = True
            if not self.is_held:
                self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Resume for a request."""
        if self.read_paused:
            self.read_paused = False
            if not self.is_held:
                self._transport.resume_reading()

    def hold(self) -> None:
        """Pause for a turn."""
        if not self.is_held:
            self.is_held = True
            if not self.read_paused:
                self._transport.pause_reading()

    def release(self) -> None:
        """Resume after a turn."""
        if self.is_held:
            self.is_held = False
            if not self.read_paused:
                self._transport.resume_reading()

    def pause_writing(self) -> None:
        """Note that the client does not read."""
        self.write_paused = True
        self._writable.clear()

    def resume_writing(self) -> None:
        """Note that the client reads, or has disconnected."""
        self.write_paused = False
        self._writable.set()

    def close(self) -> None:
        """Close the connection when the client has taken what was written, or after `LINGER_SECONDS`."""
        self._transport.close()
        if self._transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(LINGER_SECONDS, self._transport.abort)

    async def writable(self) -> None:
        """Wait until the client reads, or has disconnected."""
        await self._writable.wait()


class ReceiveBuffers:
    """The buffers of all connections of one loop, which takes what it has written out at once."""

    __slots__ = ("_pipelined", "_usual")

    def __init__(self) -> None:
        self._usual = memoryview(bytearray(USUAL_BYTES))
        self._pipelined = memoryview(bytearray(PIPELINED_BYTES))

    def of(self, *, is_pipelining: bool) -> memoryview:
        """Return the buffer for the next bytes of a connection."""
        return self._pipelined if is_pipelining else self._usual
