"""One HTTP/2 connection (RFC 9113): frames through the library h2, requests side by side, and bounds.

It takes the place of the `HttpConnection` that has found out that its client speaks HTTP/2, by ALPN (TLS) or by its
first bytes. Each request is a task that calls the same application.

- Frames are counted before they are parsed (`frame_bounds.py`). A client that sends too much, or what is no HTTP/2, is
  told so in a GOAWAY frame with RFC 9113's code, and its connection ends.
- A client may have `MOST_STREAMS` requests in progress. One that it has reset counts until its task has ended.
- Bytes of bodies that no request has taken are bounded by the windows. What a request takes is given back.
- The first frames, a header block and an idle connection have the same time limits as in HTTP/1.1.
- All requests of a connection belong to the turns of its tenants (`http/read_turns.py`). Many frames in one piece are
  handled in several iterations of the loop.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import DenialOfServiceError, ProtocolError
from h2.settings import SettingCodes, Settings
from hpack import HPACKError

from kpl_integrations.ingest.http.connection import HttpConnection
from kpl_integrations.ingest.http.raw_answers import goaway
from kpl_integrations.ingest.http.read_turns import SLICE_BYTES
from kpl_integrations.ingest.http.request_cycle import let_answer, service_unavailable
from kpl_integrations.ingest.http.request_head import SERVER, Server
from kpl_integrations.ingest.http.timed_request import TimedRequest
from kpl_integrations.ingest.http2.frame_bounds import TOKENS_PER_ANSWER, TOKENS_PER_DATA, FrameBounds, TooMuch
from kpl_integrations.ingest.http2.heads import bad_target, scope_of
from kpl_integrations.ingest.http2.stream import Http2Stream
from kpl_integrations.ingest.tenants import Tenant

_log: Final = logging.getLogger(__name__)
MOST_STREAMS: Final = 100
"""The most requests in progress on one connection."""
STREAM_WINDOW_BYTES: Final = 262_144
CONNECTION_WINDOW_BYTES: Final = 524_288
_FIRST_WINDOW_BYTES: Final = 65_535
_MOST_FRAME_BYTES: Final = 16_384
# The encoder's table of header fields: its memory is the server's, and the client's setting only a bound.
_MOST_TABLE_BYTES: Final = 4_096
# In one piece. A request has two or three, each of which takes up to 0.1 ms.
_MOST_FRAMES: Final = 64
# The first frames of a client that may bring a probe.
_MOST_PROBE_BYTES: Final = 1_024


class _Frames(H2Connection):
    """The library's connection, which remembers the ends of fewer streams: 65,536 of them take 5 MB."""

    MAX_CLOSED_STREAMS = 1_000


def become_http_2(before: HttpConnection) -> "Http2Connection":
    """Put a connection for HTTP/2 in place of this one, and return it."""
    connection = Http2Connection(before)
    before.cancel_timers()
    before.parser = None
    before.places.replace(before, connection)
    before.reader.connection = connection
    shared = before.server.shared.connections
    shared.discard(before)
    shared.add(connection)
    before.transport.set_protocol(connection)
    connection.begin()
    return connection


