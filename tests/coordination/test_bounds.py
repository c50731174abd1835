"""What is promised of a fleet, in virtual time, beside AWS's example under the same load.

The cases are those of `benchmarks/coordination_sim.py`, which also draws them.
"""

from functools import cache

import pytest

from benchmarks.coordination_fleet import Fleet, Leased
from benchmarks.coordination_sim import CASES, LIMIT, always, leased, run, scaled
from kpl_core.coordination.demand import Usage
from tests.coordination.stepping import LIMIT as TWO, RESOURCE, SteppedWorker, SteppingStore

BY_NAME = {case.name: case for case in CASES}
SEEDS = [1, 2]
ONE_SEED = [1]


@cache
def theirs_of(name: str) -> dict[str, float]:
    return run(BY_NAME[name], scaled).figures


def figures(name: str, seed: int = 1) -> tuple[dict[str, float], dict[str, float]]:
    """Return our figures and the example's; chance makes a difference to ours only."""
    return run(BY_NAME[name], leased, seed=seed).figures, theirs_of(name)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cold_start_stays_within_110_percent_and_uses_the_limit_after_three_intervals(seed):
    ours, theirs = figures("cold start of 20", seed)
    assert ours["most in a second"] <= 1.1
    assert ours["after 3 intervals"] >= 0.95
    assert theirs["most in a second"] >= 2.0


@pytest.mark.parametrize("seed", ONE_SEED)
def test_a_burst_after_idle_time_uses_80_to_110_percent_after_one_second(seed):
    ours, theirs = figures("burst after idle", seed)
    assert ours["first second"] <= 1.1
    assert ours["most in a second"] <= 1.1
    assert ours["after one second"] >= 0.8
    assert theirs["first second"] >= 10


@pytest.mark.parametrize("seed", ONE_SEED)
def test_the_total_stays_the_same_while_the_store_is_down(seed):
    ours, _ = figures("store dead for 60 s", seed)
    assert 0.8 <= ours["least"] <= ours["most"] <= 1.0 + 1e-9
    assert ours["drift"] < 0.01
    assert ours["most afterwards"] <= 1.1


def test_a_dead_aggregator_changes_the_totals_of_the_example_only():
    ours, theirs = figures("aggregator dead for 180 s")
    assert 0.8 <= ours["least"] <= ours["most"] <= 1.0 + 1e-9
    assert theirs["least"] < 0.3


@pytest.mark.parametrize("seed", ONE_SEED)
def test_workers_that_join_while_the_store_is_down_add_at_most_a_fifth(seed):
    ours, theirs = figures("store dead, 4 join", seed)
    assert ours["most"] <= 1.2
    assert theirs["most"] > 1.2


@pytest.mark.long
@pytest.mark.parametrize(("max_workers", "joining"), [(20, 0), (40, 20), (200, 180)])
@pytest.mark.parametrize("seed", [1, 2])
def test_any_number_of_workers_joining_while_the_store_is_down_add_little(max_workers, joining, seed):
    """They raise their shares until the service throttles, because no store has answered them since their start."""
    fleet = Fleet(LIMIT, throttles=True, seed=seed)

    def start(index: int, fleet: Fleet) -> Leased:
        return Leased(index, fleet, max_workers=max_workers)

    fleet.start(20, start, always)
    fleet.run(30)
    fleet.store.is_down = True
    fleet.start(joining, start, always, within=5.0)
    fleet.run(40)
    assert max(fleet.shares(start=30)) <= 1.3
    assert max(fleet.shares(start=45)) <= 1.1
    assert min(fleet.shares(start=45)) >= 0.9


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_after_halving_or_doubling_the_fleet_the_limit_is_used_again_in_three_intervals(seed):
    ours, theirs = figures("half killed, then doubled", seed)
    assert ours["after the kill"] >= 0.95
    assert ours["after the doubling"] >= 0.95
    assert ours["most in a second"] <= 1.1
    assert theirs["after the kill"] < 0.95


@pytest.mark.parametrize("seed", SEEDS)
def test_a_hot_worker_uses_the_share_of_idle_ones_and_returns_it(seed):
    ours, theirs = figures("one hot, 19 idle", seed)
    assert ours["the hot one's"] >= 0.9
    assert ours["most in a second"] <= 1.1
    assert ours["two intervals after"] >= 0.95
    assert theirs["the hot one's"] < 0.9


