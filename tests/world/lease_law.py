"""The law of the leases: what is in force in a fleet, under each kind of fault, for any seed."""

from typing import NamedTuple

from tests.world.fleet import EVERYTHING, Fleet
from tests.world.kinds_of_faults import DEMANDS, KINDS, Kind
from tests.world.network import CALM, World
from tests.world.world_loop import run_in_world

ROUNDING = 1e-6
# Intervals with faults, then until the shares must be max-min fair.
STORY, RECOVERY = 20, 6
FAIR = 0.9


class Outcome(NamedTuple):
    """What one run did; the shares are of the limit, `longest` in intervals."""

    transitions: int
    worst_rate: float
    most_units: float
    longest: float
    # The least of any worker's share of a resource, after the recovery, as a part of its max-min share.
    fairness: float

    def broken(self, kind: Kind) -> list[str]:
        """Return the sentences that are false."""
        bounds = (
            ("rate in force", self.worst_rate, kind.most_rate),
            ("units in a second", self.most_units, kind.most_units),
            ("intervals above the limit", self.longest, kind.longest),
        )
        false = [f"{name} {value:.4f} > {most:.4f}" for name, value, most in bounds if value > most + ROUNDING]
        if self.fairness < FAIR:
            false.append(f"{self.fairness:.3f} of a max-min share after {RECOVERY} intervals")
        return false


def run_law(name: str, seed: int) -> Outcome:
    """Run one story of a kind."""
    return run_in_world(lambda: _story(KINDS[name], World(seed)))


async def _story(kind: Kind, world: World) -> Outcome:
    chance, interval = world.chance, kind.interval_seconds
    count = chance.randint(2, 5)
    fleet = Fleet(
        world,
        resources=chance.randint(2, 3),
        max_workers=chance.choice([count, 6, 12]),
        interval_seconds=interval,
        weather=kind.weather,
    )
    for _ in range(count):
        kind.start(fleet)
        await fleet.sleep(chance.choice([0.0, 0.0, chance.uniform(0.0, 2.0 * interval)]))
    # The burst of a start counts too.
    end = world.now() + STORY * interval
    while world.now() < end:
        world.transitions += 1
        if kind.events and chance.random() < 0.3:
            await chance.choice(kind.events)(fleet)
        else:
            chance.choice(fleet.live).load(chance.choice(list(fleet.limits)), chance.choice(DEMANDS))
        await fleet.sleep(chance.expovariate(4.0 / interval))
    fleet.set_weather(CALM)
    await fleet.sleep(max([0.0, *(worker.link.paused_until - world.now() for worker in fleet.live)]))
    for worker in fleet.live:
        worker.link.is_cut = False
        for resource in fleet.limits:
            worker.load(resource, EVERYTHING)
    await fleet.sleep(RECOVERY * interval)
    fairness = _fairness(fleet)
    await fleet.end()
    gauge = fleet.gauge
    return Outcome(world.transitions, gauge.worst_rate, gauge.most_units, gauge.longest_above / interval, fairness)


def _fairness(fleet: Fleet) -> float:
    """Return the least part that any worker has of its max-min share; all want everything."""
    first = min(worker.rank for worker in fleet.live)
    served = [worker for worker in fleet.live if worker.rank == first]
    weight = sum(worker.weight for worker in served)
    # A plan reserves 4 % for workers that have not started, and 4 % for a trickle of each.
    return min(
        worker.rate(resource) / (0.92 * limit[0] * worker.weight / weight)
        for worker in served
        for resource, limit in fleet.limits.items()
    )
