"""The running event loop and its clock. Sleeps use the same clock, so virtual time holds everywhere."""

import asyncio
import sys
import time
from collections.abc import Callable


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
    # asyncio's own loops wrap this function, which doubles its cost; the clock is read once per put.
    return time.monotonic if type(loop).time is asyncio.BaseEventLoop.time else loop.time


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
