"""The sum over all workers: what the living ones report now, and what the ended ones reported last. Pure.

Counters and histograms add up, those of dead workers included, so they never fall. Gauges come from living workers
only; most add up, and `_GAUGES` lists the others.

Of a dead worker the counters in shared memory (`record_counts.py`) are exact, and its last report is older. So the
supervisor adds to that report what the counters added since. Acknowledged records without a known result are lost.
The others are in the worker's files. The process that replaces it opens them and counts what it finds as accepted. Of
what it does not find, Kinesis has as many as the counters say were delivered from there after the last report. The rest
is lost: the file was removed, replaced, or on a disk that is gone. So every record has one place:

    accepted = delivered + failed + spooled + dead_lettered + buffered + lost
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, Final

import msgspec
from prometheus_client.metrics_core import GaugeMetricFamily, Metric as Family
from prometheus_client.samples import Sample

from kpl_integrations.gateway_figures import RecordStats, StatsDocument, StreamStats, WorkerStats
from kpl_integrations.ingest.stats import GatewayTotals
from kpl_integrations.ingest.workers.record_counts import Counts
from kpl_integrations.metrics.catalogue import METRICS

_ACCEPTED: Final = "kinesis_producer_accepted_records"
_WAITING_TENANTS: Final = "kinesis_ingest_waiting_tenants"
_OPEN: Final = "kinesis_ingest_open"
_SILENT: Final = "kinesis_ingest_worker_silent_seconds"
_COUNTERS: Final = frozenset({"counter", "histogram", "summary"})
# Gauges whose sum would mean nothing: the worst value counts.
_GAUGES: Final[Mapping[str, Callable[[float, float], float]]] = {
    "kinesis_producer_breaker_state": max,
    "kinesis_ingest_tenant_wait_seconds": max,
    "kinesis_coordinator_lease_age_seconds": max,
    "kinesis_producer_shard_rate_limit": min,
    "kinesis_ingest_certificate_days_left": min,
    _OPEN: min,
}
# The reason of records that failed after the last report of a dead worker, which would have named it.
_NOT_REPORTED: Final = "NotReported"
# From the least to the most open. The gateway is as open as its least open worker.
_STATES: Final = ("closed", "draining", "open")


class WorkerTotals(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one worker process; `inherited` records were in its files when it started.

    `counts` are the counters in shared memory at the same instant. The supervisor notes the age of the report. `drains`
    is the orphaned spool of a process that takes no requests.
    """

    worker: int
    process_id: int
    inherited: int
    age_seconds: float = 0.0
    counts: Counts = Counts()
    drains: str = ""
    stats: StatsDocument
    families: list[Family]


class _DeadWorker(msgspec.Struct):
    """All dead processes of one worker number: what they lost, and what the last one left in its files."""

    deaths: int = 0
    # Acknowledged records that were nowhere when their process died.
    lost: int = 0
    in_files: int = 0
    # The counters at the last report that a dead process sent.
    reported: Counts = Counts()
    # How many of `in_files` the dead processes delivered after that report. Their rows may be in the files still.
    stored_later: int = 0
    # Records that an earlier process left in its files and the next one did not find: Kinesis has them, or nothing has.
    left_stored: int = 0
    left_lost: int = 0

    def missing(self, inherited: int) -> tuple[int, int]:
        """Return how many of `in_files` are not among the `inherited` ones: those that Kinesis has, and lost ones."""
        missing = max(0, self.in_files - inherited)
        stored = min(missing, self.stored_later)
        return stored, missing - stored

    def settle(self, inherited: int) -> None:
        """Keep what `missing` returns: the process that found the `inherited` records has ended too."""
        stored, gone = self.missing(inherited)
        self.left_stored += stored
        self.left_lost += gone
        self.in_files = self.stored_later = 0

    def places(self, inherited: int | None) -> RecordStats:
        """Return where the records are; `inherited` is what the living process found, None without its report."""
        lost = self.lost + self.left_lost
        if inherited is None:
            return RecordStats(spooled=self.in_files, delivered=self.left_stored, lost=lost)
        stored, gone = self.missing(inherited)
        return RecordStats(delivered=self.left_stored + stored, lost=lost + gone)


