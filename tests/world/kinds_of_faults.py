"""The kinds of faults, and what each may do to what is in force: one table."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from tests.world.fleet import EVERYTHING, LIMIT, Fleet, WorldWorker
from tests.world.network import CALM, Weather

_Event = Callable[[Fleet], Awaitable[None]]


class Kind(NamedTuple):
    """One kind of fault, and its bounds as shares of the limit.

    Args:
        most_rate: the sum of the rates in force.
        most_units: the units sent in any second.
        longest: seconds, in intervals, for which the sum may be above the limit.
        weather: of all calls.
        events: of which one happens now and then.
        start: starts one worker.
        interval_seconds: of the coordination.
    """

    most_rate: float
    most_units: float
    longest: float = 0.0
    weather: Weather = CALM
    events: tuple[_Event, ...] = ()
    start: Callable[[Fleet], WorldWorker] = Fleet.start
    interval_seconds: float = 1.0


async def _join(fleet: Fleet) -> None:
    if len(fleet.live) < fleet.max_workers:
        fleet.start()


async def _leave(fleet: Fleet) -> None:
    if len(fleet.live) > 1:
        await fleet.leave(fleet.world.chance.choice(fleet.live))


async def _crash(fleet: Fleet) -> None:
    if len(fleet.live) > 1:
        fleet.crash(fleet.world.chance.choice(fleet.live))


async def _restart(fleet: Fleet) -> None:
    """Crash one and start it again at once, with its name or another one."""
    worker = fleet.world.chance.choice(fleet.live)
    fleet.crash(worker)
    fleet.start(name=fleet.world.chance.choice(["", worker.name]))


async def _replace(fleet: Fleet) -> None:
    """Let one leave, and start it again with its name at once or soon, as a rolling deployment does."""
    chance = fleet.world.chance
    worker = chance.choice(fleet.live)
    await fleet.leave(worker)
    await fleet.sleep(chance.choice([0.0, chance.uniform(0.0, 0.5 * fleet.interval_seconds)]))
    fleet.start(name=worker.name)


async def _pause(fleet: Fleet) -> None:
    """Stop one for so short that its report is never two intervals old."""
    _pause_for(fleet, fleet.world.chance.uniform(0.1, 0.7))


async def _long_pause(fleet: Fleet) -> None:
    _pause_for(fleet, fleet.world.chance.uniform(1.0, 8.0))


def _pause_for(fleet: Fleet, intervals: float) -> None:
    worker, now = fleet.world.chance.choice(fleet.live), fleet.world.now()
    if now >= worker.link.paused_until + 2.0 * fleet.interval_seconds:
        worker.pause(now + intervals * fleet.interval_seconds)


async def _cut(fleet: Fleet) -> None:
    link = fleet.world.chance.choice(fleet.live).link
    link.is_cut = not link.is_cut


async def _lose_writes(fleet: Fleet) -> None:
    fleet.store.remember()
    await fleet.sleep(fleet.world.chance.uniform(0.05, 0.5))
    fleet.store.forget()


async def _flush(fleet: Fleet) -> None:
    fleet.store.flush()


async def _garble(fleet: Fleet) -> None:
    await fleet.store.garble(fleet.world.chance)


def _of_any_tier(fleet: Fleet) -> WorldWorker:
    chance = fleet.world.chance
    return fleet.start(tier=chance.choice(["critical", "normal", "bulk"]), weight=chance.choice([0.5, 1.0, 3.0]))


def _with_any_clock(fleet: Fleet) -> WorldWorker:
    return fleet.start(clock_error=fleet.world.chance.uniform(-3_600.0, 3_600.0))


def _opening_late(fleet: Fleet) -> WorldWorker:
    return fleet.start(opens_late=True)


def _old_or_new(fleet: Fleet) -> WorldWorker:
    return fleet.start(applies_late=fleet.world.chance.random() < 0.5)


# One call in ten fails, and at most one of each worker in an interval. More may make a worker silent for two intervals,
# and then the others divide its share: see "a cut".
INTERVAL = 5.0
_LOST_REQUESTS = Weather(lost_requests=0.1, spacing=INTERVAL)
_LOST_ANSWERS = Weather(lost_answers=0.1, spacing=INTERVAL)
_LATE = Weather(late=0.1, spacing=INTERVAL)
_SLOW = Weather(slow_answers=0.1, latest=1.7, spacing=INTERVAL)
# With the burst of the buckets, 0.1 s. A process that starts has a bucket of its own.
BURST, STARTS = 1.1, 1.15
# Intervals. A lost report is repeated after 1.1 at most, and a plan comes 0.55 later (`lease_table.GAP_INTERVALS`).
# Each takes some calls, and another loss may come meanwhile.
REPORTED = 2.5
# The same where another loss comes before the report that the first one has cost.
REPORTED_AGAIN = 4.0
# A worker that begins with a resource has what its plan gives newcomers. If the report that says so is lost, the second
# plan after that one no longer reserves it; the report is repeated after the next read of the plan.
UNREPORTED, UNTIL_REPEATED = 1.1, 1.0
KINDS: dict[str, Kind] = {
    "no fault": Kind(1.0, BURST),
    "slow answers": Kind(1.0, BURST, weather=_SLOW, interval_seconds=INTERVAL),
    "joins and leaves": Kind(1.0, STARTS, events=(_join, _join, _leave)),
    "slow answers, joins and leaves": Kind(
        1.0, STARTS, weather=_SLOW, events=(_join, _join, _leave), interval_seconds=INTERVAL
    ),
    "crashes and restarts": Kind(1.0, STARTS, events=(_join, _crash, _restart, _replace)),
    "tiers and weights": Kind(1.0, STARTS, events=(_join, _leave), start=_of_any_tier),
    "wall clocks": Kind(1.0, STARTS, events=(_join, _leave), start=_with_any_clock),
    "resources opened late": Kind(1.0, BURST, weather=_SLOW, start=_opening_late, interval_seconds=INTERVAL),
    "refused writes": Kind(1.0, BURST, weather=Weather(refused=0.15)),
    "lost requests": Kind(UNREPORTED, BURST, UNTIL_REPEATED, weather=_LOST_REQUESTS, interval_seconds=INTERVAL),
    "lost answers": Kind(1.0, BURST, weather=_LOST_ANSWERS, interval_seconds=INTERVAL),
    # A report that comes late is lost to its writer, which repeats it.
    "late calls": Kind(UNREPORTED, BURST, UNTIL_REPEATED, weather=_LATE, interval_seconds=INTERVAL),
    "pauses": Kind(1.0, BURST, events=(_pause,)),
    # What cannot hold: the others take a worker without a word for two intervals for dead, and it still has its share.
    "pauses longer than a lease": Kind(2.5, 2.5, 8.0, events=(_long_pause,)),
    "a store that loses its last writes": Kind(1.7, 1.3, REPORTED_AGAIN, events=(_lose_writes,)),
    "flush and garbage": Kind(2.5, 1.8, REPORTED, events=(_flush, _garble)),
    # Here no shard throttles; a worker that is cut off lowers its share while one does.
    "a cut": Kind(3.0, 3.0, 20.0, events=(_cut,)),
    "old and new workers": Kind(1.6, 1.3, 0.6, events=(_join, _leave), start=_old_or_new),
}
DEMANDS = (0.0, 0.02 * LIMIT[0], 0.2 * LIMIT[0], EVERYTHING, EVERYTHING)
