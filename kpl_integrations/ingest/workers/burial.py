"""Keeps the books of dead workers: who watches over the workers writes what the dead had told into the past."""

import logging
from typing import Final

import anyio
import msgspec

from kpl_core.coordination import CoordinationStore, StoreFailed
from kpl_integrations.ingest.stats.totals import GatewayTotals
from kpl_integrations.ingest.workers.company import PAST, gather
from kpl_integrations.ingest.workers.past import Past, folded
from kpl_integrations.ingest.workers.seat import Seat
from kpl_integrations.ingest.workers.snapshot import decode_snapshot
from kpl_integrations.ingest.workers.sums import sum_of

__all__ = ["Burial"]

_logger: Final = logging.getLogger("kpl_integrations.ingest.workers")


class Burial:
    """One for a run; nobody else writes the past."""

    def __init__(self, store: CoordinationStore) -> None:
        self._store = store
        self._past = Past()
        self._writing = anyio.Lock()

    async def bury(self, seat: Seat) -> None:
        """Move what a dead worker told last into the past, so that sums go on as they were."""
        async with self._writing:
            try:
                reading = await self._store.read(seat.name)
                last = None if reading.body is None else decode_snapshot(reading.body)
                self._past = folded(self._past, seat.name, seat.worker, last)
                await self._store.write(PAST, msgspec.json.encode(self._past))
                # Only now: whoever reads snapshots first and the past afterwards finds it in one of them.
                await self._store.delete(seat.name)
            except (StoreFailed, msgspec.DecodeError) as error:
                _logger.warning("what worker %d had counted cannot be kept: %s", seat.worker, error)

    async def accounts(self) -> GatewayTotals:
        """Return what all workers told, the dead and those that ended in order."""
        gathered = await gather(self._store)
        return sum_of(list(gathered.living.values()), gathered.past)
