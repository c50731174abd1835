"""A transport without a socket, for one connection of a gateway."""

import asyncio


class Wire(asyncio.Transport):
    """Notes each write, until it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = self.aborted = False
        # Of what was written, as far as the client has not read it.
        self.unread_bytes = 0
        # What took the place of the protocol that the test made.
        self.protocol: asyncio.BaseProtocol | None = None

    @property
    def said(self) -> bytes:
        """Return all that was written."""
        return b"".join(self.writes)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.closed:
            self.writes.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return self.unread_bytes

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading
