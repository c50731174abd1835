"""One sync of a worker with the store: renew its lease, write its report, sometimes compute a new summary.

The summary has the leases of all workers. A worker renews its own by reading it (`LeaseSync.renew_and_report`).

There is no leader. Any worker that sees an outdated summary claims the next one by a conditional write, reads all
reports, and writes the summary on the condition that its claim is still current. A worker that was overtaken writes
nothing. So all workers together read each report about once an interval, however many workers there are, and no single
process is needed.
"""

import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Final, NamedTuple

import msgspec

from kpl_core.coordination.bounded_calls import Call, one_after_another
from kpl_core.coordination.lease_table import LIFETIME_INTERVALS, TableRules, claim_seconds, next_summary
from kpl_core.coordination.leaseholder import Leaseholder, PreparedReport
from kpl_core.coordination.store import ABSENT, CoordinationStore
from kpl_core.coordination.store_objects import (
    OnProblem,
    Summary,
    SummaryPart,
    UnreadableObject,
    WorkerReport,
    decode,
    encode,
    part_name,
    part_of,
    part_prefix,
    split,
)

SUMMARY_NAME: Final = "leases.json"
REPORT_PREFIX: Final = "report-"
# The reports of workers that left this long ago are deleted, at most so many per summary.
STALE_INTERVALS: Final = 20.0
REMOVALS: Final = 50
MOST_OLD: Final = 200
# A lost write of the own object may be a clean-up by another worker. Twice in a short time means that a second process
# uses the same worker_id; the warning ends after a few undisturbed writes.
CONFLICTS_TOLERATED: Final = 2
MAX_CONFLICTS: Final = 6


