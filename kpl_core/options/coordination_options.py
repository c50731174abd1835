"""The options for sharing a stream's limits with other processes, checked when they are made.

Coordination is off unless `Config.coordination` is set. `kpl_core.coordination` applies the options.
"""

import re
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

import msgspec

from kpl_core.errors import ConfigError
from kpl_core.options.option import Option, check_options
from kpl_core.options.validation import shown_url

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
_NEED_HOST: Final = frozenset({"redis", "rediss"})
_WORKER_ID: Final = re.compile(r"[A-Za-z0-9_.-]{1,100}")


def _require_store(name: str, url: str) -> None:
    if "://" not in url or url.partition("://")[0] not in STORE_MODULES:
        # The value is not repeated: a URL may hold a password.
        message = (
            f"{name} is not a URL of a known kind; begin it with one of "
            f"{', '.join(f'{known}://' for known in STORE_MODULES)}"
        )
        raise ConfigError(message)
    scheme = url.partition("://")[0]
    if scheme in _NEED_HOST and not urlsplit(url).hostname:
        message = f"{name} is a {scheme}:// URL without a host; write it as {scheme}://host:6379/0"
        raise ConfigError(message)


def _require_worker_id(name: str, worker_id: str) -> None:
    if _WORKER_ID.fullmatch(worker_id) is None:
        message = (
            f"{name} is {worker_id!r}; it must be 1 to 100 letters, digits, '-', '_' or '.', "
            f"because it becomes the name of an object in the store"
        )
        raise ConfigError(message)


class CoordinationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The store that workers share, and how they divide the shards' limits by max-min fairness.

    All workers that share streams have the same store: `file:///run/kpl/orders` (one machine), `s3://bucket/prefix/`,
    `dynamodb://table/group`, `redis://host:6379/0?group=orders`, `memory://name` (one process). A worker without a
    lease uses a part of the limit divided by `max_workers`.

    Raises:
        ConfigError: a value is out of its bounds.
    """

    store: Annotated[str, Option("The URL of the store, which may have a password.", secret=True, check=_require_store)]
    max_workers: Annotated[int, Option("How many workers may ever run at the same time.", 1, 1_000_000, "workers")] = 64
    usual_workers: Annotated[
        int | None,
        Option(
            "How many workers usually run; None: max_workers. Tenants' rates are divided by it until a store answers.",
            1,
            1_000_000,
            "workers",
        ),
    ] = None
    interval_seconds: Annotated[
        float, Option("The time between two sync rounds of a worker, within 10 %.", 0.05, 3_600.0, "seconds")
    ] = 5.0
    store_timeout_seconds: Annotated[
        float,
        Option(
            "A call of the store that takes longer has failed; the worker keeps the lease it has.",
            0.01,
            600.0,
            "seconds",
        ),
    ] = 2.0
    weight: Annotated[
        float, Option("This worker's share relative to others, when they want too much.", 1e-6, 1e6, "a weight")
    ] = 1.0
    tier: Annotated[
        WorkerTier,
        Option("A worker of a higher tier gets what it wants before a lower tier gets more than a trickle."),
    ] = "normal"
    worker_id: Annotated[
        str | None, Option("The unique name of this worker; None generates one.", check=_require_worker_id)
    ] = None
    shadow: Annotated[bool, Option("Compute and log the limits, and enforce none of them.")] = False
    aggregate: Annotated[
        bool, Option("Whether this worker may compute the summary; false where `kpl coordinate` runs.")
    ] = True

    def __post_init__(self) -> None:
        """Check every value."""
        check_options(self)

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
        return shown_url(self.store)
