"""The way between a process and a shared service: each call takes time, and can be lost, late, refused or cut.

A request takes effect at its own instant, also if its caller has stopped waiting for the answer, as on a real network.
"""

import asyncio
import math
import random
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NamedTuple, TypeVar

from kpl_core.coordination import Listing, MemoryStore, Reading, StoreFailed, Written
from kpl_core.options.config import Consumer
from tests.world.world_loop import EPOCH, world_loop

Returned = TypeVar("Returned")
# These befall the process, not its requests; see `World.befall`.
PAUSES, CLOCK_STEPS = "pauses", "clock steps"


class Weather(NamedTuple):
    """What befalls calls: the times in seconds each way, and the probabilities of faults.

    Args:
        fastest: the shortest way.
        slowest: the longest way; the times between are equally likely.
        lost_requests: never reach the service.
        lost_answers: take effect, and the caller hears nothing.
        late: take effect up to `latest` seconds later; the caller has given up by then, or hears it late.
        latest: of a late call, seconds.
        slow_answers: take effect in time, and the caller hears it up to `latest` seconds later.
        refused: conditional writes that the store refuses although their condition holds.
        spacing: seconds between two faults of one process, 0 for as many as there are.
    """

    fastest: float = 0.001
    slowest: float = 0.06
    lost_requests: float = 0.0
    lost_answers: float = 0.0
    late: float = 0.0
    latest: float = 4.0
    slow_answers: float = 0.0
    refused: float = 0.0
    spacing: float = 0.0


CALM: Weather = Weather()


class Less(NamedTuple):
    """What a run leaves out of its story, so that a failure is easier to read.

    Args:
        without: names of faults.
        seconds: the longest time with faults and clients.
        clients: the most clients.
    """

    without: frozenset[str] = frozenset()
    seconds: float = math.inf
    clients: int = 1_000


WHOLE = Less()


class World:
    """The chance of one run, and the count of its transitions.

    A transition is a request that takes effect, an answer that arrives, a measurement, a change of a bucket, or an
    event of the story.
    """

    def __init__(self, seed: int, less: Less = WHOLE) -> None:
        self.seed = seed
        self.less = less
        self.chance = random.Random(seed)
        # By a chance of their own, so that a story does not depend on them otherwise.
        self._pauses = random.Random(f"pauses of {seed}")
        self.has_pauses = self._pauses.random() < 0.2 and PAUSES not in less.without
        self._steps = random.Random(f"clock steps of {seed}")
        self.has_clock_steps = self._steps.random() < 0.2 and CLOCK_STEPS not in less.without
        # Which consumers the stream has; also by a chance of its own.
        consumers = random.Random(f"consumers of {seed}")
        others: list[Consumer] = ["per_user_record", "range_blind"]
        self.consumer: Consumer = consumers.choice(others) if consumers.random() < 0.2 else "kcl"
        self.transitions = 0

    @property
    def own_faults(self) -> list[str]:
        """What befalls the process in this run."""
        return [PAUSES] * self.has_pauses + [CLOCK_STEPS] * self.has_clock_steps

    def drawn(self, names: Iterable[str], probability: float) -> list[str]:
        """Return the faults of this run: each of these with a probability, but those that the run is without."""
        return [name for name in names if self.chance.random() < probability and name not in self.less.without]

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()

    async def befall(self, until: float) -> None:
        """Let the process stand still, and its system's clock be set, now and then until then, if this run has that."""
        async with asyncio.TaskGroup() as tasks:
            _ = tasks.create_task(self._pause_at_times(until))
            _ = tasks.create_task(self._set_clock_at_times(until))

    async def _set_clock_at_times(self, until: float) -> None:
        while self.has_clock_steps:
            await asyncio.sleep(self._steps.expovariate(0.2))
            if self.now() >= until:
                return
            world_loop().wall_error += self._steps.choice([-3_600.0, -5.0, 0.5, 5.0, 86_400.0])

    async def _pause_at_times(self, until: float) -> None:
        while self.has_pauses:
            await asyncio.sleep(self._pauses.expovariate(0.1))
            if self.now() >= until:
                return
            world_loop().pause(self._pauses.choice([0.05, 1.0, 20.0]))


