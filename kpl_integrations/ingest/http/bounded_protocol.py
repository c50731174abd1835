"""uvicorn's HTTP protocol with bounds on the head of a request, which it has none for.

A client that sends its header fields a byte at a time would hold its connection for ever, and one that never
stops sending them would fill the memory. Both are looked at only when a head does not come in one piece, so a
usual request pays nothing. (The body has bounds of its own, in `body.py`.)

Fields behind a chunked body are bounded too, and read by nobody: they must not stand for what was in the head
(RFC 9110, section 6.5.1). And nobody is upgraded: such a request is answered as if it had not asked.
"""

import asyncio
import sys
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["BoundedProtocol"]

_TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\ncontent-length: 0\r\n"
    b"connection: close\r\n\r\n"
)
_TOO_SLOW: Final = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: text/plain\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)


class BoundedProtocol(HttpToolsProtocol):
    """One connection; a subclass says how long and how large a head may be."""

    header_seconds: ClassVar[float] = 10.0
    max_header_bytes: ClassVar[int] = 32_768

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - uvicorn's own
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        # Whether the piece that is being parsed holds the end of a request: then what of it is the next one's head
        # is unknown, and not counted.
        self._ends_within = False
        # Whether it holds the beginning of one.
        self._begins_within = False
        # Whether it holds something of a body.
        self._body_within = False
        # Whether what is being parsed asks for an upgrade, and where in its piece the parser stopped because of that.
        self._asks_upgrade = False
        self._stopped_at: int | None = None
        self._head_timer: asyncio.TimerHandle | None = None

    @classmethod
    def with_bounds(cls, *, header_seconds: float, max_header_bytes: int) -> "type[BoundedProtocol]":
        """Return the class with these bounds: uvicorn makes the protocol itself."""
        bounds = {"header_seconds": header_seconds, "max_header_bytes": max_header_bytes}
        return type(cls.__name__, (cls,), bounds)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        """Wait for the first head."""
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(self.header_seconds, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser; afterwards see whether a head is unfinished, or nobody waits for one any more."""
        self._ends_within = self._begins_within = self._body_within = False
        idle = self.timeout_keep_alive_task
        super().data_received(data)
        while self._stopped_at is not None:
            data = self._without_upgrade(data[self._stopped_at :])
            super().data_received(data)
        if self.transport.is_closing():
            return
        if not self._in_head:
            # Neither a head nor of a body: fields behind it, or what stands between chunks.
            is_beside = not (self._body_within or self._begins_within or self._ends_within)
            self._head_bytes = self._head_bytes + len(data) if is_beside else 0
            if self._head_bytes > self.max_header_bytes:
                self._refuse(_TOO_LARGE)
                return
            if idle is not None and not self._begins_within:
                self._stay_idle(idle.when())
            return
        if not self._ends_within:
            self._head_bytes += len(data)
        if self._head_bytes > self.max_header_bytes:
            self._refuse(_TOO_LARGE)
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.header_seconds, self._too_slow)

    def on_message_begin(self) -> None:
        """Begin a head."""
        self._begin_head()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a field of a head."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """End it."""
        self._end_head()
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._asks_upgrade = True
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body."""
        self._body_within = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request; one that asks for an upgrade has not begun."""
        self._ends_within = True
        if not self._asks_upgrade:
            super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Take note of where the parser stopped; uvicorn calls this while it handles its HttpParserUpgrade."""
        stopped = sys.exc_info()[1]
        if self._asks_upgrade and stopped is not None:
            self._stopped_at = stopped.args[0]

    def _without_upgrade(self, rest: bytes) -> bytes:
        """Return what the client would have sent had it asked for no upgrade, for a new parser.

        The parser takes such a request for one without a body, and its body for something that is no HTTP. But a
        server may ignore what it is asked (RFC 9110, section 7.8), and Java's client asks with its first request.
        """
        version = self.parser.get_http_version().encode()
        fields = [b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade"]
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (self.parser.get_method(), self.url, version, b"".join(fields))
        self._asks_upgrade, self._stopped_at = False, None
        self.parser = type(self.parser)(self)
        return head + rest

    def _stay_idle(self, until: float) -> None:
        """Wait for the next request no longer than before: what came belongs to none that is still to be answered.

        It is the rest of a body nobody read, or empty lines. uvicorn stops its timer for whatever comes, and starts
        it with the next answer only.
        """
        if self.timeout_keep_alive_task is None and not self._is_answering():
            self.timeout_keep_alive_task = self.loop.call_at(until, self.timeout_keep_alive_handler)

    def _is_answering(self) -> bool:
        """Say whether an answer is still being worked on: what is written before it would be taken for it."""
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def _begin_head(self) -> None:
        self._in_head = self._begins_within = True
        self._head_bytes = 0

    def _end_head(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._stop_waiting()

    def _stop_waiting(self) -> None:
        timer, self._head_timer = self._head_timer, None
        if timer is not None:
            timer.cancel()

    def _too_slow(self) -> None:
        self._head_timer = None
        if not self._in_head or self.transport.is_closing():
            return
        if self._is_answering():
            self._head_timer = self.loop.call_later(self.header_seconds, self._too_slow)
        else:
            self._refuse(_TOO_SLOW)

    def _refuse(self, answer: bytes) -> None:
        self._stop_waiting()
        if self.transport.is_closing():
            return
        if not self._is_answering():
            self.transport.write(answer)
        self.transport.close()
