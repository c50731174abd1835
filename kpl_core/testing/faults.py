"""Fault injection: what can go wrong, and which request or record it happens to.

An effect only describes a fault. `FakeKinesis` applies `RecordError`, `SplitDuringRequest` and
`MergeDuringRequest`. The other effects are applied by the code that serves the requests: `LocalKinesis` over
HTTP, `FakeTransport` in memory. Nothing here does I/O or reads a clock, and chance is a callable, so a plan of
faults is the same in every run.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from typing import Final

from kpl_core.testing.kinesis_api import KinesisError


@dataclass(frozen=True, slots=True)
class Latency:
    """Wait `seconds` before the request takes effect or, with `after_commit`, before its answer."""

    seconds: float
    after_commit: bool = False


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """Answer the whole request with an error. Message and status default to those of the service for that code."""

    code: str
    message: str | None = None
    status: int | None = None


@dataclass(frozen=True, slots=True)
class RecordError:
    """Fail one record inside an answer of status 200, as the service does when it throttles a shard."""

    code: str = "ProvisionedThroughputExceededException"
    message: str | None = None


@dataclass(frozen=True, slots=True)
class Hang:
    """Accept the request and never answer. Nothing is stored."""


@dataclass(frozen=True, slots=True)
class ResetBeforeCommit:
    """Reset the connection before anything is stored."""


@dataclass(frozen=True, slots=True)
class ResetAfterCommit:
    """Store all records, then reset the connection instead of answering."""


@dataclass(frozen=True, slots=True)
class WrongCount:
    """Answer with `by` more results (or fewer, if negative) than there were records."""

    by: int = -1


@dataclass(frozen=True, slots=True)
class BadBody:
    """Answer with status 200 and this body instead of the real one."""

    body: bytes = b'{"FailedRecordCount":0,"Records":['


@dataclass(frozen=True, slots=True)
class SplitDuringRequest:
    """Split a shard in the middle before the request is routed; by default the widest open one."""

    shard_id: str | None = None


@dataclass(frozen=True, slots=True)
class MergeDuringRequest:
    """Merge a shard with its right neighbour before the request is routed; by default the first two."""

    shard_id: str | None = None


Effect = (
    Latency
    | ErrorAnswer
    | RecordError
    | Hang
    | ResetBeforeCommit
    | ResetAfterCommit
    | WrongCount
    | BadBody
    | SplitDuringRequest
    | MergeDuringRequest
)


@dataclass(slots=True)
class RequestPlan:
    """The faults of one request, in the order in which to apply them.

    1. wait `latency_seconds`; 2. `hang`: never answer; 3. `reset_before`: reset the connection;
    4. `error`: answer with it; 5. `reshards`: pass them to `FakeKinesis.reshard`; 6. commit; 7. wait
    `answer_latency_seconds`; 8. `reset_after`: reset the connection; 9. change the number of results by
    `count_change`; 10. answer `body` instead.
    """

    latency_seconds: float = 0.0
    hang: bool = False
    reset_before: bool = False
    error: KinesisError | None = None
    reshards: tuple[SplitDuringRequest | MergeDuringRequest, ...] = ()
    answer_latency_seconds: float = 0.0
    reset_after: bool = False
    count_change: int = 0
    body: bytes | None = None

    def include(self, effect: Effect) -> None:
        """Add one effect. The first error and the last body win; latencies add up."""
        match effect:
            case Latency(seconds, after_commit=True):
                self.answer_latency_seconds += seconds
            case Latency(seconds):
                self.latency_seconds += seconds
            case ErrorAnswer(code, message, status):
                self.error = self.error or KinesisError(code, message, status=status)
            case WrongCount(by):
                self.count_change += by
            case BadBody(body):
                self.body = body
            case SplitDuringRequest() | MergeDuringRequest():
                self.reshards = (*self.reshards, effect)
            case _:
                self.hang |= isinstance(effect, Hang)
                self.reset_before |= isinstance(effect, ResetBeforeCommit)
                self.reset_after |= isinstance(effect, ResetAfterCommit)


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """Which requests or records a fault applies to. The default is all of them.

    Attributes:
        operation: a Kinesis operation such as "ListShards"; None is any.
        stream: a stream's name; None is any.
        page: for listings, the requested page, counted from 1.
        shard_id: for records, the shard they are routed to.
        record: for records, a predicate over partition key and data.
        skip: the first `skip` matches pass.
        every: after that, the fault applies to every n-th match.
        times: the fault applies at most this often.
        probability: the fault applies to this share of those matches, decided by `Faults.chance`.
        once_per_record: the fault applies only once to the same record, so a retry passes.
        starts_at, ends_at: the fault applies only in this span of the clock, in seconds; `ends_at` is excluded.
    """

    operation: str | None = None
    stream: str | None = None
    page: int | None = None
    shard_id: str | None = None
    record: Callable[[str, bytes], bool] | None = None
    skip: int = 0
    every: int = 1
    times: int | None = None
    probability: float = 1.0
    once_per_record: bool = False
    starts_at: float = -inf
    ends_at: float = inf


EVERY_TIME: Final = When()


class Fault:
    """One armed effect. `seen` counts the matches so far, `fired` how often the effect applied."""

    def __init__(self, effect: Effect, when: When) -> None:
        self.effect = effect
        self.when = when
        self.seen = 0
        self.fired = 0
        self._met: set[bytes] = set()

    def __repr__(self) -> str:
        return f"<Fault {self.effect} seen {self.seen} fired {self.fired}>"

    def meets(self, now: float, chance: Callable[[], float]) -> bool:
        """Count one match at `now`. Return True if the effect applies to it."""
        when = self.when
        if not when.starts_at <= now < when.ends_at:
            return False
        if when.times is not None and self.fired >= when.times:
            return False
        self.seen += 1
        if self.seen <= when.skip or (self.seen - when.skip) % when.every:
            return False
        if when.probability < 1.0 and chance() >= when.probability:
            return False
        self.fired += 1
        return True

    def meets_record(self, partition_key: str, data: bytes, now: float, chance: Callable[[], float]) -> bool:
        """Do the same for one record. With `once_per_record`, return False for a record that was met before."""
        when = self.when
        if when.record is not None and not when.record(partition_key, data):
            return False
        if not when.once_per_record:
            return self.meets(now, chance)
        digest = blake2b(f"{len(partition_key)}:{partition_key}".encode() + data, digest_size=16).digest()
        if digest in self._met or not self.meets(now, chance):
            return False
        self._met.add(digest)
        return True


class Faults:
    """The faults armed on one fake service.

    `faults.add(Hang(), When(operation="PutRecords", times=1))` arms a fault; `remove` and `clear` disarm.
    `chance` returns floats in [0, 1) and may be replaced. The default is seeded, so every run is the same.
    """

    def __init__(self, chance: Callable[[], float] | None = None) -> None:
        self.chance = random.Random(0).random if chance is None else chance  # noqa: S311 - repeatable, not secret
        self._on_requests: list[Fault] = []
        self._on_records: list[Fault] = []

    def __len__(self) -> int:
        return len(self._on_requests) + len(self._on_records)

    @property
    def on_records(self) -> bool:
        """Return True if a fault for single records is armed."""
        return bool(self._on_records)

    def add(self, effect: Effect, when: When = EVERY_TIME) -> Fault:
        """Arm `effect`. If several apply to one request, they do so in the order they were added."""
        fault = Fault(effect, when)
        (self._on_records if isinstance(effect, RecordError) else self._on_requests).append(fault)
        return fault

    def remove(self, fault: Fault) -> None:
        """Disarm one fault. It is not an error if the fault is not armed."""
        for armed in (self._on_requests, self._on_records):
            if fault in armed:
                armed.remove(fault)

    def clear(self) -> None:
        """Disarm all faults."""
        self._on_requests.clear()
        self._on_records.clear()

    def plan(self, operation: str, *, stream: str | None, now: float, page: int = 1) -> RequestPlan:
        """Return the faults of one request. Call it once per request, because it counts the match."""
        plan = RequestPlan()
        for fault in self._on_requests:
            when = fault.when
            if (
                when.operation in {None, operation}
                and when.stream in {None, stream}
                and when.page in {None, page}
                and fault.meets(now, self.chance)
            ):
                plan.include(fault.effect)
        return plan

    def record_error(
        self, partition_key: str, data: bytes, *, stream: str, shard_id: str, now: float
    ) -> RecordError | None:
        """Return the error for one record, or None if no fault applies."""
        for fault in self._on_records:
            when = fault.when
            if (
                when.stream in {None, stream}
                and when.shard_id in {None, shard_id}
                and fault.meets_record(partition_key, data, now, self.chance)
                and isinstance(fault.effect, RecordError)
            ):
                return fault.effect
        return None
