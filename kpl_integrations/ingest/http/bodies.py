"""Read a request's body with bounds on its size, its duration, and the memory of all unfinished bodies."""

from typing import Any, Final, Protocol

import anyio

from kpl_core.options.kinesis_limits import MIB
from kpl_integrations.asgi.protocol import Receive
from kpl_integrations.ingest.admission.refusals import Refusal, Refused

_LARGEST_DIGITS: Final = 18
_DEFAULT_BUDGET_BYTES: Final = 256 * MIB


class ClientGone(Exception):  # noqa: N818 - reads as a sentence where it is raised
    """The client disconnected before its request was complete. There is nothing to answer."""


class BodyBudget:
    """The bytes that all unfinished bodies together may use.

    Each body has its own bound, but ten thousand connections that send slowly would use ten thousand times that.
    A body that arrives in one piece does not count, because it is decoded at once.
    """

    def __init__(self, max_bytes: int = _DEFAULT_BUDGET_BYTES) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0

    def try_take(self, size_bytes: int) -> bool:
        """Take bytes for another piece; return False if too few are left. The first body always gets them."""
        if self.used_bytes and self.used_bytes + size_bytes > self.max_bytes:
            return False
        self.used_bytes += size_bytes
        return True

    def release(self, size_bytes: int) -> None:
        """Give bytes back."""
        self.used_bytes -= size_bytes


class ReadBody(Protocol):
    """How a route reads a body: `read_body`, or the eager variant of the fast path."""

    async def __call__(
        self, receive: Receive, *, most_bytes: int, seconds: float, budget: BodyBudget | None = None
    ) -> bytes:
        """Return the body; see `read_body`."""


def require_length(content_length: bytes | None, most_bytes: int) -> None:
    """Check the Content-Length header.

    Raises:
        Refused: it is not a number, or it is too large.
    """
    if content_length is None:
        return
    if not content_length.isdigit() or len(content_length) > _LARGEST_DIGITS:
        detail = "Content-Length is not a number of bytes"
        raise Refused(Refusal.BAD_PARAMETER, detail)
    require_size(int(content_length), most_bytes)


def require_size(size: int, most_bytes: int) -> None:
    """Check the size of a body.

    Raises:
        Refused: it is too large.
    """
    if size > most_bytes:
        detail = f"the body has {size:,} bytes or more; send at most {most_bytes:,} in one request"
        raise Refused(Refusal.TOO_LARGE, detail)


async def read_body(
    receive: Receive,
    *,
    most_bytes: int,
    seconds: float,
    budget: BodyBudget | None = None,
) -> bytes:
    """Return the complete body.

    Raises:
        Refused: it is larger than `most_bytes`, not complete after `seconds`, or the budget is used up.
        ClientGone: the client disconnected.
    """
    pieces: list[bytes] = []
    size = taken = 0
    try:
        with anyio.move_on_after(seconds):
            while True:
                message: Any = await receive()
                if message["type"] != "http.request":
                    raise ClientGone
                piece: bytes = message.get("body", b"")
                pieces.append(piece)
                size += len(piece)
                require_size(size, most_bytes)
                if not message.get("more_body", False):
                    return b"".join(pieces)
                if budget is not None:
                    if not budget.try_take(len(piece)):
                        raise _over_budget(budget)
                    taken += len(piece)
    finally:
        if budget is not None:
            budget.release(taken)
    detail = f"the body was not complete after {seconds:g} s; send it faster, or in smaller requests"
    raise Refused(Refusal.SLOW_BODY, detail)


def _over_budget(budget: BodyBudget) -> Refused:
    detail = f"unfinished bodies use {budget.used_bytes:,} bytes of {budget.max_bytes:,}; send the request again"
    return Refused(Refusal.NO_ROOM, detail)
