"""A fleet in the world: real workers with their loops, real token buckets, and load as a fluid."""

import asyncio
import contextlib
from collections.abc import Mapping

from kpl_core import CoordinationOptions
from kpl_core.coordination import Usage
from kpl_core.coordination.store_objects import Pair
from kpl_core.coordination.worker import CoordinationWorker
from kpl_core.options.coordination_options import SHARED_BURST_SECONDS, WorkerTier
from kpl_core.pipeline.token_bucket import TokenBucket
from kpl_core.records.user_record import rank_of
from tests.world.in_force import FleetGauge
from tests.world.network import CALM, StoreLink, Weather, World, WorldStore
from tests.world.world_loop import EPOCH

LIMIT: Pair = (1_000.0, 1_000_000.0)
BYTES_PER_RECORD = 1_000.0
EVERYTHING = 1e9
# Seconds of the limit that wait while a load is above its rate: callers with a bounded number of records outstanding.
BACKLOG_SECONDS = 0.2


class _Bucket:
    """One worker's bucket of one resource, its load, and its counts."""

    def __init__(self, rates: Pair, now: float) -> None:
        self.tokens = TokenBucket([(rate, rate * SHARED_BURST_SECONDS) for rate in rates], now=now)
        self.rates = rates
        # What of the rates is in force, as the gauge counts it.
        self.counted: Pair = (0.0, 0.0)
        self.demand = self.flow = self.sent = 0.0
        self.looked_at = now

    def advance(self, now: float) -> None:
        units = self.flow * (now - self.looked_at)
        self.looked_at = now
        self.sent += units
        self.tokens.charge((units, units * BYTES_PER_RECORD), now)

    def set_rates(self, rates: Pair, now: float) -> None:
        """Set the rates as `ShardLimiter.set_share` does."""
        for stream, rate in enumerate(rates):
            self.tokens.set_rate(stream, rate, now, capacity=rate * SHARED_BURST_SECONDS)
        self.rates = rates

    def reflow(self, now: float) -> float:
        """Spend saved tokens on load above the rate, and return them; set the flow."""
        jump = max(0.0, self.tokens.tokens(now)[0]) if self.demand > self.rates[0] else 0.0
        self.tokens.charge((jump, jump * BYTES_PER_RECORD), now)
        self.sent += jump
        self.flow = min(self.demand, self.rates[0])
        return jump


