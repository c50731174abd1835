"""One worker's view under the policy "proportional": its limits, scaled by the last summary it read; pure.

The objects are those of AWS's example, so that its workers and its aggregator take part:

    worker-<id>.json    worker_id, timestamp, read_rate, write_rate
    summary.json        timestamp, aggregated_read_rate, aggregated_write_rate, active_workers, aggregation_time_utc

They know two rates of one resource. A producer has two rates for each shard: those stand beside,
under `resources`, where the example's code does not look; read_rate and write_rate are their sums.
"""

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec

from kpl_core.coordination.demand import Usage
from kpl_core.coordination.proportional import initial_limit, scaled_limit
from kpl_core.coordination.report import Pair

__all__ = ["WHOLE", "Consumption", "ConsumptionSummary", "ScaledLimits", "summed"]

# The one resource of the example.
WHOLE: Final = ""


class Consumption(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A worker's object; rates are units a second."""

    timestamp: float
    worker_id: str = ""
    read_rate: float = 0.0
    write_rate: float = 0.0
    resources: dict[str, Pair] = {}


class ConsumptionSummary(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The aggregator's object."""

    timestamp: float
    aggregated_read_rate: float = 0.0
    aggregated_write_rate: float = 0.0
    active_workers: int = 0
    aggregation_time_utc: str = ""
    resources: dict[str, Pair] = {}


def summed(consumptions: Iterable[Consumption], *, at: float, staleness_seconds: float) -> ConsumptionSummary:
    """Add up the consumptions that are fresh at `at`."""
    read = write = 0.0
    count = 0
    resources: dict[str, Pair] = {}
    for each in consumptions:
        if at - each.timestamp > staleness_seconds:
            continue
        read += each.read_rate
        write += each.write_rate
        count += 1
        for resource, (first, second) in each.resources.items():
            known = resources.get(resource, (0.0, 0.0))
            resources[resource] = (known[0] + first, known[1] + second)
    return ConsumptionSummary(
        timestamp=at,
        aggregated_read_rate=read,
        aggregated_write_rate=write,
        active_workers=count,
        aggregation_time_utc=datetime.fromtimestamp(at, UTC).replace(microsecond=0, tzinfo=None).isoformat(),
        resources=resources,
    )


class ScaledLimits:
    """Follows summaries.

    Args:
        worker_id: the name of the worker's object.
        interval_seconds: between two meetings.
        worker_max: units a second that this worker may use at most; None: a resource's whole limit.
        initial: where it begins; None: `initial_limit`.
    """

    def __init__(
        self,
        worker_id: str,
        *,
        interval_seconds: float,
        worker_max: Pair | None = None,
        initial: Pair | None = None,
    ) -> None:
        self._worker_id = worker_id
        self._interval = interval_seconds
        self._worker_max = worker_max
        self._initial = initial
        self._usages: Mapping[str, Usage] = {}
        self._limits: dict[str, Pair] = {}
        self._last: tuple[float, dict[str, Pair]] | None = None
        self._met_at = -math.inf
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

    def shares(self) -> dict[str, Pair]:
        """Return the rates by resource, of all it knows."""
        return dict(self._limits)

    def _most(self, limit: Pair) -> Pair:
        return limit if self._worker_max is None else self._worker_max

    def state(self, now: float) -> Literal["newcomer", "leased", "expired"]:
        """Say on what its limits rest, in the words of the other policy."""
        if self._summary_at is None:
            return "newcomer"
        return "expired" if self.lease_age(now) > 3 * self._interval else "leased"

    def lease_age(self, now: float) -> float:
        """Return the seconds since the summary in use was written."""
        return 0.0 if self._summary_at is None else max(0.0, now - self._summary_at)

    def look(self, usages: Mapping[str, Usage], now: float) -> None:  # noqa: ARG002 - as the other policy's
        """Take note of what was consumed."""
        self._usages = usages
        for resource, usage in usages.items():
            if resource not in self._limits:
                self._limits[resource] = self.share(resource, usage.limit)

    def consumption(self, now: float, *, at: float) -> Consumption:
        """Return what to tell the others: rates since the last time, 0 the first time."""
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
            worker_id=self._worker_id, timestamp=at, read_rate=sum(reads), write_rate=sum(writes), resources=rates
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

    def meets(self, now: float) -> None:
        """Take note that a meeting begins, however it ends."""
        self._met_at = now

    def meeting_at(self, *, usual_seconds: float) -> float:
        """Return when the next meeting is due."""
        return self._met_at + usual_seconds

    def wants_meeting(self, now: float, *, usual_seconds: float) -> bool:
        """Say whether it is time to speak to the store."""
        return now >= self.meeting_at(usual_seconds=usual_seconds)


def _consumed(usage: Usage) -> Pair:
    return usage.offered[0] - usage.waiting[0], usage.offered[1] - usage.waiting[1]


def _current(summary: ConsumptionSummary, resource: str) -> Pair | None:
    if resource == WHOLE:
        return summary.aggregated_read_rate, summary.aggregated_write_rate
    return summary.resources.get(resource)


def as_json(value: Consumption | ConsumptionSummary) -> bytes:
    """Return an object with every field of the example's, zeros too."""
    fields: dict[str, Any] = {name: getattr(value, name) for name in value.__struct_fields__}
    if not value.resources:
        del fields["resources"]
    return msgspec.json.encode(fields)
