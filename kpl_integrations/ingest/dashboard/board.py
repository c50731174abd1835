"""The document of a dashboard event: what is lost, how late it is, which tenant causes it, which shard is hot. Pure."""

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final

import msgspec
from prometheus_client.samples import Sample

from kpl_integrations.gateway_figures import (
    SILENT_SECONDS,
    GatewayView,
    RateTracker,
    StatsDocument,
    StreamView,
    TenantStats,
    per_second,
    process_name,
)
from kpl_integrations.ingest.admission.refusals import REFUSALS
from kpl_integrations.ingest.readiness.parts import PartState

MOST_TENANTS: Final = 20
MOST_SHARDS: Final = 20
# Quantiles are those of so many updates, which are seconds.
WINDOW_UPDATES: Final = 10
_BYTES: Final = "kinesis_producer_bytes_total"
_THROTTLED: Final = "kinesis_producer_throttled_records_total"
_DELIVERY: Final = "kinesis_producer_delivery_seconds_bucket"
_USED: Final = "kinesis_producer_shard_utilisation"
_WAIT: Final = "kinesis_ingest_tenant_wait_seconds"
_LIMIT: Final = "kinesis_producer_shard_rate_limit"
_STATUSES: Final = {refusal.value: row.status for refusal, row in REFUSALS.items()}
_FIRST_SERVER_ERROR: Final = 500

_PART: Final = "kinesis_ingest_part"
# The worst first.
_STATES: Final = (PartState.FAILED, PartState.DEGRADED, PartState.OK)
_NO_PARTS: Final[Mapping[str, Any]] = MappingProxyType({})

_Shard = tuple[str, str]


class Board:
    """Turn successive totals of a gateway into event documents with rates."""

    def __init__(self) -> None:
        self._tracker = RateTracker()
        self._delivery = DeliveryQuantiles()
        self._delivered_bytes = 0.0
        self._throttled: dict[_Shard, float] = {}
        self._cpu_seconds: dict[str, float] = {}
        self._shed: dict[str, int] = {}
        self._updated_at: float | None = None

    def update(
        self,
        stats: StatsDocument,
        samples: Iterable[Sample],
        now: float,
        own_parts: Mapping[str, Any] = _NO_PARTS,
        *,
        is_current: bool = True,
    ) -> dict[str, Any]:
        """Return the document of one event; the rates of the first are 0.

        `samples` are the gateway's metrics, and `own_parts` the parts of this process as in `/readyz?verbose`. Both are
        old if they are not current.
        """
        samples = list(samples)
        seconds = 0.0 if self._updated_at is None else now - self._updated_at
        self._updated_at = now
        view = self._tracker.update(stats, now)
        throttled = self._throttled_per_second(samples, seconds)
        p50, p99 = self._delivery.update(samples)
        delivered_bytes, before = _sum(samples, _BYTES), self._delivered_bytes
        self._delivered_bytes = delivered_bytes
        records = stats.records
        waits = {each.labels["tenant"]: each.value for each in samples if each.name == _WAIT}
        return {
            "state": stats.state,
            "workers": len(stats.workers),
            "parts": [*_silent_processes(stats, is_current=is_current), *_parts(samples, own_parts)],
            "now": {
                "accepted": view.accepted_per_second,
                "delivered": view.delivered_per_second,
                "delivered_bytes": per_second(delivered_bytes, before, seconds),
                "throttled": sum(throttled.values()),
                "refused": sum(view.refusals_per_second.values()),
            },
            "totals": msgspec.structs.asdict(records) | {"failed": sum(records.failed.values())},
            "reasons": records.failed,
            "late": {"p50": p50, "p99": p99, "queue": max(waits.values(), default=0.0)},
            "room": stats.room.used_share,
            "room_bytes": stats.room.max_bytes,
            "answers": _answers(stats, view),
            "shards": _shards(samples, throttled),
            "shard_count": sum(each.name == _USED for each in samples),
            "breakers": _open_breakers(view.streams),
            "spool_bytes": _sum(samples, "kinesis_producer_spool_bytes"),
            "spool_failing": _sum(samples, "kinesis_producer_spool_failing"),
            "dead_letters": _sum(samples, "kinesis_producer_dlq_depth"),
            "tenants": self._tenants(stats, view, waits, seconds),
        }

    def _throttled_per_second(self, samples: Iterable[Sample], seconds: float) -> dict[_Shard, float]:
        totals = {_place(each): each.value for each in samples if each.name == _THROTTLED}
        before, self._throttled = self._throttled, totals
        return {shard: per_second(total, before.get(shard, 0.0), seconds) for shard, total in totals.items()}

    def _tenants(
        self, stats: StatsDocument, view: GatewayView, waits: Mapping[str, float], seconds: float
    ) -> list[dict[str, Any]]:
        """Return the tenants with the longest queues, each with its shares of rate, queue and measured CPU time.

        `waits` are the seconds for which the oldest record of each has waited. `shed_per_second` are the refusals with
        a status of 5xx: the tenant itself did nothing wrong.
        """
        shed = {name: _shed(each) for name, each in stats.tenants.items()}
        shed_before, self._shed = self._shed, shed
        totals = {name: each.cpu_seconds for name, each in stats.tenants.items()}
        before, self._cpu_seconds = self._cpu_seconds, totals
        cpu = {name: max(0.0, total - before.get(name, total)) for name, total in totals.items()}
        rate = sum(each.records_per_second for each in view.tenants)
        queue = sum(each.waiting_bytes for each in view.tenants)
        used = sum(cpu.values())
        rows: list[dict[str, Any]] = [
            {
                "id": each.tenant,
                "accepted": each.records_per_second,
                "rate_share": each.records_per_second / rate if rate else None,
                "waiting_records": each.waiting_records,
                "waiting_bytes": each.waiting_bytes,
                "wait": waits.get(each.tenant, 0.0),
                "queue_share": each.waiting_bytes / queue if queue else None,
                "cpu_share": cpu[each.tenant] / used if used else None,
                "refused_per_second": each.refused_per_second,
                "shed_per_second": per_second(shed[each.tenant], shed_before.get(each.tenant, 0), seconds),
                "refused": sum(stats.tenants[each.tenant].refused.values()),
            }
            for each in view.tenants
        ]
        rows.sort(key=lambda row: (-row["waiting_bytes"], -row["accepted"], -row["refused"], row["id"]))
        return rows[:MOST_TENANTS]


