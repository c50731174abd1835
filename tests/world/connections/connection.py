"""A connection in the world: the gateway's own code for HTTP/1.1 at one end, a client at the other, no socket between.

Bytes arrive in order, after some time. A client that does not read leaves what is written in the gateway's buffer,
which has the high-water mark of asyncio; so does a black hole, from which no acknowledgement comes. The gateway's
kernel keeps the first bytes, as a real one does. An answer that reaches a client which has closed its end comes back as
a reset, and the requests behind it are not answered.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.support.gateway_scene import Answer

# What the kernels of both ends hold of an answer, and where asyncio tells a connection to write no more.
KERNEL_BYTES, HIGH_WATER_BYTES = 16_384, 65_536
_REQUEST, _ANSWER = b" HTTP/1.1\r\n", b"HTTP/1.1 "
# A head that does not arrive in time is answered before its request is complete.
UNASKED = 408


class ConnectionLost(Exception):  # noqa: N818 - as the names of what a connection does
    """The connection has ended, and a request has no answer."""


class GatewayEnd(asyncio.Transport):
    """The transport that the gateway's connection writes to."""

    def __init__(self, connection: "WorldConnection") -> None:
        super().__init__({"peername": ("192.0.2.1", 1), "sockname": ("192.0.2.2", 80)})
        self._connection = connection
        self._unsent: deque[bytes] = deque()
        self.unsent_bytes = self.most_unsent_bytes = 0
        # Those that the gateway has read and not answered.
        self.open_requests = self.most_open_requests = 0
        self._is_paused = self._is_closing = self._is_reading_paused = self._is_lost = False
        self._arrived: deque[bytes | None] = deque()
        self.protocol: Any = None

    # What the gateway calls

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_lost:
            return
        self.open_requests -= bytes(data).count(_ANSWER)
        self._unsent.append(bytes(data))
        self.unsent_bytes += len(data)
        self.flush()
        self.most_unsent_bytes = max(self.most_unsent_bytes, self.unsent_bytes)
        if self.unsent_bytes > HIGH_WATER_BYTES and not self._is_paused:
            self._is_paused = True
            self.protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self._is_reading_paused = True

    def resume_reading(self) -> None:
        self._is_reading_paused = False
        if self._arrived:
            self._connection.loop.call_soon(self._take)

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self.flush()

    def abort(self) -> None:
        self._unsent.clear()
        self.unsent_bytes = 0
        self._is_closing = True
        self.lose(None)

    # What the network does

    def flush(self) -> None:
        """Send what the client's end takes."""
        while self._unsent and (size := len(self._unsent[0])) <= self._connection.room():
            self.unsent_bytes -= size
            self._connection.send_back(self._unsent.popleft())
        if self._is_paused and not self.unsent_bytes:
            self._is_paused = False
            self.protocol.resume_writing()
        if self._is_closing and not self._unsent:
            self.lose(None)

    def arrive(self, data: bytes | None) -> None:
        """Take bytes of the client; None: it has closed its end."""
        self._arrived.append(data)
        self._take()

    def _take(self) -> None:
        while self._arrived and not (self._is_reading_paused or self._is_closing):
            data = self._arrived.popleft()
            if data is None:
                if not self.protocol.eof_received():
                    self.close()
                return
            self.open_requests += data.count(_REQUEST)
            self.most_open_requests = max(self.most_open_requests, self.open_requests)
            view = self.protocol.get_buffer(len(data))
            size = min(len(view), len(data))
            view[:size] = data[:size]
            if size < len(data):
                self._arrived.appendleft(data[size:])
            self.protocol.buffer_updated(size)

    def lose(self, error: Exception | None) -> None:
        """End this end, once."""
        if not self._is_lost:
            self._is_lost = self._is_closing = True
            self._connection.loop.call_soon(self.protocol.connection_lost, error)
            self._connection.send_back(None)