class WorldWorker:
    """One process: `CoordinationWorker` with its loop, and a bucket for each resource.

    Args:
        applies_late: as releases before 1.0 did, change the buckets only at the end of a sync.
        opens_late: use a resource from its first load on, as a gateway does a tenant's rate; else all from the start.
    """

    def __init__(
        self,
        fleet: "Fleet",
        name: str,
        *,
        tier: WorkerTier = "normal",
        weight: float = 1.0,
        clock_error: float = 0.0,
        applies_late: bool = False,
        opens_late: bool = False,
    ) -> None:
        self.fleet, self.name, self.tier, self.weight = fleet, name, tier, weight
        self.link = StoreLink(fleet.world, fleet.store, fleet.weather)
        self.demand: dict[str, float] = dict.fromkeys(fleet.limits, 0.0)
        self._buckets: dict[str, _Bucket] = {}
        self._late_shares: Mapping[str, Pair] | None = None
        self._applies_late = applies_late
        self._is_paused = False
        # False while it has only the allowance of a worker that the store has not answered: see `_set_rates`.
        self._is_counted = False
        options = CoordinationOptions(
            store="memory://unused",
            max_workers=fleet.max_workers,
            interval_seconds=fleet.interval_seconds,
            worker_id=name,
            tier=tier,
            weight=weight,
        )
        self.worker = CoordinationWorker(
            self.link,
            options,
            usages=self._usages,
            apply_shares=self._apply_shares,
            clock=fleet.world.now,
            wall_clock=lambda: EPOCH + fleet.world.now() + clock_error,
            chance=fleet.world.chance.random,
        )
        for resource in () if opens_late else fleet.limits:
            self._open(resource)
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        if not self._applies_late:
            await self.worker.run()
            return
        step = self.worker.step

        async def late_step() -> None:
            await step()
            if self._late_shares is not None:
                self._set_rates(self._late_shares)

        self.worker.step = late_step  # type: ignore[method-assign]
        await self.worker.run()

    # Load

    def load(self, resource: str, demand: float) -> None:
        """Offer so many units a second from now on."""
        self.demand[resource] = demand
        if resource not in self._buckets:
            self._open(resource)
            self.worker.units_wait()
        self._change(resource)

    def _open(self, resource: str) -> None:
        """Begin to use a resource."""
        share = self.worker.share(resource, self.fleet.limits[resource])
        self._buckets[resource] = _Bucket(share, self.fleet.world.now())
        self._change(resource)

    def pause(self, until: float) -> None:
        """Stop the process: it sends nothing and hears nothing."""
        self.link.paused_until = until
        self._is_paused = True
        for resource in self._buckets:
            self._change(resource)
        asyncio.get_running_loop().call_at(until, self._resume)

    def _resume(self) -> None:
        self._is_paused = False
        for resource in self._buckets:
            self._change(resource)

    def crash(self) -> None:
        """End the process without a word."""
        self._task.cancel()
        self._stop()

    async def leave(self) -> None:
        """End the process as a producer ends."""
        await self.worker.leave()
        self.crash()

    def _stop(self) -> None:
        now = self.fleet.world.now()
        for resource, bucket in self._buckets.items():
            bucket.advance(now)
            rates = (-bucket.counted[0], -bucket.counted[1])
            self.fleet.gauge.change(resource, now, rates=rates, jump=0.0, flow=-bucket.flow)
        self._buckets.clear()

    def _change(self, resource: str) -> None:
        """Reconsider the flow and what is in force, after a change."""
        now, bucket = self.fleet.world.now(), self._buckets[resource]
        bucket.advance(now)
        before = bucket.flow
        bucket.demand = 0.0 if self._is_paused else self.demand[resource]
        jump = bucket.reflow(now)
        counted = bucket.rates if self._is_counted and not self._is_paused else (0.0, 0.0)
        rates = (counted[0] - bucket.counted[0], counted[1] - bucket.counted[1])
        bucket.counted = counted
        self.fleet.gauge.change(resource, now, rates=rates, jump=jump, flow=bucket.flow - before)

    # What the worker calls

    def _usages(self) -> Mapping[str, Usage]:
        self.fleet.world.transitions += 1
        now = self.fleet.world.now()
        usages: dict[str, Usage] = {}
        for resource, bucket in self._buckets.items():
            bucket.advance(now)
            limit = self.fleet.limits[resource]
            waiting = limit[0] * BACKLOG_SECONDS if self.demand[resource] > bucket.rates[0] else 0.0
            offered = bucket.sent + waiting
            usages[resource] = Usage(
                limit, (offered, offered * BYTES_PER_RECORD), (waiting, waiting * BYTES_PER_RECORD), bucket.sent
            )
        return usages

    def _apply_shares(self, shares: Mapping[str, Pair]) -> None:
        if self._applies_late:
            self._late_shares = shares
        else:
            self._set_rates(shares)

    def _set_rates(self, shares: Mapping[str, Pair]) -> None:
        now = self.fleet.world.now()
        if self.worker.state() == "alone":
            # The allowance of a worker that the store has not answered: its units count, and its rate does not.
            return
        self._is_counted = True
        for resource, share in shares.items():
            bucket = self._buckets.get(resource)
            if bucket is not None:
                self.fleet.world.transitions += 1
                bucket.advance(now)
                bucket.set_rates(share, now)
                self._change(resource)

    @property
    def rank(self) -> int:
        """The rank of its tier, 0 first."""
        return rank_of(self.tier)

    def rate(self, resource: str) -> float:
        """Return the units a second in force."""
        return self._buckets[resource].rates[0]


class Fleet:
    """Workers with one store. `live` has those that run."""

    def __init__(
        self, world: World, *, resources: int, max_workers: int, interval_seconds: float, weather: Weather = CALM
    ) -> None:
        self.world, self.max_workers, self.interval_seconds = world, max_workers, interval_seconds
        self.limits = {f"orders/shard-{number}": LIMIT for number in range(resources)}
        self.store = WorldStore(world)
        self.weather = weather
        self.gauge = FleetGauge(self.limits)
        self.live: list[WorldWorker] = []
        self._started = 0

    def start(
        self,
        *,
        name: str = "",
        tier: WorkerTier = "normal",
        weight: float = 1.0,
        clock_error: float = 0.0,
        applies_late: bool = False,
        opens_late: bool = False,
    ) -> WorldWorker:
        self._started += 1
        worker = WorldWorker(
            self,
            name or f"w{self._started}",
            tier=tier,
            weight=weight,
            clock_error=clock_error,
            applies_late=applies_late,
            opens_late=opens_late,
        )
        self.live.append(worker)
        return worker

    def crash(self, worker: WorldWorker) -> None:
        self.live.remove(worker)
        worker.crash()

    async def leave(self, worker: WorldWorker) -> None:
        self.live.remove(worker)
        await worker.leave()

    def set_weather(self, weather: Weather) -> None:
        self.weather = weather
        for worker in self.live:
            worker.link.weather = weather

    @staticmethod
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def end(self) -> None:
        """Stop all workers, and count the last second."""
        tasks = [worker._task for worker in self.live]  # noqa: SLF001 - of the same file
        for worker in list(self.live):
            self.crash(worker)
        self.gauge.look(self.world.now())
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
