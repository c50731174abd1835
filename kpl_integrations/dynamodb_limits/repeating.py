"""The background of a worker or an aggregator: one step again and again, in a thread or in a task."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

__all__ = ["RepeatingTask", "RepeatingThread", "Repetition"]


@dataclass
class Repetition:
    """How a step is repeated. One that fails is tried again after the pause, and told once until one succeeds.

    For whatever reason it fails: a worker whose repetition ended would keep its limits for ever, and nobody would know.

    Args:
        name: of the thread or the task.
        pause: seconds until the next step, asked each time.
        pauses_first: whether there is a pause before the first step too.
        tell: hears of the first failure in a row.
    """

    name: str
    pause: Callable[[], float]
    pauses_first: bool
    tell: Callable[[Exception], None]
    is_well: bool = True

    def succeeded(self) -> None:
        """Note that a step was done."""
        self.is_well = True

    def failed(self, error: Exception) -> None:
        """Tell of a failure, unless the one before it was told."""
        if self.is_well:
            self.tell(error)
        self.is_well = False


class RepeatingThread:
    """Repeats a step in a daemon thread of its own."""

    def __init__(self, step: Callable[[], object], repetition: Repetition) -> None:
        self._step = step
        self._repetition = repetition
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, if it does not run; also again, after `stop`."""
        if self._thread is None:
            self._stopping.clear()
            self._thread = threading.Thread(target=self._run, name=self._repetition.name, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread, after the step it may be at."""
        self._stopping.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        repetition = self._repetition
        if repetition.pauses_first and self._stopping.wait(repetition.pause()):
            return
        while True:
            try:
                self._step()
                repetition.succeeded()
            except Exception as error:  # noqa: BLE001 - told
                repetition.failed(error)
            if self._stopping.wait(repetition.pause()):
                return


class RepeatingTask:
    """Repeats a step in a task of the running loop."""

    def __init__(self, step: Callable[[], Awaitable[object]], repetition: Repetition) -> None:
        self._step = step
        self._repetition = repetition
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task, if it does not run; also again, after `stop`."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name=self._repetition.name)

    async def stop(self) -> None:
        """End the task, wherever it is."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        repetition = self._repetition
        if repetition.pauses_first:
            await asyncio.sleep(repetition.pause())
        while True:
            try:
                await self._step()
                repetition.succeeded()
            except Exception as error:  # noqa: BLE001 - told
                repetition.failed(error)
            await asyncio.sleep(repetition.pause())
