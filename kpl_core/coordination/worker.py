"""The loop around it all: look, meet, obey; with a clock, chance, a time limit, and a log that does not repeat itself.

A store that is slow, down, or full of garbage changes nothing for the caller: the worker goes on
with the shares it has. It says so once, counts each failure, and says once when it is over.
"""

import logging
import math
import random
import time
from collections.abc import Callable, Mapping
from typing import Final, Literal, NamedTuple, Protocol
from uuid import uuid4

import anyio

from kpl_core.coordination.demand import Usage
from kpl_core.coordination.lease_sync import SUMMARY_NAME, LeaseSync, OnProblem, compute
from kpl_core.coordination.lease_table import TableRules, is_claimed
from kpl_core.coordination.leaseholder import HolderRules, Leaseholder
from kpl_core.coordination.proportional import ProportionalSync, ScaledLimits, sum_up
from kpl_core.coordination.store import CoordinationStore, StoreFailed
from kpl_core.coordination.store_objects import Pair, UnreadableObject, decode_summary
from kpl_core.hooks import CoordinatorMet, Fact, ShareChanged
from kpl_core.options.coordination_options import CoordinationOptions, CoordinationPolicy, WorkerTier

__all__ = ["CoordinationWorker", "Coordinator"]

_logger = logging.getLogger("kpl_core")

# Of an interval: between two looks at what was offered, and after a meeting that failed.
LOOK_SHARE: Final = 0.2
RETRY_SHARE: Final = 0.3
JITTER: Final = 0.1
# Clocks this far apart are somebody's mistake. Nothing here depends on them; credentials and TTLs elsewhere do.
CLOCK_TOLERANCE_SECONDS: Final = 60.0
LEAVE_SECONDS: Final = 1.0
_OF_OBJECTS: Final = frozenset({"garbage", "version"})
QUIET_INTERVALS: Final = 12.0
# What a share must change by to be told and logged.
TOLD_CHANGE: Final = 0.01
_TIER_RANK: Final[Mapping[WorkerTier, int]] = {"critical": 0, "normal": 1, "bulk": 2}


class _Holder(Protocol):
    def look(self, usages: Mapping[str, Usage], now: float) -> None: ...
    def share(self, resource: str, limit: Pair) -> Pair: ...
    def state(self, now: float) -> str: ...
    def lease_age(self, now: float) -> float: ...
    def sync_due(self, now: float, *, usual_seconds: float) -> bool: ...
    def next_sync_at(self, *, usual_seconds: float) -> float: ...


