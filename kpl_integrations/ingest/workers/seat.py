"""A worker's place among the others: which of how many it is, and where they meet."""

from pathlib import Path
from typing import Final

import msgspec

from kpl_core import CoordinationOptions

__all__ = ["Seat"]

# A folder of this machine answers in well under a millisecond.
_SHARD_INTERVAL_SECONDS: Final = 1.0
_QUOTA_INTERVAL_SECONDS: Final = 0.5


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of one run of `kpl serve --workers`.

    Args:
        worker: its number, from 0; who takes over from a dead one has the same.
        life: 1 for the first process with that number, 2 for the one that took over.
        count: how many processes share the rates, those that only empty an old spool included.
        folder: of this run alone, readable by its user only.
        takes: requests; one that only empties an old spool does not.
    """

    worker: int
    life: int
    count: int
    folder: str
    takes: bool = True

    @property
    def name(self) -> str:
        """Return the name of this worker and this life, as files have it."""
        return f"worker-{self.worker}-{self.life}"

    def place_of(self, what: str) -> Path:
        """Return the folder in which the workers meet for one purpose: totals, quotas or shards."""
        return Path(self.folder) / what

    def shard_sharing(self) -> CoordinationOptions:
        """Return how the workers' producers divide what the shards take."""
        return self._sharing("shards", _SHARD_INTERVAL_SECONDS)

    def quota_sharing(self) -> CoordinationOptions:
        """Return how the workers divide their tenants' rates."""
        return self._sharing("quotas", _QUOTA_INTERVAL_SECONDS)

    def _sharing(self, what: str, interval_seconds: float) -> CoordinationOptions:
        return CoordinationOptions(
            store=self.place_of(what).as_uri(),
            max_workers=self.count,
            interval_seconds=interval_seconds,
            # Who takes over from a dead worker takes over its leases, and needs not wait until they are free.
            worker_id=f"worker-{self.worker}",
        )
