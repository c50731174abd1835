"""Simulate a fleet of workers with four limits in virtual time, with our leases or the algorithm of AWS's example.

All decisions are made by the real code (leaseholder, sync round, lease table, token bucket, adaptive rate, the
proportional arithmetic). Only time, traffic, throttling and crashes are simulated. A sync round takes no time.

Each worker uses four resources, as a producer uses several shards. The load of a case goes to the first. The second
gets a few units when a worker starts and is idle afterwards, the third is idle from the start. The fourth has a small
load all the time, so that a worker gives up the first when that is idle.
"""

import math
import random
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from kpl_core.coordination.demand import Usage
from kpl_core.coordination.lease_sync import LeaseSync
from kpl_core.coordination.leaseholder import HolderRules, Leaseholder
from kpl_core.coordination.store import Listing, MemoryStore, Reading, StoreFailed, Written
from kpl_core.pipeline.shard_limiter import AdaptiveRate
from kpl_core.pipeline.token_bucket import TokenBucket
from kpl_integrations.dynamodb_limits.proportional import initial_limit, scaled_limit

__all__ = ["BURST_SECONDS", "RESOURCE", "Fleet", "Flow", "Leased", "Scaled", "SimulatedStore"]

STEP_SECONDS = 0.02
BURST_SECONDS = 0.1
RESOURCE, BRIEF, IDLE, STEADY = (f"orders/shard-{number}" for number in range(4))
# The load of the second resource, units a second, and for how long after the start of its worker; that of the fourth.
BRIEF_RATE = 50.0
BRIEF_SECONDS = 2.0
STEADY_RATE = 5.0
# The longest backlog of a caller, in seconds of its offered rate. The rest is shed.
BACKLOG_SECONDS = 2.0


