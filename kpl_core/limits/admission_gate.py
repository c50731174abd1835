"""What becomes of work that finds the bucket empty: it waits, loses a tier, or goes elsewhere.

Seed: "Setting up token bucket rate limiters", mitigation paths. The choice is made once for a
gate; the table below is all of it. Nothing is dropped unseen: work that is refused is handed
over with its reason, its original timestamp and its severity, ready for a dead-letter queue.

Within the gate the higher tier goes first and the bucket keeps a part for "critical", so
alarms pass while counters wait. In a storm that lasts (an open breaker) what is normal counts
as bulk, so that it cannot use up what the alarms will need.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import RLock
from typing import Any, Final, Literal, get_args

from kpl_core.durability.circuit_breaker import BreakerState, CircuitBreaker
from kpl_core.errors import ConfigError
from kpl_core.limits.rejection_monitor import RejectionMonitor
from kpl_core.limits.token_bucket_limiter import TokenBucketLimiter
from kpl_core.records.user_record import TIERS, Tier

__all__ = ["OVERFLOW", "AdmissionGate", "Overflow", "RefusedWork", "Verdict", "Work"]

Overflow = Literal["queue", "downgrade", "fallback"]
Verdict = Literal["admitted", "queued", "downgraded", "diverted", "refused"]

# What happens to work of a tier when its tokens are not there: the verdict, and the tier it waits in.
OVERFLOW: Final[dict[tuple[Overflow, Tier], tuple[Verdict, Tier | None]]] = {
    ("queue", "critical"): ("queued", "critical"),
    ("queue", "normal"): ("queued", "normal"),
    ("queue", "bulk"): ("queued", "bulk"),
    ("downgrade", "critical"): ("downgraded", "normal"),
    ("downgrade", "normal"): ("downgraded", "bulk"),
    ("downgrade", "bulk"): ("refused", None),
    ("fallback", "critical"): ("diverted", None),
    ("fallback", "normal"): ("diverted", None),
    ("fallback", "bulk"): ("diverted", None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Something that costs tokens. `source_timestamp` and `severity` are its origin's own, in any form."""

    payload: Any
    tier: Tier = "normal"
    cost: float = 1
    source_timestamp: Any = None
    severity: Any = None


@dataclass(frozen=True, slots=True)
class RefusedWork:
    """Work that was not let through, as it came in, and why."""

    work: Work
    reason: Literal["rate_limited"] = "rate_limited"


