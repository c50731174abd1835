"""Read a request's body with bounds on its size, its duration, and the memory of all unfinished bodies.

Each body has its own bound, but ten thousand connections that send slowly would use ten thousand times that. So
unfinished bodies take room from `admission/clients.py`. A body that arrives in one piece takes none, because it is
decoded at once.
"""

import contextlib
import io
from collections.abc import Iterator
from typing import Any, Final

import anyio

from kpl_integrations.asgi.protocol import Receive
from kpl_integrations.ingest.admission.clients import ClientRoom, HeldBody, SharedRoom
from kpl_integrations.ingest.admission.refusals import Refusal, Refused

_LARGEST_DIGITS: Final = 18
# The rest of a refused body is read for so long, and up to so many bytes.
_DROP_SECONDS: Final = 2.0
_MOST_DROPPED_BYTES: Final = 1 << 26


class ClientGone(Exception):  # noqa: N818 - reads as a sentence where it is raised
    """The client disconnected before its request was complete. There is nothing to answer."""


def require_length(content_length: bytes | None, most_bytes: int, *, expect: bytes | None = None) -> None:
    """Check the Content-Length header. A client that expects "100 Continue" does not send the body without it.

    Raises:
        Refused: it is not a number, or it is too large.
    """
    if content_length is None:
        return
    # A field's value has no blanks around it; servers differ in whether they cut them off (RFC 9110, 5.5).
    content_length = content_length.strip(b" \t")
    if not content_length.isdigit() or len(content_length) > _LARGEST_DIGITS:
        detail = "Content-Length is not a number of bytes"
        raise Refused(Refusal.BAD_PARAMETER, detail)
    is_unread = expect is None or expect.lower() != b"100-continue"
    require_size(int(content_length), most_bytes, is_unread=is_unread)


def require_size(size: int, most_bytes: int, *, is_unread: bool = False) -> None:
    """Check the size of a body. `is_unread`: the client may still send the rest of it.

    Raises:
        Refused: it is too large.
    """
    if size > most_bytes:
        detail = f"the body has {size:,} bytes or more; send at most {most_bytes:,} in one request"
        refused = Refused(Refusal.TOO_LARGE, detail)
        refused.is_unread = is_unread
        raise refused


async def drop_rest(receive: Receive, closing: anyio.Event) -> None:
    """Read the rest of a refused body for a bounded time, or until `closing` is set, and drop it.

    A client that still sends when the server closes the connection gets a reset, often in place of the answer.
    """
    size, is_left = 0, True
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_cancel_at, closing, tasks.cancel_scope)
        tasks.cancel_scope.deadline = anyio.current_time() + _DROP_SECONDS
        while is_left and size < _MOST_DROPPED_BYTES:
            message = await receive()
            size += len(message.get("body", b""))
            is_left = message["type"] == "http.request" and message.get("more_body", False)
        tasks.cancel_scope.cancel()


async def _cancel_at(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


async def read_body(receive: Receive, *, most_bytes: int, seconds: float, room: ClientRoom | None = None) -> bytes:
    """Return the complete body.

    Raises:
        Refused: it is larger than `most_bytes`, not complete after `seconds`, or its client may use no more room.
        ClientGone: the client disconnected.
    """
    # It is written as the pieces arrive: joining 16 MiB of pieces at the end would take 10 ms.
    received = io.BytesIO()
    size = 0
    held: HeldBody | None = None
    try:
        with _time_limit(seconds, room) as reading:
            while True:
                message: Any = await receive()
                if message["type"] != "http.request":
                    raise ClientGone
                piece: bytes = message.get("body", b"")
                size += len(piece)
                require_size(size, most_bytes, is_unread=message.get("more_body", False))
                if size == len(piece) and not message.get("more_body", False):
                    return bytes(piece)
                received.write(piece)
                if not message.get("more_body", False):
                    return received.getvalue()
                if room is not None:
                    held = held or room.hold(reading.cancel)
                    if not held.try_take(len(piece)):
                        raise no_room(room.room)
        if held is not None and held.is_evicted:
            raise no_room(held.room, is_evicted=True)
        raise _too_slow(seconds)
    except Refused as refused:
        refused.work_bytes = size
        raise
    finally:
        if held is not None:
            held.release()


@contextlib.contextmanager
def _time_limit(seconds: float, room: ClientRoom | None) -> Iterator[anyio.CancelScope]:
    """Cancel the block after so many seconds, without those in which the server does not read the connection."""
    watch = None if room is None else room.watch_body
    with anyio.move_on_after(seconds) as reading:
        if watch is None:
            yield reading
            return
        unwatch = watch(reading)
        try:
            yield reading
        finally:
            unwatch()


def _too_slow(seconds: float) -> Refused:
    detail = f"the body was not complete after {seconds:g} s; send it faster, or in smaller requests"
    refused = Refused(Refusal.SLOW_BODY, detail)
    refused.is_unread = True
    return refused


def no_room(room: SharedRoom, *, is_evicted: bool = False) -> Refused:
    """Return the refusal of a body whose client may use no more room."""
    reason = (
        "another client needed the bytes of this body, the largest of the client that used most"
        if is_evicted
        else "no other client uses more than this one would with this body"
    )
    detail = (
        f"unfinished bodies use {room.used_bytes:,} of {room.max_bytes:,} bytes, and {reason}; send the request again, "
        f"with fewer unfinished ones at a time"
    )
    return Refused(Refusal.NO_ROOM, detail)
