"""The document of a dashboard event: the figures of a gateway, its rates, and its busiest tenants and shards. Pure."""

from collections.abc import Iterable
from typing import Any, Final

import msgspec
from prometheus_client.samples import Sample

from kpl_integrations.gateway_figures import GatewayView, RateTracker, StatsDocument, StreamView, per_second

MOST_TENANTS: Final = 20
MOST_SHARDS: Final = 200
_BYTES: Final = "kinesis_producer_bytes_total"
_THROTTLED: Final = "kinesis_producer_throttled_records_total"


class Board:
    """Turn successive totals of a gateway into event documents with rates."""

    def __init__(self) -> None:
        self._tracker = RateTracker()
        self._before: dict[str, float] = {}
        self._updated_at: float | None = None

    def update(self, stats: StatsDocument, samples: Iterable[Sample], now: float) -> dict[str, Any]:
        """Return the document of one event; the rates of the first are 0. `samples` are the gateway's metrics."""
        samples = list(samples)
        view = self._tracker.update(stats, now)
        metric_rates = self._metric_rates({name: _sum(samples, name) for name in (_BYTES, _THROTTLED)}, now)
        records = stats.records
        return {
            "state": stats.state,
            "now": {
                "accepted": view.accepted_per_second,
                "delivered": view.delivered_per_second,
                "delivered_bytes": metric_rates[_BYTES],
                "throttled": metric_rates[_THROTTLED],
                "refused": sum(view.refusals_per_second.values()),
            },
            "totals": msgspec.structs.asdict(records) | {"failed": sum(records.failed.values())},
            "room": stats.room.used_share,
            "answers": stats.answers,
            "refusals": stats.refusals,
            "shards": _shards(samples),
            "breakers": _open_breakers(view.streams),
            "spool_bytes": _sum(samples, "kinesis_producer_spool_bytes"),
            "dead_letters": _sum(samples, "kinesis_producer_dlq_depth"),
            "tenants": _tenants(stats, view),
        }

    def _metric_rates(self, totals: dict[str, float], now: float) -> dict[str, float]:
        seconds = 0.0 if self._updated_at is None else now - self._updated_at
        before, self._before, self._updated_at = self._before, totals, now
        return {name: per_second(total, before.get(name, total), seconds) for name, total in totals.items()}


def _tenants(stats: StatsDocument, view: GatewayView) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {
            "id": each.tenant,
            "accepted": each.records_per_second,
            "waiting_records": each.waiting_records,
            "waiting_bytes": each.waiting_bytes,
            "refused": sum(stats.tenants[each.tenant].refused.values()),
        }
        for each in view.tenants
    ]
    rows.sort(key=lambda row: (-row["waiting_bytes"], -row["accepted"], -row["refused"], row["id"]))
    return rows[:MOST_TENANTS]


def _sum(samples: Iterable[Sample], name: str) -> float:
    return sum(each.value for each in samples if each.name == name)


def _shards(samples: Iterable[Sample]) -> list[dict[str, Any]]:
    """Return the busiest shards, each with the used share of its service limit and of the limit that it may use."""
    shards: dict[tuple[str, str], dict[str, Any]] = {}
    for name, field in (("kinesis_producer_shard_utilisation", "used"), ("kinesis_producer_shard_rate_limit", "limit")):
        for sample in samples:
            if sample.name == name:
                place = (sample.labels["stream"], sample.labels["shard"])
                row = shards.setdefault(place, {"stream": place[0], "shard": place[1], "used": 0.0, "limit": 1.0})
                row[field] = sample.value
    busiest = sorted(shards.values(), key=lambda row: -row["used"])[:MOST_SHARDS]
    return sorted(busiest, key=lambda row: (row["stream"], row["shard"]))


def _open_breakers(streams: Iterable[StreamView]) -> list[dict[str, str]]:
    return [
        {"stream": each.stream, "shard": shard or "whole stream", "state": state}
        for each in streams
        for shard, state in sorted(each.breakers.items())
    ]