class LeaseSync:
    """Syncs one leaseholder.

    Args:
        store: the shared store.
        holder: the leaseholder.
        may_compute: whether it computes summaries.
        on_problem: called with a reason and a sentence for objects that cannot be read.
        on_shares: called when a summary has been applied. It puts the shares into force before it returns, so that no
            report says more than that.
        run_all: runs calls of the store that do not depend on each other.
    """

    def __init__(
        self,
        store: CoordinationStore,
        holder: Leaseholder,
        *,
        may_compute: bool,
        on_problem: OnProblem,
        on_shares: Callable[[], None] = lambda: None,
        run_all: Callable[[Iterable[Call]], Awaitable[None]] = one_after_another,
    ) -> None:
        self._store = store
        self._holder = holder
        self._on_shares = on_shares
        self._worker_id = holder.rules.worker_id
        rules = TableRules(
            interval_seconds=holder.rules.interval_seconds, store_timeout_seconds=holder.rules.store_timeout_seconds
        )
        self.writer = SummaryWriter(store, rules, on_problem, worker_id=self._worker_id, run_all=run_all)
        self._may_compute = may_compute
        self._on_problem = on_problem
        # The name and contents of the part that was read last.
        self._part: tuple[str, SummaryPart] | None = None
        # The version of this worker's report, as last written; None if the last write may have succeeded, or may yet.
        self._report_version: str | None = ABSENT
        self._unsure_body: bytes | None = None
        self._has_reported = False
        self._conflicts = 0
        # The store's clock minus this process's wall clock.
        self.clock_offset = 0.0
        # Whether the last sync began to read all reports (only a sync that computes does), and whether it finished.
        self.is_reading_all = self.has_read_all = False
        self._due: tuple[Summary | None, str, float] | None = None

    async def sync(self, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        """Renew the lease from the summary, report, and compute the next summary if no other worker does.

        Raises:
            StoreFailed: the store failed; what was applied so far stays applied.
        """
        await self.renew_and_report(clock, wall_clock)
        await self.compute_if_due(clock)
        await self.writer.remove_old()

    async def renew_and_report(self, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        """Read the summary, renew the lease from it, and report. Then `compute_if_due`.

        Raises:
            StoreFailed: the store failed; what was applied so far stays applied.
        """
        self._due = None
        self._holder.sync_started(clock())
        self.is_reading_all, self.has_read_all = False, not self._may_compute
        reading = await self._store.read(SUMMARY_NAME)
        read_at = clock()
        self.clock_offset = reading.at - wall_clock()
        try:
            head = None if reading.body is None else decode(reading.body, Summary)
            part = await self._own_part(head)
        except UnreadableObject as error:
            self._on_problem(error.reason, f"{SUMMARY_NAME}: {error}")
            if error.reason == "version":
                # A newer release wrote it for its own workers. Overwriting it would stop them.
                return
            head = None
        else:
            if head is None or not head.generation:
                self._holder.renew(None, None, clock(), at=reading.at)
            elif part is not None or not head.part_count:
                self._holder.renew(head, part, clock(), at=reading.at)
            self._on_shares()
        if self._conflicts > CONFLICTS_TOLERATED:
            sentence = (
                f"{_report_name(self._worker_id)}: another process writes it; give each process its own worker_id"
            )
            self._on_problem("duplicate", sentence)
        if self._holder.wants_to_report(head, clock()):
            await self._report(self._holder.report(clock(), at=wall_clock() + self.clock_offset))
        if self._may_compute and self._holder.may_compute(head, clock(), at=reading.at):
            # The store's clock minus this process's clock.
            self._due = head, reading.version, reading.at - read_at

    async def _report(self, prepared: PreparedReport) -> None:
        """Write this worker's report, and notice whether another process writes it too.

        Every write is conditional, so a write that arrives late never replaces a newer report. If the version changed,
        another process uses the same `worker_id` and both would spend the same lease.
        """
        name, body = _report_name(self._worker_id), encode(prepared.report)
        expected, self._report_version = self._report_version, None
        if expected is None:
            expected = (await self._store.read(name)).version
        unsure, self._unsure_body = self._unsure_body, body
        written = await self._store.write(name, body, expected=expected)
        if written.version is not None:
            self._conflicts = max(0, self._conflicts - 1)
        else:
            found = await self._store.read(name)
            if self._has_reported and found.version != expected and found.body != unsure:
                self._conflicts = min(self._conflicts + CONFLICTS_TOLERATED, MAX_CONFLICTS)
            written = await self._store.write(name, body, expected=found.version)
            if written.version is None:
                return
        self._report_version, self._has_reported = written.version, True
        self._holder.reported(prepared)

    async def _own_part(self, head: Summary | None) -> SummaryPart | None:
        if head is None or not head.part_count:
            return None
        number = part_of(self._worker_id, head.part_count)
        name = part_name(head, number)
        if self._part is not None and self._part[0] == name:
            # The summary was renewed.
            return self._part[1]
        reading = await self._store.read(name)
        if reading.body is None:
            # A newer head exists and the next sync reads it.
            return None
        self._part = (name, decode(reading.body, SummaryPart))
        return self._part[1]

    async def compute_if_due(self, clock: Callable[[], float]) -> None:
        """Compute the next summary if the last `renew_and_report` found it due, and renew the lease from it.

        Raises:
            StoreFailed: the store failed.
        """
        if self._due is None:
            return
        (head, version, offset), self._due = self._due, None
        self.is_reading_all = True
        summary = await self.writer.compute(head, version, at=clock() + offset)
        self.has_read_all = True
        if summary is not None:
            self._holder.renew(summary, None, clock(), at=summary.computed_at)
            self._on_shares()

    async def leave(self, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        """Report that this worker's leases are free. `Leaseholder.leave` comes first, and its shares are in force.

        Raises:
            StoreFailed: the other workers will notice when its report is too old.
        """
        await self._report(self._holder.report(clock(), at=wall_clock() + self.clock_offset, leaving=True))


class _Claim(NamedTuple):
    """The head with a claim and without it, and the claim's version; None if the answer to its write is not known."""

    body: bytes
    released: bytes
    version: str | None


class SummaryWriter:
    """Computes and writes summaries, one at a time, for a worker or for a process that does nothing else.

    Args:
        store: the store with the reports.
        rules: the parameters.
        on_problem: called with a reason and a sentence for each object that cannot be read.
        worker_id: the worker that computes; "" for none.
        run_all: runs calls of the store that do not depend on each other.
    """

    def __init__(
        self,
        store: CoordinationStore,
        rules: TableRules,
        on_problem: OnProblem,
        *,
        worker_id: str = "",
        run_all: Callable[[Iterable[Call]], Awaitable[None]] = one_after_another,
    ) -> None:
        self._store = store
        self._run_all = run_all
        self._rules = rules
        self._on_problem = on_problem
        self._worker_id = worker_id
        # The last summary with parts that this object wrote: the next one needs no read of the parts.
        self._last: Summary | None = None
        # The claim of this process while it computes, or while its write may have succeeded.
        self._claim: _Claim | None = None
        # The names of parts that are not needed any more, the latest ones.
        self._old_parts: list[str] = []
        # The workers that the last computation found gone. They are not remembered, because one may have restarted.
        self._gone: list[str] = []

    async def compute(self, head: Summary | None, version: str, *, at: float) -> Summary | None:
        """Compute and write the summary that follows `head`; return None if another process does or did.

        Args:
            head: the latest summary, None if none can be read.
            version: the version of the object that `head` came from.
            at: the store's clock.

        Raises:
            StoreFailed: the store failed.
        """
        interval, store = self._rules.interval_seconds, self._store
        unclaimed = Summary(generation=0, computed_at=0.0, began_at=0.0) if head is None else head
        claimed_until = at + claim_seconds(interval, self._rules.store_timeout_seconds)
        body = encode(msgspec.structs.replace(unclaimed, claimed_until=claimed_until))
        released = encode(msgspec.structs.replace(unclaimed, claimed_until=0.0))
        self._claim = _Claim(body, released, None)
        claimed = await store.write(SUMMARY_NAME, body, expected=version)
        if claimed.version is None:
            self._last = self._claim = None
            return None
        self._claim = _Claim(body, released, claimed.version)
        previous = await self._with_parts(head)
        listing = await store.read_all(REPORT_PREFIX)
        gone: list[str] = []
        reports = _reports(
            listing.bodies,
            self._on_problem,
            gone,
            oldest=listing.at - (STALE_INTERVALS + LIFETIME_INTERVALS) * interval,
        )
        summary = next_summary(previous, reports, self._rules, at=listing.at)
        parts: list[SummaryPart] = []
        if head is not None and previous is not None and summary.generation == previous.generation:
            # A renewal. Its parts stay, and those before them are deleted below.
            written_head = msgspec.structs.replace(head, computed_at=summary.computed_at, claimed_until=0.0)
            written_head.old_part_count = 0
        else:
            # The version of the claim is unique, so a worker that was overtaken cannot overwrite these parts.
            summary.generation = 1 if head is None else head.generation + 1
            summary.token = f"{zlib.crc32(claimed.version.encode()):08x}"
            written_head, parts = split(summary, after=head)
        summary.computed_by = written_head.computed_by = self._worker_id
        await self._run_all(
            [partial(store.write, part_name(written_head, number), encode(part)) for number, part in enumerate(parts)]
        )
        written = await store.write(SUMMARY_NAME, encode(written_head), expected=claimed.version)
        self._claim = None
        if written.version is None:
            self._last = None
            return None
        self._last = summary if written_head.part_count else None
        self._old_parts = (self._old_parts + _old_parts(head))[-MOST_OLD:]
        self._gone = gone[:REMOVALS]
        return summary

    async def give_up(self) -> None:
        """Release the claim of a computation that failed, so that another worker need not wait for its end.

        Raises:
            StoreFailed: the claim ends an interval after it was written.
        """
        claim, self._claim = self._claim, None
        if claim is None:
            return
        version = claim.version
        if version is None:
            reading = await self._store.read(SUMMARY_NAME)
            if reading.body != claim.body:
                return
            version = reading.version
        await self._store.write(SUMMARY_NAME, claim.released, expected=version)

    async def remove_old(self) -> None:
        """Delete the parts that the summaries of this process made useless, and the reports of workers that are gone.

        The next call continues with the parts, and the next computation finds the reports again.

        Raises:
            StoreFailed: the store failed.
        """
        gone, self._gone = self._gone, []

        async def remove_part(name: str) -> None:
            await self._store.delete(name)
            self._old_parts.remove(name)

        parts = [partial(remove_part, name) for name in self._old_parts]
        await self._run_all([*parts, *(partial(self._store.delete, _report_name(worker_id)) for worker_id in gone)])

    async def _with_parts(self, head: Summary | None) -> Summary | None:
        """Return the summary with all its parts; None if a part is missing, and then only the reports count."""
        if head is None or not head.generation:
            return None
        if not head.part_count:
            return head
        last, self._last = self._last, None
        if last is not None and (last.generation, last.token) == (head.generation, head.token):
            return msgspec.structs.replace(last, computed_at=head.computed_at)
        listing = await self._store.read_all(part_prefix(head.generation, head.token))
        try:
            parts = [decode(body, SummaryPart) for body in listing.bodies.values()]
        except UnreadableObject as error:
            self._on_problem(error.reason, f"a part of {SUMMARY_NAME}: {error}")
            return None
        if len(parts) < head.part_count:
            return None
        members = {worker_id: member for part in parts for worker_id, member in part.members.items()}
        return msgspec.structs.replace(head, members=members, resources=parts[0].resources(), part_count=0)


def _reports(
    bodies: Mapping[str, bytes], on_problem: OnProblem, gone: list[str], *, oldest: float
) -> Iterator[WorkerReport]:
    """Yield the reports one by one; append to `gone` the workers that left, or did not report since `oldest`."""
    for name, body in bodies.items():
        try:
            report = decode(body, WorkerReport)
        except UnreadableObject as error:
            on_problem(error.reason, f"{name}: {error}")
            continue
        if report.leaving or report.written_at < oldest:
            gone.append(report.worker_id)
        yield report


def _old_parts(head: Summary | None) -> list[str]:
    """Return the parts of the summary before the last one."""
    # The parts of `head` itself stay: another worker may just have read `head` and be about to read its part.
    return [] if head is None else [f"{head.old_part_prefix}{number}.json" for number in range(head.old_part_count)]


def _report_name(worker_id: str) -> str:
    return f"{REPORT_PREFIX}{worker_id}.json"
