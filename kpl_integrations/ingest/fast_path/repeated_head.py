"""A request whose head says, byte for byte, what the one before it said, but for the length of its body.

A client that keeps its connection open sends the same target and header fields again and again. To parse them again
costs more than to decode and put the record behind them, and comes to the same. So a connection compares what it
receives with the last head (as HPACK refers to fields sent before, without the client's help); only the bytes of
Content-Length may be others.
"""

import re
from typing import Final, Self

__all__ = ["RepeatedHead"]

# Every open connection may keep one.
LONGEST_HEAD: Final = 4_096
_MOST_DIGITS: Final = 10
_END: Final = b"\r\n\r\n"
_CONTENT_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)", re.IGNORECASE)


class RepeatedHead:
    """The bytes of a head before the digits of its Content-Length, and those behind them."""

    __slots__ = ("_after", "_before", "_latest")

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = before
        self._after = after
        self._latest = len(before) + _MOST_DIGITS + len(after)

    @classmethod
    def of(cls, received: bytes, body_bytes: int) -> Self | None:
        """Return the head of the request that a parser found in `received`, its first byte and its last.

        None: something follows it, it has no Content-Length, or it is long.
        """
        end = received.find(_END, 0, LONGEST_HEAD) + len(_END)
        if end < len(_END) or len(received) - end != body_bytes:
            return None
        length = _CONTENT_LENGTH.search(received, 0, end)
        return None if length is None else cls(received[: length.start(1)], received[length.end(1) : end])

    def body_of(self, received: bytes) -> bytes | None:
        """Return the body of a request if it has this head, and nothing is missing or left over; else None."""
        before, after = self._before, self._after
        if not received.startswith(before):
            return None
        start = len(before)
        stop = received.find(after, start, self._latest)
        digits = received[start:stop]
        if stop <= start or not digits.isdigit():
            return None
        end = stop + len(after)
        return received[end:] if int(digits) == len(received) - end else None