class _SyncRound(Protocol):
    clock_offset: float
    is_reading_all: bool
    has_read_all: bool

    async def sync(self, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None: ...
    async def leave(self, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None: ...


class _Trouble(NamedTuple):
    """When something was last wrong, and whether only a look at everybody's objects shows it."""

    seen_at: float
    needs_full_read: bool


class CoordinationWorker:
    """Keeps one process within its shares of whatever `usages` names.

    Args:
        store: where workers meet; its owner closes it.
        options: policy and numbers.
        usages: returns the counts of each resource; called a few times an interval.
        apply_shares: takes the shares by resource, units a second, when some changed; not called in shadow mode.
        tell: hears facts.
        clock: monotonic seconds, the one the sleeps go by.
        wall_clock: seconds since 1970.
        chance: for the jitter, 0 to 1.
    """

    def __init__(
        self,
        store: CoordinationStore,
        options: CoordinationOptions,
        *,
        usages: Callable[[], Mapping[str, Usage]],
        apply_shares: Callable[[Mapping[str, Pair]], None],
        tell: Callable[[Fact], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._options = options
        self._usages = usages
        self._apply_shares = apply_shares
        self._tell = tell
        self._clock = clock
        self._wall_clock = wall_clock
        self._chance = chance
        self.worker_id = options.worker_id or uuid4().hex
        self._holder, self._sync_round = self._policy(store)
        self._shares: dict[str, Pair] = {}
        self._limits: dict[str, Pair] = {}
        self._told: dict[str, Pair] = {}
        # What was warned of and is not over, by reason.
        self._troubles: dict[str, _Trouble] = {}
        self._complaints: dict[str, str] = {}
        self._usual_seconds = 0.0

    def _policy(self, store: CoordinationStore) -> tuple[_Holder, _SyncRound]:
        options = self._options
        if options.policy == "proportional":
            limits = ScaledLimits(self.worker_id, interval_seconds=options.interval_seconds)
            return limits, ProportionalSync(
                store,
                limits,
                worker_id=self.worker_id,
                interval_seconds=options.interval_seconds,
                staleness_seconds=options.staleness_seconds,
                may_compute=options.aggregate,
                on_problem=self._on_problem,
            )
        holder = Leaseholder(
            HolderRules(
                worker_id=self.worker_id,
                interval_seconds=options.interval_seconds,
                max_workers=options.max_workers,
                weight=options.weight,
                tier=_TIER_RANK[options.tier],
            )
        )
        return holder, LeaseSync(
            store,
            holder,
            TableRules(interval_seconds=options.interval_seconds),
            worker_id=self.worker_id,
            may_compute=options.aggregate,
            on_problem=self._on_problem,
        )

    async def run(self) -> None:
        """Take part until cancelled."""
        while True:
            await self.turn()
            now = self._clock()
            look_at = now + LOOK_SHARE * self._options.interval_seconds
            next_sync_at = self._holder.next_sync_at(usual_seconds=self._usual_seconds)
            await anyio.sleep(max(0.001, min(look_at, next_sync_at) - now))

    async def turn(self) -> None:
        """Look once, meet the others if it is time, and obey."""
        now = self._clock()
        usages = self._usages()
        self._holder.look(usages, now)
        if self._holder.sync_due(now, usual_seconds=self._usual_seconds):
            await self._sync()
        self._follow(usages)

    async def leave(self) -> None:
        """Tell the others that this worker's shares are free, if that is possible within a second."""
        try:
            with anyio.fail_after(min(LEAVE_SECONDS, self._options.store_timeout_seconds), shield=True):
                await self._sync_round.leave(self._clock, self._wall_clock)
        except Exception:  # noqa: BLE001 - as in `_sync`
            # They will find out within two intervals.
            return

    def share(self, resource: str, limit: Pair) -> Pair:
        """Return the rates this worker may use of a resource, units a second."""
        return self._holder.share(resource, limit)

    def lease_age(self) -> float:
        """Return the seconds since the summary in use was computed, 0 before there is one."""
        return self._holder.lease_age(self._clock())

    def fractions(self) -> dict[str, float]:
        """Return this worker's part, 0 to 1, of each limit: of a shard's records, and of its bytes."""
        parts: dict[str, float] = {}
        for resource, (first, second) in self._shares.items():
            limit = self._limits[resource]
            parts[f"{resource} records"] = first / limit[0]
            parts[f"{resource} bytes"] = second / limit[1]
        return parts

    async def _sync(self) -> None:
        interval = self._options.interval_seconds
        failure = ""
        self._complaints.clear()
        self._usual_seconds = interval * (1.0 - JITTER + 2.0 * JITTER * self._chance())
        try:
            with anyio.fail_after(self._options.store_timeout_seconds):
                await self._sync_round.sync(self._clock, self._wall_clock)
        except StoreFailed as error:
            failure = error.reason
            self._warn(failure, str(error), needs_full_read=self._sync_round.is_reading_all)
        except TimeoutError:
            failure = "slow"
            seconds = self._options.store_timeout_seconds
            sentence = f"no answer within {seconds:g} s; see whether the store is overloaded"
            self._warn(failure, sentence, needs_full_read=self._sync_round.is_reading_all)
        except Exception as error:
            # Records must not stop for what a store, perhaps the caller's own, does.
            failure = "broken"
            _logger.debug("a meeting ended by an error that no store may raise", exc_info=True)
            sentence = f"{type(error).__name__}; the log at DEBUG has where, report it to whoever wrote the store"
            self._warn(failure, sentence, needs_full_read=self._sync_round.is_reading_all)
        else:
            self._recovered()
        if failure:
            self._usual_seconds *= RETRY_SHARE * 2
        now = self._clock()
        state = self._holder.state(now)
        for reason in (failure, *self._complaints):
            self._tell(CoordinatorMet(self.worker_id, state, self._holder.lease_age(now), reason))

    def _recovered(self) -> None:
        for reason, sentence in self._complaints.items():
            self._warn(reason, sentence, needs_full_read=reason in _OF_OBJECTS)
        offset = self._sync_round.clock_offset
        if abs(offset) > CLOCK_TOLERANCE_SECONDS:
            self._complaints["clock"] = ""
            self._warn("clock", f"this machine's clock is {-offset:+,.0f} s off the store's; synchronise it")
        # Some is noticed only by who looks at everybody's objects, and that is not this worker each time.
        looked_since = self._clock() - QUIET_INTERVALS * self._options.interval_seconds
        over = {
            reason
            for reason, trouble in self._troubles.items()
            if reason not in self._complaints
            and (not trouble.needs_full_read or self._sync_round.has_read_all or trouble.seen_at < looked_since)
        }
        if over:
            for reason in over:
                del self._troubles[reason]
            _logger.info("coordination at %s is well again (%s)", self._options.shown_store, ", ".join(sorted(over)))

    def _on_problem(self, reason: str, sentence: str) -> None:
        self._complaints.setdefault(reason, sentence)

    def _warn(self, reason: str, sentence: str, *, needs_full_read: bool = False) -> None:
        known = self._troubles.get(reason)
        needs_full_read = needs_full_read or (known is not None and known.needs_full_read)
        self._troubles[reason] = _Trouble(self._clock(), needs_full_read)
        if known is None:
            _logger.warning(
                "coordination at %s: %s: %s. This worker goes on with the share it has.",
                self._options.shown_store,
                reason,
                sentence.rstrip("."),
            )

    def _follow(self, usages: Mapping[str, Usage]) -> None:
        shares = {resource: self._holder.share(resource, usage.limit) for resource, usage in usages.items()}
        if shares == self._shares:
            return
        self._shares = shares
        self._limits = {resource: usage.limit for resource, usage in usages.items()}
        if not self._options.shadow:
            self._apply_shares(shares)
        for resource, share in shares.items():
            told = self._told.get(resource)
            if told is None or not _about_equal(told, share):
                self._told[resource] = share
                self._tell_share(resource, share, usages[resource].limit)
        for resource in self._told.keys() - shares.keys():
            del self._told[resource]

    def _tell_share(self, resource: str, share: Pair, limit: Pair) -> None:
        stream, _, shard_id = resource.rpartition("/")
        self._tell(ShareChanged(stream, shard_id, share[0] / limit[0], share[1] / limit[1], not self._options.shadow))
        if self._options.shadow:
            _logger.info(
                "coordination, in shadow: %s would be limited to %.4g and %.4g a second", resource, share[0], share[1]
            )


def _about_equal(one: Pair, other: Pair) -> bool:
    return all(math.isclose(a, b, rel_tol=TOLD_CHANGE) for a, b in zip(one, other, strict=True))


class Coordinator:
    """One round at a time; the caller sleeps in between.

    Args:
        store: where the workers meet.
        policy: as theirs.
        interval_seconds: as theirs.
        max_workers: the least to plan for; workers report their own.
        staleness_seconds: proportional only: objects older than this do not count.
        on_problem: hears the reason and a sentence of each object that cannot be read.
    """

    def __init__(
        self,
        store: CoordinationStore,
        *,
        policy: CoordinationPolicy,
        interval_seconds: float,
        max_workers: int = 1,
        staleness_seconds: float = 15.0,
        on_problem: OnProblem,
    ) -> None:
        self._store = store
        self._policy: CoordinationPolicy = policy
        self._rules = TableRules(interval_seconds=interval_seconds, max_workers=max_workers, dedicated=True)
        self._staleness = staleness_seconds
        self._on_problem = on_problem

    async def compute_once(self) -> tuple[int, Literal["computed", "overtaken"]]:
        """Compute a summary; return how many workers count, and whether it was this process that wrote it.

        Raises:
            StoreFailed: it could not be done.
        """
        if self._policy == "proportional":
            summed = await sum_up(self._store, staleness_seconds=self._staleness, on_problem=self._on_problem)
            return summed.active_workers, "computed"
        reading = await self._store.read(SUMMARY_NAME)
        try:
            head = None if reading.body is None else decode_summary(reading.body)
        except UnreadableObject as error:
            if error.reason == "version":
                message = f"{SUMMARY_NAME}: {error}"
                raise StoreFailed(message, reason="version") from error
            self._on_problem(error.reason, f"{SUMMARY_NAME}: {error}")
            head = None
        if head is not None and is_claimed(head, self._rules.interval_seconds, at=reading.at):
            return head.member_count, "overtaken"
        summary = await compute(
            self._store, head, reading.version, self._rules, at=reading.at, on_problem=self._on_problem
        )
        if summary is None:
            return 0 if head is None else head.member_count, "overtaken"
        return summary.member_count, "computed"