class DeliveryQuantiles:
    """The time from put to acknowledgement over the last updates, from the counts of a histogram.

    A quantile is interpolated in its bucket, as Prometheus does. Above the last bound it is that bound.
    """

    def __init__(self) -> None:
        # The cumulative counts by upper bound at each update, oldest first.
        self._seen: deque[dict[float, float]] = deque(maxlen=WINDOW_UPDATES + 1)

    def update(self, samples: Iterable[Sample]) -> tuple[float | None, float | None]:
        """Return p50 and p99 in seconds; None if nothing was delivered since the oldest update."""
        counts: Counter[float] = Counter()
        for each in samples:
            if each.name == _DELIVERY:
                counts[float(each.labels["le"])] += each.value  # type: ignore[assignment] # a Counter of floats
        if self._seen and any(counts[bound] < count for bound, count in self._seen[-1].items()):
            # A restarted process counts from 0.
            self._seen.clear()
        self._seen.append(dict(counts))
        oldest = self._seen[0]
        recent = {bound: count - oldest.get(bound, 0.0) for bound, count in sorted(counts.items())}
        return _quantile(recent, 0.5), _quantile(recent, 0.99)


def _quantile(cumulative: Mapping[float, float], share: float) -> float | None:
    total = max(cumulative.values(), default=0.0)
    if total <= 0:
        return None
    rank = share * total
    bounds = [0.0, *cumulative]
    counts = [0.0, *cumulative.values()]
    for (low, below), (high, count) in itertools.pairwise(zip(bounds, counts, strict=True)):
        if count >= rank:
            return low if high == float("inf") else low + (high - low) * (rank - below) / (count - below)
    return None