class WorldConnection:
    """A client's connection: requests in their order, also several before the first answer.

    Args:
        make: makes the gateway's connection.
        seconds: each way.
    """

    def __init__(self, make: Callable[[], Any], *, seconds: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.seconds = seconds
        self.is_open, self.is_reading = True, True
        # Whether several requests are under way at a time.
        self.is_shared = self._is_gone = False
        # What happens to the bytes that arrive: nothing, never; and the next answer arrives in part.
        self.is_black_hole = self.cuts_next = False
        self.false: list[str] = []
        self.end = GatewayEnd(self)
        self._waiting: deque[asyncio.Future[Answer]] = deque()
        self._answer = bytearray()
        self._there: deque[bytes | None] = deque()
        self._back: deque[bytes | None] = deque()
        # What is on its way, or in a kernel because the client does not read.
        self._back_bytes = 0
        self.end.protocol = make()
        self.end.protocol.connection_made(self.end)

    @property
    def is_idle(self) -> bool:
        """Whether a request could be sent and answered at once."""
        return self.is_open and not self._waiting

    async def ask(self, request: bytes, *, pieces: int = 1, between: float = 0.0) -> Answer:
        """Send a request, in pieces with some time between them, and return its answer.

        Raises:
            ConnectionLost: there will be none.
        """
        answer: asyncio.Future[Answer] = self.loop.create_future()
        self._waiting.append(answer)
        step = -(-len(request) // pieces)
        for begin in range(0, len(request), step):
            if begin:
                await asyncio.sleep(between)
            if not self.is_open:
                raise ConnectionLost
            self._send(request[begin : begin + step])
        return await answer

    def leave(self, *, reset: bool) -> None:
        """Close the client's end: at once, or behind what it has sent.

        A client that does not read closes only its half then, and never reads. From a black hole nothing arrives.
        """
        if reset and not self.is_black_hole:
            self.break_off()
            return
        self._send(None)
        self._lost(is_gone=self.is_reading)

    def break_off(self) -> None:
        """Break the connection at both ends."""
        self.end.lose(ConnectionResetError())
        self._lost()

    def read(self, *, on: bool) -> None:
        """Read answers from now on, or stop to read them."""
        if not self.is_open:
            return
        self.is_reading = on
        if on:
            for _ in range(len(self._back)):
                self._arrive_back()
            self.end.flush()

    def room(self) -> float:
        """Return how many bytes the gateway's end can get rid of."""
        if self._takes_bytes:
            return float("inf")
        return KERNEL_BYTES - self._back_bytes

    @property
    def _takes_bytes(self) -> bool:
        return not self.is_black_hole and (self.is_reading or self._is_gone)

    def send_back(self, data: bytes | None) -> None:
        """Let bytes travel to the client; None: the gateway has closed its end."""
        self._back.append(data)
        self._back_bytes += len(data or b"")
        if self.is_reading:
            self.loop.call_later(self.seconds, self._arrive_back)

    def _send(self, data: bytes | None) -> None:
        self._there.append(data)
        self.loop.call_later(self.seconds, self._arrive)

    def _arrive(self) -> None:
        data = self._there.popleft()
        if not self.is_black_hole:
            self.end.arrive(data)

    def _arrive_back(self) -> None:
        if not self._takes_bytes or not self._back:
            return
        data = self._back.popleft()
        self._back_bytes -= len(data or b"")
        if not self.is_open:
            self.loop.call_later(self.seconds, self.end.lose, ConnectionResetError())
        elif data is None:
            self._lost()
        elif self.cuts_next:
            self._hear(data[: len(data) // 2])
            self.break_off()
        else:
            self._hear(data)

    def _hear(self, data: bytes) -> None:
        self._answer += data
        while (head := self._answer.find(b"\r\n\r\n")) >= 0:
            lines = self._answer[:head].split(b"\r\n")
            fields = {
                name.decode(): value.strip().decode() for name, _, value in (x.partition(b":") for x in lines[1:])
            }
            end = head + 4 + int(fields["content-length"])
            if len(self._answer) < end:
                return
            answer = Answer(int(lines[0].split()[1]), fields, bytes(self._answer[head + 4 : end]))
            del self._answer[:end]
            if self._waiting:
                waiting = self._waiting.popleft()
                if not waiting.done():
                    waiting.set_result(answer)
            elif answer.status != UNASKED:
                self.false.append(f"an answer to no request: {answer}")
            if fields.get("connection") == "close":
                self._lost()

    def _lost(self, *, is_gone: bool = True) -> None:
        self.is_open, self._is_gone = False, is_gone
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(ConnectionLost())
        self._waiting.clear()
        self.end.flush()
