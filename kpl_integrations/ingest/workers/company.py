"""The workers of one gateway as each of them sees them: what all tell of themselves, in a folder of this machine.

Each writes a snapshot of its totals about twice a second, and once more whenever one of them is asked for the sum: so
what one worker has told is known to the next that is asked, and a sum of counters never falls. What a worker counted
in the last half second before it was killed is missing from it.

    worker-<number>-<life>   a worker's snapshot
    past                     what dead workers had told, written by whoever watches over them
"""

import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import anyio
import msgspec

from kpl_core.coordination import CoordinationStore, StoreFailed
from kpl_integrations.gateway_figures import StatsDocument
from kpl_integrations.ingest.admission.tenant_account import TenantAccount
from kpl_integrations.ingest.stats.totals import GatewayTotals, SingleProcessStats
from kpl_integrations.ingest.workers.past import Past
from kpl_integrations.ingest.workers.seat import Seat
from kpl_integrations.ingest.workers.snapshot import Snapshot, decode_snapshot, encode_snapshot, snapshot_of
from kpl_integrations.ingest.workers.sums import sum_of

__all__ = ["PAST", "SNAPSHOTS", "Company", "Gathered", "gather"]

SNAPSHOTS: Final = "worker-"
PAST: Final = "past"
TELL_SECONDS: Final = 0.5
# Of the time, at most, a worker with very many tenants spends on telling.
_MOST_OF_THE_TIME: Final = 0.02

_logger: Final = logging.getLogger("kpl_integrations.ingest.workers")


class Gathered(msgspec.Struct, frozen=True):
    """Snapshots by the name of their file, none of them of the dead, and the past."""

    living: dict[str, Snapshot]
    past: Past


class Company:
    """The whole, for the worker that `alone` is of.

    `inherited` are the user records it found in its files. `ask` returns when the workers of these names told anew.
    """

    def __init__(
        self,
        alone: SingleProcessStats,
        store: CoordinationStore,
        seat: Seat,
        *,
        inherited: int,
        ask: Callable[[Iterable[str]], Awaitable[None]],
    ) -> None:
        self._alone = alone
        self._store = store
        self._seat = seat
        self._inherited = inherited
        self._ask = ask
        self._known = Gathered({}, Past())
        self._is_well = True
        # An older snapshot must not be written after a newer one.
        self._telling = anyio.Lock()

    async def run(self) -> None:
        """Tell, until cancelled."""
        while True:
            started = time.process_time()
            await self.tell()
            took = time.process_time() - started
            await anyio.sleep(max(TELL_SECONDS, took / _MOST_OF_THE_TIME))

    async def tell(self) -> Snapshot:
        """Let the others know what this worker has counted."""
        async with self._telling:
            totals = await self._alone.totals()
            snapshot = snapshot_of(totals, self._seat, process_id=os.getpid(), inherited=self._inherited)
            try:
                await self._store.write(self._seat.name, encode_snapshot(snapshot))
            except StoreFailed as error:
                self._complain(error)
            else:
                self._is_well = True
        return snapshot

    async def totals(self) -> GatewayTotals:
        """Return the sum over all workers."""
        own = await self.tell()
        try:
            self._known = await gather(self._store)
            await self._ask(name for name in self._known.living if name != self._seat.name)
            self._known = await gather(self._store)
        except StoreFailed as error:
            # What they told last; better old than theirs left out, by which counters would fall.
            self._complain(error)
        return sum_of(list((self._known.living | {self._seat.name: own}).values()), self._known.past)

    async def tenant_stats(self, account: TenantAccount) -> StatsDocument:
        """Return the sum over all workers; it has the tenant's own too, if it ever asked."""
        del account
        return (await self.totals()).stats

    def _complain(self, error: StoreFailed) -> None:
        if self._is_well:
            _logger.warning("what the other workers count cannot be had: %s; until then old counts are told", error)
        self._is_well = False


async def gather(store: CoordinationStore) -> Gathered:
    """Return what all workers told.

    Raises:
        StoreFailed: it cannot be had.
    """
    listing = await store.read_all(SNAPSHOTS)
    # After the snapshots: one that is removed meanwhile is in the past already, and never in neither.
    reading = await store.read(PAST)
    try:
        past = Past() if reading.body is None else msgspec.json.decode(reading.body, type=Past)
        dead = frozenset(past.lives)
        living = {name: decode_snapshot(body) for name, body in listing.bodies.items() if name not in dead}
    except msgspec.DecodeError as error:
        message = f"a snapshot of a worker cannot be read: {error}; see who else writes to the folder"
        raise StoreFailed(message, reason="garbage") from error
    return Gathered(living, past)
