"""Which of the gateway's workers this process is, and how it shares rates with the others."""

from pathlib import Path
from typing import Final

import msgspec

from kpl_core import CoordinationOptions

# A store in a local folder answers in well under a millisecond, so short intervals are cheap.
_SHARD_INTERVAL_SECONDS: Final = 1.0
_QUOTA_INTERVAL_SECONDS: Final = 0.5


class WorkerIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of one run of `kpl serve --workers`.

    Args:
        worker: its number, from 0; the process that replaces a dead one has the same number.
        count: how many processes share the rates, including those that only drain an orphaned spool.
        folder: the coordination folder of this run, readable by its user only.
        takes_requests: False for a process that only drains an orphaned spool.
    """

    worker: int
    count: int
    folder: str
    takes_requests: bool = True

    def store_folder(self, purpose: str) -> Path:
        """Return the folder of one coordination store: "quotas" or "shards"."""
        return Path(self.folder) / purpose

    def shard_sharing(self) -> CoordinationOptions:
        """Return how the workers' producers divide the shards' limits."""
        return self._sharing("shards", _SHARD_INTERVAL_SECONDS)

    def quota_sharing(self) -> CoordinationOptions:
        """Return how the workers divide their tenants' rates."""
        return self._sharing("quotas", _QUOTA_INTERVAL_SECONDS)

    def _sharing(self, purpose: str, interval_seconds: float) -> CoordinationOptions:
        return CoordinationOptions(
            store=self.store_folder(purpose).as_uri(),
            max_workers=self.count,
            interval_seconds=interval_seconds,
            # A replacement has the dead worker's id, so it takes over its leases at once.
            worker_id=f"worker-{self.worker}",
        )
