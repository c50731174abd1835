"""Decides about work that finds no tokens: queue it, downgrade its tier, divert it, or reject it.

Seed: "Setting up token bucket rate limiters", mitigation paths. Each limiter has one overflow rule; the table below is
all of it. Nothing is dropped silently: rejected work is handed to a callback with its reason, its original
timestamp and its severity, ready for a dead-letter queue.

A higher tier goes first, and the bucket has a reserve for "critical", so alarms pass while counters wait. While the
breaker is open, in a long storm, normal work counts as bulk and cannot use up the tokens that alarms will need.
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
from kpl_core.options.validation import require, require_choice
from kpl_core.records.user_record import TIERS, Tier

Overflow = Literal["queue", "downgrade", "fallback"]
Verdict = Literal["admitted", "queued", "downgraded", "diverted", "refused"]

# For work without tokens, by overflow rule and tier: the verdict, and the tier in which it waits.
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
    """A unit of work that costs tokens. `source_timestamp` and `severity` are passed on unchanged."""

    payload: Any
    tier: Tier = "normal"
    cost: float = 1
    source_timestamp: Any = None
    severity: Any = None


@dataclass(frozen=True, slots=True)
class RefusedWork:
    """Work that was not admitted, unchanged, and the reason."""

    work: Work
    reason: Literal["rate_limited"] = "rate_limited"


class OverflowLimiter:
    """A limiter with a rule for the work that it does not admit. Thread-safe.

    Args:
        limiter: the limiter whose tokens are spent.
        overflow: the rule for work that finds no tokens.
        on_refused: called with work that is rejected or evicted.
        fallback: called with work that is diverted. Required for "fallback", and not allowed otherwise.
        max_waiting: the most work that waits. When it is reached, the newest work of a lower tier is evicted; if
            there is none, the new work is rejected.
        monitor: counts every decision about new work.
        breaker: counts the same decisions. While it is not closed, normal work counts as bulk.
        clock: returns seconds for both.

    `fallback` and `on_refused` are called without a lock. The monitor's `on_change` is called with its lock
    and may call it.

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
        # The work, unchanged, by the tier in which it waits.
        self._waiting: dict[Tier, deque[Work]] = {tier: deque() for tier in TIERS}
        self._verdicts: Counter[Verdict] = Counter()
        self._evicted = 0

    def submit(self, work: Work) -> Verdict:
        """Admit work, or apply the overflow rule. The caller does "admitted" work now.

        `release` returns queued and downgraded work when there are tokens for it.

        Raises:
            ValueError: it costs more than its tier can ever be granted, or its tier is unknown.
        """
        self._limiter.require_grantable(work.cost, work.tier)
        evicted: Work | None = None
        with self._lock:
            tier = self._tier_now(work)
            # Work must not overtake what waits in its own tier or above.
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
                self._report(granted=granted)
            except BaseException:
                # The caller gets the exception and still has its own work. The evicted work would be lost.
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
        """Return the waiting work for which there are tokens, and spend them. The higher tier goes first.

        A lower tier gets nothing while a higher one waits, because it would spend the tokens the other waits for.
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
        """Return the seconds until `release` returns work, or `math.inf` if nothing waits."""
        with self._lock:
            for tier, waiting in self._waiting.items():
                if waiting:
                    return self._limiter.wait_seconds(waiting[0].cost, tier)
        return math.inf

    def statistics(self) -> dict[str, int]:
        """Return the count of each verdict, of evicted work, and of the work that waits now."""
        with self._lock:
            verdicts = {verdict: self._verdicts[verdict] for verdict in get_args(Verdict)}
            return {**verdicts, "evicted": self._evicted, "waiting": sum(map(len, self._waiting.values()))}

    def _tier_now(self, work: Work) -> Tier:
        """Return the effective tier: while the breaker is not closed, normal work is bulk."""
        if work.tier != "normal" or self._breaker is None:
            return work.tier
        return "normal" if self._breaker.state(self._clock()) is BreakerState.CLOSED else "bulk"

    def _keep(self, work: Work, tier: Tier) -> tuple[Work | None, bool]:
        """Enqueue work in a tier. Return the work evicted for it, if any, and whether it was enqueued."""
        try:
            self._limiter.require_grantable(work.cost, tier)
        except ValueError:
            # Critical work may cost more than a lower tier can be granted; it would wait there without end.
            return None, False
        evicted: Work | None = None
        if sum(map(len, self._waiting.values())) >= self._max_waiting:
            lower = [each for each in TIERS[TIERS.index(tier) + 1 :] if self._waiting[each]]
            if not lower:
                return None, False
            evicted = self._waiting[lower[-1]].pop()
        self._waiting[tier].append(work)
        return evicted, True

    def _report(self, *, granted: bool) -> None:
        if self._breaker is not None:
            self._breaker.record_outcomes(succeeded=int(granted), failed=int(not granted), now=self._clock())
        if self._monitor is not None:
            self._monitor.record(granted, self._clock())


def _check(overflow: Overflow, *, has_fallback: bool, max_waiting: int) -> None:
    require_choice("overflow", overflow, get_args(Overflow))
    if has_fallback != (overflow == "fallback"):
        given = "a" if has_fallback else "no"
        message = f"overflow is {overflow!r}, and {given} fallback is given; give one with overflow='fallback' only"
        raise ConfigError(message)
    require(max_waiting >= 1, "max_waiting", max_waiting, "at least 1")
