"""The policy "proportional": the algorithm of AWS's example for DynamoDB, operation by operation.

Source: Jason Hunter, "Rate-limiting calls to Amazon DynamoDB using Python Boto3, Part 2: Distributed Coordination" (AWS
Database Blog). Each worker scales its own limit by the ratio of the maximum to the total consumption, and moves 40 % of
the way:

    scale  = aggregate_max / aggregate_current      (1 while nothing is consumed)
    target = min(scale * own limit, own maximum)
    limit  = 0.6 * limit + 0.4 * target

It exists for comparison, and to migrate a fleet worker by worker. Its known weaknesses: each worker starts with its
initial limit; an idle worker is raised to its maximum and can burst with it; an outdated summary is applied again and
again.

The objects are those of the example, so that its workers and its aggregator can take part:

    worker-<id>.json    worker_id, timestamp, read_rate, write_rate
    summary.json        timestamp, aggregated_read_rate, aggregated_write_rate, active_workers, aggregation_time_utc

They have two rates of one resource. A producer has two rates per shard; those are in `resources`, which the example's
code ignores, and read_rate and write_rate are their sums.

In the example one driver computes the summary. Here any worker may: a worker that sees a summary older than an interval
takes `summary.claim` by a conditional write, so that only one worker reads all objects.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal, TypeVar

import msgspec

from kpl_core.coordination.demand import Usage
from kpl_core.coordination.store import ABSENT, CoordinationStore
from kpl_core.coordination.store_objects import OnProblem, Pair
from kpl_core.options.coordination_options import PROPORTIONAL_FIRST_SHARE

SMOOTHING: Final = 0.4
T = TypeVar("T")


def initial_limit(*, aggregate_max: float, worker_max: float) -> float:
    """Return the limit of a worker without a configured one: a tenth of the total, at most its own maximum."""
    return min(worker_max, aggregate_max * PROPORTIONAL_FIRST_SHARE)


def scaled_limit(limit: float, *, aggregate_max: float, aggregate_current: float, worker_max: float) -> float:
    """Return a worker's next limit. All values are units a second."""
    scale = aggregate_max / aggregate_current if aggregate_current > 0 else 1.0
    target = min(scale * limit, worker_max)
    return (1 - SMOOTHING) * limit + SMOOTHING * target


# The only resource of the example.
WHOLE: Final = ""


