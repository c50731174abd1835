"""An awaitable's first step, taken at once: what has its answer already needs no timer.

Nearly every request arrives whole, so that `receive()` returns without waiting; a timer around it would cost as
much as decoding and putting its record. So the coroutine is started by hand, and only one that really waits is
given a timer and driven on.

That takes a coroutine that opens no cancel scope of its own around its waiting: begun outside the timer's scope, it
would be closed inside it. A plain server's `receive` opens none; one that middleware has wrapped may.
"""

from collections.abc import Awaitable, Coroutine, Generator
from typing import Any, Final, Generic, TypeVar

__all__ = ["NOT_YET", "FirstStep"]

T = TypeVar("T")

NOT_YET: Final = object()


class FirstStep(Generic[T]):
    """Starts `awaitable` when it is made, in the running task. `value` is its result, or `NOT_YET`: then await it."""

    __slots__ = ("_coroutine", "_waits_for", "value")

    def __init__(self, awaitable: Awaitable[T]) -> None:
        # A server's `receive` is nearly always a coroutine function, but ASGI does not promise it.
        coroutine: Any = awaitable if hasattr(awaitable, "send") else _awaited(awaitable)
        self._coroutine: Coroutine[Any, Any, T] = coroutine
        self.value: T | object = NOT_YET
        try:
            self._waits_for = coroutine.send(None)
        except StopIteration as finished:
            self.value = finished.value

    def __await__(self) -> Generator[Any, Any, T]:
        """Return the value; else hand on what the coroutine waits for, and to it what comes back, until it returns."""
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
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is the coroutine's
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
