"""What must not be left half done: it is carried to its end, and a cancellation is delivered behind it.

A shielded scope keeps off the cancellations of anyio and trio. asyncio's own (`task.cancel()`, which is
`asyncio.timeout`, `wait_for` and Ctrl-C) go through it; so there the work has a task of its own.
"""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import anyio

__all__ = ["to_the_end"]


async def to_the_end(work: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Run `work` to its end, which it must come to by itself; then let who cancelled have his way."""
    with anyio.CancelScope(shield=True):
        trio = sys.modules.get("trio")
        if trio is not None and trio.lowlevel.in_trio_task():
            await work()
            return
        task = asyncio.ensure_future(work())
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as error:
                cancelled = error
        await task
        if cancelled is not None:
            raise cancelled
