"""A request's body, of bounded size and in bounded time."""

from typing import Any, Final

import anyio

from kpl_integrations.asgi.protocol import Message, Receive
from kpl_integrations.ingest.admission.admission import Refusal, Refused
from kpl_integrations.ingest.admission.body_room import BodyRoom
from kpl_integrations.ingest.http.first_step import NOT_YET, FirstStep

__all__ = ["ClientGone", "first_body", "read_body", "require_length", "require_size"]

_LARGEST_DIGITS: Final = 18


class ClientGone(Exception):  # noqa: N818 - reads as a sentence where it is raised
    """The client went away before its request was whole; there is nobody to answer."""


def require_length(content_length: bytes | None, most_bytes: int) -> None:
    """Check what the client says it will send.

    Raises:
        Refused: it is no number, or too much.
    """
    if content_length is None:
        return
    if not content_length.isdigit() or len(content_length) > _LARGEST_DIGITS:
        detail = "Content-Length is no number of bytes"
        raise Refused(Refusal.BAD_PARAMETER, detail)
    if int(content_length) > most_bytes:
        raise _too_large(int(content_length), most_bytes)


def require_size(size: int, most_bytes: int) -> None:
    """Check how large a body is.

    Raises:
        Refused: it is too large.
    """
    if size > most_bytes:
        raise _too_large(size, most_bytes)


def first_body(first: FirstStep[Message], *, most_bytes: int) -> bytes | None:
    """Return the body if the first message is here and holds all of it, else None.

    Raises:
        Refused: it is larger than `most_bytes`.
    """
    message: Any = first.value
    if message is NOT_YET or message["type"] != "http.request" or message.get("more_body", False):
        return None
    body: bytes = message.get("body", b"")
    require_size(len(body), most_bytes)
    return body


async def read_body(
    receive: Receive,
    *,
    most_bytes: int,
    seconds: float,
    first: FirstStep[Message] | None = None,
    room: BodyRoom | None = None,
) -> bytes:
    """Return the body, of which `first` is the first message or waits for it.

    Raises:
        Refused: it is larger than `most_bytes`, not whole after `seconds`, or too much of others' is on its way.
        ClientGone: the client hung up.
    """
    pieces: list[bytes] = []
    size = 0
    held = 0
    try:
        with anyio.move_on_after(seconds):
            message: Any = await (receive() if first is None else first)
            while True:
                if message["type"] != "http.request":
                    raise ClientGone
                piece: bytes = message.get("body", b"")
                pieces.append(piece)
                size += len(piece)
                if size > most_bytes:
                    raise _too_large(size, most_bytes)
                if not message.get("more_body", False):
                    return b"".join(pieces)
                if room is not None:
                    if not room.try_take(len(piece)):
                        raise _no_room(room)
                    held += len(piece)
                message = await receive()
    finally:
        if room is not None:
            room.release(held)
    detail = f"the body was not whole after {seconds:g} s; send it faster, or in smaller requests"
    raise Refused(Refusal.SLOW_BODY, detail)


def _no_room(room: BodyRoom) -> Refused:
    detail = f"bodies of {room.held_bytes:,} bytes are on their way already, of {room.most_bytes:,}; send it again"
    return Refused(Refusal.NO_ROOM, detail)


def _too_large(size: int, most_bytes: int) -> Refused:
    detail = f"the body has {size:,} bytes or more; send at most {most_bytes:,} in one request"
    return Refused(Refusal.TOO_LARGE, detail)
