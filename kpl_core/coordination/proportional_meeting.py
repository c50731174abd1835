"""One meeting under the policy "proportional": write the own object, read the summary, scale; now and then sum up.

In AWS's example one driver sums up. Here any worker may: who finds the summary older than an
interval takes `summary.claim` by a conditional write, so that only one reads all objects.
"""

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from kpl_core.coordination.scaled_limits import Consumption, ConsumptionSummary, ScaledLimits, as_json, summed
from kpl_core.coordination.store import ABSENT, CoordinationStore

__all__ = ["CONSUMPTION_PREFIX", "CONSUMPTION_SUMMARY", "ProportionalMeeting", "read_consumptions", "sum_up"]

CONSUMPTION_PREFIX: Final = "worker-"
CONSUMPTION_SUMMARY: Final = "summary.json"
# Its name does not end in .json, so the example's aggregator does not take it for a worker's.
CLAIM: Final = "summary.claim"

Complain = Callable[[str, str], None]


class ProportionalMeeting:
    """Speaks for one worker's limits. `complain(reason, sentence)` hears of objects that cannot be read."""

    def __init__(
        self,
        store: CoordinationStore,
        limits: ScaledLimits,
        *,
        worker_id: str,
        interval_seconds: float,
        staleness_seconds: float,
        may_compute: bool,
        complain: Complain,
    ) -> None:
        self._store = store
        self._limits = limits
        self._worker_id = worker_id
        self._interval = interval_seconds
        self._staleness = staleness_seconds
        self._may_compute = may_compute
        self._complain = complain
        self.clock_offset = 0.0
        # Whether the last meeting looked at everybody's objects, as only who sums up does; and came to the end of it.
        self.is_looking = self.has_looked = False

    async def meet(self, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        """Report, and scale by the summary if there is one; no summary changes nothing.

        Raises:
            StoreFailed: it could not be done; what was obeyed so far stays.
        """
        self._limits.meets(clock())
        self.is_looking, self.has_looked = False, not self._may_compute
        consumption = self._limits.consumption(clock(), at=wall_clock() + self.clock_offset)
        written = await self._store.write(f"{CONSUMPTION_PREFIX}{self._worker_id}.json", as_json(consumption))
        self.clock_offset = written.at - wall_clock()
        reading = await self._store.read(CONSUMPTION_SUMMARY)
        summary = None
        if reading.body is not None:
            try:
                summary = msgspec.json.decode(reading.body, type=ConsumptionSummary)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                self._complain("garbage", f"{CONSUMPTION_SUMMARY}: it cannot be read ({error}); see who writes it")
        if summary is not None:
            self._limits.apply(summary, clock(), at=reading.at)
        # Of the future: written before the store's clock was set back.
        is_old = summary is None or abs(reading.at - summary.timestamp) >= self._interval
        if self._may_compute and is_old:
            await self._sum_up(at=reading.at)

    async def _sum_up(self, *, at: float) -> None:
        claim = await self._store.read(CLAIM)
        if claim.body is not None and 0.0 < _until(claim.body) - at <= self._interval:
            return
        until = msgspec.json.encode(at + self._interval * 0.9)
        won = await self._store.write(CLAIM, until, expected=claim.version if claim.body is not None else ABSENT)
        if won.version is not None:
            self.is_looking = True
            await sum_up(self._store, staleness_seconds=self._staleness, complain=self._complain)
            self.has_looked = True

    async def leave(self, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:  # noqa: ARG002
        """Remove the own object, so that its last rate does not count any more."""
        await self._store.delete(f"{CONSUMPTION_PREFIX}{self._worker_id}.json")


async def sum_up(store: CoordinationStore, *, staleness_seconds: float, complain: Complain) -> ConsumptionSummary:
    """Read all workers' objects, write the summary and return it.

    Raises:
        StoreFailed: it could not be done.
    """
    listing = await store.read_all(CONSUMPTION_PREFIX)
    consumptions = read_consumptions(listing.bodies, complain)
    summary = summed(consumptions, at=listing.at, staleness_seconds=staleness_seconds)
    await store.write(CONSUMPTION_SUMMARY, as_json(summary))
    return summary


def read_consumptions(bodies: Mapping[str, bytes], complain: Complain) -> list[Consumption]:
    """Return the objects that can be read."""
    found = []
    for name, body in bodies.items():
        try:
            found.append(msgspec.json.decode(body, type=Consumption))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            complain("garbage", f"{name}: it cannot be read ({error}); see who writes it")
    return found


def _until(body: bytes) -> float:
    try:
        return float(msgspec.json.decode(body, type=float))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return 0.0
