"""The policy "proportional": the algorithm of AWS's example for DynamoDB, operation by operation; pure.

Source: Jason Hunter, "Rate-limiting calls to Amazon DynamoDB using Python Boto3, Part 2: Distributed Coordination" (AWS
Database Blog). Each worker scales its own limit by the ratio of the maximum to the total consumption, and moves 40 % of
the way:

    scale  = aggregate_max / aggregate_current      (1 while nothing is consumed)
    target = min(scale * own limit, own maximum)
    limit  = 0.6 * limit + 0.4 * target

It exists for fleets that mix with the example's own workers. Its known weaknesses: each worker starts with its initial
limit; an idle worker is raised to its maximum and can burst with it; an outdated summary is applied again and again
(`distributed_rate` ignores one).

The objects are those of the example, so that its workers and its aggregator can take part:

    worker-<id>.json    worker_id, timestamp, read_rate, write_rate
    summary.json        timestamp, aggregated_read_rate, aggregated_write_rate, active_workers, aggregation_time_utc
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

import msgspec

Rates = tuple[float, float]
SMOOTHING: Final = 0.4
# The example starts with a tenth of the limit.
FIRST_SHARE: Final = 0.1


def initial_limit(*, aggregate_max: float, worker_max: float) -> float:
    """Return the limit of a worker without a configured one: a tenth of the total, at most its own maximum."""
    return min(worker_max, aggregate_max * FIRST_SHARE)


def scaled_limit(limit: float, *, aggregate_max: float, aggregate_current: float, worker_max: float) -> float:
    """Return a worker's next limit. All values are units a second."""
    scale = aggregate_max / aggregate_current if aggregate_current > 0 else 1.0
    target = min(scale * limit, worker_max)
    return (1 - SMOOTHING) * limit + SMOOTHING * target


class Consumption(msgspec.Struct, kw_only=True):
    """A worker's object. Rates are units a second; the example's code also writes null, and numbers as text."""

    timestamp: float
    worker_id: str = ""
    read_rate: float | None = 0.0
    write_rate: float | None = 0.0


class ConsumptionSummary(msgspec.Struct, kw_only=True):
    """The aggregator's object."""

    timestamp: float
    aggregated_read_rate: float | None = 0.0
    aggregated_write_rate: float | None = 0.0
    active_workers: int = 0
    aggregation_time_utc: str = ""


def summed(consumptions: Iterable[Consumption], *, at: float, staleness_seconds: float) -> ConsumptionSummary:
    """Add up the consumptions that are not stale at `at`."""
    fresh = [each for each in consumptions if at - each.timestamp <= staleness_seconds]
    return ConsumptionSummary(
        timestamp=at,
        aggregated_read_rate=sum(each.read_rate or 0.0 for each in fresh),
        aggregated_write_rate=sum(each.write_rate or 0.0 for each in fresh),
        active_workers=len(fresh),
        aggregation_time_utc=datetime.fromtimestamp(at, UTC).replace(microsecond=0, tzinfo=None).isoformat(),
    )


class ScaledRates:
    """One worker's read and write rate, scaled by each summary it reads.

    Args:
        aggregate_max: the rates that all workers share, units a second.
        worker_max: the most this worker may use.
        initial: the initial rates.
    """

    def __init__(self, *, aggregate_max: Rates, worker_max: Rates, initial: Rates) -> None:
        self.rates = initial
        self._aggregate_max = aggregate_max
        self._worker_max = worker_max
        self._last: tuple[float, Rates] | None = None

    def consumption_rates(self, consumed: Rates, now: float) -> Rates:
        """Return the rates since the last call, 0 in the first call. `consumed` are units, and only grow."""
        last, self._last = self._last, (now, consumed)
        if last is None:
            return 0.0, 0.0
        passed = max(now - last[0], 1e-6)
        return max(0.0, (consumed[0] - last[1][0]) / passed), max(0.0, (consumed[1] - last[1][1]) / passed)

    def apply(self, summary: ConsumptionSummary) -> None:
        """Scale both rates by a summary."""
        current = summary.aggregated_read_rate or 0.0, summary.aggregated_write_rate or 0.0
        reads, writes = (
            scaled_limit(rate, aggregate_max=total, aggregate_current=used, worker_max=most)
            for rate, total, used, most in zip(self.rates, self._aggregate_max, current, self._worker_max, strict=True)
        )
        self.rates = (reads, writes)