class DeadTotals:
    """The totals of all dead workers: the last report of each, and what its counters gained after that.

    Those of drainers that ended in order are included.
    """

    def __init__(self) -> None:
        self.workers: dict[int, _DeadWorker] = {}
        self.stats = StatsDocument(state="closed")
        self.families: list[Family] = []

    def add(self, worker: int, last: WorkerTotals | None, counts: Counts) -> int:
        """Count one death, and return how many acknowledged records it lost.

        `last` is the process's last report, None if it never sent one. `counts` are the worker's counters.
        """
        dead = self.workers.setdefault(worker, _DeadWorker())
        dead.deaths += 1
        lost, dead.lost = counts.open - dead.lost, counts.open
        if last is None:
            dead.stored_later = counts.since(dead.reported).stored_later
            return lost
        dead.settle(last.inherited)
        late = counts.since(last.counts)
        dead.reported, dead.stored_later = last.counts, late.stored_later
        records = last.stats.records
        failed = records.failed | ({_NOT_REPORTED: late.reported} if late.reported else {})
        finished = RecordStats(delivered=records.delivered + late.stored, failed=failed)
        dead.in_files = max(0, records.accepted + late.acknowledged - _places_of(finished) - lost)
        self._keep(last, finished)
        return lost

    def add_ended(self, last: WorkerTotals) -> None:
        """Keep the counts of a process that ended in order and is not replaced: its last report is final."""
        if dead := self.workers.get(last.worker):
            dead.settle(last.inherited)
        self._keep(last, last.stats.records)

    def _keep(self, last: WorkerTotals, records: RecordStats) -> None:
        self.stats = _added(self.stats, _counters_of(last.stats, records))
        self.families = _merged([*self.families, *(each for each in last.families if each.type in _COUNTERS)])

    def missing(self, first: WorkerTotals) -> int:
        """Return how many records are lost because the process that sends its first report did not find them."""
        dead = self.workers.get(first.worker)
        return 0 if dead is None else dead.missing(first.inherited)[1]

    def places(self, living: Sequence[WorkerTotals]) -> RecordStats:
        """Return where the records of dead workers are that their last reports had not as finished."""
        inherited = {each.worker: each.inherited for each in living}
        places = (each.places(inherited.get(worker)) for worker, each in self.workers.items())
        return reduce(_added, places, RecordStats())


def sum_of(living: Sequence[WorkerTotals], dead: DeadTotals) -> GatewayTotals:
    """Return the sum over all workers; `living` has at most one report for each worker."""
    stats: StatsDocument = reduce(_added, (each.stats for each in living), dead.stats)
    records = _added(stats.records, dead.places(living))
    states = (each.stats.state for each in living if not each.drains)
    stats = msgspec.structs.replace(
        stats,
        state=min(states, key=_STATES.index, default="closed"),
        records=msgspec.structs.replace(records, accepted=_places_of(records)),
        answers=dict(sorted(stats.answers.items())),
        refusals=dict(sorted(stats.refusals.items())),
        workers={
            str(each.worker): WorkerStats(
                process_id=each.process_id,
                state=each.stats.state,
                drains=each.drains,
                silent_seconds=round(each.age_seconds, 1),
                deaths=dead.workers.get(each.worker, _DeadWorker()).deaths,
                accepted=each.stats.records.accepted,
                requests=sum(each.stats.answers.values()),
            )
            for each in sorted(living, key=lambda each: each.worker)
        },
    )
    return GatewayTotals(stats, _families(living, dead, stats))


def _places_of(records: RecordStats) -> int:
    """Return how many records have a place: all that were accepted."""
    finished = records.delivered + sum(records.failed.values())
    return finished + records.spooled + records.dead_lettered + records.buffered + records.lost


