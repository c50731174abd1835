"""A store whose calls each wait for the test's permission, so that a test can interleave syncs as it likes."""

import contextlib
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from kpl_core.coordination.demand import Usage
from kpl_core.coordination.lease_sync import LeaseSync
from kpl_core.coordination.leaseholder import HolderRules, Leaseholder
from kpl_core.coordination.store import Listing, MemoryStore, Reading, StoreFailed, Written

# A worker has load for the first two at times, and never for the third.
RESOURCES = RESOURCE, OTHER, IDLE = "orders/shard-0", "orders/shard-1", "orders/shard-2"
LIMIT = (1000.0, 1_000_000.0)


class _Turn:
    def __await__(self) -> Generator[None, None, None]:
        yield


class SteppingStore(MemoryStore):
    """Suspends before each call; with `is_down` the calls fail."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self.is_down = False

    def remembered(self) -> dict[str, tuple[bytes, str]]:
        """Return a copy of the contents."""
        return dict(self._objects)

    def go_back_to(self, remembered: dict[str, tuple[bytes, str]]) -> None:
        """Restore older contents, as after a failover to a stale replica."""
        self._objects = dict(remembered)

    async def _turn(self) -> None:
        await _Turn()
        if self.is_down:
            message = "down"
            raise StoreFailed(message, reason="down")

    async def read(self, name: str) -> Reading:
        await self._turn()
        return await super().read(name)

    async def write(self, name: str, body: bytes, *, expected: str | None = None) -> Written:
        await self._turn()
        return await super().write(name, body, expected=expected)

    async def read_all(self, prefix: str) -> Listing:
        await self._turn()
        return await super().read_all(prefix)

    async def delete(self, name: str) -> None:
        await self._turn()
        await super().delete(name)


class SteppedWorker:
    """One worker whose sync advances one store call at a time."""

    def __init__(self, name: str, store: MemoryStore, clock: Callable[[], float], *, max_workers: int) -> None:
        self.name = name
        self._clock = clock
        self.demand = self.other_demand = 0.0
        # Of the first resource.
        self.throttled_share = self._throttled = 0.0
        self._offered = dict.fromkeys(RESOURCES, 0.0)
        self._looked_at = clock()
        self.holder = Leaseholder(HolderRules(worker_id=name, interval_seconds=5.0, max_workers=max_workers))
        self.complaints: list[str] = []
        self.met_at = clock()
        self._sync_round = LeaseSync(
            store,
            self.holder,
            may_compute=True,
            on_problem=lambda reason, _: self.complaints.append(reason),
        )
        self._running: Coroutine[Any, Any, None] | None = None

    def measure(self) -> None:
        now = self._clock()
        self._offered[RESOURCE] += self.demand * (now - self._looked_at)
        self._throttled += self.throttled_share * self.demand * (now - self._looked_at)
        self._offered[OTHER] += self.other_demand * (now - self._looked_at)
        self._looked_at = now
        usages = {
            resource: Usage(
                LIMIT, (count, count * 1000), sent=count, throttled=self._throttled if resource == RESOURCE else 0.0
            )
            for resource, count in self._offered.items()
        }
        self.holder.measure(usages, now)

    def step(self, *, measures: bool = True) -> bool:
        """Continue to the next store call; return True when the sync has finished."""
        if self._running is None:
            if measures:
                self.measure()
            self.met_at = self._clock()
            self._running = self._sync_round.sync(self._clock, self._clock)
        try:
            self._running.send(None)
        except StopIteration:
            self._running = None
            return True
        except StoreFailed:
            self._running = None
            return True
        return False

    def sync(self, *, measures: bool = True) -> None:
        while not self.step(measures=measures):
            pass

    def leave(self) -> None:
        running = self._sync_round.leave(self._clock, self._clock)
        with contextlib.suppress(StopIteration):
            while True:
                running.send(None)

    def share(self, dimension: int = 0, resource: str = RESOURCE) -> float:
        return self.holder.share(resource, LIMIT)[dimension]
