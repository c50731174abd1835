"""One sync of a worker with the store: read and apply the summary, write the report, sometimes compute a new summary.

There is no leader. Any worker that sees an outdated summary claims the next one by a conditional write, reads all
reports, and writes the summary on the condition that its claim is still current. A worker that was overtaken writes
nothing. So all workers together read each report about once an interval, however many workers there are, and no single
process is needed.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec

from kpl_core.coordination.lease_table import LIFETIME_INTERVALS, TableRules, next_summary
from kpl_core.coordination.leaseholder import Leaseholder
from kpl_core.coordination.store import CoordinationStore
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
FORGOTTEN_INTERVALS: Final = 20.0
REMOVALS: Final = 50
# A lost write of the own object may be a clean-up by another worker. Twice in a short time means that a second process
# uses the same worker_id; the warning ends after a few undisturbed writes.
CONFLICTS_TOLERATED: Final = 2
MAX_CONFLICTS: Final = 6


class LeaseSync:
    """Syncs one leaseholder. `on_problem(reason, sentence)` is called for objects that cannot be read."""

    def __init__(
        self,
        store: CoordinationStore,
        holder: Leaseholder,
        *,
        may_compute: bool,
        on_problem: OnProblem,
    ) -> None:
        self._store = store
        self._holder = holder
        self._worker_id = holder.rules.worker_id
        rules = TableRules(interval_seconds=holder.rules.interval_seconds)
        self._writer = SummaryWriter(store, rules, on_problem, worker_id=self._worker_id)
        self._may_compute = may_compute
        self._on_problem = on_problem
        # The name and contents of the part that was read last.
        self._part: tuple[str, SummaryPart] | None = None
        # The version of this worker's report, as last written.
        self._report_version: str | None = None
        self._conflicts = 0
        # The store's clock minus this process's wall clock.
        self.clock_offset = 0.0
        # Whether the last sync began to read all reports (only a sync that computes does), and whether it finished.
        self.is_reading_all = self.has_read_all = False

    async def sync(self, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        """Read and apply the summary, report, and compute the next summary if no other worker does.

        Raises:
            StoreFailed: the store failed; what was applied so far stays applied.
        """
        self._holder.sync_started(clock())
        self.is_reading_all, self.has_read_all = False, not self._may_compute
        reading = await self._store.read(SUMMARY_NAME)
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
                self._holder.apply(None, None, clock(), at=reading.at)
            elif part is not None or not head.part_count:
                self._holder.apply(head, part, clock(), at=reading.at)
        if self._conflicts > CONFLICTS_TOLERATED:
            sentence = (
                f"{_report_name(self._worker_id)}: another process writes it; give each process its own worker_id"
            )
            self._on_problem("duplicate", sentence)
        if self._holder.wants_to_report(head, clock()):
            await self._report(encode(self._holder.report(clock(), at=wall_clock() + self.clock_offset)))
        if self._may_compute and self._holder.may_compute(head, clock(), at=reading.at):
            await self._compute(head, reading.version, at=reading.at, clock=clock)

    async def _report(self, body: bytes) -> None:
        """Write this worker's report, and notice whether another process writes it too.

        If its version changed, another process uses the same `worker_id` and both would spend the same lease.
        """
        name = _report_name(self._worker_id)
        # Unknown if this write fails, because it may have succeeded.
        expected, self._report_version = self._report_version, None
        written = await self._store.write(name, body, expected=expected)
        if written.version is not None:
            self._conflicts = max(0, self._conflicts - 1)
        else:
            written = await self._store.write(name, body)
            self._conflicts = min(self._conflicts + CONFLICTS_TOLERATED, MAX_CONFLICTS)
        self._report_version = written.version

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

    async def _compute(self, head: Summary | None, version: str, *, at: float, clock: Callable[[], float]) -> None:
        self.is_reading_all = True
        summary = await self._writer.compute(head, version, at=at)
        self.has_read_all = True
        if summary is not None:
            self._holder.apply(summary, None, clock(), at=summary.computed_at)

    async def leave(self, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        """Report that this worker's leases are free.

        Raises:
            StoreFailed: the other workers will notice when its report is too old.
        """
        report = self._holder.report(clock(), at=wall_clock() + self.clock_offset, leaving=True)
        await self._store.write(_report_name(self._worker_id), encode(report))


class SummaryWriter:
    """Computes and writes summaries, one at a time, for a worker or for a process that does nothing else.

    Args:
        store: the store with the reports.
        rules: the parameters.
        on_problem: called with a reason and a sentence for each object that cannot be read.
        worker_id: the worker that computes; "" for none.
    """

    def __init__(
        self, store: CoordinationStore, rules: TableRules, on_problem: OnProblem, *, worker_id: str = ""
    ) -> None:
        self._store = store
        self._rules = rules
        self._on_problem = on_problem
        self._worker_id = worker_id
        # The last summary with parts that this object wrote: the next one needs no read of the parts.
        self._last: Summary | None = None

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
        until = at + interval
        claim = (
            Summary(generation=0, computed_at=0.0, began_at=0.0, claimed_until=until)
            if head is None
            else msgspec.structs.replace(head, claimed_until=until)
        )
        claimed = await store.write(SUMMARY_NAME, encode(claim), expected=version)
        if claimed.version is None:
            self._last = None
            return None
        previous = await self._with_parts(head)
        listing = await store.read_all(REPORT_PREFIX)
        gone: list[str] = []
        reports = _reports(
            listing.bodies,
            self._on_problem,
            gone,
            oldest=listing.at - (FORGOTTEN_INTERVALS + LIFETIME_INTERVALS) * interval,
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
        for number, part in enumerate(parts):
            await store.write(part_name(written_head, number), encode(part))
        written = await store.write(SUMMARY_NAME, encode(written_head), expected=claimed.version)
        if written.version is None:
            self._last = None
            return None
        self._last = summary if written_head.part_count else None
        await _remove_old(store, head, gone)
        return summary

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


async def _remove_old(store: CoordinationStore, head: Summary | None, gone: list[str]) -> None:
    """Delete the parts of the summary before the last one, and the reports of workers that are gone."""
    if head is not None and head.old_part_count:
        # Keep the parts of `head` itself: another worker may just have read `head` and be about to read its part.
        for number in range(head.old_part_count):
            await store.delete(f"{head.old_part_prefix}{number}.json")
    for worker_id in gone[:REMOVALS]:
        await store.delete(_report_name(worker_id))


def _report_name(worker_id: str) -> str:
    return f"{REPORT_PREFIX}{worker_id}.json"
