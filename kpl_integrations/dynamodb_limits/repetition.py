"""Repeats a step in the background: in a daemon thread, or in a task of the running loop."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Repetition:
    """How a background step is repeated.

    A failed step is repeated after the pause, after any exception: a worker that stopped would keep its limits
    without a bound and without notice. Only the first failure of a series is reported.

    Args:
        name: name of the thread or the task.
        pause: returns the seconds until the next step.
        pauses_first: whether to pause before the first step.
        on_failure: called with the first failure of a series.
    """

    name: str
    pause: Callable[[], float]
    pauses_first: bool
    on_failure: Callable[[Exception], None]
    has_failed: bool = False

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Run one step in the block, and report its failure, unless the step before failed too."""
        try:
            yield
            self.has_failed = False
        except Exception as error:  # noqa: BLE001 - reported
            if not self.has_failed:
                self.on_failure(error)
            self.has_failed = True


class RepeatingThread:
    """Repeats a step in a daemon thread."""

    def __init__(self, step: Callable[[], object], repetition: Repetition) -> None:
        self._step = step
        self._repetition = repetition
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread if it does not run; works again after `stop`."""
        if self._thread is None:
            self._stopping.clear()
            self._thread = threading.Thread(target=self._run, name=self._repetition.name, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step. A worker keeps its limits."""
        self._stopping.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        repetition = self._repetition
        if repetition.pauses_first and self._stopping.wait(repetition.pause()):
            return
        while True:
            with repetition.reporting():
                self._step()
            if self._stopping.wait(repetition.pause()):
                return


class RepeatingTask:
    """Repeats a step in a task of the running loop."""

    def __init__(self, step: Callable[[], Awaitable[object]], repetition: Repetition) -> None:
        self._step = step
        self._repetition = repetition
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task if it does not run; works again after `stop`."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name=self._repetition.name)

    async def stop(self) -> None:
        """Cancel the task. A worker keeps its limits."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        repetition = self._repetition
        if repetition.pauses_first:
            await asyncio.sleep(repetition.pause())
        while True:
            with repetition.reporting():
                await self._step()
            await asyncio.sleep(repetition.pause())