class Consumption(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A worker's object. Rates are units a second; the example's code also writes null, and numbers as text."""

    timestamp: float
    worker_id: str = ""
    read_rate: float | None = 0.0
    write_rate: float | None = 0.0
    resources: dict[str, Pair] = {}


class ConsumptionSummary(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The aggregator's object."""

    timestamp: float
    aggregated_read_rate: float | None = 0.0
    aggregated_write_rate: float | None = 0.0
    active_workers: int = 0
    aggregation_time_utc: str = ""
    resources: dict[str, Pair] = {}


def summed(consumptions: Iterable[Consumption], *, at: float, staleness_seconds: float) -> ConsumptionSummary:
    """Add up the consumptions that are not stale at `at`."""
    fresh = [each for each in consumptions if at - each.timestamp <= staleness_seconds]
    resources: dict[str, Pair] = {}
    for each in fresh:
        for resource, (first, second) in each.resources.items():
            known = resources.get(resource, (0.0, 0.0))
            resources[resource] = (known[0] + first, known[1] + second)
    return ConsumptionSummary(
        timestamp=at,
        aggregated_read_rate=sum(each.read_rate or 0.0 for each in fresh),
        aggregated_write_rate=sum(each.write_rate or 0.0 for each in fresh),
        active_workers=len(fresh),
        aggregation_time_utc=datetime.fromtimestamp(at, UTC).replace(microsecond=0, tzinfo=None).isoformat(),
        resources=resources,
    )


class ScaledLimits:
    """One worker's limits, scaled by the last summary it read; pure.

    Args:
        worker_id: the name of the worker's object.
        interval_seconds: the time between two syncs.
        worker_max: the most this worker may use, units a second; None: the whole limit of a resource.
        initial: the initial limit; None: `initial_limit`.
    """

    def __init__(
        self,
        worker_id: str,
        *,
        interval_seconds: float,
        worker_max: Pair | None = None,
        initial: Pair | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.interval_seconds = interval_seconds
        self._worker_max = worker_max
        self._initial = initial
        self._usages: Mapping[str, Usage] = {}
        self._limits: dict[str, Pair] = {}
        self._last: tuple[float, dict[str, Pair]] | None = None
        self._synced_at = -math.inf
        self._summary_at: float | None = None

    def share(self, resource: str, limit: Pair) -> Pair:
        """Return the rates this worker may use of a resource."""
        known = self._limits.get(resource)
        if known is not None:
            return known
        if self._initial is not None:
            return self._initial
        worker_max = self._most(limit)
        return (
            initial_limit(aggregate_max=limit[0], worker_max=worker_max[0]),
            initial_limit(aggregate_max=limit[1], worker_max=worker_max[1]),
        )

    def _most(self, limit: Pair) -> Pair:
        return limit if self._worker_max is None else self._worker_max

    def state(self, now: float) -> Literal["newcomer", "leased", "expired"]:
        """Return the basis of its limits, in the terms of the other policy."""
        if self._summary_at is None:
            return "newcomer"
        return "expired" if self.lease_age(now) > 3 * self.interval_seconds else "leased"

    def lease_age(self, now: float) -> float:
        """Return the seconds since the applied summary was written."""
        return 0.0 if self._summary_at is None else max(0.0, now - self._summary_at)

    def measure(self, usages: Mapping[str, Usage], now: float) -> None:  # noqa: ARG002 - the signature of the other policy
        """Record the measured usage of each resource."""
        self._usages = usages
        for resource, usage in usages.items():
            if resource not in self._limits:
                self._limits[resource] = self.share(resource, usage.limit)

    def consumption(self, now: float, *, at: float) -> Consumption:
        """Return this worker's object: the rates since the last call, 0 in the first call."""
        totals = {name: _consumed(usage) for name, usage in self._usages.items()}
        rates: dict[str, Pair] = {}
        if self._last is not None:
            then, before = self._last
            passed = max(now - then, 1e-6)
            for name, (first, second) in totals.items():
                known = before.get(name, (0.0, 0.0))
                rates[name] = (max(0.0, (first - known[0]) / passed), max(0.0, (second - known[1]) / passed))
        self._last = (now, totals)
        whole = rates.pop(WHOLE, None)
        reads = [whole[0]] if whole else [rate[0] for rate in rates.values()]
        writes = [whole[1]] if whole else [rate[1] for rate in rates.values()]
        return Consumption(
            worker_id=self.worker_id, timestamp=at, read_rate=sum(reads), write_rate=sum(writes), resources=rates
        )

    def apply(self, summary: ConsumptionSummary, now: float, *, at: float) -> None:
        """Scale every limit by a summary."""
        self._summary_at = now - max(0.0, at - summary.timestamp)
        for resource, limits in self._limits.items():
            usage = self._usages.get(resource)
            current = _current(summary, resource)
            if usage is None or current is None:
                continue
            most = self._most(usage.limit)
            first, second = (
                scaled_limit(
                    limits[dimension],
                    aggregate_max=usage.limit[dimension],
                    aggregate_current=current[dimension],
                    worker_max=most[dimension],
                )
                for dimension in (0, 1)
            )
            self._limits[resource] = (first, second)

    def sync_started(self, now: float) -> None:
        """Note that a sync has started; it may still fail."""
        self._synced_at = now

    def next_sync_at(self, *, usual_seconds: float) -> float:
        """Return when the next sync is due."""
        return self._synced_at + usual_seconds

    def early_measure_at(self, now: float) -> float:  # noqa: ARG002 - as above
        """Return infinity: this policy only looks back."""
        return math.inf

    def sync_due(self, now: float, *, usual_seconds: float) -> bool:
        """Return True if a sync is due."""
        return now >= self.next_sync_at(usual_seconds=usual_seconds)


def _consumed(usage: Usage) -> Pair:
    return usage.offered[0] - usage.waiting[0], usage.offered[1] - usage.waiting[1]


def _current(summary: ConsumptionSummary, resource: str) -> Pair | None:
    if resource == WHOLE:
        return summary.aggregated_read_rate or 0.0, summary.aggregated_write_rate or 0.0
    return summary.resources.get(resource)


def as_json(value: Consumption | ConsumptionSummary) -> bytes:
    """Return the JSON of an object with every field of the example, zeros included."""
    fields: dict[str, Any] = {name: getattr(value, name) for name in value.__struct_fields__}
    if not value.resources:
        del fields["resources"]
    return msgspec.json.encode(fields)


CONSUMPTION_PREFIX: Final = "worker-"
CONSUMPTION_SUMMARY: Final = "summary.json"
# Its name does not end in .json, so the example's aggregator does not read it as a worker's object.
CLAIM: Final = "summary.claim"


class ProportionalSync:
    """Syncs one worker's limits. `on_problem(reason, sentence)` is called for objects that cannot be read."""

    def __init__(
        self,
        store: CoordinationStore,
        limits: ScaledLimits,
        *,
        staleness_seconds: float,
        may_compute: bool,
        on_problem: OnProblem,
    ) -> None:
        self._store = store
        self._limits = limits
        self._staleness = staleness_seconds
        self._may_compute = may_compute
        self._on_problem = on_problem
        self.clock_offset = 0.0
        # Whether the last sync began to read all objects (only a sync that aggregates does), and whether it finished.
        self.is_reading_all = self.has_read_all = False

    async def sync(self, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        """Report, and scale the limits by the summary; without a summary the limits stay.

        Raises:
            StoreFailed: the store failed; what was applied so far stays applied.
        """
        self._limits.sync_started(clock())
        self.is_reading_all, self.has_read_all = False, not self._may_compute
        consumption = self._limits.consumption(clock(), at=wall_clock() + self.clock_offset)
        written = await self._store.write(f"{CONSUMPTION_PREFIX}{self._limits.worker_id}.json", as_json(consumption))
        self.clock_offset = written.at - wall_clock()
        reading = await self._store.read(CONSUMPTION_SUMMARY)
        summary = _decoded(reading.body, ConsumptionSummary, CONSUMPTION_SUMMARY, self._on_problem)
        if summary is not None:
            self._limits.apply(summary, clock(), at=reading.at)
        # A summary from the future was written before the store's clock was set back.
        is_old = summary is None or abs(reading.at - summary.timestamp) >= self._limits.interval_seconds
        if self._may_compute and is_old:
            await self._sum_up(at=reading.at)

    async def _sum_up(self, *, at: float) -> None:
        claim = await self._store.read(CLAIM)
        if 0.0 < (_decoded(claim.body, float, CLAIM, self._on_problem) or 0.0) - at <= self._limits.interval_seconds:
            return
        until = msgspec.json.encode(at + self._limits.interval_seconds * 0.9)
        won = await self._store.write(CLAIM, until, expected=claim.version if claim.body is not None else ABSENT)
        if won.version is not None:
            self.is_reading_all = True
            await sum_up(self._store, staleness_seconds=self._staleness, on_problem=self._on_problem)
            self.has_read_all = True

    async def leave(self, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:  # noqa: ARG002
        """Delete this worker's consumption object, so that its last rate is no longer counted."""
        await self._store.delete(f"{CONSUMPTION_PREFIX}{self._limits.worker_id}.json")


async def sum_up(store: CoordinationStore, *, staleness_seconds: float, on_problem: OnProblem) -> ConsumptionSummary:
    """Read the objects of all workers, write the summary and return it.

    Raises:
        StoreFailed: the store failed.
    """
    listing = await store.read_all(CONSUMPTION_PREFIX)
    found = [_decoded(body, Consumption, name, on_problem) for name, body in listing.bodies.items()]
    readable = [each for each in found if each is not None]
    summary = summed(readable, at=listing.at, staleness_seconds=staleness_seconds)
    await store.write(CONSUMPTION_SUMMARY, as_json(summary))
    return summary


def _decoded(body: bytes | None, kind: type[T], name: str, on_problem: OnProblem) -> T | None:
    """Return the content of an object, None if it does not exist or cannot be decoded."""
    if body is None:
        return None
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        on_problem("garbage", f"{name}: it cannot be decoded ({error}); check which program writes it")
        return None
