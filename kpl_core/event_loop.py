"""The running event loop and its clock. Sleeps use the same clock, so virtual time holds everywhere."""

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")

_detached: Final[set[asyncio.Task[None]]] = set()


def running_loop() -> object:
    """Return an object that identifies the running event loop.

    Raises:
        RuntimeError: no loop is running.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        import trio  # noqa: PLC0415 - trio is optional

        return trio.lowlevel.current_trio_token()


def running_clock() -> Callable[[], float]:
    """Return the running loop's monotonic clock, in seconds."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        import trio  # noqa: PLC0415

        return trio.lowlevel.current_clock().current_time
    # asyncio's own loops wrap this function, which doubles its cost; the clock is read once per put. A test may replace
    # the method of one loop.
    is_wrapper = getattr(loop.time, "__func__", None) is asyncio.BaseEventLoop.time
    return time.monotonic if is_wrapper else loop.time


def run_soon(function: Callable[[], object]) -> None:
    """Call `function` in the running event loop, after the present step; now if no loop runs."""
    try:
        asyncio.get_running_loop().call_soon(function)
    except RuntimeError:
        trio = sys.modules.get("trio")
        if trio is None or not trio.lowlevel.in_trio_run():
            function()
        else:
            trio.lowlevel.current_trio_token().run_sync_soon(function)


def start_detached(run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `run` in a task of the running event loop that no task group waits for. It must not raise."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        import trio  # noqa: PLC0415

        trio.lowlevel.spawn_system_task(run)
        return
    task = loop.create_task(run())
    # The loop itself has weak references only.
    _detached.add(task)
    task.add_done_callback(_detached.discard)


def caller_from_any_thread() -> Callable[[Callable[[], object]], None]:
    """Return a function that calls a function in the event loop that runs now; without effect after its end."""
    try:
        call: Callable[..., object] = asyncio.get_running_loop().call_soon_threadsafe
    except RuntimeError:
        import trio  # noqa: PLC0415

        call = trio.lowlevel.current_trio_token().run_sync_soon

    def call_soon(function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):
            call(function)

    return call_soon


async def run_in_daemon_thread(work: Callable[[], T]) -> T:
    """Return what `work` returns, or raise what it raises; asyncio only.

    The end of the program does not wait for the thread, and it is none of the loop's executor, which has only a few.
    `work` runs here where no thread can be started, at the end of the interpreter, and in a background sender, whose
    loop has a thread of its own already.
    """
    loop = asyncio.get_running_loop()
    if getattr(loop, "runs_in_place", False):
        return work()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(result)  # type: ignore[arg-type] # without an error there is a result
        else:
            answer.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - raised where the answer is awaited
            failure = error
        with contextlib.suppress(RuntimeError):  # raised by a closed loop
            loop.call_soon_threadsafe(settle, result, failure)

    try:
        threading.Thread(target=run, name="kpl-worker", daemon=True).start()
    except RuntimeError:
        return work()
    return await answer
