"""What `Config` says about user records that cannot be delivered at once: values, checked where they are made.

Spool, dead letters, circuit breaker and tiers are off until one of these is given, and what is off costs
nothing. Who obeys them: `ReliableStreamPipeline` decides, the driver's `Keeping` moves records to disk.
"""

import math
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

import msgspec

from kpl_core.errors import ConfigError
from kpl_core.options.kinesis_limits import MIB

__all__ = ["BreakerPolicy", "DeadLetterOptions", "SpoolMode", "SpoolOptions", "Synchronous", "TierPolicy"]

SpoolMode = Literal["overflow", "write_ahead"]
Synchronous = Literal["full", "normal"]

# Smallest, largest and unit of each option that is a number.
_SPOOL_BOUNDS: Final = MappingProxyType(
    {
        "max_bytes": (MIB, 1 << 44, "bytes"),
        "max_dead_letter_bytes": (MIB, 1 << 44, "bytes"),
        "commit_interval_ms": (0.0, 1_000.0, "milliseconds"),
        "commit_max_records": (1, 100_000, "records"),
        "commit_max_bytes": (1_024, 1 << 30, "bytes"),
        "busy_timeout_ms": (0.0, 60_000.0, "milliseconds"),
        "replay_records_per_second": (0.001, 1e9, "records a second"),
        "replay_bytes_per_second": (1.0, 1e12, "bytes a second"),
        "replay_in_flight_records": (1, 1_000_000, "records"),
        "replay_in_flight_bytes": (1, 1 << 40, "bytes"),
        "replay_in_flight_per_key": (1, 1_000_000, "records"),
    }
)


class SpoolOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How much a spool holds, how it commits, and how fast it gives back.

    Args:
        mode: "overflow": what could not be delivered in time is spooled instead of failing, and
            delivered later. "write_ahead": every user record is in the spool before it is
            acknowledged (`await put()` returns), and leaves it when Kinesis has confirmed it.
        path: the SQLite file; `-wal`, `-shm` and `.lock` stand beside it, on a local disk.
        max_bytes: records spooled, as envelopes. The file takes up to 1.3 times that, and 64 MiB of WAL.
        max_dead_letter_bytes: the same for dead letters.
        commit_interval_ms: how long an append waits for others to share its fsync; 2 to 10 is
            sensible: less costs an fsync per append, more only adds latency.
        commit_max_records: as many waiting records commit at once.
        commit_max_bytes: as many waiting bytes commit at once.
        synchronous: "full" survives a power cut; "normal" survives kill -9 only, and is faster on
            disks with a slow fsync.
        busy_timeout_ms: how long to wait for another program that reads the file.
        replay_records_per_second: how fast the backlog is given back to the producer, at most.
        replay_bytes_per_second: the same in bytes of data and key.
        replay_in_flight_records: replayed records without a result yet, at most. This bounds how
            long a fresh record can wait behind replayed ones.
        replay_in_flight_bytes: the same in bytes of data and key.
        replay_in_flight_per_key: with 1 a key's records arrive in order whatever the producer does; those
            that travel in one aggregated record count as one. A producer with `ordering="per_key"` keeps the
            order itself; then more is faster.

    Raises:
        ConfigError: an option is of a wrong type or out of its bounds.
    """

    path: Path
    mode: SpoolMode = "overflow"
    max_bytes: int = 1024 * MIB
    max_dead_letter_bytes: int = 1024 * MIB
    commit_interval_ms: float = 4.0
    commit_max_records: int = 2_000
    commit_max_bytes: int = 4 * MIB
    synchronous: Synchronous = "full"
    busy_timeout_ms: float = 5_000.0
    replay_records_per_second: float = 5_000.0
    replay_bytes_per_second: float = 5.0 * MIB
    replay_in_flight_records: int = 1_000
    replay_in_flight_bytes: int = MIB
    replay_in_flight_per_key: int = 1

    def __post_init__(self) -> None:
        """Check every bound."""
        _require_path(self.path)
        _require_choice("mode", self.mode, get_args(SpoolMode))
        _require_choice("synchronous", self.synchronous, get_args(Synchronous))
        for name, (smallest, largest, unit) in _SPOOL_BOUNDS.items():
            _require_number(name, getattr(self, name), smallest, largest, unit)


_LETTER_BOUNDS: Final = MappingProxyType(
    {
        "max_bytes": (MIB, 1 << 44, "bytes"),
        "redrive_base_seconds": (0.001, 1e9, "seconds"),
        "redrive_cap_seconds": (0.001, 1e9, "seconds"),
        "redrive_records_per_second": (0.001, 1e9, "records a second"),
        "redrive_in_flight_records": (1, 1_000_000, "records"),
    }
)


class DeadLetterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where user records go that failed for good, when they are tried again, and who is told.

    Args:
        path: an SQLite file as for a spool; None: the file of `Config.spool`, or the `dead_letter_sink`
            that was given to the producer.
        max_bytes: dead letters in a file of their own; in a spool's, its `max_dead_letter_bytes` holds.
        redrive: try letters again by themselves, critical first. (A sink is somebody else's to redrive.)
        redrive_base_seconds: the longest wait before the first redrive; each further one may wait
            twice as long. Full jitter.
        redrive_cap_seconds: the longest wait of all.
        max_redrives: after as many a letter waits for a person; None: for ever.
        redrive_records_per_second: how fast letters are tried again, at most.
        redrive_in_flight_records: letters tried again and without a result yet, at most.
        alarm_depth: so many letters ring once, in the log and through the hooks, and again only after the
            depth fell to half; None: never.

    Raises:
        ConfigError: an option is of a wrong type or out of its bounds.
    """

    path: Path | None = None
    max_bytes: int = 1024 * MIB
    redrive: bool = True
    redrive_base_seconds: float = 10.0
    redrive_cap_seconds: float = 3_600.0
    max_redrives: int | None = None
    redrive_records_per_second: float = 1_000.0
    redrive_in_flight_records: int = 500
    alarm_depth: int | None = 1_000

    def __post_init__(self) -> None:
        """Check every bound."""
        if self.path is not None:
            _require_path(self.path)
        for name, (smallest, largest, unit) in _LETTER_BOUNDS.items():
            _require_number(name, getattr(self, name), smallest, largest, unit)
        if self.redrive_cap_seconds < self.redrive_base_seconds:
            message = (
                f"redrive_cap_seconds is {self.redrive_cap_seconds:g}, below redrive_base_seconds, "
                f"{self.redrive_base_seconds:g}; raise the one or lower the other"
            )
            raise ConfigError(message)
        if self.max_redrives is not None:
            _require_number("max_redrives", self.max_redrives, 0, 1 << 31, "redrives")
        if self.alarm_depth is not None:
            _require_number("alarm_depth", self.alarm_depth, 1, 1 << 62, "dead letters")


class TierPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How critical, normal and bulk user records share what may be outstanding.

    Args:
        critical_reserve: share of `max_outstanding_records` and `max_outstanding_bytes` that only
            critical user records may use; also of a shard's rate while its breaker is open.
        bulk_share: share of the rest that bulk user records may use. They give way first: with a
            dead-letter queue `put_nowait` files them as `rate_limited` when it is used up.

    Raises:
        ConfigError: a share is not between 0 and 1.
    """

    critical_reserve: float = 0.1
    bulk_share: float = 0.5

    def __post_init__(self) -> None:
        """Check both shares."""
        _require_number("critical_reserve", self.critical_reserve, 0.0, 0.9, "of the room")
        _require_number("bulk_share", self.bulk_share, 0.0, 1.0, "of the room")


class BreakerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """When to open, for how long, and what it takes to close again.

    With the defaults 100 % throttles open it within `window_seconds * failure_share`, half a
    second, and a shard that is healthy again is closed within `max_open_seconds` and one
    round trip of the probes (`probe_timeout_seconds` more if probes are lost).

    Args:
        failure_share: share of failed records in the window that opens it, above 0, at most 1.
        window_seconds: length of the sliding window.
        minimum_records: fewer records than this in the window open nothing.
        open_seconds: the first break; each break after failed probes is twice as long.
        max_open_seconds: the longest break.
        probe_records: records that may probe, and must be answered, in the half-open state.
        probe_timeout_seconds: probes without an answer for this long are given up, new ones granted.

    Raises:
        ConfigError: a value is out of its bounds.
    """

    failure_share: float = 0.5
    window_seconds: float = 1.0
    minimum_records: int = 10
    open_seconds: float = 1.0
    max_open_seconds: float = 5.0
    probe_records: int = 10
    probe_timeout_seconds: float = 3.0

    def __post_init__(self) -> None:
        """Check every bound."""
        if not 0.0 < self.failure_share <= 1.0:
            _out_of_bounds("failure_share", self.failure_share, "above 0 and at most 1")
        for name in ("window_seconds", "open_seconds", "probe_timeout_seconds"):
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                _out_of_bounds(name, value, "a finite number of seconds above 0")
        if not self.open_seconds <= self.max_open_seconds < math.inf:
            _out_of_bounds("max_open_seconds", self.max_open_seconds, f"at least open_seconds ({self.open_seconds})")
        for name in ("minimum_records", "probe_records"):
            value = getattr(self, name)
            if value < 1:
                _out_of_bounds(name, value, "at least 1 record")


def _require_path(path: object) -> None:
    if not isinstance(path, Path):
        message = f"path is {path!r}; it must be a pathlib.Path"
        raise ConfigError(message)


def _require_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        message = f"{name} is {value!r}; it must be {' or '.join(map(repr, allowed))}"
        raise ConfigError(message)


def _require_number(name: str, value: Any, smallest: float, largest: float, unit: str) -> None:  # noqa: ANN401
    kind = int if isinstance(smallest, int) else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or math.isnan(value):
        message = f"{name} is {value!r}; it must be a number of {unit}"
        raise ConfigError(message)
    if not smallest <= value <= largest:
        message = f"{name} is {value!r}; it must be between {smallest:,g} and {largest:,g} {unit}"
        raise ConfigError(message)


def _out_of_bounds(name: str, value: float, bound: str) -> None:
    message = f"{name} is {value!r}; it must be {bound}"
    raise ConfigError(message)
