"""Measure the total rate over time for each case of the coordination page, with our leases and AWS's example.

python -m benchmarks.coordination_sim               print the table, write docs/benchmarks/coordination.svg and .md
python -m benchmarks.coordination_sim --scale       the time of a summary for 10,000 workers, 1,000 shards

All cases except --scale run in virtual time and give the same result on every machine.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.coordination_fleet import Fleet, Leased, Scaled
from benchmarks.coordination_plot import draw
from benchmarks.coordination_scale import measure as measure_scale

__all__ = ["CASES", "LIMIT", "Case", "Outcome", "run"]

LIMIT = 1_000.0
INTERVAL = 5.0
WORKERS = 20
# The maximum size of a deployment of 20.
MAX_WORKERS = 24
HOT = 5_000.0
DOCS = Path(__file__).parents[1] / "docs" / "benchmarks"

Start = Callable[[int, Fleet], Any]


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: what happens.
        bound: the promise for our leases.
        play: runs the case with a fleet; returns the figures by name.
        seconds: the time range of the plot.
        throttles: whether the service refuses what is above the limit; workers that no store has answered need that.
    """

    name: str
    bound: str
    play: Callable[[Fleet, Start], dict[str, float]]
    throttles: bool = False


@dataclass(frozen=True)
class Outcome:
    """The result of a case: figures, and the total in each window of a second as a share of the limit."""

    figures: dict[str, float]
    totals: list[float]


def leased(index: int, fleet: Fleet) -> Leased:
    """Return a worker with our leases."""
    return Leased(index, fleet, max_workers=MAX_WORKERS)


def scaled(index: int, fleet: Fleet) -> Scaled:
    """Return a worker with the example's algorithm."""
    return Scaled(index, fleet)


def always(_: float) -> float:
    """Offer far more than the limit."""
    return HOT


def mean(values: list[float]) -> float:
    """Return the mean, 0 without values."""
    return sum(values) / len(values) if values else 0.0


def cold_start(fleet: Fleet, start: Start) -> dict[str, float]:
    """Twenty workers start within half a second."""
    fleet.start(WORKERS, start, always)
    fleet.run(60)
    return {
        "most in a second": max(fleet.shares()),
        "after 3 intervals": min(fleet.shares(start=3 * INTERVAL, end=5 * INTERVAL)),
    }


def burst_after_idle(fleet: Fleet, start: Start) -> dict[str, float]:
    """All workers idle for 100 s, then all offer far more than the limit."""
    fleet.start(WORKERS, start, lambda now: 0.5 if now < 100 else HOT)
    fleet.run(160)
    return {
        "first second": max(fleet.shares(start=100, end=101)),
        "after one second": min(fleet.shares(start=101, end=110)),
        "most in a second": max(fleet.shares(start=100)),
    }


def outage(fleet: Fleet, start: Start) -> dict[str, float]:
    """The store, and with it the aggregator, is down for 60 s. No worker joins."""
    fleet.start(WORKERS, start, always)
    fleet.run(100)
    before = mean(fleet.shares(start=90, end=100))
    fleet.store.is_down = True
    fleet.run(60)
    totals = fleet.shares(start=100, end=160)
    fleet.store.is_down = False
    fleet.run(30)
    return {
        "least": min(totals),
        "most": max(totals),
        "drift": abs(mean(totals[-250:]) - before),
        "most afterwards": max(fleet.shares(start=160)),
    }


def dead_aggregator(fleet: Fleet, start: Start) -> dict[str, float]:
    """Only the aggregator is down for 180 s. The example's workers continue with its last summary."""
    fleet.start(WORKERS, start, always)
    fleet.run(40)
    fleet.aggregator_is_dead = True
    if isinstance(fleet.workers[0].algorithm, Leased):
        fleet.store.is_down = True
    fleet.run(180)
    totals = fleet.shares(start=41)
    return {"least": min(totals), "most": max(totals)}


