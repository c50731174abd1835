"""Hours in milliseconds: event loops whose clock jumps instead of waiting.

Whenever no task can run, the clock moves to the next timer; while any can, it stands still.
Sleeps take no real time and durations are exact, on a slow machine as well. trio brings such
a clock; for asyncio it is a `selectors` object between the loop and the operating system.

A loop that waits only for sockets or threads waits in real time. But a timer does not wait
for them, so a test that talks to another thread or process runs in real time instead. A
clock starts at 0.0 with each test or example.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Literal, TypeVar

import trio
from trio.testing import MockClock

BackendName = Literal["asyncio", "trio"]
Backend = tuple[BackendName, dict[str, Any]]
Returned = TypeVar("Returned")


class _JumpingSelector(selectors.DefaultSelector):
    """Reports what is ready now; where the loop would wait for a timer, the clock jumps to it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(0)
        if not ready:
            self.now += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio loop in virtual time: `asyncio.Runner(loop_factory=VirtualTimeLoop)`."""

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def virtual_time_backend(name: BackendName) -> Backend:
    """Return an anyio backend in virtual time, with a clock of its own."""
    if name == "asyncio":
        return name, {"loop_factory": VirtualTimeLoop}
    return name, {"clock": MockClock(autojump_threshold=0)}


def run_in_virtual_time(
    function: Callable[..., Coroutine[Any, Any, Returned]], *args: object, backend: BackendName
) -> Returned:
    """Run an async function from a synchronous test: each Hypothesis example gets its own loop and clock.

    By the backends' own means, because `anyio.run` hands a clock on to trio only since anyio 4.14.
    """
    if backend == "trio":
        return trio.run(partial(function, *args), clock=MockClock(autojump_threshold=0))
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(function(*args))