class AdmissionGate:
    """A limiter, and what happens where it says no. Safe to use from many threads.

    Args:
        limiter: whose tokens are spent.
        overflow: what to do with work that finds none.
        on_refused: called with work that is refused or evicted.
        fallback: called with work that is diverted: needed for "fallback", and only there.
        max_waiting: the most work that waits. Beyond it the newest of a lower tier is evicted, or
            the newcomer refused if there is none.
        monitor: told of every decision about new work.
        breaker: told the same; while it is not closed, normal work counts as bulk.
        clock: returns seconds for both.

    `fallback` and `on_refused` are called without any lock. The monitor's `on_change` is called
    with the gate's, and may call the gate.

    Raises:
        ConfigError: an unknown overflow, a fallback missing or superfluous, or `max_waiting` below 1.
    """

    def __init__(
        self,
        limiter: TokenBucketLimiter,
        *,
        overflow: Overflow,
        on_refused: Callable[[RefusedWork], object],
        fallback: Callable[[RefusedWork], object] | None = None,
        max_waiting: int = 10_000,
        monitor: RejectionMonitor | None = None,
        breaker: CircuitBreaker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check(overflow, has_fallback=fallback is not None, max_waiting=max_waiting)
        self._limiter = limiter
        self._overflow: Overflow = overflow
        self._on_refused = on_refused
        self._fallback = fallback
        self._max_waiting = max_waiting
        self._monitor = monitor
        self._breaker = breaker
        self._clock = clock
        self._lock = RLock()
        # As it came in, under the tier it waits in.
        self._waiting: dict[Tier, deque[Work]] = {tier: deque() for tier in TIERS}
        self._verdicts: Counter[Verdict] = Counter()
        self._evicted = 0

    def submit(self, work: Work) -> Verdict:
        """Let work through or decide what becomes of it; "admitted" means: do it now.

        Work that is queued or downgraded comes out of `release` when its tokens are there.

        Raises:
            ValueError: it costs more than its tier can ever be granted, or its tier is unknown.
        """
        self._limiter.require_grantable(work.cost, work.tier)
        evicted: Work | None = None
        with self._lock:
            tier = self._tier_now(work)
            # Nobody overtakes what waits in its own tier or above.
            is_next = not any(self._waiting[each] for each in TIERS[: TIERS.index(tier) + 1])
            granted = is_next and self._limiter.acquire(work.cost, tier)[0]
            verdict: Verdict = "admitted"
            if not granted:
                verdict, waits_in = OVERFLOW[self._overflow, tier]
                if waits_in is not None:
                    evicted, is_kept = self._keep(work, waits_in)
                    verdict = verdict if is_kept else "refused"
            self._verdicts[verdict] += 1
            self._evicted += evicted is not None
            try:
                self._tell(granted=granted)
            except BaseException:
                # Whoever submitted this work hears of the error and still has it; what it evicted has nobody else.
                if evicted is not None:
                    self._on_refused(RefusedWork(evicted))
                raise
        if evicted is not None:
            self._on_refused(RefusedWork(evicted))
        if verdict == "refused":
            self._on_refused(RefusedWork(work))
        elif verdict == "diverted" and self._fallback is not None:
            self._fallback(RefusedWork(work))
        return verdict

    def release(self) -> list[Work]:
        """Return the waiting work whose tokens are there now, and spend them; the higher tier goes first.

        A lower tier gets nothing while a higher one waits: it would spend what the other waits for.
        """
        released: list[Work] = []
        with self._lock:
            for tier, waiting in self._waiting.items():
                while waiting:
                    if self._limiter.wait_seconds(waiting[0].cost, tier) > 0.0:
                        return released
                    if not self._limiter.acquire(waiting[0].cost, tier)[0]:
                        return released
                    released.append(waiting.popleft())
        return released

    def release_in(self) -> float:
        """Return the seconds until `release` has something to return; `math.inf` if nothing waits."""
        with self._lock:
            for tier, waiting in self._waiting.items():
                if waiting:
                    return self._limiter.wait_seconds(waiting[0].cost, tier)
        return math.inf

    def statistics(self) -> dict[str, int]:
        """Return how often each verdict was given, how much was evicted later, and how much waits now."""
        with self._lock:
            verdicts = {verdict: self._verdicts[verdict] for verdict in get_args(Verdict)}
            return {**verdicts, "evicted": self._evicted, "waiting": sum(map(len, self._waiting.values()))}

    def _tier_now(self, work: Work) -> Tier:
        """Return the tier that counts: in a storm that lasts, normal work is bulk."""
        if work.tier != "normal" or self._breaker is None:
            return work.tier
        return "normal" if self._breaker.state(self._clock()) is BreakerState.CLOSED else "bulk"

    def _keep(self, work: Work, tier: Tier) -> tuple[Work | None, bool]:
        """Let work wait in a tier; return what was evicted for it, and whether it waits."""
        try:
            self._limiter.require_grantable(work.cost, tier)
        except ValueError:
            # Critical work may cost what a lower tier is never granted; waiting there would never end.
            return None, False
        evicted: Work | None = None
        if sum(map(len, self._waiting.values())) >= self._max_waiting:
            lower = [each for each in TIERS[TIERS.index(tier) + 1 :] if self._waiting[each]]
            if not lower:
                return None, False
            evicted = self._waiting[lower[-1]].pop()
        self._waiting[tier].append(work)
        return evicted, True

    def _tell(self, *, granted: bool) -> None:
        if self._breaker is not None:
            self._breaker.record_outcomes(succeeded=int(granted), failed=int(not granted), now=self._clock())
        if self._monitor is not None:
            self._monitor.record(granted, self._clock())


def _check(overflow: Overflow, *, has_fallback: bool, max_waiting: int) -> None:
    if overflow not in get_args(Overflow):
        message = f"overflow is {overflow!r}; it must be one of {', '.join(get_args(Overflow))}"
        raise ConfigError(message)
    if has_fallback != (overflow == "fallback"):
        message = (
            f"overflow is {overflow!r}, and {'a' if has_fallback else 'no'} fallback is given; each needs the other"
        )
        raise ConfigError(message)
    if max_waiting < 1:
        message = f"max_waiting is {max_waiting!r}; it must be 1 or more"
        raise ConfigError(message)
