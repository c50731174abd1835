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
SEND_SECONDS: Final = 30.0
"""A client that takes less than `LEAST_BYTES` of what was written in this time does not get the rest."""
LEAST_BYTES: Final = 1_024


class ConnectionFlow:
    """The transport reads if neither a request nor a turn pauses it. It has a bound on slow clients."""

    __slots__ = ("_reading_timer", "_transport", "_writable", "is_held", "read_paused", "write_paused")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.is_held = self.read_paused = self.write_paused = False
        self._writable = asyncio.Event()
        self._writable.set()
        # Runs while the client does not read.
        self._reading_timer: asyncio.TimerHandle | None = None

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
        if self._reading_timer is not None:
            self._reading_timer.cancel()
            self._reading_timer = None

    def abort_unless_read(self) -> None:
        """Abort the connection if its client takes nearly nothing for `SEND_SECONDS` until `resume_writing`."""
        unsent = self._transport.get_write_buffer_size()
        self._reading_timer = asyncio.get_running_loop().call_later(SEND_SECONDS, self._look_at_reading, unsent)

    def _look_at_reading(self, unsent_before: int) -> None:
        if unsent_before - self._transport.get_write_buffer_size() < LEAST_BYTES:
            self._transport.abort()
        else:
            self.abort_unless_read()

    def close(self) -> None:
        """Close the connection when the client has taken what was written, or after `LINGER_SECONDS`."""
        if self._transport.is_closing():
            return
        unsent = self._transport.get_write_buffer_size()
        self._transport.close()
        if unsent:
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