def _counters_of(stats: StatsDocument, records: RecordStats) -> StatsDocument:
    """Return the part of an ended worker's statistics that stays in the sum; `records` replace those of its report."""
    return StatsDocument(
        state="closed",
        records=records,
        answers=stats.answers,
        refusals=stats.refusals,
        tenants={
            tenant: msgspec.structs.replace(each, waiting_records=0, waiting_bytes=0)
            for tenant, each in stats.tenants.items()
        },
        streams={
            stream: StreamStats(accepted=each.accepted, delivered=each.delivered, failed=each.failed)
            for stream, each in stats.streams.items()
        },
    )


def _added(one: Any, other: Any) -> Any:  # noqa: ANN401 - numbers, or structs and dictionaries of them
    """Return the sum of two numbers, or of two structs or dictionaries of numbers, member by member."""
    if isinstance(one, dict):
        return one | {key: _added(one[key], value) if key in one else value for key, value in other.items()}
    if isinstance(one, msgspec.Struct):
        names = one.__struct_fields__
        return type(one)(**{name: _added(getattr(one, name), getattr(other, name)) for name in names})
    if isinstance(one, str):
        # A breaker's state: closed only if it is closed in each worker.
        return other if one == "closed" else one
    return one + other


def _families(living: Sequence[WorkerTotals], dead: DeadTotals, stats: StatsDocument) -> list[Family]:
    # A worker that only drains an orphaned spool does not decide whether the gateway is open.
    reported = (family for each in living for family in each.families if not each.drains or family.name != _OPEN)
    families = _merged([*dead.families, *reported])
    # These two are no sums: the records of a dead worker's spool, or a tenant at two workers, would count twice.
    exact = {
        _ACCEPTED: stats.records.accepted,
        _WAITING_TENANTS: sum(each.waiting_records > 0 for each in stats.tenants.values()),
    }
    for family in families:
        if family.name in exact:
            family.samples = [each._replace(value=exact[family.name]) for each in family.samples]
    own = {"kinesis_ingest_workers": len(stats.workers), "kinesis_ingest_lost_records": stats.records.lost}
    silent = GaugeMetricFamily(_SILENT, METRICS[_SILENT].meaning, labels=METRICS[_SILENT].labels)
    for number, worker in stats.workers.items():
        silent.add_metric([number], worker.silent_seconds)
    return [*families, *(GaugeMetricFamily(name, METRICS[name].meaning, value) for name, value in own.items()), silent]


def _merged(families: Iterable[Family]) -> list[Family]:
    """Return each metric once, with the values of the same name and labels combined."""
    merged: dict[str, Family] = {}
    values: dict[str, dict[tuple[str, frozenset[tuple[str, str]]], Sample]] = {}
    for family in families:
        merged.setdefault(family.name, Family(family.name, family.documentation, family.type))
        samples = values.setdefault(family.name, {})
        combine = operator.add if family.type in _COUNTERS else _GAUGES.get(family.name, operator.add)
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            if key in samples:
                combine_two = min if sample.name.endswith("_created") else combine
                samples[key] = sample._replace(value=combine_two(samples[key].value, sample.value))
            else:
                samples[key] = sample
    for name, family in merged.items():
        family.samples = list(values[name].values())
    return list(merged.values())


def encode(message: WorkerTotals | GatewayTotals) -> bytes:
    """Return a report or a sum as one line of JSON."""
    return msgspec.json.encode(message, enc_hook=_plain_family)


def _plain_family(family: Family) -> object:
    samples = [(each.name, each.labels, each.value) for each in family.samples]
    return family.name, family.documentation, family.type, samples


def _family(_: type, plain: Any) -> Family:  # noqa: ANN401 - decoded JSON
    name, documentation, kind, samples = plain
    family = Family(name, documentation, kind)
    for sample in samples:
        family.add_sample(*sample)
    return family


decode_report: Final = msgspec.json.Decoder(WorkerTotals, dec_hook=_family).decode
decode_totals: Final = msgspec.json.Decoder(GatewayTotals, dec_hook=_family).decode