def finished(coroutine: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401
    """Run a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as stopped:
        return stopped.value
    message = "it waits"
    raise AssertionError(message)


class SimulatedStore(MemoryStore):
    """A memory store that can be unavailable and counts its calls."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self.is_down = False
        self.calls: dict[str, int] = {}

    def _called(self, kind: str) -> None:
        self.calls[kind] = self.calls.get(kind, 0) + 1
        if self.is_down:
            message = "down"
            raise StoreFailed(message, reason="down")

    async def read(self, name: str) -> Reading:
        """Return one object."""
        self._called("read")
        return await super().read(name)

    async def write(self, name: str, body: bytes, *, expected: str | None = None) -> Written:
        """Write an object."""
        self._called("write")
        return await super().write(name, body, expected=expected)

    async def read_all(self, prefix: str) -> Listing:
        """Return all objects whose names begin with the prefix."""
        self._called("read_all")
        return await super().read_all(prefix)


class Algorithm(Protocol):
    """One worker's part in keeping the limit."""

    def tick(self, usages: Mapping[str, Usage], now: float) -> None:
        """Read the store, and run a sync round if it is due."""

    def next_tick(self, now: float) -> float:
        """Return the time of the next tick."""

    def early_tick(self, now: float) -> float:
        """Return the time of the next tick if units wait."""

    def rate(self, resource: str) -> float:
        """Return what this worker may use of a resource now, units a second."""


class Leased:
    """Our policy, `leases`. With `is_cut_off` this worker cannot reach the store."""

    def __init__(
        self, index: int, fleet: "Fleet", *, max_workers: int, interval: float = 5.0, weight: float = 1.0, tier: int = 1
    ) -> None:
        self._fleet = fleet
        self._interval = interval
        self.name = f"worker-{index}"
        self.is_cut_off = False
        self.holder = Leaseholder(
            HolderRules(
                worker_id=self.name, interval_seconds=interval, max_workers=max_workers, weight=weight, tier=tier
            )
        )
        self.complaints: list[str] = []
        self.sync_round = LeaseSync(
            fleet.store,
            self.holder,
            may_compute=True,
            on_problem=lambda reason, sentence: self.complaints.append(f"{reason}: {sentence}"),
        )
        self._usual = 0.0
        self._limit = (fleet.limit, fleet.limit)

    def tick(self, usages: Mapping[str, Usage], now: float) -> None:
        """Read the store, and run a sync round if it is due."""
        self.holder.measure(usages, now)
        if self.holder.sync_due(now, usual_seconds=self._usual):
            self._usual = self._interval * self._fleet.chance.uniform(0.9, 1.1)
            store = self._fleet.store
            was_down = store.is_down
            store.is_down = was_down or self.is_cut_off
            try:
                finished(self.sync_round.sync(self._fleet.clock, self._fleet.clock))
            except StoreFailed:
                self._usual *= 0.6
            finally:
                store.is_down = was_down

    def next_tick(self, now: float) -> float:
        """Return the time of the next tick."""
        return min(
            now + self._interval / 5, max(now + STEP_SECONDS, self.holder.next_sync_at(usual_seconds=self._usual))
        )

    def early_tick(self, now: float) -> float:
        """Return the time of the next tick if units wait."""
        return self.holder.early_measure_at(now)

    def rate(self, resource: str) -> float:
        """Return what this worker may use of a resource now, units a second."""
        return self.holder.share(resource, self._limit)[0]


class Scaled:
    """The example's policy: every worker scales its own limit, and one aggregator sums the consumption."""

    def __init__(
        self,
        index: int,
        fleet: "Fleet",
        *,
        worker_max_share: float = 0.75,
        interval: float = 5.0,
        staleness: float = 15.0,
    ) -> None:
        self.name = f"worker-{index}"
        self._fleet = fleet
        self._interval = interval
        self._staleness = staleness
        self._worker_max = fleet.limit * worker_max_share
        self._limit = initial_limit(aggregate_max=fleet.limit, worker_max=self._worker_max)
        self._last: tuple[float, float] | None = None
        self._sync_at = fleet.now + interval * fleet.chance.uniform(0.9, 1.1)

    def tick(self, usages: Mapping[str, Usage], now: float) -> None:
        """Report, sum up if the aggregator is alive, and scale."""
        if now < self._sync_at or self._fleet.store.is_down:
            return
        usage = usages[RESOURCE]
        self._sync_at = now + self._interval * self._fleet.chance.uniform(0.9, 1.1)
        rate = 0.0 if self._last is None else (usage.sent - self._last[1]) / (now - self._last[0])
        self._last = (now, usage.sent)
        self._fleet.consumptions[self.name] = (now, rate)
        # The aggregator's own loop. Any worker that ticks runs it.
        if not self._fleet.aggregator_is_dead and now - self._fleet.summed_at >= self._interval:
            fresh = [rate for at, rate in self._fleet.consumptions.values() if now - at <= self._staleness]
            self._fleet.summed_at, self._fleet.consumption = now, sum(fresh)
        if self._fleet.consumption is not None:
            self._limit = scaled_limit(
                self._limit,
                aggregate_max=self._fleet.limit,
                aggregate_current=self._fleet.consumption,
                worker_max=self._worker_max,
            )

    def next_tick(self, now: float) -> float:
        """Return the time of the next tick."""
        return now + self._interval / 20

    def early_tick(self, now: float) -> float:  # noqa: ARG002 - as above
        """Return the time of the next tick if units wait: no earlier one."""
        return math.inf

    def rate(self, resource: str) -> float:
        """Return what this worker may use of the first resource; the example has one only, so the others are free."""
        return self._limit if resource == RESOURCE else self._fleet.limit


class Flow:
    """What one worker offers to one resource, and its token bucket."""

    def __init__(self, offered: Callable[[float], float], until: float, rate: float, now: float) -> None:
        self.offered = offered
        # Nothing is offered after this instant.
        self.until = until
        self.rate = rate
        self.bucket = TokenBucket([(rate, rate * BURST_SECONDS)], now=now)
        self.adaptive = AdaptiveRate(now)
        self.backlog = self.arrived = 0.0
        self.sent = self.throttled = 0

    def usage(self, limit: float) -> Usage:
        """Return the counts, for a coordination worker."""
        waiting = self.backlog if self.backlog >= 1.0 else 0.0
        counts = (self.arrived, self.arrived), (waiting, waiting)
        return Usage((limit, limit), *counts, float(self.sent), float(self.throttled))

    def use_rate(self, rate: float, now: float) -> None:
        """Send at this rate from now on."""
        if rate != self.rate:
            self.rate = rate
            self.bucket.set_rate(0, rate * self.adaptive.fraction, now, capacity=rate * BURST_SECONDS)

    def send(self, now: float) -> int:
        """Send what arrived, as the bucket allows; return how many units."""
        offered = self.offered(now) if now <= self.until else 0.0
        arriving = offered * STEP_SECONDS
        self.arrived += arriving
        self.backlog = min(self.backlog + arriving, max(1.0, offered * BACKLOG_SECONDS))
        if self.backlog < 1.0:
            return 0
        count = int(min(self.backlog, self.bucket.tokens(now)[0]))
        if count >= 1:
            self.bucket.charge((count,), now)
        else:
            count = int(self.bucket.try_take((1.0,), now))
        self.backlog -= count
        self.sent += count
        return count

    def answered(self, sent: int, throttled: int, now: float) -> None:
        """Note how many units of a request were throttled. They are sent again."""
        self.throttled += throttled
        self.backlog += throttled
        if self.adaptive.answered(sent=sent, throttled=throttled, now=now):
            self.bucket.set_rate(0, self.rate * self.adaptive.fraction, now)


def _brief(_: float) -> float:
    return BRIEF_RATE


class _Worker:
    def __init__(self, algorithm: Any, offered: Callable[[float], float], now: float, first_tick: float) -> None:  # noqa: ANN401
        self.algorithm = algorithm
        loads = {
            RESOURCE: (offered, math.inf),
            BRIEF: (_brief, now + BRIEF_SECONDS),
            IDLE: (_brief, now),
        }
        self.flows = {resource: Flow(*load, algorithm.rate(resource), now) for resource, load in loads.items()}
        self.next_tick = first_tick
        self.early_tick = math.inf
        self.is_alive = True

    @property
    def rate(self) -> float:
        """What it may use of the first resource, units a second."""
        return self.flows[RESOURCE].rate

    @property
    def sent(self) -> int:
        """The units sent to the first resource."""
        return self.flows[RESOURCE].sent


class Fleet:
    """Workers come and go; `sent` is the number of units sent to the first resource in each step.

    Args:
        limit: of each resource, units a second.
        seed: of the random times.
        throttles: whether the service refuses what is above the limit of the first resource; `throttled` counts that.
        service_burst_seconds: the burst of that service, in seconds of the limit.
    """

    def __init__(
        self, limit: float, *, seed: int = 1, throttles: bool = False, service_burst_seconds: float = 0.25
    ) -> None:
        self.limit = limit
        self.now = 0.0
        self.chance = random.Random(seed)
        self.store = SimulatedStore(self.clock)
        self.workers: list[_Worker] = []
        self.sent: list[int] = []
        self.throttled: list[int] = []
        self.service = TokenBucket([(limit, limit * service_burst_seconds)], now=0.0) if throttles else None
        self.consumptions: dict[str, tuple[float, float]] = {}
        self.consumption: float | None = None
        self.summed_at = -1e9
        self.aggregator_is_dead = False

    def clock(self) -> float:
        """Return the fleet's time, seconds."""
        return self.now

    def start(
        self,
        count: int,
        algorithm: Callable[[int, "Fleet"], Any],
        offered: Callable[[float], float],
        *,
        within: float = 0.5,
    ) -> list[_Worker]:
        """Start workers. Each runs its first sync round at a random time `within` so many seconds."""
        started = []
        for _ in range(count):
            first = self.now + self.chance.uniform(0.0, within)
            started.append(_Worker(algorithm(len(self.workers), self), offered, self.now, first))
            self.workers.append(started[-1])
        return started

    def kill(self, workers: list[_Worker]) -> None:
        """Kill workers without a shutdown."""
        for worker in workers:
            worker.is_alive = False

    def run(self, seconds: float) -> None:
        """Advance the time."""
        for _ in range(round(seconds / STEP_SECONDS)):
            self.now = round(self.now + STEP_SECONDS, 6)
            self.sent.append(0)
            self.throttled.append(0)
            # In turn, because a service that throttles serves the first of a step.
            first = len(self.sent) % max(1, len(self.workers))
            for worker in self.workers[first:] + self.workers[:first]:
                if worker.is_alive:
                    self._step(worker)

    def _step(self, worker: _Worker) -> None:
        now = self.now
        is_waiting = now >= worker.early_tick and any(flow.backlog >= 1.0 for flow in worker.flows.values())
        if is_waiting or now >= worker.next_tick:
            usages = {name: flow.usage(self.limit) for name, flow in worker.flows.items()}
            steady = STEADY_RATE * now
            usages[STEADY] = Usage((self.limit, self.limit), (steady, steady))
            worker.algorithm.tick(usages, now)
            worker.next_tick = worker.algorithm.next_tick(now)
            worker.early_tick = worker.algorithm.early_tick(now)
            for resource, flow in worker.flows.items():
                flow.use_rate(worker.algorithm.rate(resource), now)
        for resource, flow in worker.flows.items():
            if flow.backlog < 1.0 and now > flow.until:
                continue
            count = flow.send(now)
            if count and resource == RESOURCE:
                self.sent[-1] += count
                if self.service is not None:
                    accepted = int(max(0.0, min(count, self.service.tokens(now)[0])))
                    self.service.charge((accepted,), now)
                    flow.answered(count, count - accepted, now)
                    self.throttled[-1] += count - accepted

    def shares(self, *, start: float = 0.0, end: float | None = None, window: float = 1.0) -> list[float]:
        """Return the units sent in each window between two instants, as a share of the limit."""
        first = round(start / STEP_SECONDS)
        last = len(self.sent) if end is None else round(end / STEP_SECONDS)
        width = round(window / STEP_SECONDS)
        if last - first < width:
            return []
        total = sum(self.sent[first : first + width])
        found = [total]
        for step in range(first + width, last):
            total += self.sent[step] - self.sent[step - width]
            found.append(total)
        return [each / (self.limit * window) for each in found]