class Http2Connection(asyncio.BufferedProtocol):
    """One connection, with the places, turns, bounds and server of the one before."""

    def __init__(self, before: HttpConnection) -> None:
        self.server = before.server
        self.places = before.places
        self.turns = before.turns
        self.transport = before.transport
        self.flow = before.flow
        self.reader = before.reader
        self.loop = before.loop
        self._buffers = before.buffers
        self._header_seconds = before.header_seconds
        self._client = before.client
        self._scope_of_all = before.scope_of_all()
        now = self.loop.time()
        self._bounds = FrameBounds(before.max_header_bytes, now)
        self.frames = self._new_frames(before.max_header_bytes)
        self.streams: dict[int, Http2Stream] = {}
        # How many tasks of requests run, those of reset ones included.
        self._running = 0
        # The instant since which no request is in progress; None: one is. Whether one has been.
        self._idle_since: float | None = now
        self._is_new = True
        self._has_many_frames = False
        self._is_leaving = False
        self._timer: asyncio.TimerHandle | None = None
        self._timers_stopped_at = now
        self._will_flush = False

    @staticmethod
    def _new_frames(most_header_bytes: int) -> _Frames:
        frames = _Frames(
            H2Configuration(
                client_side=False,
                header_encoding=None,
                # `Http2Stream` has done both.
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        frames.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: MOST_STREAMS,
                SettingCodes.MAX_HEADER_LIST_SIZE: most_header_bytes,
                SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
                SettingCodes.ENABLE_PUSH: 0,
            },
        )
        frames.decoder.max_header_list_size = most_header_bytes
        return frames

    # From the transport and the server

    def begin(self) -> None:
        """Send the server's settings, and start the timer of the first request."""
        self.frames.initiate_connection()
        self.frames.increment_flow_control_window(CONNECTION_WINDOW_BYTES - _FIRST_WINDOW_BYTES)
        self._flush()
        self._start_timer()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - no loop knows better
        """Return where the loop writes what it receives, right before `buffer_updated`."""
        return self._buffers.of(is_pipelining=self._has_many_frames)

    def buffer_updated(self, nbytes: int) -> None:
        """Handle so many bytes of the buffer, at once or when it is the turn of this connection."""
        data = bytes(self.get_buffer(nbytes)[:nbytes])
        self._has_many_frames = self.may_be_cut(data)
        self.turns.wake(self.server.answered)
        self.reader.receive(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the reason changes nothing
        """Tell the requests, and break reference cycles."""
        self.server.shared.connections.discard(self)
        self.places.keep(self)
        self._stop_timer()
        self.reader.close()
        self._end_streams()
        self.flow.resume_writing()

    def pause_writing(self) -> None:
        """Read no more from a client that does not read: frames ask for answers."""
        self.flow.pause_writing()
        self.flow.pause_reading()

    def resume_writing(self) -> None:
        """Go on reading."""
        self.flow.resume_writing()
        self.flow.resume_reading()

    def shutdown(self) -> None:
        """Let the requests in progress end, and take no others."""
        if self._is_leaving or self.transport.is_closing():
            return
        self._is_leaving = True
        # The library's own GOAWAY would end the answers too.
        last = self.frames.highest_inbound_stream_id
        self._flush()
        self.transport.write(goaway(last, ErrorCodes.NO_ERROR))
        self._close_if_left()

    def _close_if_left(self) -> None:
        if (self._is_leaving or self._bounds.has_left) and not self.streams:
            self._flush()
            self.transport.close()

    # Frames

    def may_be_cut(self, data: bytes) -> bool:
        """Return True if these are so many frames that the loop would be late."""
        return len(data) > SLICE_BYTES and self._bounds.frames_in(data) > _MOST_FRAMES

    def may_be_probe(self, data: bytes) -> bool:
        """Return True if these may be the first frames of a health check."""
        return self._is_new and len(data) <= _MOST_PROBE_BYTES

    def feed(self, data: bytes) -> None:
        """Parse frames, and start the requests in them."""
        if self.transport.is_closing():
            return
        try:
            events = self.frames.receive_data(self._bounds.receive(data, self.loop.time()))
            for event in events:
                handle = _HANDLERS.get(type(event))
                if handle is not None:
                    handle(self, event)
        except TooMuch as too_much:
            self._end(ErrorCodes.ENHANCE_YOUR_CALM, str(too_much))
        except ProtocolError as error:
            code = None
            if isinstance(error.__cause__, HPACKError) and not isinstance(error, DenialOfServiceError):
                # The library has written another code.
                self.frames.clear_outbound_data_buffer()
                code = ErrorCodes.COMPRESSION_ERROR
            self._end(code, f"{type(error).__name__} {error}")
        else:
            self._flush()
            self._close_if_left()
            if self._bounds.head_began_at is not None:
                # That of an idle connection is later.
                self._stop_timer()
                self._start_timer()

    def _flush(self) -> None:
        self._will_flush = False
        data = self.frames.data_to_send()
        if data and not self.transport.is_closing():
            self.transport.write(data)

    def _flush_soon(self) -> None:
        """Write what all requests answer in this iteration of the loop at once."""
        if not self._will_flush:
            self._will_flush = True
            self.loop.call_soon(self._flush)

    def _end(self, code: ErrorCodes | None, reason: str) -> None:
        """Close the connection, and say why; None: the library has said it."""
        _log.debug("an HTTP/2 connection is ended: %s; client=%s", reason, self._client)
        if code is not None:
            self.frames.close_connection(code, reason.encode())
        self._stop_timer()
        self._end_streams()
        self._flush()
        self.transport.close()

    def _end_streams(self) -> None:
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.client_gone()

    # Requests

    def _begin_request(self, event: RequestReceived) -> None:
        stream_id = event.stream_id
        if self._running >= MOST_STREAMS or self._is_leaving:
            self.frames.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
            return
        self._is_new, self._idle_since = False, None
        fields = dict(event.headers)
        stream = Http2Stream(
            self,
            stream_id,
            is_head=fields[b":method"] == b"HEAD",
            expects_continue=fields.get(b"expect", b"").lower() == b"100-continue",
        )
        self.streams[stream_id] = stream
        if event.stream_ended is not None:
            stream.end_body()
        application: Any = self.server.application
        if self.server.is_full():
            application = service_unavailable
            self.shutdown()
        claim = self._note
        if self.turns.is_active:
            application = timed = TimedRequest(self.reader, application, self._note)
            claim = timed.claim
        scope = {**self._scope_of_all, "state": self.server.app_state.copy()}
        try:
            scope |= scope_of(event.headers, self.server.root_path)
        except ValueError:
            application = bad_target
        server = Server(claim, self._verified, self.reader.watch_body, stream.whole_body)
        scope["extensions"] = {SERVER: {"request": server}}
        self._running += 1
        tasks = self.server.shared.tasks
        task = self.loop.create_task(let_answer(application, scope, stream))
        tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: "asyncio.Task[None]") -> None:
        self.server.shared.tasks.discard(task)
        self._running -= 1

    def _add_body(self, event: DataReceived) -> None:
        stream = self.streams.get(event.stream_id)
        if stream is None:
            # The rest of a body that no request reads.
            self.received(event.stream_id, event.flow_controlled_length)
        else:
            stream.add_body(event.data, event.flow_controlled_length)

    def _end_body(self, event: StreamEnded) -> None:
        stream = self.streams.get(event.stream_id)
        if stream is not None:
            stream.end_body()

    def _reset(self, event: StreamReset) -> None:
        stream = self.streams.pop(event.stream_id, None)
        if stream is not None:
            stream.client_gone()
            self._note_idle()

    def _open_window(self, event: WindowUpdated) -> None:
        stream = self.streams.get(event.stream_id)
        for each in (stream,) if stream is not None else self.streams.values():
            each.window_opened()

    def _settle(self, _event: RemoteSettingsChanged) -> None:
        """Take the client's settings."""
        if self.frames.encoder.header_table_size > _MOST_TABLE_BYTES:
            self.frames.encoder.header_table_size = _MOST_TABLE_BYTES
        for each in self.streams.values():
            each.window_opened()

    # From the requests

    def send_head(self, stream_id: int, status: int, headers: list[tuple[bytes, bytes]], *, end: bool) -> None:
        """Send the head of an answer."""
        fields = [(b":status", b"%d" % status), *self.server.shared.default_headers, *headers]
        self.frames.send_headers(stream_id, fields, end_stream=end)
        self._flush_soon()

    def send_some(self, stream_id: int, data: memoryview, *, end: bool) -> int:
        """Send as much as the windows allow, and nothing while the client does not read the connection."""
        sent = 0
        while not self.flow.write_paused:
            size = min(len(data) - sent, self.frames.local_flow_control_window(stream_id), _MOST_FRAME_BYTES)
            is_last = end and sent + max(0, size) == len(data)
            if size <= 0 and not (is_last and not data):
                break
            self.frames.send_data(stream_id, data[sent : sent + size].tobytes(), end_stream=is_last)
            self._bounds.earn(TOKENS_PER_DATA)
            sent += size
            if sent == len(data):
                break
        self._flush_soon()
        return sent

    def send_continue(self, stream_id: int) -> None:
        """Ask for the body."""
        self.frames.send_headers(stream_id, [(b":status", b"100")])
        self._flush_soon()

    def received(self, stream_id: int, size_bytes: int) -> None:
        """Let the client send as many bytes again."""
        self.frames.acknowledge_received_data(size_bytes, stream_id)
        self._flush_soon()

    @property
    def write_paused(self) -> bool:
        """Whether the client does not read from the connection."""
        return self.flow.write_paused

    async def writable(self) -> None:
        """Wait until the client reads from the connection, or is gone."""
        await self.flow.writable()

    def give_up(self, stream_id: int) -> None:
        """Abort an answer that has begun."""
        stream = self.streams.pop(stream_id, None)
        if stream is not None:
            stream.client_gone()
            self.frames.reset_stream(stream_id, ErrorCodes.INTERNAL_ERROR)
            self._flush_soon()
            self._note_idle()

    def answered(self, stream_id: int, *, is_read: bool) -> None:
        """Note that an answer is sent."""
        self.server.shared.total_requests += 1
        self._bounds.earn(TOKENS_PER_ANSWER)
        self.streams.pop(stream_id, None)
        if not is_read:
            # It need not send the rest (RFC 9113, section 8.1).
            self.frames.reset_stream(stream_id, ErrorCodes.NO_ERROR)
            self._flush_soon()
        self._note_idle()

    def _note_idle(self) -> None:
        if not self.streams:
            self._idle_since = self.loop.time()
            self._close_if_left()
            if self._timer is None:
                self._start_timer()

    # Bounds

    def is_answering(self) -> bool:
        """Return True if a request is in progress."""
        return bool(self.streams)

    def is_sending_body(self) -> bool:
        """Return True if the client has not sent all of a body."""
        return any(stream.more_body for stream in self.streams.values())

    def _verified(self) -> None:
        self.places.keep(self)

    def _note(self, tenant: Tenant | None) -> bool:
        """Note the tenant of a request; None: its credentials are not verified. Return True: it is not refused."""
        self.reader.claim(tenant)
        if tenant is not None:
            self._verified()
        return True

    def _ends_at(self) -> float | None:
        """Return the instant at which the connection ends if nothing happens."""
        began = self._bounds.head_began_at
        if began is not None:
            return began + self._header_seconds
        if self._idle_since is None:
            return None
        return self._idle_since + (self._header_seconds if self._is_new else self.server.keep_alive_seconds)

    def _start_timer(self) -> None:
        at = self._ends_at()
        if at is not None and not self.transport.is_closing():
            self._timer = self.loop.call_at(at, self._look_at_time)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_at_time(self) -> None:
        self._timer = None
        at = self._ends_at()
        if at is None or self.transport.is_closing() or self.flow.is_held:
            return
        if self.loop.time() < at:
            self._timer = self.loop.call_at(at, self._look_at_time)
        elif self._is_new or self._bounds.head_began_at is not None:
            self._end(ErrorCodes.ENHANCE_YOUR_CALM, "the header fields did not arrive in time")
        else:
            self._end(ErrorCodes.NO_ERROR, "the connection is idle")

    def stop_timers(self) -> None:
        """Stop the time limits of a header block and of an idle connection."""
        self._timers_stopped_at = self.loop.time()
        self._stop_timer()

    def restart_timers(self) -> None:
        """Continue them with the time that was left."""
        paused = self.loop.time() - self._timers_stopped_at
        if self._idle_since is not None:
            self._idle_since += paused
        if self._bounds.head_began_at is not None:
            self._bounds.head_began_at += paused
        self._start_timer()

    def refuse_busy(self) -> None:
        """Close the connection: the gateway has too much to do."""
        self._end(ErrorCodes.ENHANCE_YOUR_CALM, "the gateway has too many requests; send this one again later")


_HANDLERS: Final[Mapping[type, Callable[[Http2Connection, Any], None]]] = {
    RequestReceived: Http2Connection._begin_request,  # noqa: SLF001 - its own, as all of these
    DataReceived: Http2Connection._add_body,  # noqa: SLF001
    StreamEnded: Http2Connection._end_body,  # noqa: SLF001
    StreamReset: Http2Connection._reset,  # noqa: SLF001
    WindowUpdated: Http2Connection._open_window,  # noqa: SLF001
    RemoteSettingsChanged: Http2Connection._settle,  # noqa: SLF001
}
