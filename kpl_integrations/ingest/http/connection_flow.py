"""Whether a connection is read, for which there are two reasons not to, and whether its client reads."""

import asyncio
from typing import Final

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
