"""Read a body without a timer if it has already arrived.

Most requests arrive complete, so `receive()` returns without waiting. A timer around it would cost as much as
decoding and putting the record. So the coroutine is started by hand, and only one that really waits gets a timer.

This requires a `receive` that opens no cancel scope of its own around its waiting: it would be entered outside the
timer's scope and left inside it. A plain server's `receive` opens none; one that middleware has wrapped may.
"""

from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Final, Generic, TypeVar

from kpl_integrations.asgi.protocol import Message, Receive
from kpl_integrations.ingest.admission.senders import SenderRoom
from kpl_integrations.ingest.http.bodies import read_body, require_size

T = TypeVar("T")

NOT_YET: Final = object()


class EagerAwait(Generic[T]):
    """Start `awaitable` in the running task at once. `value` is its result, or `NOT_YET`: then await this object."""

    __slots__ = ("_coroutine", "_waits_for", "value")

    def __init__(self, awaitable: Awaitable[T]) -> None:
        # A server's `receive` is nearly always a coroutine function, but ASGI does not require that.
        coroutine: Any = awaitable if hasattr(awaitable, "send") else _awaited(awaitable)
        self._coroutine: Coroutine[Any, Any, T] = coroutine
        self.value: T | object = NOT_YET
        try:
            self._waits_for = coroutine.send(None)
        except StopIteration as finished:
            self.value = finished.value

    def __await__(self) -> Generator[Any, Any, T]:
        """Return the value, or run the coroutine to its end."""
        if self.value is not NOT_YET:
            return self.value  # type: ignore[return-value] # not NOT_YET, so it is the coroutine's
        coroutine = self._coroutine
        waits_for = self._waits_for
        while True:
            try:
                sent = yield waits_for
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as error:  # noqa: BLE001 - every exception belongs to the coroutine
                try:
                    waits_for = coroutine.throw(error)
                except StopIteration as finished:
                    return finished.value  # type: ignore[no-any-return]
            else:
                try:
                    waits_for = coroutine.send(sent)
                except StopIteration as finished:
                    return finished.value  # type: ignore[no-any-return]


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable


async def read_body_eagerly(
    receive: Receive, *, most_bytes: int, seconds: float, room: SenderRoom | None = None
) -> bytes:
    """Return the body as `http.bodies.read_body` does; without a timer if its first message is all of it."""
    first = EagerAwait(receive())
    message: Any = first.value
    if message is not NOT_YET and message["type"] == "http.request" and not message.get("more_body", False):
        body: bytes = message.get("body", b"")
        require_size(len(body), most_bytes)
        return body
    return await read_body(_first_then(first, receive), most_bytes=most_bytes, seconds=seconds, room=room)


def _first_then(first: Awaitable[Message], receive: Receive) -> Callable[[], Awaitable[Message]]:
    """Return a `receive` whose first message is `first`."""
    firsts = [first]
    return lambda: firsts.pop() if firsts else receive()