def _silent_processes(stats: StatsDocument, *, is_current: bool) -> list[dict[str, Any]]:
    """Return a failed part for each process that hangs, because what is shown of it is no longer known."""
    if not is_current:
        action = (
            "take a stack of the main process, which started the workers (`py-spy dump --pid PID`), kill it, and start "
            "the gateway again: its workers stop in order without it"
        )
        return [_silent("supervisor", None, "it does not answer, and all figures are old", action)]
    return [
        _silent(
            process_name(worker, each.drains),
            each.silent_seconds,
            f"process {each.process_id} does not answer, and its figures are old",
            f"take a stack (`py-spy dump --pid {each.process_id}`) and kill it: another one takes its place",
        )
        for worker, each in stats.workers.items()
        if each.silent_seconds > SILENT_SECONDS
    ]


def _silent(part: str, seconds: float | None, detail: str, action: str) -> dict[str, Any]:
    state = PartState.FAILED.value
    return {"part": part, "state": state, "processes": None, "seconds": seconds, "detail": detail, "action": action}


def _parts(samples: Iterable[Sample], own: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the configured parts, each with its worst state in any process; the worst part first.

    What is wrong is known of this process only. A part that is worse in another one has no detail.
    """
    counts = {(each.labels["part"], each.labels["state"]): each.value for each in samples if each.name == _PART}
    rows = []
    for part in dict.fromkeys(part for part, _ in counts):
        state = next((state for state in _STATES if counts.get((part, state))), None)
        if state is None:
            continue
        known = own.get(part, {})
        is_known = known.get("state") == state
        rows.append(
            {
                "part": part,
                "state": state.value,
                "processes": int(counts[part, state]),
                "seconds": known["seconds"] if is_known else None,
                "detail": known["detail"] if is_known else "",
                "action": known["action"] if is_known else "",
            }
        )
    return sorted(rows, key=lambda row: [each.value for each in _STATES].index(row["state"]))


def _answers(stats: StatsDocument, view: GatewayView) -> list[dict[str, Any]]:
    """Return the answered statuses, each with the reasons of its refusals.

    The Kinesis API answers refusals with other statuses, 200 for PutRecords. `within` is how many of them did so.
    """
    rows = []
    refused = {reason: _STATUSES[reason] for reason in stats.refusals if reason in _STATUSES}
    for status in sorted({*map(int, stats.answers), *refused.values()}):
        count, rate = stats.answers.get(str(status), 0), view.answers_per_second.get(str(status), 0.0)
        reasons = sorted((each for each in refused if refused[each] == status), key=lambda each: -stats.refusals[each])
        within = sum(stats.refusals[each] for each in reasons) - count
        within_rate = sum(view.refusals_per_second[each] for each in reasons) - rate
        rows.append(
            {
                "status": status,
                "phrase": HTTPStatus(status).phrase,
                "count": count,
                "per_second": rate,
                "within": {"count": within, "per_second": max(0.0, within_rate)} if reasons and within > 0 else None,
                "refusals": [
                    {"reason": each, "count": stats.refusals[each], "per_second": view.refusals_per_second[each]}
                    for each in reasons
                ],
            }
        )
    return [row for row in rows if row["count"] or row["within"]]


def _shards(samples: Iterable[Sample], throttled: Mapping[_Shard, float]) -> list[dict[str, Any]]:
    """Return the hottest shards: the used share of the service limit, and the share that the adaptive rate allows."""
    used = {_place(each): each.value for each in samples if each.name == _USED}
    limits = {_place(each): each.value for each in samples if each.name == _LIMIT}
    places = sorted({*used, *limits}, key=lambda place: (-used.get(place, 0.0), -throttled.get(place, 0.0), place))
    return [
        {
            "stream": place[0],
            "shard": place[1],
            "used": used.get(place, 0.0),
            "limit": limits.get(place, 1.0),
            "throttled": throttled.get(place, 0.0),
        }
        for place in places[:MOST_SHARDS]
    ]


def _open_breakers(streams: Iterable[StreamView]) -> list[dict[str, str]]:
    return [
        {"stream": each.stream, "shard": shard or "whole stream", "state": state}
        for each in streams
        for shard, state in sorted(each.breakers.items())
    ]


def _shed(tenant: TenantStats) -> int:
    return sum(count for reason, count in tenant.refused.items() if _STATUSES.get(reason, 0) >= _FIRST_SERVER_ERROR)


def _place(sample: Sample) -> _Shard:
    return sample.labels["stream"], sample.labels["shard"]


def _sum(samples: Iterable[Sample], name: str) -> float:
    return sum(each.value for each in samples if each.name == name)
