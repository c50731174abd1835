"""Facts that leave the core, and the Protocol of those who listen.

A fact is told once per request, refresh or change of rate, never once per user
record, so metrics cost nothing on the hot path. Vendors (Prometheus,
OpenTelemetry, CloudWatch) live outside and translate facts into their words.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Literal, Protocol, runtime_checkable

import msgspec

__all__ = [
    "BreakerChanged",
    "CoordinatorMet",
    "DeadLetterAlarm",
    "Fact",
    "Hook",
    "OpeningHook",
    "RecordsFinished",
    "RequestCompleted",
    "ShardMapRefreshed",
    "ShardRateChanged",
    "ShareChanged",
    "require_hooks",
]


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
    # Codes of single Kinesis records inside an answer, and how many had each.
    record_errors: Mapping[str, int]
    # Kinesis records refused for throughput, by the shard that refused them ("" if unpredicted).
    throttled_by_shard: Mapping[str, int]
    # Seconds from the arrival of the oldest of them, by the first of each Kinesis record, until they were sent.
    queue_wait: float = 0.0
    # Failed attempts of Kinesis records by predicted shard ("" if unpredicted) and code; a failed request has its own.
    errors_by_shard: Mapping[tuple[str, str], int] = msgspec.field(default_factory=dict)
    # What an `OpeningHook` said when each of them opened, those of which it said None left out.
    opened_in: tuple[object, ...] = ()


class RecordsFinished(msgspec.Struct, frozen=True):
    """User records of one Kinesis record got their final result, or went to where they are kept until they do."""

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
    # Seconds from the arrival of the oldest of them to this moment.
    age: float
    # The Kinesis record as the service counts it, key and data; 0 for a user record that was settled alone.
    kinesis_bytes: int = 0


class ShardMapRefreshed(msgspec.Struct, frozen=True):
    """A new shard map is in use."""

    stream: str
    open_shards: int


class ShardRateChanged(msgspec.Struct, frozen=True):
    """The adaptive rate of a shard moved; 1.0 is the configured limit."""

    stream: str
    shard_id: str
    fraction: float


class BreakerChanged(msgspec.Struct, frozen=True):
    """A circuit breaker changed its state; `shard_id` "" is the breaker of the whole stream."""

    stream: str
    shard_id: str
    state: Literal["closed", "open", "half_open"]


class CoordinatorMet(msgspec.Struct, frozen=True):
    """A worker has met the others at their store, or tried to."""

    worker_id: str
    # "alone", "newcomer", "leased" or "expired".
    state: str
    # Seconds since the summary in use was computed.
    lease_age: float
    # "" if all was well, else why not: slow, down, denied, missing, limit, garbage, version or clock.
    failure: str


class ShareChanged(msgspec.Struct, frozen=True):
    """This worker's share of a shard moved; 1.0 is the configured limit."""

    stream: str
    shard_id: str
    records: float
    bytes: float
    # False in shadow mode.
    enforced: bool


class DeadLetterAlarm(msgspec.Struct, frozen=True):
    """The depth of the dead-letter queue passed its threshold (`raised`), or fell to half of it."""

    raised: bool
    depth: int
    threshold: int


Fact = (
    RequestCompleted
    | RecordsFinished
    | ShardMapRefreshed
    | ShardRateChanged
    | BreakerChanged
    | DeadLetterAlarm
    | CoordinatorMet
    | ShareChanged
)


class Hook(Protocol):
    """Somebody who wants the facts. Called synchronously on the producer's loop: be quick, do not raise."""

    def __call__(self, fact: Fact, /) -> None:
        """Take note of one fact."""


@runtime_checkable
class OpeningHook(Hook, Protocol):
    """A hook that wants to know where Kinesis records come from, such as the span that was current."""

    def opening_context(self) -> object:
        """Return what to remember of the caller's context; None is nothing.

        Called once for each Kinesis record, by the put that opens it: small, quick, and free of cycles.
        """


def require_hooks(hooks: Iterable[Hook]) -> tuple[Hook, ...]:
    """Return the hooks.

    Raises:
        TypeError: one cannot be called, or calling it would only make a coroutine, which nobody awaits.
    """
    found = tuple(hooks)
    for hook in found:
        if not callable(hook):
            message = f"a hook is {hook!r}; it must be a callable that takes a fact"
            raise TypeError(message)
        if inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(type(hook).__call__):
            message = f"hook {hook!r} is an async function, which nobody would await; give a plain one"
            raise TypeError(message)
    return found