def outage_with_joins(fleet: Fleet, start: Start) -> dict[str, float]:
    """The maximum number of additional workers start while the store is down."""
    fleet.start(WORKERS, start, always)
    fleet.run(100)
    fleet.store.is_down = True
    fleet.run(10)
    fleet.start(MAX_WORKERS - WORKERS, start, always)
    fleet.run(50)
    totals = fleet.shares(start=100, end=160)
    fleet.store.is_down = False
    fleet.run(30)
    return {"most": max(totals), "most afterwards": max(fleet.shares(start=160))}


def churn(fleet: Fleet, start: Start) -> dict[str, float]:
    """Half the workers are killed; half a minute later their number doubles."""
    fleet.start(WORKERS, start, always)
    fleet.run(100)
    fleet.kill(fleet.workers[: WORKERS // 2])
    fleet.run(30)
    fleet.start(WORKERS // 2, start, always)
    fleet.run(30)
    return {
        "after the kill": min(fleet.shares(start=100 + 3 * INTERVAL, end=130)),
        "after the doubling": min(fleet.shares(start=130 + 3 * INTERVAL)),
        "most in a second": max(fleet.shares(start=100)),
    }


def skew(fleet: Fleet, start: Start) -> dict[str, float]:
    """One worker offers far more than the limit. Nineteen do so for 5 s, then offer nothing; after 80 s all do."""
    (hot,) = fleet.start(1, start, always)
    fleet.start(WORKERS - 1, start, lambda now: HOT if now < 5 or now >= 80 else 0.0)
    fleet.run(50)
    sent_before = hot.sent
    fleet.run(30)
    share = (hot.sent - sent_before) / (30 * LIMIT)
    fleet.run(20)
    return {
        "the hot one's": share,
        "most in a second": max(fleet.shares(start=5)),
        "two intervals after": min(fleet.shares(start=80 + 2 * INTERVAL)),
    }


CASES = (
    Case("cold start of 20", "at most 1.1 in every second, at least 0.95 after 3 intervals", cold_start),
    Case("burst after idle", "at most 1.1, at least 0.8 after one second", burst_after_idle),
    Case("store dead for 60 s", "between 0.8 and 1.0, no drift", outage),
    Case("store dead, 4 join", "at most 1.2", outage_with_joins, throttles=True),
    Case("aggregator dead for 180 s", "between 0.8 and 1.0", dead_aggregator),
    Case("half killed, then doubled", "within 5 % of the limit after 3 intervals", churn),
    Case("one hot, 19 idle", "the hot one gets at least 0.9", skew),
)


def run(case: Case, start: Start, *, seed: int = 1) -> Outcome:
    """Run a case with one algorithm."""
    fleet = Fleet(LIMIT, seed=seed, throttles=case.throttles)
    figures = case.play(fleet, start)
    return Outcome(figures, fleet.shares())


def main() -> int:
    parser = argparse.ArgumentParser("coordination_sim", description=__doc__)
    parser.add_argument("--scale", action="store_true", help="only the summary of 10,000 workers")
    if parser.parse_args().scale:
        print("\n".join(measure_scale()))
        return 0
    outcomes = [(case, run(case, leased), run(case, scaled)) for case in CASES]
    rows = ["| case | promised | leases | the example |", "| --- | --- | --- | --- |"]
    for case, ours, theirs in outcomes:
        rows.append(f"| {case.name} | {case.bound} | {_said(ours)} | {_said(theirs)} |")
    print("\n".join(rows))
    DOCS.mkdir(parents=True, exist_ok=True)
    (DOCS / "coordination.svg").write_text(
        draw([(case.name, ours.totals, theirs.totals) for case, ours, theirs in outcomes]), encoding="utf-8"
    )
    return 0


def _said(outcome: Outcome) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in outcome.figures.items())


if __name__ == "__main__":
    sys.exit(main())
