"""Bytes with which a client attacks an HTTP/2 server, each of about a wanted size, and what it is told.

Each ends with a request for /livez, so that a server that does not mind has something to answer.
"""

from collections.abc import Callable
from typing import NamedTuple

import hpack
from h2.errors import ErrorCodes

from tests.support.http2_frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    START,
    WINDOW_UPDATE,
    block,
    frame,
    request,
)

LAST_STREAM = 2**31 - 1
WINDOW = (1).to_bytes(4, "big")


def settings_of(window: int) -> bytes:
    """Return the client's setting of the window of each stream."""
    return frame(SETTINGS, (4).to_bytes(2, "big") + window.to_bytes(4, "big"))


class Attack(NamedTuple):
    """`code` is that of the GOAWAY frame; None: /livez is answered."""

    name: str
    make: Callable[[int], bytes]
    code: ErrorCodes | None


def many(*frames: bytes) -> Callable[[int], bytes]:
    one = b"".join(frames)
    return lambda size: START + one * (size // len(one)) + request(LAST_STREAM)


def in_streams(make: Callable[[int], bytes]) -> Callable[[int], bytes]:
    """Return an attack that does the same in one stream after the other."""

    def made(size: int) -> bytes:
        one = len(make(1))
        return START + b"".join(make(1 + 2 * number) for number in range(size // one)) + request(LAST_STREAM)

    return made


def in_one_head(size: int) -> bytes:
    """Send one field, and then refer to it: a byte each, which stands for 4,000 bytes."""
    first = hpack.Encoder().encode([*pseudo_fields(), ("x-bomb", "b" * 3_900)])
    block_of = first + b"\xbe" * max(0, min(size, 16_000) - len(first))
    return START + frame(HEADERS, block_of, flags=END_HEADERS | END_STREAM, stream=1)


def pseudo_fields() -> list[tuple[str, str]]:
    return [(":method", "GET"), (":scheme", "http"), (":authority", "x"), (":path", "/livez")]


def continued(payload: bytes) -> Callable[[int], bytes]:
    """Return a head in so many frames. It has an end: a server waits for ten seconds for one that has none."""
    more, last = frame(CONTINUATION, payload, stream=1), frame(CONTINUATION, flags=END_HEADERS, stream=1)
    return lambda size: START + frame(HEADERS, block(), stream=1) + more * (size // len(more)) + last


def body_of(payload: bytes) -> Callable[[int], bytes]:
    """Return a POST whose body comes in such pieces, and no more of them than the window allows."""
    piece = frame(DATA, payload, stream=1)
    head = frame(HEADERS, block("POST", "/v1/streams/orders/records"), flags=END_HEADERS, stream=1)
    return lambda size: START + head + piece * min(size // len(piece), 60_000) + request(LAST_STREAM)


def beyond_the_window(size: int) -> bytes:
    head = frame(HEADERS, block("POST", "/v1/streams/orders/records"), flags=END_HEADERS, stream=1)
    return START + head + frame(DATA, bytes(16_000), stream=1) * max(40, size // 16_009) + request(LAST_STREAM)


def answers_wait(*frames: bytes) -> Callable[[int], bytes]:
    """Return a hundred requests whose answers the client does not take, and then these frames, again and again."""
    asked = b"".join(request(1 + 2 * number, "GET", "/openapi.json") for number in range(100))
    one = b"".join(frames)
    return lambda size: START + settings_of(0) + asked + one * max(1, (size - len(asked)) // len(one))


def growing_windows(size: int) -> bytes:
    """Let a hundred answers go on by a byte each, again and again."""
    settings = b"".join(settings_of(1 + number) for number in range(size // 15))
    asked = b"".join(request(1 + 2 * number, "GET", "/openapi.json") for number in range(100))
    return START + settings_of(0) + asked + settings


def many_fields(size: int) -> bytes:
    """Return heads of 520 fields, a byte each."""
    fields = block() + b"\x90" * 520
    heads = (
        frame(HEADERS, fields, flags=END_HEADERS | END_STREAM, stream=1 + 2 * number)
        for number in range(size // len(fields))
    )
    return START + b"".join(heads)


def after_the_answer(size: int) -> bytes:
    """Return a body of small frames behind a request that is complete."""
    return START + request(1) + frame(DATA, b"x", stream=1) * (size // 10)


CALM, BROKEN = ErrorCodes.ENHANCE_YOUR_CALM, ErrorCodes.PROTOCOL_ERROR
ATTACKS = [
    Attack("SETTINGS", many(frame(SETTINGS)), CALM),
    Attack("PING", many(frame(PING, bytes(8))), CALM),
    Attack("PRIORITY", many(frame(PRIORITY, bytes(5), stream=3)), CALM),
    Attack("WINDOW_UPDATE", many(frame(WINDOW_UPDATE, WINDOW)), CALM),
    Attack("unknown frames", many(frame(0xBE)), CALM),
    Attack("rapid reset", in_streams(lambda n: request(n) + frame(RST_STREAM, bytes(4), stream=n)), CALM),
    Attack("empty DATA", body_of(b""), CALM),
    Attack("DATA of one byte", body_of(b"x"), None),
    Attack("CONTINUATION", continued(bytes(1_000)), CALM),
    Attack("small CONTINUATION", continued(b"x"), BROKEN),
    Attack("empty CONTINUATION", continued(b""), CALM),
    Attack("a head that grows", in_one_head, CALM),
    Attack("requests beyond the most", in_streams(lambda n: frame(HEADERS, block(), flags=4, stream=n)), BROKEN),
    Attack("a window of a byte", answers_wait(frame(WINDOW_UPDATE, WINDOW)), CALM),
    Attack("SETTINGS beside answers", answers_wait(*(settings_of(size) for size in (0, 1))), CALM),
    Attack("one-byte windows by SETTINGS", growing_windows, CALM),
    Attack("many fields", many_fields, CALM),
    Attack("DATA behind a request", after_the_answer, CALM),
    Attack("DATA beyond the window", beyond_the_window, ErrorCodes.FLOW_CONTROL_ERROR),
]
BROKEN_FRAMES: dict[str, tuple[bytes, ErrorCodes | None]] = {
    # It may speak no HTTP/2 at all (RFC 9113, section 3.4).
    "no preface": (b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n" + frame(SETTINGS), None),
    "DATA first": (START[:24] + frame(DATA, b"x", stream=1), BROKEN),
    "the head of a frame that is too large": (
        START + frame(0xBE, bytes(2**24 - 1))[:9],
        ErrorCodes.FRAME_SIZE_ERROR,
    ),
    "a frame that is too large": (START + frame(DATA, bytes(16_385), stream=1), ErrorCodes.FRAME_SIZE_ERROR),
    "SETTINGS of 5 bytes": (START + frame(SETTINGS, bytes(5)), ErrorCodes.FRAME_SIZE_ERROR),
    "PING of 7 bytes": (START + frame(PING, bytes(7)), ErrorCodes.FRAME_SIZE_ERROR),
    "an even stream": (START + request(2), BROKEN),
    "a stream again": (START + request(5) + request(3), BROKEN),
    "a window of zero more": (START + frame(WINDOW_UPDATE, bytes(4)), BROKEN),
    "a window that overflows": (START + frame(WINDOW_UPDATE, b"\x7f\xff\xff\xff"), ErrorCodes.FLOW_CONTROL_ERROR),
    "no header block": (START + frame(HEADERS, b"\xff" * 9, flags=5, stream=1), ErrorCodes.COMPRESSION_ERROR),
    "a name in upper case": (START + request(1, "GET", "/livez", ("X-A", "b")), BROKEN),
    "a field of connections": (START + request(1, "GET", "/livez", ("connection", "close")), BROKEN),
    "PUSH_PROMISE": (START + frame(5, bytes(4) + block(), flags=4, stream=1), BROKEN),
    "another length": (
        START
        + frame(HEADERS, block("POST", "/livez", ("content-length", "5")), flags=4, stream=1)
        + frame(DATA, b"x", flags=1, stream=1),
        BROKEN,
    ),
}
