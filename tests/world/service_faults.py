"""What befalls a producer's requests, by name: an effect of `kpl_core.testing`, drawn from a world's chance."""

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from kpl_core.testing import (
    BadBody,
    Effect,
    ErrorAnswer,
    FakeKinesis,
    Faults,
    Hang,
    Latency,
    MergeDuringRequest,
    RecordError,
    ResetAfterCommit,
    ResetBeforeCommit,
    SplitDuringRequest,
    When,
    WrongCount,
)

PUT = "PutRecords"
# The transport itself raises, before anything is sent.
RAISES = "raising transport"
# A shard that is closed again so soon may never have been listed.
UNSEEN_SECONDS = 5.0


class ServiceFault(NamedTuple):
    """How to draw a fault.

    Args:
        draw: makes its effect.
        operation: of the requests that it befalls; None for records.
        doubles: True if records may be stored without an answer that says so, so that a retry stores them again.
        once: True if it happens once, and not for a while.
        is_final: True if no retry helps, so that records fail.
    """

    draw: Callable[[random.Random], Effect]
    operation: str | None = PUT
    doubles: bool = False
    once: bool = False
    is_final: bool = False


SERVICE_FAULTS: Mapping[str, ServiceFault] = {
    "throttled records": ServiceFault(lambda _: RecordError(), None),
    "failed records": ServiceFault(lambda _: RecordError("InternalFailure"), None),
    "server errors": ServiceFault(lambda _: ErrorAnswer("InternalFailure")),
    "unavailable": ServiceFault(lambda _: ErrorAnswer("ServiceUnavailable", status=503)),
    "KMS throttles": ServiceFault(lambda _: ErrorAnswer("KMSThrottlingException")),
    "stalls": ServiceFault(lambda _: Hang()),
    "slow requests": ServiceFault(lambda chance: Latency(chance.uniform(0.05, 3.0))),
    "slow answers": ServiceFault(lambda chance: Latency(chance.uniform(0.05, 3.0), after_commit=True), doubles=True),
    "broken requests": ServiceFault(lambda _: ResetBeforeCommit()),
    "broken answers": ServiceFault(lambda _: ResetAfterCommit(), doubles=True),
    "wrong counts": ServiceFault(lambda chance: WrongCount(chance.choice([-1, 1])), doubles=True),
    "cut answers": ServiceFault(lambda _: BadBody(), doubles=True),
    "splits": ServiceFault(lambda _: SplitDuringRequest(), once=True),
    "merges": ServiceFault(lambda _: MergeDuringRequest(), once=True),
    "invalid requests": ServiceFault(lambda _: ErrorAnswer("InvalidArgumentException"), is_final=True),
    "refused signatures": ServiceFault(lambda _: ErrorAnswer("InvalidSignatureException"), is_final=True),
    "no listings": ServiceFault(lambda _: ErrorAnswer("LimitExceededException"), "ListShards"),
}
# A spool keeps what is refused for good as a dead letter, and these stories have none.
PASSING_FAULTS = [name for name, fault in SERVICE_FAULTS.items() if not fault.is_final]


def arm(faults: Faults, name: str, chance: random.Random, *, now: float, seconds: float) -> None:
    """Let a fault befall requests or records from now on, for so many seconds."""
    fault = SERVICE_FAULTS[name]
    when: dict[str, Any] = {"starts_at": now, "ends_at": now + seconds, "operation": fault.operation}
    if fault.once:
        when["times"] = 1
    else:
        when["probability"] = chance.choice([0.05, 0.3, 1.0])
    if fault.operation is None:
        # A record's error needs no operation, and a retry passes or does not.
        when["once_per_record"] = chance.random() < 0.5
    _ = faults.add(fault.draw(chance), When(**when))


def may_double(names: Iterable[str], kinesis: FakeKinesis, stream: str, *, has_pauses: bool) -> bool:
    """Return True if some of these faults store records without saying so, or hide where they are."""
    faults = {*names}
    # It is not known then whether a KCL keeps a record where it is, so it is sent again.
    hides = "no listings" in faults and not faults.isdisjoint({"splits", "merges"})
    shards = kinesis._account.stream(stream, 0.0, ready=False).shards.all  # noqa: SLF001 - closed ones too
    hides = hides or any(
        shard.closed_ms is not None and shard.closed_ms - shard.opened_ms < UNSEEN_SECONDS * 1_000 for shard in shards
    )
    # After a pause an answer can be there too late.
    return hides or has_pauses or any(fault.doubles for name, fault in SERVICE_FAULTS.items() if name in faults)
