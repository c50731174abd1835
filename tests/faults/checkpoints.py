"""Run a coroutine step by step, and meddle at one of its checkpoints.

A checkpoint is a place where a coroutine gives the loop its turn, and so where it can be cancelled.
They are counted from 1; a run with `at=0` only counts. Works on asyncio and trio.
"""

import types
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class Checkpoints:
    """Calls `meddle` when a coroutine stops at checkpoint number `at`; `passed` counts them.

    With `again` it meddles at every checkpoint from there on.
    """

    def __init__(self, at: int, meddle: Callable[[], object], *, again: bool = False) -> None:
        self._at = at
        self._meddle = meddle
        self._again = again
        self.passed = 0

    async def through(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, in the task that awaits this."""
        return await self._step(coroutine)

    @types.coroutine
    def _step(self, coroutine: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        step: Callable[[], Any] = partial(coroutine.send, None)
        while True:
            try:
                yielded = step()
            except StopIteration as stop:
                result: T = stop.value
                return result
            self.passed += 1
            if self.passed == self._at or (self._again and 0 < self._at < self.passed):
                self._meddle()
            try:
                sent = yield yielded
            except BaseException as error:  # noqa: BLE001 - thrown on, as `yield from` would
                step = partial(coroutine.throw, error)
            else:
                step = partial(coroutine.send, sent)
