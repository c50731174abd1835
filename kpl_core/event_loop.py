"""Which loop runs us, and its clock: the same clock that sleeps use, so virtual time is virtual for all."""

import asyncio
import time
from collections.abc import Callable

__all__ = ["running_clock", "running_loop"]


def running_loop() -> object:
    """Return something that identifies the running event loop.

    Raises:
        RuntimeError: none is running.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        import trio  # noqa: PLC0415 - only whoever runs trio has it

        return trio.lowlevel.current_trio_token()


def running_clock() -> Callable[[], float]:
    """Return the running loop's monotonic clock, in seconds."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        import trio  # noqa: PLC0415

        return trio.lowlevel.current_clock().current_time
    # asyncio's own loops only wrap this function, at twice its price; it is read once per put.
    return time.monotonic if type(loop).time is asyncio.BaseEventLoop.time else loop.time
