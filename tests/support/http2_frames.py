"""HTTP/2 as bytes: frames as an attacker writes them, one by one, and what a server answers."""

import struct
from typing import Any

import hpack
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, StreamEnded

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS = 1, 4
HEADER = struct.Struct(">BHBBL")


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    """Return one frame (RFC 9113, section 4.1)."""
    return HEADER.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


START = PREFACE + frame(SETTINGS)


def block(method: str = "GET", path: str = "/livez", *fields: tuple[str, str]) -> bytes:
    """Return a header block that uses no dynamic table."""
    pseudo = [(":method", method), (":scheme", "http"), (":authority", "x"), (":path", path)]
    return bytes(hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(*each) for each in [*pseudo, *fields]]))


def request(stream: int, method: str = "GET", path: str = "/livez", *fields: tuple[str, str]) -> bytes:
    """Return a request without a body."""
    return frame(HEADERS, block(method, path, *fields), flags=END_STREAM | END_HEADERS, stream=stream)


def post(stream: int, path: str, body: bytes, *fields: tuple[str, str]) -> bytes:
    """Return a request with a body in one frame."""
    head = frame(HEADERS, block("POST", path, *fields), flags=END_HEADERS, stream=stream)
    return head + frame(DATA, body, flags=END_STREAM, stream=stream)


def frames_of(said: bytes) -> list[tuple[int, int, int, bytes]]:
    """Return kind, flags, stream and payload of each complete frame."""
    found = []
    while len(said) >= HEADER.size:
        high, low, kind, flags, stream = HEADER.unpack_from(said)
        end = HEADER.size + (high << 16 | low)
        if len(said) < end:
            break
        found.append((kind, flags, stream, said[HEADER.size : end]))
        said = said[end:]
    return found


def goaway_code(said: bytes) -> int | None:
    """Return the error code of the last GOAWAY; None without one."""
    codes = [int.from_bytes(payload[4:8], "big") for kind, _, _, payload in frames_of(said) if kind == GOAWAY]
    return codes[-1] if codes else None


def heads(said: bytes) -> dict[int, dict[str, str]]:
    """Return the header fields of each answer by stream."""
    decoder = hpack.Decoder()
    return {
        stream: {str(name): str(value) for name, value in decoder.decode(payload)}
        for kind, _, stream, payload in frames_of(said)
        if kind == HEADERS
    }


def statuses(said: bytes) -> dict[int, int]:
    """Return the status of each answer by stream."""
    return {stream: int(fields[":status"]) for stream, fields in heads(said).items()}


def reset_codes(said: bytes) -> dict[int, int]:
    """Return the error codes of RST_STREAM by stream."""
    return {
        stream: int.from_bytes(payload, "big") for kind, _, stream, payload in frames_of(said) if kind == RST_STREAM
    }


class Http2Client:
    """The library's client: what it says, and the answers that it hears, by stream."""

    def __init__(self) -> None:
        self.h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.h2.initiate_connection()
        self.answers: dict[int, tuple[int, dict[str, str], bytes]] = {}
        self.ended: set[int] = set()
        # Whether the server may send again what was received.
        self.returns_window = True
        self.events: list[Any] = []

    def say(self) -> bytes:
        """Return what is to be sent."""
        return self.h2.data_to_send()

    def begin(self, method: str, path: str, fields: list[tuple[str, str]] | None = None, *, ends: bool = False) -> int:
        """Begin a request, and return its stream. `ends`: it has no body."""
        stream = self.h2.get_next_available_stream_id()
        pseudo = [(":method", method), (":scheme", "http"), (":authority", "x"), (":path", path)]
        self.h2.send_headers(stream, pseudo + (fields or []), end_stream=ends)
        return stream

    def ask(self, method: str, path: str, fields: list[tuple[str, str]] | None = None, body: bytes = b"") -> int:
        """Send a request, and return its stream."""
        stream = self.begin(method, path, fields, ends=not body)
        if body:
            self.h2.send_data(stream, body, end_stream=True)
        return stream

    def hear(self, said: bytes) -> None:
        """Take what the server says."""
        events = self.h2.receive_data(said)
        self.events += events
        for event in events:
            if isinstance(event, ResponseReceived):
                fields: dict[str, str] = dict(event.headers)  # type: ignore[arg-type] # decoded, as the client asks
                self.answers[event.stream_id] = int(fields[":status"]), fields, b""
            elif isinstance(event, DataReceived):
                status, fields, body = self.answers[event.stream_id]
                self.answers[event.stream_id] = status, fields, body + event.data
                if self.returns_window:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, StreamEnded):
                self.ended.add(event.stream_id)
