"""The options for user records that cannot be delivered at once, checked when they are made.

Spool, dead letters, circuit breaker and tiers are off unless `Config` has an option of these classes. A feature
that is off costs nothing. The pipeline decides by them; the producer's `DurableStore` writes records to disk.
"""

import math
from pathlib import Path
from typing import Final, Literal, get_args

import msgspec
from msgspec.structs import force_setattr

from kpl_core.errors import ConfigError
from kpl_core.options.kinesis_limits import MIB
from kpl_core.options.validation import (
    ABOVE_ZERO,
    Bound,
    require_bounds,
    require_choice,
    require_order,
    require_path,
)

SpoolMode = Literal["overflow", "write_ahead"]
SpoolFailure = Literal["fail", "bypass", "refuse"]
Synchronous = Literal["full", "normal"]

_SPOOL_BOUNDS: Final = {
    "max_bytes": Bound(MIB, 1 << 44, "bytes", whole=True),
    "max_dead_letter_bytes": Bound(MIB, 1 << 44, "bytes", whole=True),
    "commit_interval_ms": Bound(0.0, 1_000.0, "milliseconds"),
    "commit_max_records": Bound(1, 100_000, "records", whole=True),
    "commit_max_bytes": Bound(1_024, 1 << 30, "bytes", whole=True),
    "busy_timeout_ms": Bound(0.0, 60_000.0, "milliseconds"),
    "replay_records_per_second": Bound(0.001, 1e9, "records a second"),
    "replay_bytes_per_second": Bound(1.0, 1e12, "bytes a second"),
    "replay_in_flight_records": Bound(1, 1_000_000, "records", whole=True),
    "replay_in_flight_bytes": Bound(1, 1 << 40, "bytes", whole=True),
    "replay_in_flight_per_key": Bound(1, 1_000_000, "records", whole=True),
}


class SpoolOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How much a spool holds, how it commits, and how fast it replays.

    Args:
        mode: "overflow": a record that could not be delivered in time is spooled instead of failing, and
            delivered later. "write_ahead": every user record is in the spool before it is acknowledged
            (`await put()` returns), and is removed when Kinesis has confirmed it.
        failure: what a write-ahead spool does while it cannot store, because its disk is full or fails, or it has
            `max_bytes`. "fail": each put tries, and fails with `NotSpooled`. "bypass": user records go straight to
            Kinesis, so `await put()` returns when they are in memory; what is not delivered in time then has failed.
            "refuse": puts raise `NotSpooled` at once. All end by themselves when the spool can store.
        path: the SQLite file, on a local disk. The files `-wal`, `-shm` and `.lock` are next to it.
        max_bytes: the most bytes of spooled records, as envelopes. The file takes up to 1.3 times as much, and
            64 MiB of WAL.
        max_dead_letter_bytes: the same for dead letters.
        commit_interval_ms: how long an append waits for others to share its fsync. Use 2 to 10: less costs an
            fsync per append, more only adds latency.
        commit_max_records: this many waiting records commit at once.
        commit_max_bytes: this many waiting bytes commit at once.
        synchronous: "full" survives a power cut. "normal" survives kill -9 only, and is faster on disks with a
            slow fsync.
        busy_timeout_ms: how long to wait for another program that reads the file.
        replay_records_per_second: the highest rate at which the backlog is put again.
        replay_bytes_per_second: the same in bytes of data and key.
        replay_in_flight_records: the most replayed records that have no result yet. This bounds how long a new
            record can wait behind replayed ones.
        replay_in_flight_bytes: the same in bytes of data and key.
        replay_in_flight_per_key: with 1, the records of a key always arrive in order; records in one aggregated
            record count as one. A producer with `ordering="per_key"` keeps the order itself; then more is faster.

    Raises:
        ConfigError: an option is of a wrong type or out of its bounds.
    """

    path: str | Path
    mode: SpoolMode = "overflow"
    failure: SpoolFailure = "fail"
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
        force_setattr(self, "path", require_path("path", self.path))
        require_choice("mode", self.mode, get_args(SpoolMode))
        require_choice("failure", self.failure, get_args(SpoolFailure))
        if self.failure != "fail" and self.mode != "write_ahead":
            message = (
                f"failure is {self.failure!r} and mode is {self.mode!r}, in which no put waits for the spool; "
                f"set mode to 'write_ahead', or leave failure at 'fail'"
            )
            raise ConfigError(message)
        require_choice("synchronous", self.synchronous, get_args(Synchronous))
        require_bounds(self, _SPOOL_BOUNDS)

    @property
    def file(self) -> Path:
        """Return `path` as a `pathlib.Path`."""
        return Path(self.path)


_LETTER_BOUNDS: Final = {
    "max_bytes": Bound(MIB, 1 << 44, "bytes", whole=True),
    "redrive_base_seconds": Bound(0.001, 1e9, "seconds"),
    "redrive_cap_seconds": Bound(0.001, 1e9, "seconds"),
    "redrive_records_per_second": Bound(0.001, 1e9, "records a second"),
    "redrive_in_flight_records": Bound(1, 1_000_000, "records", whole=True),
    "max_redrives": Bound(0, 1 << 31, "redrives", whole=True, optional=True),
    "alarm_depth": Bound(1, 1 << 62, "dead letters", whole=True, optional=True),
}


class DeadLetterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where user records go that failed for good, when they are redriven, and when an alarm fires.

    Args:
        path: an SQLite file as for a spool. None: the file of `Config.spool`, or the producer's
            `dead_letter_sink`.
        max_bytes: the most bytes of dead letters in a file of their own. In a spool's file,
            `SpoolOptions.max_dead_letter_bytes` applies.
        redrive: redrive dead letters automatically, critical first. (A sink is not redriven.)
        redrive_base_seconds: the longest wait before the first redrive; it doubles with each further one.
            Full jitter.
        redrive_cap_seconds: the longest wait of all.
        max_redrives: a dead letter that was redriven this often waits for an operator; None: no bound.
        redrive_records_per_second: the highest rate of redriven records.
        redrive_in_flight_records: the most redriven records that have no result yet.
        alarm_depth: this many dead letters raise one alarm, in the log and through the hooks. The next alarm
            comes only after the depth fell to half; None: no alarm.

    Raises:
        ConfigError: an option is of a wrong type or out of its bounds.
    """

    path: str | Path | None = None
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
            force_setattr(self, "path", require_path("path", self.path))
        require_bounds(self, _LETTER_BOUNDS)
        require_order(self, "redrive_base_seconds", "redrive_cap_seconds")


