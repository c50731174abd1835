"""The options for sharing a stream's limits with other processes, checked when they are made.

Coordination is off unless `Config.coordination` is set. `kpl_core.coordination` applies the options.
"""

import re
from typing import Final, Literal, get_args

import msgspec

from kpl_core.errors import ConfigError
from kpl_core.options.validation import Bound, require_bounds, require_choice

WorkerTier = Literal["critical", "normal", "bulk"]

# A worker uses this share of limit / max_workers until a store has answered it. Other workers may hold the whole
# limit; with a burst of 0.1 s, all workers that can start during a store outage stay within a fifth of the limit.
ALONE_SHARE: Final = 1 / 6
# A shared limit allows a shorter burst, because the bursts of several workers can coincide.
SHARED_BURST_SECONDS: Final = 0.1

# The scheme of a store's URL -> the module of `kpl_core.coordination` whose `open_store` opens it. The module is
# imported when the first such store is opened.
STORE_MODULES: Final = {
    "memory": "store",
    "file": "stores.file",
    "s3": "stores.s3",
    "dynamodb": "stores.dynamodb",
    "redis": "stores.redis",
    "rediss": "stores.redis",
    "unix": "stores.redis",
}
_USER_AND_PASSWORD: Final = re.compile(r"//[^/?#]*@")
_SECRET_PARAMETER: Final = re.compile(r"([?&](?:password|token|secret)=)[^&]*", re.IGNORECASE)
_BOUNDS: Final = {
    "max_workers": Bound(1, 1_000_000, "workers", whole=True),
    "interval_seconds": Bound(0.05, 3_600.0, "seconds"),
    "store_timeout_seconds": Bound(0.01, 600.0, "seconds"),
    "weight": Bound(1e-6, 1e6, "a weight"),
}


class CoordinationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The store that workers share, and how they divide the shards' limits.

    Args:
        store: the store's URL, the same for all workers that share streams:
            `file:///run/kpl/orders` (one machine), `s3://bucket/prefix/`, `dynamodb://table/group`,
            `redis://host:6379/0?group=orders`, `memory://name` (one process).
        max_workers: how many workers may ever run at the same time. A worker without a lease uses a part of
            the limit divided by this.
        interval_seconds: the time between two sync rounds of a worker, within 10 %.
        store_timeout_seconds: a call of the store that takes longer has failed; the worker keeps the lease it has.
        weight: this worker's share relative to others, when they want more than the limit.
        tier: a worker of a higher tier gets what it wants before a lower tier gets more than a trickle.
        worker_id: the unique name of this worker; None generates one.
        shadow: compute and log the limits, and enforce none of them.
        aggregate: whether this worker may compute the summary; set False where `kpl coordinate` runs.

    Raises:
        ConfigError: a value is out of its bounds.
    """

    store: str
    max_workers: int = 64
    interval_seconds: float = 5.0
    store_timeout_seconds: float = 2.0
    weight: float = 1.0
    tier: WorkerTier = "normal"
    worker_id: str | None = None
    shadow: bool = False
    aggregate: bool = True

    def __post_init__(self) -> None:
        """Check every value."""
        scheme, separator, _ = str(self.store).partition("://")
        if not separator or scheme not in STORE_MODULES:
            # The value is not repeated: a URL may hold a password.
            message = (
                "store is not a URL of a known kind; begin it with one of "
                f"{', '.join(f'{known}://' for known in STORE_MODULES)}"
            )
            raise ConfigError(message)
        require_choice("tier", self.tier, get_args(WorkerTier))
        require_bounds(self, _BOUNDS)
        if self.worker_id is not None and not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", self.worker_id):
            message = (
                f"worker_id is {self.worker_id!r}; it must be 1 to 100 letters, digits, '-', '_' or '.', "
                f"because it becomes the name of an object in the store"
            )
            raise ConfigError(message)

    def __repr__(self) -> str:
        """Show the store, without passwords, and the number of workers."""
        return f"CoordinationOptions(store={self.shown_store!r}, max_workers={self.max_workers})"

    @property
    def first_share(self) -> float:
        """Return the share of a shard's limits that a worker uses before its first sync round."""
        return ALONE_SHARE / self.max_workers

    @property
    def shown_store(self) -> str:
        """Return the store's URL without its secrets."""
        return _SECRET_PARAMETER.sub(r"\1***", _USER_AND_PASSWORD.sub("//***@", self.store))
