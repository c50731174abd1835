"""One meeting of a worker with the others, at the store: read, apply_shares, report, and now and then compute.

Leaderless: whoever finds the summary old enough claims the next one by a conditional write,
reads all reports and writes the summary under the condition that its claim still stands. One
that is overtaken writes nothing. So all workers together read each report about once an
interval, however many there are, and there is no driver to die.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec

from kpl_core.coordination.lease_table import LIFETIME_INTERVALS, TableRules, next_summary
from kpl_core.coordination.leaseholder import Leaseholder
from kpl_core.coordination.store import CoordinationStore
from kpl_core.coordination.store_objects import (
    Summary,
    SummaryPart,
    UnreadableObject,
    WorkerReport,
    decode_part,
    decode_report,
    decode_summary,
    encode,
    part_name,
    part_of,
    part_prefix,
    split,
)

__all__ = ["REPORT_PREFIX", "SUMMARY_NAME", "LeaseSync", "compute"]

SUMMARY_NAME: Final = "leases.json"
REPORT_PREFIX: Final = "report-"
# Reports of workers gone for so long are removed, so many at a time.
FORGOTTEN_INTERVALS: Final = 20.0
REMOVALS: Final = 50
# Once somebody else may have tidied up, twice there is another worker of this name; and it is there until the own
# object stayed as it was a few times in a row.
SUSPICIOUS: Final = 2
MOST_SUSPICION: Final = 6

OnProblem = Callable[[str, str], None]


class LeaseSync:
    """Speaks for one leaseholder. `on_problem(reason, sentence)` hears of objects that cannot be read."""

    def __init__(
        self,
        store: CoordinationStore,
        holder: Leaseholder,
        rules: TableRules,
        *,
        worker_id: str,
        may_compute: bool,
        on_problem: OnProblem,
    ) -> None:
        self._store = store
        self._holder = holder
        self._rules = rules
        self._worker_id = worker_id
        self._may_compute = may_compute
        self._on_problem = on_problem
        # Of the own object, as last written.
        self._report_version: str | None = None
        self._suspicion = 0
        # The store's clock less this process' wall clock.
        self.clock_offset = 0.0
        # Whether the last meeting looked at everybody's objects, as only who computes does; and came to the end of it.
        self.is_reading_all = self.has_read_all = False

    async def sync(self, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        """Read the summary and obey it, report, and compute the next summary if nobody else did.

        Raises:
            StoreFailed: it could not be done; what was obeyed so far stays.
        """
        self._holder.sync_started(clock())
        self.is_reading_all, self.has_read_all = False, not self._may_compute
        reading = await self._store.read(SUMMARY_NAME)
        self.clock_offset = reading.at - wall_clock()
        try:
            head = None if reading.body is None else decode_summary(reading.body)
            part = await self._own_part(head)
        except UnreadableObject as error:
            self._on_problem(error.reason, f"{SUMMARY_NAME}: {error}")
            if error.reason == "version":
                # Somebody newer speaks to his like. Writing over it would stop them.
                return
            head = None
        else:
            if head is None or not head.generation:
                self._holder.apply(None, None, clock(), at=reading.at)
            elif part is not None or not head.part_count:
                self._holder.apply(head, part, clock(), at=reading.at)
        if self._suspicion > SUSPICIOUS:
            sentence = f"{_report_name(self._worker_id)}: another process writes it; give each a worker_id of its own"
            self._on_problem("duplicate", sentence)
        if self._holder.wants_to_report(clock()):
            await self._report(encode(self._holder.report(clock(), at=wall_clock() + self.clock_offset)))
        if self._may_compute and self._holder.may_compute(head, at=reading.at):
            await self._compute(head, reading.version, at=reading.at, clock=clock)

    async def _report(self, body: bytes) -> None:
        """Write the own object; grow suspicious if somebody writes it too, who would hold the same lease once more."""
        name = _report_name(self._worker_id)
        # Unknown again if this fails: it may have been written.
        expected, self._report_version = self._report_version, None
        written = await self._store.write(name, body, expected=expected)
        if written.version is not None:
            self._suspicion = max(0, self._suspicion - 1)
        else:
            written = await self._store.write(name, body)
            self._suspicion = min(self._suspicion + SUSPICIOUS, MOST_SUSPICION)
        self._report_version = written.version

    async def _own_part(self, head: Summary | None) -> SummaryPart | None:
        if head is None or not head.part_count:
            return None
        reading = await self._store.read(part_name(head, part_of(self._worker_id, head.part_count)))
        # Gone already: there is a newer head, to be read at the next meeting.
        return None if reading.body is None else decode_part(reading.body)

    async def _compute(self, head: Summary | None, version: str, *, at: float, clock: Callable[[], float]) -> None:
        self.is_reading_all = True
        summary = await compute(self._store, head, version, self._rules, at=at, on_problem=self._on_problem)
        self.has_read_all = True
        if summary is not None:
            self._holder.apply(summary, None, clock(), at=summary.computed_at)

    async def leave(self, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        """Tell the others that this worker's leases are free.

        Raises:
            StoreFailed: they will find out when its report is too old.
        """
        report = self._holder.report(clock(), at=wall_clock() + self.clock_offset, leaving=True)
        await self._store.write(_report_name(self._worker_id), encode(report))


async def compute(
    store: CoordinationStore,
    head: Summary | None,
    version: str,
    rules: TableRules,
    *,
    at: float,
    on_problem: OnProblem,
) -> Summary | None:
    """Compute and write the summary that follows `head`; None: somebody else does, or did.

    Args:
        store: where the reports are.
        head: the latest summary, None if there is none that can be read.
        version: of the object `head` came from.
        rules: intervals and bounds.
        at: the store's clock.
        on_problem: hears of reports that cannot be read.

    Raises:
        StoreFailed: it could not be done.
    """
    until = at + rules.interval_seconds
    claim = (
        Summary(generation=0, computed_at=0.0, began_at=0.0, claimed_until=until)
        if head is None
        else msgspec.structs.replace(head, claimed_until=until)
    )
    claimed = await store.write(SUMMARY_NAME, encode(claim), expected=version)
    if claimed.version is None:
        return None
    listing = await store.read_all(REPORT_PREFIX)
    previous = await _whole(store, head, on_problem)
    oldest = listing.at - (FORGOTTEN_INTERVALS + LIFETIME_INTERVALS) * rules.interval_seconds
    gone: list[str] = []
    reports = _reports(listing.bodies, on_problem, gone, oldest=oldest)
    summary = next_summary(previous, reports, rules, at=listing.at)
    # The version of the claim is nobody else's, so no parts are written over by one who is overtaken.
    summary.token = f"{zlib.crc32(claimed.version.encode()):08x}"
    written_head, parts = split(summary, after=head)
    for number, part in enumerate(parts):
        await store.write(part_name(written_head, number), encode(part))
    written = await store.write(SUMMARY_NAME, encode(written_head), expected=claimed.version)
    if written.version is None:
        return None
    await _remove_old(store, head, gone)
    return summary


def _reports(
    bodies: Mapping[str, bytes], on_problem: OnProblem, gone: list[str], *, oldest: float
) -> Iterator[WorkerReport]:
    """Read one report after the other; add to `gone` who left, or wrote none since `oldest`."""
    for name, body in bodies.items():
        try:
            report = decode_report(body)
        except UnreadableObject as error:
            on_problem(error.reason, f"{name}: {error}")
            continue
        if report.leaving or report.written_at < oldest:
            gone.append(report.worker_id)
        yield report


async def _whole(store: CoordinationStore, head: Summary | None, on_problem: OnProblem) -> Summary | None:
    """Return the summary with all its parts; None if one is missing: then the reports say what is held."""
    if head is None or not head.generation:
        return None
    if not head.part_count:
        return head
    listing = await store.read_all(part_prefix(head.generation, head.token))
    try:
        parts = [decode_part(body) for body in listing.bodies.values()]
    except UnreadableObject as error:
        on_problem(error.reason, f"a part of {SUMMARY_NAME}: {error}")
        return None
    if len(parts) < head.part_count:
        return None
    members = {worker_id: member for part in parts for worker_id, member in part.members.items()}
    return msgspec.structs.replace(head, members=members, resources=parts[0].resources(), part_count=0)


async def _remove_old(store: CoordinationStore, head: Summary | None, gone: list[str]) -> None:
    """Remove the parts of the summary before the last, and reports of workers long gone."""
    if head is not None and head.old_part_count:
        # Not the parts of `head` itself: somebody may just have read it, and look for his part.
        for number in range(head.old_part_count):
            await store.delete(f"{head.old_part_prefix}{number}.json")
    for worker_id in gone[:REMOVALS]:
        await store.delete(_report_name(worker_id))


def _report_name(worker_id: str) -> str:
    return f"{REPORT_PREFIX}{worker_id}.json"
