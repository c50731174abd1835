"""The loop of a worker: measure, sync, apply the shares. It has the clock, the jitter, the timeout and the log.

If the store is slow, down or full of garbage, the worker keeps the shares it has. It logs each problem once, counts
each failed sync, and logs once when the problem is over.

`Coordinator` is the alternative to workers that compute summaries: a process of its own that does nothing else.
"""

import contextlib
import itertools
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final, Literal, NamedTuple, TypeVar
from uuid import uuid4

import anyio

from kpl_core.coordination.bounded_calls import BoundedStore, in_parallel
from kpl_core.coordination.demand import Usage
from kpl_core.coordination.lease_sync import SUMMARY_NAME, LeaseSync, SummaryWriter
from kpl_core.coordination.lease_table import TableRules, claim_seconds, is_claimed
from kpl_core.coordination.leaseholder import HolderRules, Leaseholder, LeaseState
from kpl_core.coordination.store import CoordinationStore, StoreFailed
from kpl_core.coordination.store_objects import OnProblem, Pair, Summary, UnreadableObject, decode
from kpl_core.hooks import CoordinatorMet, Fact, ShareChanged
from kpl_core.options.coordination_options import CoordinationOptions
from kpl_core.records.user_record import rank_of

Returned = TypeVar("Returned")

_logger = logging.getLogger("kpl_core")

# Shares of an interval: the time between two measurements, and the time before a retry after a failed sync.
MEASURE_SHARE: Final = 0.2
RETRY_SHARE: Final = 0.3
JITTER: Final = 0.1
# A larger difference is a configuration error. Coordination does not depend on it; credentials and TTLs elsewhere do.
CLOCK_TOLERANCE_SECONDS: Final = 60.0
LEAVE_SECONDS: Final = 1.0
SHOWN_SHARES: Final = 3
# A worker without a new plan for so many intervals, and for so many seconds, says so.
PLAN_INTERVALS: Final = 3.0
# With shorter intervals a busy machine alone delays plans.
LEAST_PLAN_SECONDS: Final = 5.0
QUIET_INTERVALS: Final = 12.0
# A share is reported and logged when it changes by more than 1 %.
_is_close: Final = partial(math.isclose, rel_tol=0.01)


class _Problem(NamedTuple):
    """When a problem was last seen, and whether only a sync that reads all reports can see it."""

    seen_at: float
    needs_full_read: bool


class PlanInForce(NamedTuple):
    """The plan in a store: for how many workers, how old, and the least part of a limit that it leaves unassigned.

    That is None if no resource is planned, or if the fleet is so large that the plan has parts.
    """

    workers: int
    age_seconds: float
    unassigned: float | None


async def read_plan(store: CoordinationStore) -> PlanInForce | None:
    """Return the plan of a store; None if there is none.

    Raises:
        StoreFailed: the store failed; or the plan cannot be read, reason "garbage" or "version".
    """
    reading = await store.read(SUMMARY_NAME)
    if reading.body is None:
        return None
    try:
        head = decode(reading.body, Summary)
    except UnreadableObject as error:
        message = f"{SUMMARY_NAME}: {error}"
        raise StoreFailed(message, reason=error.reason) from error
    parts = [
        part / most for plan in head.resources.values() for part, most in zip(plan.unassigned, plan.limit, strict=True)
    ]
    return PlanInForce(head.member_count, reading.at - head.computed_at, min(parts, default=None))