_TIER_BOUNDS: Final = {
    "critical_reserve": Bound(0.0, 0.9, "a share of the buffer"),
    "bulk_share": Bound(0.0, 1.0, "a share of the rest"),
}


class TierPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How critical, normal and bulk user records share the buffer.

    Args:
        critical_reserve: the share of `max_outstanding_records` and `max_outstanding_bytes` that only critical
            user records may use; also the share of a shard's rate while its breaker is open.
        bulk_share: the share of the rest that bulk user records may use. When it is used up and there is a
            dead-letter queue, `put_nowait` makes them dead letters with reason `rate_limited`.

    Raises:
        ConfigError: a share is not between 0 and 1.
    """

    critical_reserve: float = 0.1
    bulk_share: float = 0.5

    def __post_init__(self) -> None:
        """Check both shares."""
        require_bounds(self, _TIER_BOUNDS)


_BREAKER_BOUNDS: Final = {
    "failure_share": Bound(0.0, 1.0, "a share of the records in the window", above=True),
    "window_seconds": ABOVE_ZERO,
    "minimum_records": Bound(1, math.inf, "records", whole=True),
    "open_seconds": ABOVE_ZERO,
    "max_open_seconds": ABOVE_ZERO,
    "probe_records": Bound(1, math.inf, "records", whole=True),
    "probe_timeout_seconds": ABOVE_ZERO,
}


class BreakerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """When a circuit breaker opens, for how long, and what closes it.

    With the defaults, 100 % throttled records open it within `window_seconds * failure_share` = 0.5 s. The breaker
    of a healthy shard closes within `max_open_seconds` and one round trip of the probes, and
    `probe_timeout_seconds` later if probes are lost.

    Args:
        failure_share: the share of failed records in the window that opens it, above 0 and at most 1.
        window_seconds: the length of the sliding window.
        minimum_records: with fewer records in the window the breaker does not open.
        open_seconds: how long it stays open at first; this doubles after each failed probe.
        max_open_seconds: the longest time it stays open.
        probe_records: how many records may probe, and must be answered, in the half-open state.
        probe_timeout_seconds: probes without an answer for this long are given up, and new ones allowed.

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
        require_bounds(self, _BREAKER_BOUNDS)
        require_order(self, "open_seconds", "max_open_seconds")
