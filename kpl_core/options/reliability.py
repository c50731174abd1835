"""The options for user records that cannot be delivered at once, checked when they are made.

Spool, dead letters, circuit breaker and tiers are off unless `Config` has an option of these classes. A feature
that is off costs nothing. The pipeline decides by them; the producer's `DurableStore` writes records to disk.
"""

from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from kpl_core.errors import ConfigError
from kpl_core.options.kinesis_limits import MIB
from kpl_core.options.option import Option, check_options
from kpl_core.options.validation import require_order

SpoolMode = Literal["overflow", "write_ahead"]
SpoolFailure = Literal["fail", "bypass", "refuse"]
Synchronous = Literal["full", "normal"]
_MOST_BYTES: Final = 1 << 44


def marked_path(path: str | Path, mark: object) -> Path:
    """Return spool-MARK.db for spool.db: a file of records belongs to one producer."""
    path = Path(path)
    return path.with_name(f"{path.stem}-{mark}{path.suffix}")


class SpoolOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How much a spool holds, how it commits, and how fast it replays.

    The SQLite file has the files `-wal`, `-shm` and `.lock` next to it. It takes up to 1.3 times `max_bytes`, and
    64 MiB of WAL. "overflow": a record that could not be delivered in time is spooled instead of failing, and delivered
    later. "write_ahead": every user record is in the spool before it is acknowledged (`await put()` returns), and is
    removed when Kinesis has confirmed it.

    `failure` says what a write-ahead spool does while it cannot store, because its disk is full or fails, or it has
    `max_bytes`. "fail": each put tries, and fails with `NotSpooled`. "bypass": user records go straight to Kinesis, so
    `await put()` returns when they are in memory; what is not delivered in time then has failed. "refuse": puts raise
    `NotSpooled` at once. All end by themselves when the spool can store.

    Raises:
        ConfigError: an option is of a wrong type or out of its bounds.
    """

    path: Annotated[str | Path, Option("The SQLite file, on a local disk.")]
    mode: Annotated[
        SpoolMode, Option("Whether it stores what overflows, or every record before it is acknowledged.")
    ] = "overflow"
    failure: Annotated[SpoolFailure, Option("What a write-ahead spool does while it cannot store.")] = "fail"
    max_bytes: Annotated[int, Option("The most spooled records, as envelopes.", MIB, _MOST_BYTES, "bytes")] = 1024 * MIB
    max_dead_letter_bytes: Annotated[int, Option("The same for dead letters.", MIB, _MOST_BYTES, "bytes")] = 1024 * MIB
    commit_interval_ms: Annotated[
        float,
        Option(
            "How long an append waits for others to share its fsync; less than 2 costs an fsync for each append.",
            0.0,
            1_000.0,
            "milliseconds",
        ),
    ] = 4.0
    commit_max_records: Annotated[int, Option("So many waiting records commit at once.", 1, 100_000, "records")] = 2_000
    commit_max_bytes: Annotated[int, Option("So many waiting bytes commit at once.", 1_024, 1 << 30, "bytes")] = 4 * MIB
    synchronous: Annotated[
        Synchronous,
        Option(
            '"full" survives a power cut; "normal" survives kill -9 only, and is faster on disks with a slow fsync.'
        ),
    ] = "full"
    busy_timeout_ms: Annotated[
        float, Option("How long to wait for another program that reads the file.", 0.0, 60_000.0, "milliseconds")
    ] = 5_000.0
    replay_records_per_second: Annotated[
        float, Option("The highest rate at which the backlog is put again.", 0.001, 1e9, "records a second")
    ] = 5_000.0
    replay_bytes_per_second: Annotated[
        float, Option("The same in bytes of data and key.", 1.0, 1e12, "bytes a second")
    ] = 5.0 * MIB
    replay_in_flight_records: Annotated[
        int,
        Option(
            "The most replayed records without a result; bounds how long a new record can wait behind them.",
            1,
            1_000_000,
            "records",
        ),
    ] = 1_000
    replay_in_flight_bytes: Annotated[int, Option("The same in bytes of data and key.", 1, 1 << 40, "bytes")] = MIB
    # A producer with `ordering="per_key"` keeps the order itself; then more is faster.
    replay_in_flight_per_key: Annotated[
        int,
        Option(
            "The same for one key: with 1, its records always arrive in order; an aggregated record counts as one.",
            1,
            1_000_000,
            "records",
        ),
    ] = 1

    def __post_init__(self) -> None:
        """Check every bound."""
        check_options(self)
        if self.failure != "fail" and self.mode != "write_ahead":
            message = (
                f"failure is {self.failure!r} and mode is {self.mode!r}, in which no put waits for the spool; "
                f"set mode to 'write_ahead', or leave failure at 'fail'"
            )
            raise ConfigError(message)

    @property
    def file(self) -> Path:
        """Return `path` as a `pathlib.Path`."""
        return Path(self.path)


class DeadLetterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where user records go that failed permanently, when they are redriven, and when an alarm fires.

    A file of their own is an SQLite file as for a spool. In a spool's file `max_dead_letter_bytes` applies.
    Redriving begins with critical records, with full jitter; a sink is not redriven.

    Raises:
        ConfigError: an option is of a wrong type or out of its bounds.
    """

    path: Annotated[
        str | Path | None, Option("Their own file; None: the file of the spool, or the producer's dead_letter_sink.")
    ] = None
    max_bytes: Annotated[int, Option("The most dead letters in a file of their own.", MIB, _MOST_BYTES, "bytes")] = (
        1024 * MIB
    )
    redrive: Annotated[bool, Option("Redrive dead letters automatically.")] = True
    redrive_base_seconds: Annotated[
        float,
        Option("The longest wait before the first redrive; doubles with each further one.", 0.001, 1e9, "seconds"),
    ] = 10.0
    redrive_cap_seconds: Annotated[float, Option("The longest wait of all.", 0.001, 1e9, "seconds")] = 3_600.0
    max_redrives: Annotated[
        int | None,
        Option("A dead letter redriven so often waits for an operator; None: no bound.", 0, 1 << 31, "redrives"),
    ] = None
    redrive_records_per_second: Annotated[
        float, Option("The highest rate of redriven records.", 0.001, 1e9, "records a second")
    ] = 1_000.0
    redrive_in_flight_records: Annotated[
        int, Option("The most redriven records without a result.", 1, 1_000_000, "records")
    ] = 500
    alarm_depth: Annotated[
        int | None,
        Option(
            "So many dead letters raise one alarm, and the next one after the depth fell to half; None: no alarm.",
            1,
            1 << 62,
            "dead letters",
        ),
    ] = 1_000

    def __post_init__(self) -> None:
        """Check every bound."""
        check_options(self)
        require_order(self, "redrive_base_seconds", "redrive_cap_seconds")


class TierPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How critical, normal and bulk user records share the buffer.

    `bulk_share` is of what `critical_reserve` leaves. When it is used up and there is a dead-letter queue, `put_nowait`
    makes bulk records dead letters with reason `rate_limited`.

    Raises:
        ConfigError: a share is not between 0 and 1.
    """

    critical_reserve: Annotated[
        float,
        Option(
            "The share of the buffer, and of a shard's rate while its breaker is open, for critical records only.",
            0.0,
            0.9,
            "a share of the buffer",
        ),
    ] = 0.1
    bulk_share: Annotated[
        float, Option("The share of the rest that bulk records may use.", 0.0, 1.0, "a share of the rest")
    ] = 0.5

    def __post_init__(self) -> None:
        """Check both shares."""
        check_options(self)


class BreakerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """When a circuit breaker opens, for how long, and what closes it.

    With the defaults, 100 % throttled records open it within `window_seconds * failure_share` = 0.5 s. The breaker
    of a healthy shard closes within `max_open_seconds` and one round trip of the probes, and
    `probe_timeout_seconds` later if probes are lost. The answer to a probe counts however late it is.

    Raises:
        ConfigError: a value is out of its bounds.
    """

    failure_share: Annotated[
        float,
        Option(
            "The share of failed records in the window that opens it.",
            0.0,
            1.0,
            "a share of the records in the window",
            above=True,
        ),
    ] = 0.5
    window_seconds: Annotated[float, Option("The length of the sliding window.", 0.0, unit="seconds", above=True)] = 1.0
    minimum_records: Annotated[
        int,
        Option(
            "With fewer records in the window, or in requests that failed in a row, the breaker does not open.",
            1,
            unit="records",
        ),
    ] = 10
    open_seconds: Annotated[
        float,
        Option("How long it stays open at first; doubles after each failed probe.", 0.0, unit="seconds", above=True),
    ] = 1.0
    max_open_seconds: Annotated[float, Option("The longest it stays open.", 0.0, unit="seconds", above=True)] = 5.0
    probe_records: Annotated[
        int,
        Option("How many records may probe, and must be answered, in the half-open state.", 1, unit="records"),
    ] = 10
    probe_timeout_seconds: Annotated[
        float,
        Option("After so long, unanswered probes are given up and new ones allowed.", 0.0, unit="seconds", above=True),
    ] = 3.0

    def __post_init__(self) -> None:
        """Check every bound."""
        check_options(self)
        require_order(self, "open_seconds", "max_open_seconds")
