"""The head of a connection's last request, as bytes and parsed: most requests repeat it.

A client that keeps its connection open repeats the same target and header fields. Parsing them again costs more than
decoding and putting a record, and gives the same result. So a connection compares the received bytes with its last
head. These parts may differ:

- the digits of Content-Length;
- the value of Authorization: a proxy sends the requests of several tenants over one connection;
- the values of `X-Request-Id`, `traceparent` and `tracestate`, of which each request may have its own;
- the values of fields that neither the server nor the gateway reads, such as `User-Agent`.

The head of a chunked request has to be the same.
"""

import re
from collections.abc import Mapping
from typing import Final, Self

import msgspec

from kpl_integrations.ingest.http.correlation import CORRELATING, Correlation
from kpl_integrations.ingest.http.request_head import RecordsHead

# A connection stores one head with at most so many bytes and lines, and verified credentials of so many bytes.
LONGEST_HEAD: Final = 4_096
_MOST_LINES: Final = 64
_MOST_CREDENTIAL_BYTES: Final = 8_192
# What a stored head uses apart from its line, which it has twice: as bytes and as text.
_HEAD_BYTES: Final = 256
_MOST_DIGITS: Final = 10
_LINE: Final = b"\r\n"
_END: Final = b"\r\n\r\n"
# More chunks are the parser's to join.
_MOST_CHUNKS: Final = 64
_CHUNK_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,7})\r\n")
_CHUNKED: Final = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked\r\n", re.IGNORECASE)
_CONTENT_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)", re.IGNORECASE)
_AUTHORIZATION: Final = b"authorization"
# Fields whose values are the same in each request that takes the cached head: those that the server or the gateway
# reads. Names with these starts are read too.
_READ: Final = frozenset(
    {
        b"access-control-request-headers",
        b"access-control-request-method",
        b"connection",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"cookie",
        b"expect",
        b"host",
        b"http2-settings",
        b"idempotency-key",
        b"keep-alive",
        b"origin",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_READ_STARTS: Final = (b"ce-", b"x-ack", b"x-amz-", b"x-explicit-", b"x-forwarded-", b"x-partition-", b"forwarded")
_BLANKS: Final = b" \t"
_CORRELATING: Final = frozenset(CORRELATING)
_UNCORRELATED: Final = Correlation()
_NAME: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+", re.IGNORECASE)
# What the parser accepts in every value; a line with another byte is parsed.
_PLAIN: Final = bytes(range(0x20, 0x7F))


def _joined_chunks(received: bytes, start: int) -> bytes | None:
    """Return the chunked body from `start` on; None if it does not end at the last byte or has many chunks."""
    chunks: list[bytes] = []
    while len(chunks) <= _MOST_CHUNKS and (found := _CHUNK_SIZE.match(received, start)) is not None:
        size = int(found[1], 16)
        end = found.end() + size
        if received[end : end + len(_LINE)] != _LINE:
            return None
        start = end + len(_LINE)
        if not size:
            return b"".join(chunks) if start == len(received) else None
        chunks.append(received[found.end() : end])
    return None


def _correlation_with(lines: Mapping[bytes, bytes], first: Correlation) -> Correlation:
    """Return the values of these lines, by name in lower case, else those of the first head."""
    pairs = zip(CORRELATING, first, strict=True)
    return Correlation(
        *[lines[name].partition(b":")[2].strip(_BLANKS) if name in lines else value for name, value in pairs]
    )


class HeadCache:
    """The bytes of a head, cut at the digits of its Content-Length, and the parsed head of the latest request."""

    __slots__ = ("_after", "_before", "_changing", "_credential_bytes", "_first", "_heads", "_is_chunked", "_latest",
                 "_length_line", "_line", "_lines", "head")  # fmt: skip

    def __init__(self, before: bytes, after: bytes, head: RecordsHead, *, is_chunked: bool = False) -> None:
        self.head = self._first = head
        self._before = before
        self._after = after
        self._is_chunked = is_chunked
        self._latest = len(before) + _MOST_DIGITS + len(after)
        self._length_line = before.count(_LINE)
        # The lines, and by number the start of those whose rest may differ; made for the first head that differs.
        self._lines: list[bytes] = []
        self._changing: dict[int, bytes] = {}
        # Heads with other verified credentials, by their line.
        self._heads: dict[bytes, RecordsHead] = {}
        self._credential_bytes = 0
        # The line with the credentials of `head`, unless that is the first head.
        self._line = b""

    @classmethod
    def of(cls, received: bytes, body_bytes: int, head: RecordsHead) -> Self | None:
        """Return the head of the one complete request in `received`, which the parser has accepted.

        Returns None if other bytes follow it, if it is long, or if it has neither a Content-Length nor a few chunks.
        """
        end = received.find(_END, 0, LONGEST_HEAD) + len(_END)
        if end < len(_END) or received.count(_LINE, 0, end) > _MOST_LINES:
            return None
        if _CHUNKED.search(received, 0, end) is not None:
            return None if _joined_chunks(received, end) is None else cls(received[:end], b"", head, is_chunked=True)
        if len(received) - end != body_bytes:
            return None
        length = _CONTENT_LENGTH.search(received, 0, end)
        return None if length is None else cls(received[: length.start(1)], received[length.end(1) : end], head)

    def body_of(self, received: bytes) -> bytes | None:
        """Return the body of a request with this head. None: the head differs, or the body has another length.

        `head` is then the head of this request.
        """
        before, after = self._before, self._after
        if self._is_chunked:
            self.head = self._first
            return _joined_chunks(received, len(before)) if received.startswith(before) else None
        if not received.startswith(before):
            return self._body_after_similar(received)
        start = len(before)
        stop = received.find(after, start, self._latest)
        digits = received[start:stop]
        if stop <= start or not digits.isdigit():
            return self._body_after_similar(received)
        end = stop + len(after)
        self.head = self._first
        return received[end:] if int(digits) == len(received) - end else None

    def span_of(self, received: bytes, begin: int) -> tuple[int, int] | None:
        """Return where the body of the request at `begin` starts and ends; None: another head, or not all is here.

        `head` is then the head of this request.
        """
        before, after = self._before, self._after
        if self._is_chunked or not received.startswith(before, begin):
            return None
        start = begin + len(before)
        stop = received.find(after, start, begin + self._latest)
        digits = received[start:stop]
        if stop <= start or not digits.isdigit():
            return None
        body = stop + len(after)
        end = body + int(digits)
        if end > len(received):
            return None
        self.head = self._first
        return body, end

    def is_whole(self, received: bytes) -> bool:
        """Return True if these bytes are one request with this head."""
        head, line = self.head, self._line
        is_whole = self.body_of(received) is not None
        self.head, self._line = head, line
        return is_whole

    def _body_after_similar(self, received: bytes) -> bytes | None:
        """Return the body of a request whose head differs only where it may, and remember the head."""
        end = received.find(_END, 0, LONGEST_HEAD)
        if not self._lines:
            self._cut()
        lines = received[: max(end, 0)].split(_LINE)
        if len(lines) != len(self._lines):
            return None
        changing, length = self._changing, b"0"
        changed: dict[bytes, bytes] = {}
        for number, (line, known) in enumerate(zip(lines, self._lines, strict=True)):
            if line == known:
                continue
            start = changing.get(number)
            if start is None or not line.startswith(start) or line.translate(None, _PLAIN):
                return None
            if number == self._length_line:
                length = line[len(start) :]
            else:
                changed[start[:-1].lower()] = line
        body = received[end + len(_END) :]
        if not length.isdigit() or len(length) > _MOST_DIGITS or int(length) != len(body):
            return None
        self.head = self._head_with(changed.get(_AUTHORIZATION, b""))
        if not _CORRELATING.isdisjoint(changed):
            correlation = _correlation_with(changed, self._first.correlation or _UNCORRELATED)
            self.head = msgspec.structs.replace(self.head, correlation=correlation)
        return body

    def _head_with(self, line: bytes) -> RecordsHead:
        """Return the parsed head with the credentials of this line; empty: with those of the first head."""
        self._line = line
        if not line:
            return self._first
        head = self._heads.get(line)
        if head is None:
            shown = line.partition(b":")[2].strip().decode("ascii")
            head = msgspec.structs.replace(self._first, authorization=shown)
        return head

    def keep_credentials(self) -> None:
        """Store `head`, because its credentials are verified."""
        if self.head is self._first or not self._line or self._line in self._heads:
            return
        size = 2 * len(self._line) + _HEAD_BYTES
        self._credential_bytes += size
        if self._credential_bytes > _MOST_CREDENTIAL_BYTES:
            self._heads.clear()
            self._credential_bytes = size
        self._heads[self._line] = msgspec.structs.replace(self.head, correlation=self._first.correlation)

    def _cut(self) -> None:
        """Cut the head into lines, and find those whose rest may differ."""
        self._lines = (self._before + b"0" + self._after)[: -len(_END)].split(_LINE)
        for number, line in enumerate(self._lines[1:], 1):
            name, colon, _ = line.partition(b":")
            lower = name.lower()
            if number == self._length_line:
                self._changing[number] = self._before.rpartition(_LINE)[2]
            elif colon and _NAME.fullmatch(name) and lower not in _READ and not lower.startswith(_READ_STARTS):
                self._changing[number] = name + colon
