"""An event loop on a virtual clock that never asks the operating system, so that a seed repeats a run exactly.

Where the loop would wait for a timer, the clock jumps to it. No socket, pipe or thread can wake the loop: a world has
only what its own tasks do. Where no timer is left and no task can run, `WorldStopped` says so. It also ends a run in
which time stands still, and one that outlasts a virtual day, because tasks with timers of their own hide one that waits
forever.

An alarm such as pytest's raises in whatever runs. asyncio only logs what a callback raises, and keeps what a task
raises for those that await it. So the next step of the loop raises it again.

The order of sets of strings depends on the interpreter's hash seed. `python -m tests.world` fixes it.
"""

import asyncio
import gc
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from struct import pack
from types import FrameType
from typing import Any, TypeVar
from zlib import crc32

import pytest

_FileObject = Any
Returned = TypeVar("Returned")
HASH_SEED = "0"
# Seconds since 1970.
EPOCH = 1_800_000_000.0
# No story is as long as a day. At one instant, a busy gateway makes some hundred steps.
MOST_SECONDS, MOST_STEPS_AT_AN_INSTANT = 86_400.0, 100_000
# As the gateway sets it (`ingest/serving.py`): searching for cycles took a fifth of a run.
GARBAGE_THRESHOLD = (50_000, 20, 20)


class WorldStopped(BaseException):
    """The run would not end: no timer is left, time stands still, or a day is over. No part of a story catches it."""


class _ClockSelector(selectors.BaseSelector):
    """Stands between the loop and the operating system: it keeps registrations, and its clock jumps."""

    def __init__(self) -> None:
        self.now = 0.0
        # How often the loop has run what was ready, and a checksum of these instants.
        self.steps = self.trace = 0
        # What ends the run at the next step.
        self.alarm: BaseException | None = None
        self._steps_at_now = 0
        self._keys: dict[_FileObject, selectors.SelectorKey] = {}

    def register(self, fileobj: _FileObject, events: int, data: Any = None) -> selectors.SelectorKey:
        descriptor = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, descriptor, events, data)
        return key

    def unregister(self, fileobj: _FileObject) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.alarm is not None:
            # Once: the runner needs more steps to cancel the tasks.
            alarm, self.alarm = self.alarm, None
            raise alarm
        if timeout is None:
            message = "every task waits, and no timer is left"
            raise WorldStopped(message)
        self._steps_at_now = 0 if timeout > 0.0 else self._steps_at_now + 1
        self.now += max(0.0, timeout)
        self.steps += 1
        if self.now > MOST_SECONDS or self._steps_at_now > MOST_STEPS_AT_AN_INSTANT:
            message = f"the run does not end: {self.steps:,} steps, {self._steps_at_now:,} of them at {self.now} s"
            raise WorldStopped(message)
        self.trace = crc32(pack("<d", self.now), self.trace)
        return []

    def get_map(self) -> Mapping[_FileObject, selectors.SelectorKey]:
        return self._keys


class WorldLoop(asyncio.SelectorEventLoop):
    """An asyncio loop in virtual time: `asyncio.Runner(loop_factory=WorldLoop)`."""

    def __init__(self) -> None:
        self._clock = _ClockSelector()
        # By how much the system's clock was set, seconds; the loop's own clock cannot be set.
        self.wall_error = 0.0
        super().__init__(self._clock)

    def raise_next(self, alarm: BaseException) -> None:
        """Raise this at the next step, where no task and no callback can catch it."""
        self._clock.alarm = alarm

    def time(self) -> float:
        return self._clock.now

    def wall_clock(self) -> float:
        """Return what `time.time` is in this world."""
        return EPOCH + self._clock.now + self.wall_error

    def trace(self) -> tuple[int, int]:
        """Return how many steps the loop has made, and a checksum of their instants: equal runs have equal ones."""
        return self._clock.steps, self._clock.trace

    def pause(self, seconds: float) -> None:
        """Stop the process for so long, as SIGSTOP and a paused machine do: afterwards all its timers are late."""
        self._clock.now += seconds


def world_loop() -> WorldLoop:
    """Return the loop that runs."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, WorldLoop)
    return loop


def run_in_world(main: Callable[[], Coroutine[Any, Any, Returned]]) -> Returned:
    """Run an async function on a loop of its own, which begins at 0.0; `time.time` follows it."""
    loop = WorldLoop()
    with (
        asyncio.Runner(loop_factory=lambda: loop) as runner,
        pytest.MonkeyPatch.context() as patch,
        _alarms_raised_by(loop),
        _seldom_collected(),
    ):
        patch.setattr(time, "time", loop.wall_clock)
        patch.setattr(time, "monotonic", loop.time)
        # Nothing takes CPU time in the world; a clock that followed the loop's would count waiting as CPU time.
        patch.setattr(time, "process_time", lambda: 0.0)
        patch.setattr(time, "thread_time", lambda: 0.0)
        return runner.run(main())


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Search for cycles less often in this block."""
    before = gc.get_threshold()
    gc.set_threshold(*GARBAGE_THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def _alarms_raised_by(loop: WorldLoop) -> Iterator[None]:
    """Let what the handlers of alarms raise in this block end the loop."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGPROF)}
    watched = [number for number, handler in handlers.items() if callable(handler)]

    def handle(number: int, frame: FrameType | None) -> None:
        handler = handlers[signal.Signals(number)]
        assert callable(handler)
        try:
            handler(number, frame)
        except BaseException as alarm:
            loop.raise_next(alarm)
            raise

    for number in watched:
        _ = signal.signal(number, handle)
    try:
        yield
    finally:
        for number in watched:
            _ = signal.signal(number, handlers[number])


def use_wall_clock(patch: pytest.MonkeyPatch, makes: Callable[..., None]) -> None:
    """Let objects follow the world's `time.time`, which is the default of this `__init__`: a default is bound early."""

    def wall_clock() -> float:
        return time.time()

    patch.setitem(getattr(makes, "__kwdefaults__", {}), "wall_clock", wall_clock)


def fix_hash_seed(module: str) -> None:
    """Run `python -m module` again with a fixed hash seed, unless this is that run. It is set when Python starts."""
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        command = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"PYTHONHASHSEED": HASH_SEED})  # noqa: S606
