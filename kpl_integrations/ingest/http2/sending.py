"""The bodies of one HTTP/2 connection's answers that the client has not taken yet (RFC 9113, section 5.2).

A client decides with its windows when it takes an answer. So no task waits for it: what is known of an answer is kept
here, the frames that make room cause it to be sent, and its streams take turns. `next_end` is when the first of them
has waited for too long. A synchronous machine around the library's connection: `now` is in seconds.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from h2.connection import H2Connection
from h2.exceptions import ProtocolError

from kpl_integrations.ingest.http.connection_flow import LEAST_BYTES, SEND_SECONDS

_MOST_FRAME_BYTES: Final = 16_384
# What is given to the transport at once. It then says whether the client reads.
_FLUSH_BYTES: Final = 65_536


class _Unsent:
    """The rest of an answer, or of a part of one. `is_end`: nothing follows."""

    __slots__ = ("data", "is_end", "since", "taken", "taken_bytes")

    def __init__(self, data: memoryview, now: float, *, is_end: bool) -> None:
        self.data = data
        self.is_end = is_end
        # The instant since which the client has taken so few bytes, and who waits until it has taken all.
        self.since = now
        self.taken_bytes = 0
        self.taken: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Wake the task that waits for this, if there is one."""
        if self.taken is not None and not self.taken.done():
            self.taken.set_result(None)


class AnswerSender:
    """The unsent answers of one connection.

    `flush` gives what the library has to the transport, `is_paused` tells whether the client does not read that,
    `sent` gets the size of each frame, `ended` the stream of each answer that is sent whole, and `failed` one that
    cannot be sent. `waits` is told how many bytes more wait here, or fewer; all of them are `unsent_bytes`.
    """

    def __init__(
        self,
        frames: H2Connection,
        *,
        flush: Callable[[], None],
        is_paused: Callable[[], bool],
        sent: Callable[[int], None],
        ended: Callable[[int], None],
        failed: Callable[[int], None],
        waits: Callable[[int], None],
    ) -> None:
        self._frames = frames
        self._flush = flush
        self._is_paused = is_paused
        self._sent = sent
        self._ended = ended
        self._failed = failed
        self._waits = waits
        self.unsent_bytes = 0
        # By stream; the one that has waited for the longest time first.
        self._unsent: dict[int, _Unsent] = {}
        # Those whose own window is not known to be used up, in the order of their turns.
        self._ready: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._unsent)

    def __contains__(self, stream_id: int) -> bool:
        return stream_id in self._unsent

    def send(self, stream_id: int, data: bytes, now: float, *, is_end: bool) -> None:
        """Send this, now or later. A stream has one such part at a time."""
        self._unsent[stream_id] = _Unsent(memoryview(data), now, is_end=is_end)
        self._ready[stream_id] = None
        self._count(len(data))
        self.serve(now)

    def taken(self, stream_id: int) -> "asyncio.Future[None] | None":
        """Return what is done when the client has taken the part of this stream, or never will; None: it has."""
        unsent = self._unsent.get(stream_id)
        if unsent is None:
            return None
        if unsent.taken is None or unsent.taken.cancelled():
            unsent.taken = asyncio.get_running_loop().create_future()
        return unsent.taken

    def window_opened(self, stream_id: int, now: float) -> None:
        """Send what a larger window allows, of one stream, or of the connection (0)."""
        if stream_id in self._unsent:
            self._ready[stream_id] = None
        self.serve(now)

    def windows_changed(self, now: float) -> None:
        """Look at the windows of all streams again: the client has changed its settings."""
        self._ready |= dict.fromkeys(self._unsent)
        self.serve(now)

    def serve(self, now: float) -> None:
        """Send as much as the windows and the transport allow, a frame of each stream in turn."""
        unflushed = 0
        while self._ready and not self._is_paused():
            stream_id = next(iter(self._ready))
            del self._ready[stream_id]
            try:
                sent = self._send_frame(stream_id, now)
            except ProtocolError:
                # The client has reset the stream in the same piece.
                self._failed(stream_id)
                continue
            if sent is None:
                self._ready = {stream_id: None} | self._ready
                break
            unflushed += sent
            if unflushed >= _FLUSH_BYTES:
                self._flush()
                unflushed = 0

    def _send_frame(self, stream_id: int, now: float) -> int | None:
        """Send a frame of this stream, whose next turn comes after those of the others, unless its window is used up.

        Returns its size; None: the connection's window is used up.
        """
        unsent = self._unsent[stream_id]
        window = self._frames.local_flow_control_window(stream_id)
        if window <= 0 and unsent.data:
            return None if self._frames.outbound_flow_control_window <= 0 else 0
        piece = unsent.data[: min(window, _MOST_FRAME_BYTES)]
        is_last = len(piece) == len(unsent.data)
        self._frames.send_data(stream_id, piece.tobytes(), end_stream=unsent.is_end and is_last)
        self._sent(len(piece))
        self._count(-len(piece))
        unsent.data = unsent.data[len(piece) :]
        if not is_last:
            self._ready[stream_id] = None
            unsent.taken_bytes += len(piece)
            if unsent.taken_bytes >= LEAST_BYTES:
                unsent.since, unsent.taken_bytes = now, 0
                self._unsent[stream_id] = self._unsent.pop(stream_id)
            return len(piece)
        del self._unsent[stream_id]
        unsent.wake()
        if unsent.is_end:
            self._ended(stream_id)
        return len(piece)

    def drop(self, stream_id: int) -> None:
        """Forget an answer: its stream has ended."""
        self._ready.pop(stream_id, None)
        unsent = self._unsent.pop(stream_id, None)
        if unsent is not None:
            self._count(-len(unsent.data))
            unsent.wake()

    def _count(self, size_bytes: int) -> None:
        self.unsent_bytes += size_bytes
        self._waits(size_bytes)

    def next_end(self) -> float | None:
        """Return the instant at which an answer has waited for too long, None if none waits."""
        for unsent in self._unsent.values():
            return unsent.since + SEND_SECONDS
        return None

    def overdue(self, now: float) -> list[int]:
        """Return the streams whose client took too little of their answers for too long."""
        return [stream_id for stream_id, unsent in self._unsent.items() if unsent.since + SEND_SECONDS <= now]
