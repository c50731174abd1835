"""What `Config` says about sharing a stream's limits with other processes: a value, checked where it is made.

Off until it is given. `kpl_core.coordination` obeys it.
"""

import math
import re
from typing import Any, Final, Literal, get_args

import msgspec

from kpl_core.errors import ConfigError

__all__ = ["ALONE_SHARE", "SHARED_BURST_SECONDS", "CoordinationOptions", "CoordinationPolicy", "WorkerTier"]

CoordinationPolicy = Literal["leases", "proportional"]
WorkerTier = Literal["critical", "normal", "bulk"]

# Of limit / max_workers: what a worker uses until a store has answered it. Others may hold the whole limit; with a
# burst of a tenth of a second, all who can start while the store is away stay within a fifth of it.
ALONE_SHARE: Final = 1 / 6
# A shared limit is kept more closely than one's own: bursts of several workers would meet.
SHARED_BURST_SECONDS: Final = 0.1
# AWS's example begins with a tenth of the whole.
PROPORTIONAL_FIRST_SHARE: Final = 0.1

_SCHEMES: Final = ("memory", "file", "s3", "dynamodb", "redis", "rediss", "unix")
_USER_AND_PASSWORD: Final = re.compile(r"//[^/?#]*@")
_SECRET_PARAMETER: Final = re.compile(r"([?&](?:password|token|secret)=)[^&]*", re.IGNORECASE)
# Smallest, largest and unit.
_BOUNDS: Final = {
    "max_workers": (1, 1_000_000, "workers"),
    "interval_seconds": (0.05, 3_600.0, "seconds"),
    "staleness_seconds": (0.1, 86_400.0, "seconds"),
    "store_timeout_seconds": (0.01, 600.0, "seconds"),
    "weight": (1e-6, 1e6, "(a weight)"),
}


class CoordinationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where workers meet, and how they divide what the shards take.

    Args:
        store: the meeting place, the same for all workers that share streams:
            `file:///run/kpl/orders` (one machine), `s3://bucket/prefix/`, `dynamodb://table/group`,
            `redis://host:6379/0?group=orders`, `memory://name` (one process).
        policy: "leases" divides by max-min fairness; "proportional" scales as AWS's example for DynamoDB does.
        max_workers: as many workers as may ever run at a time; one that has no lease yet uses the
            limit divided by this.
        interval_seconds: how often a worker speaks to the store, give or take 10 %.
        staleness_seconds: proportional only: objects older than this do not count.
        store_timeout_seconds: a meeting that takes longer has failed; the worker goes on with what it has.
        weight: this worker's part relative to others, where they want more than there is.
        tier: a worker of a higher tier gets what it wants before a lower one gets more than a trickle.
        worker_id: the name of this worker, unique; None makes one.
        shadow: compute and log what would be enforced, and enforce nothing.
        aggregate: whether this worker may compute the summary; False where `kpl coordinate` does.

    Raises:
        ConfigError: a value is out of its bounds.
    """

    store: str
    policy: CoordinationPolicy = "leases"
    max_workers: int = 64
    interval_seconds: float = 5.0
    staleness_seconds: float = 15.0
    store_timeout_seconds: float = 2.0
    weight: float = 1.0
    tier: WorkerTier = "normal"
    worker_id: str | None = None
    shadow: bool = False
    aggregate: bool = True

    def __post_init__(self) -> None:
        """Check every value."""
        scheme, separator, _ = str(self.store).partition("://")
        if not separator or scheme not in _SCHEMES:
            # Not what it is: a URL may hold a password.
            message = f"store is no URL of a known kind; begin it with one of {', '.join(f'{s}://' for s in _SCHEMES)}"
            raise ConfigError(message)
        _require_choice("policy", self.policy, get_args(CoordinationPolicy))
        _require_choice("tier", self.tier, get_args(WorkerTier))
        for name, (smallest, largest, unit) in _BOUNDS.items():
            _require_number(name, getattr(self, name), smallest, largest, unit)
        if self.worker_id is not None and not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", self.worker_id):
            message = (
                f"worker_id is {self.worker_id!r}; it must be 1 to 100 letters, digits, '-', '_' or '.', "
                f"because it becomes the name of an object in the store"
            )
            raise ConfigError(message)

    def __repr__(self) -> str:
        """Show everything but passwords in the URL."""
        return (
            f"CoordinationOptions(store={self.shown_store!r}, policy={self.policy!r}, max_workers={self.max_workers})"
        )

    @property
    def first_share(self) -> float:
        """Return the share of a shard's limits that is used before the first meeting."""
        return PROPORTIONAL_FIRST_SHARE if self.policy == "proportional" else ALONE_SHARE / self.max_workers

    @property
    def shown_store(self) -> str:
        """Return the store's URL without what may be secret in it."""
        return _SECRET_PARAMETER.sub(r"\1***", _USER_AND_PASSWORD.sub("//***@", self.store))


def _require_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        message = f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}"
        raise ConfigError(message)


def _require_number(name: str, value: Any, smallest: float, largest: float, unit: str) -> None:  # noqa: ANN401
    kind: Any = int if isinstance(smallest, int) else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind):
        message = f"{name} is {value!r}; it must be a number of {unit}"
        raise ConfigError(message)
    if math.isnan(value) or not smallest <= value <= largest:
        message = f"{name} is {value!r}; it must be between {smallest:,.9g} and {largest:,.9g} {unit}"
        raise ConfigError(message)