class WorldStore(MemoryStore):
    """A shared store that loses writes, or all it has, or gets garbage."""

    def __init__(self, world: World) -> None:
        super().__init__(lambda: EPOCH + world.now())
        self._remembered: dict[str, tuple[bytes, str]] = {}

    def remember(self) -> None:
        """Note the contents."""
        self._remembered = dict(self._objects)

    def forget(self) -> None:
        """Lose what was written since `remember`, as a failover to a replica does."""
        self._objects = dict(self._remembered)

    def flush(self) -> None:
        """Lose everything."""
        self._objects = {}

    async def garble(self, chance: random.Random) -> None:
        """Overwrite one object with garbage."""
        if self._objects:
            _ = await self.write(chance.choice(sorted(self._objects)), b"\xff{")


class StoreLink:
    """One process's calls of the shared store."""

    def __init__(self, world: World, store: MemoryStore, weather: Weather = CALM) -> None:
        self._world = world
        self._store = store
        self.weather = weather
        self.is_cut = False
        # No answer arrives before this: the process is stopped, or its machine is.
        self.paused_until = -math.inf
        self._next_fault_at = 0.0

    def _happens(self, probability: float) -> bool:
        now = self._world.now()
        if probability <= 0.0 or now < self._next_fault_at or self._world.chance.random() >= probability:
            return False
        self._next_fault_at = now + self.weather.spacing
        return True

    def _way(self) -> float:
        return self._world.chance.uniform(self.weather.fastest, self.weather.slowest)

    async def _call(self, effect: Callable[[], Coroutine[Any, Any, Returned]]) -> Returned:
        loop, weather, world = asyncio.get_running_loop(), self.weather, self._world
        if self.is_cut:
            await asyncio.sleep(self._way())
            message = "no answer"
            raise StoreFailed(message, reason="down")
        done: asyncio.Future[Returned] = loop.create_future()
        there, back = self._way(), self._way()
        is_lost = self._happens(weather.lost_answers)
        if self._happens(weather.late):
            there += world.chance.uniform(0.0, weather.latest)
        if self._happens(weather.slow_answers):
            back += world.chance.uniform(0.0, weather.latest)

        def arrive() -> None:
            world.transitions += 1
            outcome = _at_once(effect())
            if not is_lost:
                loop.call_later(max(back, self.paused_until - loop.time()), answer, outcome)

        def answer(outcome: Returned) -> None:
            world.transitions += 1
            if not done.done():
                done.set_result(outcome)

        if not self._happens(weather.lost_requests):
            loop.call_later(max(there, self.paused_until - loop.time()), arrive)
        return await done

    async def read(self, name: str) -> Reading:
        return await self._call(lambda: self._store.read(name))

    async def write(self, name: str, body: bytes, *, expected: str | None = None) -> Written:
        if expected is not None and self._happens(self.weather.refused):
            # Another write in between, which was then undone: the version never repeats.
            return await self._call(lambda: self._store.write(name, body, expected="refused"))
        return await self._call(lambda: self._store.write(name, body, expected=expected))

    async def read_all(self, prefix: str) -> Listing:
        return await self._call(lambda: self._store.read_all(prefix))

    async def delete(self, name: str) -> None:
        await self._call(lambda: self._store.delete(name))

    async def aclose(self) -> None:
        """Leave the shared store open."""


def _at_once(effect: Coroutine[Any, Any, Returned]) -> Returned:
    """Run a call of `MemoryStore`, which never waits."""
    try:
        effect.send(None)
    except StopIteration as stop:
        value: Returned = stop.value
        return value
    message = "the store waited"
    raise AssertionError(message)
