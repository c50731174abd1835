"""One HTTP/2 connection (RFC 9113): frames through the library h2, requests side by side, and bounds.

It takes the place of the `HttpConnection` that has found out that its client speaks HTTP/2, by ALPN (TLS) or by its
first bytes. Each request is a task that calls the same application.

- Frames are counted before they are parsed (`frame_bounds.py`). A client that sends too much, or what is not HTTP/2, is
  told so in a GOAWAY frame with RFC 9113's code, and its connection ends. So does one with a malformed request, which
  RFC 9113 (section 5.4.1) allows.
- A client may have a hundred requests in progress. One that it has reset counts until its task has ended. Fewer run
  while no credentials were verified or many others run (`share.py`); the rest wait, and no task is theirs.
- An answer whose client does not take it waits without a task (`sending.py`).
- Bytes of bodies that no request has taken are bounded by the windows. What a request takes is given back.
- The first frames, a header block and an idle connection have the same time limits as in HTTP/1.1.
- All requests of a connection belong to the turns of its tenants (`http/read_turns.py`). Many frames in one piece are
  handled in several iterations of the loop.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

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
from h2.settings import SettingCodes
from hpack import HPACKError, NeverIndexedHeaderTuple

from kpl_integrations.ingest.admission.refusals import Refusal
from kpl_integrations.ingest.http.answers import Headers, goaway
from kpl_integrations.ingest.http.connection import HttpConnection
from kpl_integrations.ingest.http.connection_flow import SEND_SECONDS
from kpl_integrations.ingest.http.correlation import REQUEST_ID_HEADER
from kpl_integrations.ingest.http.read_turns import SLICE_BYTES
from kpl_integrations.ingest.http.request_cycle import application_for
from kpl_integrations.ingest.http2.frame_bounds import TOKENS_PER_ANSWER, FrameBounds, TooMuch
from kpl_integrations.ingest.http2.frames import (
    CONNECTION_WINDOW_BYTES,
    FIRST_WINDOW_BYTES,
    MOST_TABLE_BYTES,
    server_frames,
)
from kpl_integrations.ingest.http2.sending import AnswerSender
from kpl_integrations.ingest.http2.share import MOST_STREAMS, ConnectionShare
from kpl_integrations.ingest.http2.stream import Http2Stream, has_missing_body, scope_of

_log: Final = logging.getLogger(__name__)
# In one piece. A request has two or three, each of which takes up to 0.1 ms.
_MOST_FRAMES: Final = 64
# The first frames of a client that may bring a probe.
_MOST_PROBE_BYTES: Final = 1_024


def become_http_2(before: HttpConnection) -> "Http2Connection":
    """Put a connection for HTTP/2 in place of this one, and return it."""
    connection = Http2Connection(before)
    before.cancel_timers()
    before.parser = None
    before.places.replace(connection)
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
        self.refusals = before.refusals
        self.transport = before.transport
        self.flow = before.flow
        self.reader = before.reader
        self.loop = before.loop
        self._buffers = before.buffers
        self._header_seconds = before.header_seconds
        self._client = before.client
        self._scope_of_all = before.scope_of_all
        now = self.loop.time()
        self._share = ConnectionShare(before.places, before.server.most_connections)
        self._bounds = FrameBounds(before.max_header_bytes, now, self._has_ended)
        self.frames = server_frames(
            before.max_header_bytes,
            most_streams=MOST_STREAMS,
            count_fields=lambda fields: self._bounds.take_for_fields(fields, self.loop.time()),
        )
        self._sender = AnswerSender(
            self.frames,
            flush=self._flush,
            is_paused=lambda: self.flow.write_paused,
            sent=self._bounds.earn_for_data,
            ended=self._answered,
            failed=self.give_up,
            waits=self._share.waits,
        )
        # The requests until their answers are sent, those that do not run yet, and the tasks of those that run. A
        # request that was reset has a task until that has ended.
        self.streams: dict[int, Http2Stream] = {}
        self._waiting: dict[int, Callable[[], None]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        # The instant since which no request is in progress; None: one is. Whether one has been.
        self._idle_since: float | None = now
        self._is_new = True
        # A small one if the last piece had many frames.
        self._buffer = self._buffers.of(is_pipelining=False)
        self._is_leaving = False
        self._timer: asyncio.TimerHandle | None = None
        self._timers_stopped_at = now
        self._will_flush = False

    # From the transport and the server

    def begin(self) -> None:
        """Send the server's settings, and start the timer of the first request."""
        self.frames.initiate_connection()
        self.frames.increment_flow_control_window(CONNECTION_WINDOW_BYTES - FIRST_WINDOW_BYTES)
        self._flush()
        self._start_timer()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - no loop knows better
        """Return where the loop writes what it receives, right before `buffer_updated`."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Handle so many bytes of the buffer, at once or when it is the turn of this connection."""
        data = bytes(self._buffer[:nbytes])
        self._buffer = self._buffers.of(is_pipelining=self.may_be_cut(data))
        self.turns.wake(self.server.answered)
        self.reader.receive(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the reason changes nothing
        """Tell the requests, and break reference cycles."""
        self.server.shared.connections.discard(self)
        self.places.keep(self)
        self.reader.close()
        self._end_streams()
        self._stop_timer()

    def eof_received(self) -> None:
        """Close the connection: its client sends no more, and may never read what was written."""
        self.flow.close()

    def pause_writing(self) -> None:
        """Read no more from a client that does not read: frames ask for answers."""
        self.flow.pause_writing()
        self.flow.pause_reading()

    def resume_writing(self) -> None:
        """Go on reading, and sending."""
        self.flow.resume_writing()
        self.flow.resume_reading()
        self._sender.serve(self.loop.time())
        self._flush_soon()

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
            self.flow.close()

    # Frames

    def may_be_cut(self, data: bytes) -> bool:
        """Return True if these are so many frames that the loop would be late."""
        return len(data) > SLICE_BYTES and self._bounds.frames_in(data) > _MOST_FRAMES

    def takes_more(self) -> bool:
        """Return True: its requests do not wait for each other."""
        return True

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
            self._end(too_much.code, str(too_much))
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
        self._end_streams()
        self._stop_timer()
        self._flush()
        self.flow.close()

    def _end_streams(self) -> None:
        self._waiting.clear()
        for stream_id in list(self.streams):
            self._drop(stream_id)

    def _has_ended(self, stream_id: int) -> bool:
        """Return True if this stream's request was begun before these frames, and is not in progress any more."""
        return stream_id not in self.streams and stream_id <= self.frames.highest_inbound_stream_id

    # Requests

    def _begin_request(self, event: RequestReceived) -> None:
        stream_id, has_body = event.stream_id, event.stream_ended is None
        if self._is_leaving or not self._share.has_place(len(self.streams.keys() | self._tasks.keys())):
            self._reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
            return
        fields = dict(event.headers)
        if not has_body and has_missing_body(fields):
            self._reset_stream(stream_id, ErrorCodes.PROTOCOL_ERROR)
            return
        self._is_new, self._idle_since = False, None
        stream = Http2Stream(
            self,
            stream_id,
            is_head=fields[b":method"] == b"HEAD",
            expects_continue=fields.get(b"expect", b"").lower() == b"100-continue",
        )
        self.streams[stream_id] = stream
        self._share.begins()
        if not has_body:
            stream.end_body()
        self._waiting[stream_id] = partial(self._run, stream_id, stream, event.headers)
        self._run_waiting()

    def _run_waiting(self) -> None:
        while self._waiting and self._share.may_run(len(self._tasks), len(self._sender)):
            self._waiting.pop(next(iter(self._waiting)))()

    def _run(self, stream_id: int, stream: Http2Stream, headers: Headers) -> None:
        scope = {**self._scope_of_all, "state": self.server.app_state.copy()}
        application = application_for(self, stream, scope)
        if self.server.is_full(self.places.http_2_requests):
            self.shutdown()
        try:
            scope |= scope_of(headers, self.server.root_path)
        except ValueError:
            scope["headers"] = headers
            application = self.refusals.application(Refusal.BAD_HTTP)
        task = self._tasks[stream_id] = self.server.start(stream.run(application, scope, self.refusals))
        self.places.http_2_requests += 1
        task.add_done_callback(partial(self._task_ended, stream_id))

    def _task_ended(self, stream_id: int, _task: "asyncio.Task[None]") -> None:
        self.places.http_2_requests -= 1
        del self._tasks[stream_id]
        self._run_waiting()

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

    def _reset_stream(self, stream_id: int, code: ErrorCodes) -> None:
        # The client may have reset it in the same piece.
        with contextlib.suppress(ProtocolError):
            self.frames.reset_stream(stream_id, code)
            self._flush_soon()

    def _reset(self, event: StreamReset) -> None:
        self._drop(event.stream_id)

    def _drop(self, stream_id: int) -> Http2Stream | None:
        """Forget a request that gets no answer, or no more of it. Returns it if it was in progress."""
        stream = self.streams.pop(stream_id, None)
        if stream is not None:
            self._share.ends()
            self._waiting.pop(stream_id, None)
            self._sender.drop(stream_id)
            stream.client_gone()
            self._run_waiting()
            self._note_idle()
        return stream

    def _open_window(self, event: WindowUpdated) -> None:
        self._sender.window_opened(event.stream_id, self.loop.time())

    def _settle(self, event: RemoteSettingsChanged) -> None:
        """Take the client's settings."""
        if self.frames.encoder.header_table_size > MOST_TABLE_BYTES:
            self.frames.encoder.header_table_size = MOST_TABLE_BYTES
        if SettingCodes.INITIAL_WINDOW_SIZE in event.changed_settings:
            now = self.loop.time()
            self._bounds.take_for_answers(len(self._sender), now)
            self._sender.windows_changed(now)

    # From the requests

    def send_head(self, stream_id: int, status: int, headers: Headers, *, end: bool) -> None:
        """Send the head of an answer. `end`: it has no body."""
        # A value of its own would push the others out of the encoder's table.
        own = [NeverIndexedHeaderTuple(*each) if each[0] == REQUEST_ID_HEADER else each for each in headers]
        fields = [(b":status", b"%d" % status), *self.server.shared.default_headers, *own]
        self.frames.send_headers(stream_id, fields, end_stream=end)
        self._flush_soon()
        if end:
            self._answered(stream_id)

    def send_data(self, stream_id: int, data: bytes, *, end: bool) -> None:
        """Send a part of an answer as the client takes it."""
        self._sender.send(stream_id, data, self.loop.time(), is_end=end)
        self._flush_soon()
        if stream_id not in self._sender:
            return
        if not self._share.may_wait(self._sender.unsent_bytes):
            self.give_up(stream_id)
        self._start_timer()

    def unsent(self, stream_id: int) -> "asyncio.Future[None] | None":
        """Return what is done when the client has taken what was sent, or never will; None: it has."""
        return self._sender.taken(stream_id)

    def send_continue(self, stream_id: int) -> None:
        """Ask for the body."""
        self.frames.send_headers(stream_id, [(b":status", b"100")])
        self._flush_soon()

    def received(self, stream_id: int, size_bytes: int) -> None:
        """Let the client send as many bytes again."""
        self.frames.acknowledge_received_data(size_bytes, stream_id)
        self._flush_soon()

    def give_up(self, stream_id: int) -> None:
        """Abort an answer that has begun."""
        if self._drop(stream_id) is not None:
            self._reset_stream(stream_id, ErrorCodes.INTERNAL_ERROR)

    def _answered(self, stream_id: int) -> None:
        """Note that an answer is sent."""
        self.server.shared.total_requests += 1
        self._bounds.earn(TOKENS_PER_ANSWER)
        stream = self.streams.pop(stream_id, None)
        if stream is not None:
            self._share.ends()
        if stream is not None and stream.more_body:
            # It need not send the rest (RFC 9113, section 8.1).
            self._reset_stream(stream_id, ErrorCodes.NO_ERROR)
        self._run_waiting()
        self._note_idle()

    def _note_idle(self) -> None:
        if not self.streams:
            self._idle_since = self.loop.time()
            self._close_if_left()
            self._start_timer()

    # Bounds

    def is_answering(self) -> bool:
        """Return True if the application works on an answer. One that waits for its client makes place for others."""
        return bool(self._tasks)

    def is_sending_body(self) -> bool:
        """Return True if the client has not sent all of a body."""
        return any(stream.more_body for stream in self.streams.values())

    def verified(self) -> None:
        """Keep this connection, and let it have more: it has shown valid credentials."""
        self.places.keep(self)
        self._share.verify(len(self.streams))
        self._run_waiting()

    def _ends_at(self) -> float | None:
        """Return the instant at which the connection, or an answer, ends if nothing happens."""
        ends = [self._sender.next_end()]
        if self._bounds.head_began_at is not None:
            ends.append(self._bounds.head_began_at + self._header_seconds)
        elif self._idle_since is not None:
            ends.append(self._idle_since + (self._header_seconds if self._is_new else self.server.keep_alive_seconds))
        return min((at for at in ends if at is not None), default=None)

    def _start_timer(self) -> None:
        """Look at the time when something may end, unless that is done before. Then it is asked again."""
        at = self._ends_at()
        if at is None or self.transport.is_closing() or (self._timer is not None and self._timer.when() <= at):
            return
        self._stop_timer()
        self._timer = self.loop.call_at(at, self._look_at_time)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_at_time(self) -> None:
        self._timer = None
        at, now = self._ends_at(), self.loop.time()
        if at is None or self.transport.is_closing() or self.flow.is_held:
            return
        if now < at:
            self._start_timer()
        elif overdue := self._sender.overdue(now):
            _log.info("answers are aborted: their client took nearly nothing of them for %g s", SEND_SECONDS)
            for stream_id in overdue:
                self.give_up(stream_id)
            self._start_timer()
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
        now = self.loop.time()
        if self._idle_since is not None:
            # It may have become idle during the pause.
            self._idle_since += now - max(self._timers_stopped_at, self._idle_since)
        if self._bounds.head_began_at is not None:
            self._bounds.head_began_at += now - self._timers_stopped_at
        self._stop_timer()
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
