"""Fault switches: which effect meets which request or record, and when.

Nothing here does I/O or reads a clock, and chance is a callable, so a plan of faults is the same
in every run.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from typing import Final

from kpl_core.testing.fault_effects import Effect, RecordError, RequestPlan

__all__ = ["EVERY_TIME", "Fault", "Faults", "When"]


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """Which requests or records a fault meets. The default is every one of them.

    Attributes:
        operation: a Kinesis operation such as "ListShards"; None is any.
        stream: a stream's name; None is any.
        page: for listings, the page asked for, counted from 1.
        shard_id: for records, the shard they are routed to.
        record: for records, a predicate over partition key and data.
        skip: let this many pass first.
        every: then meet every n-th.
        times: meet at most this many.
        probability: and of those only this share, by the injected chance.
        once_per_record: a record met once is let through when it comes again.
        starts_at, ends_at: meet only in this span of the clock, in seconds; `ends_at` excluded.
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
    """One armed effect. `seen` counts what matched so far, `fired` what it met."""

    __slots__ = ("_met", "effect", "fired", "seen", "when")

    def __init__(self, effect: Effect, when: When) -> None:
        self.effect = effect
        self.when = when
        self.seen = 0
        self.fired = 0
        self._met: set[bytes] = set()

    def __repr__(self) -> str:
        return f"<Fault {self.effect} seen {self.seen} fired {self.fired}>"

    def meets(self, now: float, chance: Callable[[], float]) -> bool:
        """Count one match at `now` and say whether the effect meets it."""
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
        """Do the same for one record, which may be left alone because it was met before."""
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

    `faults.add(Hang(), When(operation="PutRecords", times=1))` arms, `remove` and `clear` disarm.
    `chance` returns floats in [0, 1) and may be replaced; the default is seeded, so runs repeat.
    """

    def __init__(self, chance: Callable[[], float] | None = None) -> None:
        self.chance = random.Random(0).random if chance is None else chance  # noqa: S311 - repeatable, not secret
        self._on_requests: list[Fault] = []
        self._on_records: list[Fault] = []

    def __len__(self) -> int:
        return len(self._on_requests) + len(self._on_records)

    @property
    def on_records(self) -> bool:
        """Return whether any armed fault concerns single records."""
        return bool(self._on_records)

    def add(self, effect: Effect, when: When = EVERY_TIME) -> Fault:
        """Arm `effect`; several may meet one request, in the order they were added."""
        fault = Fault(effect, when)
        (self._on_records if isinstance(effect, RecordError) else self._on_requests).append(fault)
        return fault

    def remove(self, fault: Fault) -> None:
        """Disarm one fault; one that is not armed is no error."""
        for armed in (self._on_requests, self._on_records):
            if fault in armed:
                armed.remove(fault)

    def clear(self) -> None:
        """Disarm all."""
        self._on_requests.clear()
        self._on_records.clear()

    def plan(self, operation: str, *, stream: str | None, now: float, page: int = 1) -> RequestPlan:
        """Return what shall happen to one request; call it once per request, it counts."""
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
        """Return the error one record shall get, None to let it through."""
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
