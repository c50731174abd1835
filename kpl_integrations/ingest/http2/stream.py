"""One request on an HTTP/2 connection: its head as ASGI has it (RFC 9113, section 8.3), and its answer as frames."""

from collections.abc import Awaitable
from typing import Final, Protocol

from kpl_integrations.asgi.protocol import Scope
from kpl_integrations.ingest.http.answers import Headers
from kpl_integrations.ingest.http.request_cycle import RequestCycle, ResponseHead
from kpl_integrations.ingest.http.request_head import target_of

# Fields of HTTP/1.1 that HTTP/2 does not have (RFC 9113, section 8.2.2).
_OF_CONNECTIONS: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)


def scope_of(headers: Headers, root_path: str) -> Scope:
    """Return what the scope of one request has besides that of its connection.

    Raises:
        ValueError: its target is not a path.
    """
    fields = dict(headers)
    target = fields.get(b":path", b"")
    if not target.startswith(b"/") and target != b"*":
        message = "the target is not a path"
        raise ValueError(message)
    return {
        **target_of(target, root_path),
        "http_version": "2",
        "method": fields[b":method"].decode("ascii"),
        "headers": _as_in_http_1(headers, fields),
    }


def has_missing_body(fields: dict[bytes, bytes]) -> bool:
    """Return True if a request without a body has a Content-Length that says otherwise (RFC 9113, section 8.1.1)."""
    return fields.get(b"content-length", b"0").strip(b"0") != b""


def _as_in_http_1(headers: Headers, fields: dict[bytes, bytes]) -> Headers:
    """Return the fields with Host and one Cookie (RFC 9113, sections 8.2.3 and 8.3.1)."""
    found = [field for field in headers if not field[0].startswith(b":") and field[0] != b"cookie"]
    if b"host" not in fields and b":authority" in fields:
        found.insert(0, (b"host", fields[b":authority"]))
    if b"cookie" in fields:
        found.append((b"cookie", b"; ".join([value for name, value in headers if name == b"cookie"])))
    return found


class StreamPort(Protocol):
    """What a stream uses of its connection."""

    def send_head(self, stream_id: int, status: int, headers: Headers, *, end: bool) -> None:
        """Send the head of an answer. `end`: nothing follows."""

    def send_data(self, stream_id: int, data: bytes, *, end: bool) -> None:
        """Send a part of the answer as the client takes it. `end`: nothing follows."""

    def unsent(self, stream_id: int) -> Awaitable[None] | None:
        """Return what is done when the client has taken all of that, or never will; None: it has."""

    def send_continue(self, stream_id: int) -> None:
        """Ask for the body."""

    def received(self, stream_id: int, size_bytes: int) -> None:
        """Let the client send as many bytes again."""

    def give_up(self, stream_id: int) -> None:
        """Abort an answer that has begun."""


class Http2Stream(RequestCycle):
    """A request over HTTP/2. Its body counts as what it uses of the windows."""

    ends_with_length = True

    def __init__(self, port: StreamPort, stream_id: int, *, is_head: bool, expects_continue: bool) -> None:
        super().__init__(is_head=is_head, expects_continue=expects_continue)
        self._port = port
        self._id = stream_id

    def ask_for_body(self) -> None:
        """Send 100 (Continue)."""
        self._port.send_continue(self._id)

    def give_back(self, size_bytes: int) -> None:
        """Open the windows again."""
        if size_bytes:
            self._port.received(self._id, size_bytes)

    def watch_client(self) -> None:
        """Do nothing: the connection is read while its requests wait."""

    def writable(self) -> Awaitable[None] | None:
        """Wait until the client has taken the part before."""
        return self._port.unsent(self._id)

    def write(self, head: ResponseHead | None, body: bytes, *, is_end: bool) -> None:
        """Send frames, the last of which ends the stream."""
        if head is not None:
            fields = [field for field in head.fields if field[0] not in _OF_CONNECTIONS]
            self._port.send_head(self._id, head.status, fields, end=is_end and not body)
        if body or (is_end and head is None):
            self._port.send_data(self._id, body, end=is_end)

    def abort(self) -> None:
        """Reset the stream."""
        self._port.give_up(self._id)
