"""The facts that the core reports, and the Protocol of the hooks that receive them.

The core reports a fact once per request, refresh or change of rate, never once per user record, so metrics cost
nothing on the hot path. Adapters outside the core translate facts for Prometheus, OpenTelemetry and CloudWatch.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Literal, Protocol, runtime_checkable

import msgspec


class RequestCompleted(msgspec.Struct, frozen=True):
    """A PutRecords request was answered, failed or timed out. Instants are monotonic seconds."""

    stream: str
    started_at: float
    ended_at: float
    kinesis_records: int
    user_records: int
    size_bytes: int
    # The code of a failed request, None if the service answered with a list of records.
    error_code: str | None
    # The error codes of single Kinesis records in an answer, and the count of each.
    record_errors: Mapping[str, int]
    # Throttled Kinesis records by shard ("" if unpredicted).
    throttled_by_shard: Mapping[str, int]
    # Seconds from the arrival of the oldest user record until the request was sent; the first user record of each
    # Kinesis record counts.
    queue_wait: float = 0.0
    # Failed attempts of Kinesis records by predicted shard ("" if unpredicted) and code. If the whole request failed,
    # every record has the code of the request.
    errors_by_shard: Mapping[tuple[str, str], int] = msgspec.field(default_factory=dict)
    # What an `OpeningHook` returned when each Kinesis record opened, except None.
    opened_in: tuple[object, ...] = ()
    # The message that came with `error_code`.
    error_message: str | None = None


class RecordsFinished(msgspec.Struct, frozen=True):
    """User records of one Kinesis record got their final result, or were spooled until they get it."""

    stream: str
    shard_id: str | None
    tier: str
    outcome: Literal["delivered", "failed", "spooled", "dead_lettered"]
    # "" for a delivery, else the error code of the last attempt ("Expired", "AccessDeniedException", ...).
    reason: str
    user_records: int
    # Key + data, as the caller counted them.
    user_bytes: int
    attempts: int
    # Seconds since the oldest of them arrived.
    age: float
    # Key + data of the Kinesis record, as the service counts it; 0 for a user record that finished by itself.
    kinesis_bytes: int = 0
    # How many of them the spool or the dead letters had stored before: written ahead, replayed or redriven.
    kept_before: int = 0


class RecordsWrittenAhead(msgspec.Struct, frozen=True):
    """The write-ahead spool has stored user records, which now travel. Their results follow in `RecordsFinished`."""

    stream: str
    user_records: int


class ShardMapRefreshed(msgspec.Struct, frozen=True):
    """A new shard map is in use."""

    stream: str
    open_shards: int


class ShardRateChanged(msgspec.Struct, frozen=True):
    """The adaptive rate of a shard changed; 1.0 is the configured limit."""

    stream: str
    shard_id: str
    fraction: float


class BreakerChanged(msgspec.Struct, frozen=True):
    """A circuit breaker changed its state. `shard_id` is "" for the breaker of the whole stream.

    `error_code` is that of the last failure, "" if there was none: `Internal` for no connection and no valid answer.
    """

    stream: str
    shard_id: str
    state: Literal["closed", "open", "half_open"]
    error_code: str = ""


class CoordinatorMet(msgspec.Struct, frozen=True):
    """A worker finished a sync round with the store, or failed to."""

    worker_id: str
    # "alone", "newcomer", "leased" or "expired".
    state: str
    # Seconds since the summary in use was computed.
    lease_age: float
    # "" for success, else the cause: slow, down, denied, missing, limit, garbage, version or clock.
    failure: str


class ShareChanged(msgspec.Struct, frozen=True):
    """This worker's share of a shard's limits changed; 1.0 is the configured limit."""

    stream: str
    shard_id: str
    records: float
    bytes: float
    # False in shadow mode.
    enforced: bool


class DeadLetterAlarm(msgspec.Struct, frozen=True):
    """The dead-letter queue grew to its threshold (`raised`), or shrank to half of it."""

    raised: bool
    depth: int
    threshold: int


Fact = (
    RequestCompleted
    | RecordsFinished
    | RecordsWrittenAhead
    | ShardMapRefreshed
    | ShardRateChanged
    | BreakerChanged
    | DeadLetterAlarm
    | CoordinatorMet
    | ShareChanged
)


class Hook(Protocol):
    """Receives the facts. The producer calls it on its loop: return quickly, and do not raise."""

    def __call__(self, fact: Fact, /) -> None:
        """Receive one fact."""


@runtime_checkable
class OpeningHook(Hook, Protocol):
    """A hook that records the context in which a Kinesis record was opened, such as the current span."""

    def opening_context(self) -> object:
        """Return what to keep of the caller's context, or None.

        The put that opens a Kinesis record calls it once. The value should be small and free of reference cycles.
        """


def require_hooks(hooks: Iterable[Hook]) -> tuple[Hook, ...]:
    """Return the hooks as a tuple, after checking them.

    Raises:
        TypeError: this is no list; or one is not callable, or an async function, which the producer would not await.
    """
    if not isinstance(hooks, Iterable):
        message = f"hooks is {hooks!r}; it must be a list of hooks, also for a single one"
        raise TypeError(message)
    found = tuple(hooks)
    for hook in found:
        if not callable(hook):
            message = f"a hook is {hook!r}; it must be a callable that takes a fact"
            raise TypeError(message)
        if inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(type(hook).__call__):
            message = f"hook {hook!r} is an async function, which the producer does not await; give a plain function"
            raise TypeError(message)
    return found
