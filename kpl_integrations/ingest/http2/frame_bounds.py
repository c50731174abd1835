"""Bounds on the frames of one HTTP/2 connection, before anything parses them (RFC 9113, sections 4.1 and 10.5).

    control frames  SETTINGS, PING, RST_STREAM, WINDOW_UPDATE, PRIORITY, empty and unknown frames cost the server work
                    and the client 9 to 15 bytes each. They take tokens, which answers and time give back. So a client
                    may reset requests, but not faster than it takes answers.
    other frames    A DATA frame takes a token if its request has ended, a header block one for every 16 fields.
    sizes           A frame is bounded before it is kept, and the bytes of HEADERS and its CONTINUATION frames before
                    they are decompressed.
    GOAWAY          The client begins no more requests. It is taken out: the library `h2` would send no answers after
                    it, and RFC 9113 (section 6.8) wants those of the requests that have begun.

A synchronous machine: it gets bytes and instants.
"""

from collections.abc import Callable
from typing import Final

from h2.errors import ErrorCodes

_PREFACE_BYTES: Final = 24
_HEADER_BYTES: Final = 9
_END_HEADERS: Final = 0x4
_END_STREAM: Final = 0x1
_DATA, _HEADERS, _GOAWAY, _CONTINUATION = 0x0, 0x1, 0x7, 0x9
# A browser that loads a page sends about ten.
_MOST_TOKENS: Final = 200.0
_TOKENS_PER_SECOND: Final = 50.0
TOKENS_PER_ANSWER: Final = 4.0
"""What a client may send for an answer: updates of two windows, and two more."""
# The same for so many bytes of an answer: the updates of two windows.
_TOKENS_PER_DATA, _DATA_BYTES = 2.0, 4_096
# A request of a browser or of an SDK has 10 to 30 fields.
_FIELDS_PER_TOKEN: Final = 16
# Those that new settings let go on, perhaps by a byte each.
_ANSWERS_PER_TOKEN: Final = 4
# No setting of ours allows more (RFC 9113, section 4.2).
_MOST_FRAME_BYTES: Final = 16_384


class TooMuch(Exception):  # noqa: N818 - reads as a sentence where it is raised
    """The client sends more than it may. The message says of what, `code` is for its GOAWAY frame."""

    def __init__(self, message: str, code: ErrorCodes = ErrorCodes.ENHANCE_YOUR_CALM) -> None:
        super().__init__(message)
        self.code = code


class FrameBounds:
    """What one client has sent. `head_began_at` is the instant at which an unfinished header block began, or None.

    `has_ended` tells of a stream whether its request has ended.
    """

    __slots__ = ("_block_bytes", "_drops", "_ends_block", "_has_ended", "_left", "_most_block_bytes", "_partial",
                 "_refilled_at", "_tokens", "has_left", "head_began_at")  # fmt: skip

    def __init__(self, most_block_bytes: int, now: float, has_ended: Callable[[int], bool] = lambda _: False) -> None:
        self._most_block_bytes = most_block_bytes
        self._has_ended = has_ended
        self._tokens, self._refilled_at = _MOST_TOKENS, now
        # A frame's header until it is complete; how many bytes of its payload are to come; whether they are dropped.
        # The preface is not a frame, and is parsed too.
        self._partial = b""
        self._left = _PREFACE_BYTES
        self._drops = False
        self._block_bytes = 0
        # Whether the header block ends with this frame.
        self._ends_block = False
        self.head_began_at: float | None = None
        # Whether the client has said that it begins no more requests.
        self.has_left = False

    def earn(self, tokens: float) -> None:
        """Give tokens for something that the server has sent."""
        self._tokens = min(_MOST_TOKENS, self._tokens + tokens)

    def earn_for_data(self, size_bytes: int) -> None:
        """Give tokens for so many bytes of an answer."""
        self.earn(_TOKENS_PER_DATA * size_bytes / _DATA_BYTES)

    def take_for_answers(self, count: int, now: float) -> None:
        """Take the tokens of new settings, for which so many answers are looked at; raises `TooMuch`."""
        self._take_tokens(count // _ANSWERS_PER_TOKEN, now)

    def take_for_fields(self, fields: int, now: float) -> None:
        """Take the tokens of a header block; raises `TooMuch`."""
        self._take_tokens(fields // _FIELDS_PER_TOKEN, now)

    def frames_in(self, data: bytes) -> int:
        """Return how many frames begin in the bytes that come next."""
        data = self._partial + data
        at, frames = self._left, 0
        while at + _HEADER_BYTES <= len(data):
            at += _HEADER_BYTES + int.from_bytes(data[at : at + 3], "big")
            frames += 1
        return frames

    def receive(self, data: bytes, now: float) -> bytes:
        """Return those of these bytes, and of kept ones, that are to be parsed.

        Raises:
            TooMuch: a bound is exceeded.
        """
        data, self._partial = self._partial + data, b""
        at, kept = 0, []
        while at < len(data):
            if self._left:
                end = min(at + self._left, len(data))
                self._left -= end - at
            elif len(data) - at < _HEADER_BYTES:
                self._partial = data[at:]
                break
            else:
                end = at + _HEADER_BYTES
                self._left = int.from_bytes(data[at : at + 3], "big")
                self._begin(data[at + 3], data[at + 4], int.from_bytes(data[at + 5 : end], "big"), now)
            if not self._drops:
                kept.append(data[at:end])
            at = end
            if self._ends_block and not self._left:
                self._ends_block, self._block_bytes, self.head_began_at = False, 0, None
        return b"".join(kept)

    def _begin(self, kind: int, flags: int, stream_id: int, now: float) -> None:
        """Count a frame, whose payload has `_left` bytes."""
        if self._left > _MOST_FRAME_BYTES:
            message = f"a frame of {self._left:,} bytes; at most {_MOST_FRAME_BYTES:,} are allowed"
            raise TooMuch(message, ErrorCodes.FRAME_SIZE_ERROR)
        self._drops = kind == _GOAWAY
        if kind in {_HEADERS, _CONTINUATION}:
            self._count_block(flags, now)
        elif kind == _DATA and (self._left or flags & _END_STREAM) and not self._has_ended(stream_id):
            return
        if kind == _GOAWAY:
            self.has_left = True
        if kind == _HEADERS or (kind == _CONTINUATION and self._left):
            return
        self._take_tokens(1, now)

    def _count_block(self, flags: int, now: float) -> None:
        self._block_bytes += self._left
        if self._block_bytes > self._most_block_bytes:
            message = f"a header block of more than {self._most_block_bytes:,} bytes"
            raise TooMuch(message)
        self._ends_block = bool(flags & _END_HEADERS)
        if self.head_began_at is None:
            self.head_began_at = now

    def _take_tokens(self, tokens: int, now: float) -> None:
        self.earn((now - self._refilled_at) * _TOKENS_PER_SECOND)
        self._refilled_at = now
        self._tokens -= tokens
        if self._tokens < 0.0:
            message = f"more than {_TOKENS_PER_SECOND:g} control frames a second, besides those that answers allow"
            raise TooMuch(message)