# A shard that takes a burst of a second throttles so late that intervals of 1 s need one more.
@pytest.mark.parametrize(
    ("interval", "burst", "intervals"), [(5.0, 0.25, 3), (5.0, 1.0, 3), (1.0, 0.25, 3), (1.0, 1.0, 4)]
)
@pytest.mark.parametrize(
    ("max_workers", "seed"),
    [(8, 1), *(pytest.param(count, seed, marks=pytest.mark.long) for count in (8, 64) for seed in range(2, 5))],
)
def test_half_of_a_fleet_that_is_cut_off_uses_the_limit_with_the_other_half(
    interval, burst, intervals, max_workers, seed
):
    """The other half divides the whole limit again, so the service throttles all, and each lowers its part."""
    fleet = Fleet(LIMIT, throttles=True, seed=seed, service_burst_seconds=burst)
    workers = fleet.start(
        8, lambda index, fleet: Leased(index, fleet, max_workers=max_workers, interval=interval), lambda _: 3_000.0
    )
    fleet.run(30)
    cut_off = workers[:4]
    for worker in cut_off:
        worker.algorithm.is_cut_off = True
    fleet.run(40)
    part = []
    for _ in range(20):
        fleet.run(1)
        part.append(sum(worker.rate for worker in cut_off))
    used = fleet.shares(start=30 + intervals * interval, window=5.0)
    assert max(used) <= 1.1
    assert min(used) >= 0.9
    assert sum(fleet.throttled[-2_000:]) <= 0.015 * sum(fleet.sent[-2_000:])
    assert sum(part) >= 0.1 * LIMIT * len(part)
    # With the store back, each has its part again.
    for worker in cut_off:
        worker.algorithm.is_cut_off = False
    fleet.run(4 * interval)
    assert max(worker.rate for worker in workers) <= 1.1 * min(worker.rate for worker in workers)


def test_a_borrowed_share_is_returned_within_one_interval():
    fleet = Fleet(LIMIT)
    (hot,) = fleet.start(1, leased, always)
    lenders = fleet.start(19, leased, lambda now: 0.0 if now < 60 else 5_000.0)
    fleet.run(60)
    assert hot.rate > 0.9 * LIMIT
    fleet.run(5)
    assert hot.rate < 0.1 * LIMIT
    fleet.run(1.5)
    assert min(worker.rate for worker in lenders) > 0.9 * LIMIT / 20


def test_weights_and_tiers_divide_a_contended_limit():
    fleet = Fleet(LIMIT)

    def worker(weight: float, tier: int):
        return lambda index, fleet: Leased(index, fleet, max_workers=4, weight=weight, tier=tier)

    heavy, light = (fleet.start(1, worker(weight, 1), always)[0] for weight in (3.0, 1.0))
    fleet.run(20)
    assert heavy.rate == pytest.approx(3 * light.rate, rel=0.02)
    (critical,) = fleet.start(1, worker(1.0, 0), lambda _: 600.0)
    fleet.run(20)
    assert critical.rate >= 600
    assert heavy.rate + light.rate <= LIMIT - critical.rate


def test_the_two_limits_are_independent():
    """A worker with few large records leaves its record rate to other workers, and vice versa."""
    now = [0.0]
    store = SteppingStore(lambda: now[0])
    large, small = (SteppedWorker(name, store, lambda: now[0], max_workers=2) for name in ("large", "small"))
    for second in range(40):
        now[0] = float(second)
        large.holder.measure({RESOURCE: Usage(TWO, (10.0 * second, 5e6 * second))}, now[0])
        small.holder.measure({RESOURCE: Usage(TWO, (5e3 * second, 1e4 * second))}, now[0])
        for worker in (large, small):
            worker.sync(measures=False)
    assert small.share(0) > 900
    assert large.share(1) > 900_000


def test_a_worker_that_was_cut_off_for_long_asks_early_again():
    """The syncs that failed used up the early ones, and it took its share one interval later."""
    now = [0.0]
    store, cut = (SteppingStore(lambda: now[0]) for _ in range(2))
    cut.is_down = True
    other, worker = (
        SteppedWorker(name, each, lambda: now[0], max_workers=2) for name, each in (("o", store), ("w", cut))
    )
    other.demand = worker.demand = 5e3
    for second in range(200):
        now[0] = float(second)
        other.sync()
        worker.sync()
    cut.go_back_to(store.remembered())
    cut.is_down = False
    worker.sync()
    assert worker.holder.next_sync_at(usual_seconds=5.0) - now[0] < 0.5 * 5.0


def test_a_throttle_lowers_the_share_of_a_worker_without_the_store_once():
    """Each measurement after it lowered the share again, to nothing within a minute, and it never rose."""
    now = [0.0]
    worker = SteppedWorker("w", SteppingStore(lambda: now[0]), lambda: now[0], max_workers=1)
    worker.demand = 5e3
    for second in range(20):
        now[0] = float(second)
        worker.sync()
    share = worker.share()
    for second in range(20, 36):
        now[0] = float(second)
        worker.measure()
    worker.throttled_share = 0.1
    now[0] = 36.0
    worker.measure()
    worker.throttled_share = 0.0
    assert 0.85 * share < worker.share() < 0.95 * share
    for second in range(37, 90):
        now[0] = float(second)
        worker.measure()
    assert worker.share() == share
