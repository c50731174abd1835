"""Put records at a steady rate and time each one: open loop, so that a slow producer cannot slow the load.

A record's time runs from the instant it was due, not from the instant it was put: the delay of a stalled event
loop is part of the result (Tene's "coordinated omission"). Shared with the peers: standard
library only.
"""

import asyncio
import gc
import resource
import time
from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

__all__ = ["RECORDS_PER_SECOND", "StepWatch", "deliver_steadily"]

RECORDS_PER_SECOND = 2_000
_TICK_SECONDS = 0.001


async def deliver_steadily(
    records: list[tuple[str, bytes]], put: Callable[[str, bytes, Callable[[bool], None]], Awaitable[None]]
) -> dict[str, Any]:
    """Put `records` at 2,000 a second; return the figures of the run.

    `put` puts one record, and calls the function when it is acknowledged, with True for a success. So a producer with
    callbacks needs no task per record. All puts come from one task, as aiokpl requires.
    """
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    ended, outstanding = asyncio.Event(), len(records)

    def note(due_at: float, is_success: bool) -> None:  # noqa: FBT001 - called with one value
        nonlocal outstanding
        if is_success:
            latencies.append(loop.time() - due_at)
        outstanding -= 1
        if not outstanding:
            ended.set()

    cpu_before = resource.getrusage(resource.RUSAGE_SELF)
    started_at = loop.time()
    with StepWatch() as watch:
        for position, (key, data) in enumerate(records):
            due_at = started_at + position / RECORDS_PER_SECOND
            early = due_at - loop.time()
            if early > 0:
                await asyncio.sleep(max(early, _TICK_SECONDS))
            await put(key, data, partial(note, due_at))
        await ended.wait()
    cpu_after = resource.getrusage(resource.RUSAGE_SELF)
    wall_seconds = loop.time() - started_at
    cpu_seconds = (cpu_after.ru_utime + cpu_after.ru_stime) - (cpu_before.ru_utime + cpu_before.ru_stime)
    latencies.sort()
    return {
        "acknowledged": len(latencies),
        "p50_ms": _quantile_ms(latencies, 0.5),
        "p99_ms": _quantile_ms(latencies, 0.99),
        "max_ms": _quantile_ms(latencies, 1.0),
        "cpu_share": cpu_seconds / wall_seconds,
        **watch.figures(),
    }


class StepWatch:
    """Records the longest callback of the event loop, without garbage collections, and the longest collection.

    It uses CPU time of the thread, because on a shared machine wall time includes other processes.
    """

    def __init__(self) -> None:
        self._longest_step_seconds = 0.0
        self._longest_collection_seconds = 0.0
        self._collection_started_at = 0.0
        self._collecting_seconds = 0.0

    def __enter__(self) -> Self:
        run = self._run = asyncio.Handle._run  # noqa: SLF001 - every callback runs through it

        def timed(handle: asyncio.Handle) -> None:
            self._collecting_seconds = 0.0
            started_at = time.thread_time()
            run(handle)
            taken = time.thread_time() - started_at - self._collecting_seconds
            if taken > self._longest_step_seconds:
                self._longest_step_seconds = taken

        gc.callbacks.append(self._collection)
        asyncio.Handle._run = timed  # type: ignore[assignment, method-assign]  # noqa: SLF001
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        asyncio.Handle._run = self._run  # type: ignore[method-assign]  # noqa: SLF001
        gc.callbacks.remove(self._collection)

    def figures(self) -> dict[str, float]:
        """Return both in milliseconds."""
        return {
            "longest_step_ms": self._longest_step_seconds * 1000,
            "longest_collection_ms": self._longest_collection_seconds * 1000,
        }

    def _collection(self, phase: str, _information: dict[str, int]) -> None:
        if phase == "start":
            self._collection_started_at = time.thread_time()
            return
        taken = time.thread_time() - self._collection_started_at
        self._collecting_seconds += taken
        self._longest_collection_seconds = max(self._longest_collection_seconds, taken)


def _quantile_ms(ordered: list[float], quantile: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * quantile))] * 1000 if ordered else float("nan")