class CoordinationWorker:
    """Keeps one process within its shares of the resources in `usages`.

    Args:
        store: the shared store; its owner closes it.
        options: the interval, the number of workers, and the weight and tier of this one.
        usages: returns the counts of each resource; called a few times an interval.
        apply_shares: receives the shares by resource, units a second, when some changed; not called in shadow mode.
        tell: receives facts for the hooks.
        clock: monotonic seconds, the clock of the sleeps.
        wall_clock: seconds since 1970.
        chance: returns a number in [0, 1), for the jitter.
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
        self._holder = Leaseholder(
            HolderRules(
                worker_id=self.worker_id,
                interval_seconds=options.interval_seconds,
                max_workers=options.max_workers,
                store_timeout_seconds=options.store_timeout_seconds,
                weight=options.weight,
                tier=rank_of(options.tier),
                unenforced_part=None if options.usual_workers is None else 1.0 / options.usual_workers,
            )
        )
        self._sync_round = LeaseSync(
            BoundedStore(store, options.store_timeout_seconds),
            self._holder,
            may_compute=options.aggregate,
            on_problem=self._on_problem,
            on_shares=self._use_shares,
            run_all=in_parallel,
        )
        self._measured: Mapping[str, Usage] = {}
        self._shares: dict[str, Pair] = {}
        self._limits: dict[str, Pair] = {}
        self._reported_shares: dict[str, Pair] = {}
        # Problems that were logged and are not over, by reason.
        self._problems: dict[str, _Problem] = {}
        self._object_problems: dict[str, str] = {}
        self._usual_seconds = 0.0
        # When the plan in use was computed, or when the first sync began.
        self._planned_at = math.inf
        self._woken = anyio.Event()
        self._running: anyio.CancelScope | None = None

    async def run(self) -> None:
        """Sync and apply shares until cancelled, or until `leave`."""
        with anyio.CancelScope() as self._running:
            await self._run()

    async def _run(self) -> None:
        while True:
            # New before the step: units that begin to wait during its sync were not measured.
            self._woken = anyio.Event()
            await self.step()
            now = self._clock()
            next_at = self._holder.next_sync_at(usual_seconds=self._usual_seconds)
            if not self._holder.uses_little:
                next_at = min(next_at, now + MEASURE_SHARE * self._options.interval_seconds)
            early_at = min(next_at, self._holder.early_measure_at(now))
            with anyio.move_on_after(max(0.001, next_at - now)):
                await self._woken.wait()
                await anyio.sleep(max(0.001, early_at - self._clock()))

    def units_wait(self) -> None:
        """Measure again soon, if that can help: units wait for tokens. Callable at any time, as often as they do."""
        self._woken.set()

    async def step(self) -> None:
        """Measure once, and sync if it is due. What this worker gives up is out of force before it reports."""
        self._measure()
        if self._holder.sync_due(self._clock(), usual_seconds=self._usual_seconds):
            # A store that does not answer must not end the measurements: throttling lowers a share meanwhile.
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._keep_measuring)
                await self._sync()
                tasks.cancel_scope.cancel()
        self._report_shares()

    def _measure(self) -> None:
        self._measured = self._usages()
        self._holder.measure(self._measured, self._clock())
        self._use_shares()

    async def _keep_measuring(self) -> None:
        while True:
            await anyio.sleep(MEASURE_SHARE * self._options.interval_seconds)
            self._measure()

    async def leave(self) -> None:
        """Stop using the shares, then report that they are free, if that takes less than a second.

        What remains in force is what every plan reserves for a worker that has not started.
        """
        if self._running is not None:
            self._running.cancel()
        self._holder.leave()
        self._use_shares()
        try:
            with anyio.fail_after(min(LEAVE_SECONDS, self._options.store_timeout_seconds), shield=True):
                await self._sync_round.leave(self._clock, self._wall_clock)
        except Exception:  # noqa: BLE001 - as in `_sync`
            # The other workers will notice within two intervals.
            return

    def share(self, resource: str, limit: Pair) -> Pair:
        """Return the rates this worker may use of a resource, units a second."""
        return self._holder.share(resource, limit)

    def claimable_part(self, resource: str) -> float:
        """Return the part of a resource that this worker gets if it wants all; 0.0 if no current plan says it."""
        return self._holder.claimable_part(resource, self._clock())

    def state(self) -> LeaseState:
        """Return the basis of its shares."""
        return self._holder.state(self._clock())

    def lease_age(self) -> float:
        """Return the seconds since the applied summary was computed, 0 before the first one."""
        return self._holder.lease_age(self._clock())

    def fractions(self) -> dict[str, float]:
        """Return this worker's fraction, 0 to 1, of each limit: of a shard's records, and of its bytes."""
        parts: dict[str, float] = {}
        for resource, (first, second) in self._shares.items():
            limit = self._limits[resource]
            parts[f"{resource} records"] = first / limit[0]
            parts[f"{resource} bytes"] = second / limit[1]
        return parts

    async def _sync(self) -> None:
        interval = self._options.interval_seconds
        most_seconds = claim_seconds(interval, self._options.store_timeout_seconds)
        failure = sentence = ""
        self._object_problems.clear()
        self._planned_at = min(self._planned_at, self._clock())
        self._usual_seconds = interval * (1.0 - JITTER + 2.0 * JITTER * self._chance())
        try:
            with anyio.fail_after(most_seconds):
                await self._sync_round.renew_and_report(self._clock, self._wall_clock)
            writer = self._sync_round.writer
            await within_claim(writer, most_seconds, lambda: self._sync_round.compute_if_due(self._clock))
            await remove_within(writer, self._options.store_timeout_seconds, self._on_problem)
        except StoreFailed as error:
            failure, sentence = error.reason, str(error)
        except TimeoutError:
            failure = "slow"
            sentence = (
                f"reading the summary and reporting took {most_seconds:g} s; check whether the store is overloaded"
            )
        except Exception as error:
            # An error in a store, perhaps the caller's own class, must not stop records.
            failure = "broken"
            _logger.debug("a sync failed with an exception that a store must not raise", exc_info=True)
            sentence = (
                f"{type(error).__name__}; the log at DEBUG has the traceback; report it to the author of the store"
            )
        else:
            self._recovered()
        if failure:
            self._warn(failure, sentence, needs_full_read=self._sync_round.is_reading_all)
            self._usual_seconds *= RETRY_SHARE * 2
        now = self._clock()
        state = self._holder.state(now)
        for reason in (failure, *self._object_problems):
            self._tell(CoordinatorMet(self.worker_id, state, self._holder.lease_age(now), reason))

    def _recovered(self) -> None:
        for reason, sentence in self._object_problems.items():
            self._warn(reason, sentence, needs_full_read=reason != "duplicate")
        offset = self._sync_round.clock_offset
        if abs(offset) > CLOCK_TOLERANCE_SECONDS:
            self._object_problems["clock"] = ""
            self._warn("clock", f"this machine's clock differs from the store's by {-offset:+,.0f} s; synchronise it")
        if not self._measured:
            # A worker that uses nothing needs no plan.
            self._planned_at = self._clock()
        elif self.state() in {"leased", "expired"}:
            self._planned_at = self._clock() - self.lease_age()
        without_plan = self._clock() - self._planned_at
        overdue_seconds = max(PLAN_INTERVALS * self._options.interval_seconds, LEAST_PLAN_SECONDS)
        if not self._object_problems and without_plan > overdue_seconds:
            self._object_problems["plan"] = ""
            sentence = f"no new plan for {without_plan:.0f} s; check whether the store is too slow for the interval"
            self._warn("plan", sentence)
        # Some problems are visible only in a sync that reads all reports, and this worker does not do that each time.
        full_read_since = self._clock() - QUIET_INTERVALS * self._options.interval_seconds
        over = {
            reason
            for reason, problem in self._problems.items()
            if reason not in self._object_problems
            and (not problem.needs_full_read or self._sync_round.has_read_all or problem.seen_at < full_read_since)
        }
        if over:
            for reason in over:
                del self._problems[reason]
            _logger.info("coordination at %s works again (%s)", self._options.shown_store, ", ".join(sorted(over)))

    def _on_problem(self, reason: str, sentence: str) -> None:
        self._object_problems.setdefault(reason, sentence)

    def _warn(self, reason: str, sentence: str, *, needs_full_read: bool = False) -> None:
        known = self._problems.get(reason)
        needs_full_read = needs_full_read or (known is not None and known.needs_full_read)
        self._problems[reason] = _Problem(self._clock(), needs_full_read)
        if known is None:
            _logger.warning(
                "coordination at %s: %s: %s. %s",
                self._options.shown_store,
                reason,
                sentence.rstrip("."),
                self._in_force(),
            )

    def _in_force(self) -> str:
        """Return a sentence about the basis of the shares, with some of them."""
        rates = ", ".join(
            f"{resource} {first:.4g} and {second:.4g} a second"
            for resource, (first, second) in itertools.islice(self._shares.items(), SHOWN_SHARES)
        )
        basis = "This worker keeps its present share."
        if self.state() == "alone" and self._options.usual_workers is None:
            basis = "No store has answered since the start, so the service's throttling decides."
        return f"In force: {rates}. {basis}" if rates else basis

    def _use_shares(self) -> None:
        """Put the shares into force; once more for the resources that are not used any more."""
        limits = {resource: usage.limit for resource, usage in self._measured.items()}
        shares = {resource: self._holder.share(resource, limit) for resource, limit in (self._limits | limits).items()}
        if shares == self._shares and limits == self._limits:
            return
        self._shares = {resource: shares[resource] for resource in limits}
        self._limits = limits
        if not self._options.shadow:
            self._apply_shares(shares)

    def _report_shares(self) -> None:
        for resource, share in self._shares.items():
            reported = self._reported_shares.get(resource)
            if reported is None or not all(map(_is_close, reported, share)):
                self._reported_shares[resource] = share
                self._report_share(resource, share, self._limits[resource])
        for resource in self._reported_shares.keys() - self._shares.keys():
            del self._reported_shares[resource]

    def _report_share(self, resource: str, share: Pair, limit: Pair) -> None:
        stream, _, shard_id = resource.rpartition("/")
        self._tell(ShareChanged(stream, shard_id, share[0] / limit[0], share[1] / limit[1], not self._options.shadow))
        if self._options.shadow:
            _logger.info(
                "coordination in shadow mode: %s would be limited to %.4g and %.4g a second",
                resource,
                share[0],
                share[1],
            )


async def within_claim(writer: SummaryWriter, seconds: float, compute: Callable[[], Awaitable[Returned]]) -> Returned:
    """Compute within the time of a claim, or release the claim, so that another worker need not wait for its end.

    Raises:
        StoreFailed: the store failed, or it was too slow for a summary.
    """
    is_done = False
    try:
        with anyio.fail_after(seconds):
            result = await compute()
        is_done = True
    except TimeoutError:
        message = f"computing a summary took longer than {seconds:g} s; lengthen the interval, or use a faster store"
        raise StoreFailed(message, reason="slow") from None
    finally:
        if not is_done:
            with anyio.move_on_after(LEAVE_SECONDS, shield=True), contextlib.suppress(Exception):
                await writer.give_up()
    return result


async def remove_within(writer: SummaryWriter, seconds: float, on_problem: OnProblem) -> None:
    """Delete old objects for at most so long. What fails is a problem of these objects: the plan is written."""
    try:
        with anyio.move_on_after(seconds):
            await writer.remove_old()
    except StoreFailed as error:
        on_problem(error.reason, f"deleting old objects: {error}")


class Coordinator:
    """Computes summaries in a process of its own, for large fleets or for workers that may not read reports.

    It computes one summary per call; the caller sleeps in between. Workers compute only when it is late, so it may be
    stopped, moved or run twice.

    Args:
        store: the store of the workers.
        interval_seconds: as for the workers.
        max_workers: the minimum to plan for; workers report their own.
        on_problem: called with a reason and a sentence for each object that cannot be read.
    """

    def __init__(
        self,
        store: CoordinationStore,
        *,
        interval_seconds: float,
        max_workers: int = 1,
        on_problem: OnProblem,
    ) -> None:
        self._store = store
        self._rules = TableRules(interval_seconds=interval_seconds, max_workers=max_workers, dedicated=True)
        self._on_problem = on_problem
        self._writer = SummaryWriter(store, self._rules, on_problem, run_all=in_parallel)

    async def compute_once(self) -> tuple[int, Literal["computed", "overtaken"]]:
        """Compute a summary; return the number of workers in it, and whether this process wrote it.

        Raises:
            StoreFailed: the store failed.
        """
        reading = await self._store.read(SUMMARY_NAME)
        try:
            head = None if reading.body is None else decode(reading.body, Summary)
        except UnreadableObject as error:
            if error.reason == "version":
                message = f"{SUMMARY_NAME}: {error}"
                raise StoreFailed(message, reason="version") from error
            self._on_problem(error.reason, f"{SUMMARY_NAME}: {error}")
            head = None
        if head is not None and is_claimed(head, self._rules.interval_seconds, 0.0, at=reading.at):
            return head.member_count, "overtaken"
        summary = await within_claim(
            self._writer,
            self._rules.interval_seconds,
            lambda: self._writer.compute(head, reading.version, at=reading.at),
        )
        if summary is None:
            return 0 if head is None else head.member_count, "overtaken"
        await remove_within(self._writer, self._rules.interval_seconds, self._on_problem)
        return summary.member_count, "computed"
