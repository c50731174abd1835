"""What the dashboard shows, made of totals: rates since the last look, and the busiest of what is many; pure."""

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

__all__ = ["Board", "MetricSample", "Totals"]

MOST_TENANTS: Final = 20
MOST_SHARDS: Final = 200


class MetricSample(NamedTuple):
    """One value of `/metrics`."""

    name: str
    labels: Mapping[str, str]
    value: float


class Totals(NamedTuple):
    """What a gateway has counted since it began: the document of `/v1/stats`, and its metrics."""

    stats: Mapping[str, Any]
    samples: Iterable[MetricSample]


class Board:
    """Remembers the totals of the last look, so that what it shows is what happens now."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        self._looked_at: float | None = None
        self._elapsed = 0.0

    def look(self, totals: Totals, now: float) -> dict[str, Any]:
        """Return the document of one event; the first one's rates are 0."""
        # What a clock that stands still would divide by.
        self._elapsed = 0.0 if self._looked_at is None else max(now - self._looked_at, 1e-3)
        self._looked_at = now
        before, self._before = self._before, {}
        stats, samples = totals.stats, list(totals.samples)
        records, room = stats["records"], stats["room"]
        return {
            "state": stats["state"],
            "now": {
                "accepted": self._rate(before, "accepted", records["accepted"]),
                "delivered": self._rate(before, "delivered", records["delivered"]),
                "delivered_bytes": self._rate(before, "bytes", _sum(samples, "kinesis_producer_bytes_total")),
                "throttled": self._rate(before, "throttled", _sum(samples, "kinesis_producer_throttled_records_total")),
                "refused": self._rate(before, "refused", sum(stats["refusals"].values())),
            },
            "totals": {
                "accepted": records["accepted"],
                "delivered": records["delivered"],
                "failed": sum(records["failed"].values()),
                "spooled": records["spooled"],
                "dead_lettered": records["dead_lettered"],
                "buffered": records["buffered"],
            },
            "room": max(
                room["outstanding_records"] / room["max_records"], room["outstanding_bytes"] / room["max_bytes"]
            ),
            "answers": stats["answers"],
            "refusals": stats["refusals"],
            "shards": _shards(samples),
            "breakers": _open_breakers(stats["streams"]),
            "spool_bytes": _sum(samples, "kinesis_producer_spool_bytes"),
            "dead_letters": _sum(samples, "kinesis_producer_dlq_depth"),
            "tenants": self._tenants(before, stats["tenants"]),
        }

    def _rate(self, before: Mapping[str, float], name: str, total: float) -> float:
        self._before[name] = total
        if not self._elapsed:
            return 0.0
        # A total that falls belongs to a process that began anew.
        return max(0.0, total - before.get(name, total)) / self._elapsed

    def _tenants(self, before: Mapping[str, float], tenants: Mapping[str, Any]) -> list[dict[str, Any]]:
        rows = [
            {
                "id": tenant_id,
                "accepted": self._rate(before, f"tenant {tenant_id}", each["accepted_records"]),
                "waiting_records": each["waiting_records"],
                "waiting_bytes": each["waiting_bytes"],
                "refused": sum(each["refused"].values()),
            }
            for tenant_id, each in tenants.items()
        ]
        rows.sort(key=lambda row: (-row["waiting_bytes"], -row["accepted"], -row["refused"], row["id"]))
        return rows[:MOST_TENANTS]


def _sum(samples: Iterable[MetricSample], name: str) -> float:
    return sum(each.value for each in samples if each.name == name)


def _shards(samples: Iterable[MetricSample]) -> list[dict[str, Any]]:
    """Return the busiest shards, each with the share of its service limit, and of the limit it may use."""
    shards: dict[tuple[str, str], dict[str, Any]] = {}
    for name, field in (("kinesis_producer_shard_utilisation", "used"), ("kinesis_producer_shard_rate_limit", "limit")):
        for sample in samples:
            if sample.name == name:
                place = (sample.labels["stream"], sample.labels["shard"])
                row = shards.setdefault(place, {"stream": place[0], "shard": place[1], "used": 0.0, "limit": 1.0})
                row[field] = sample.value
    busiest = sorted(shards.values(), key=lambda row: -row["used"])[:MOST_SHARDS]
    return sorted(busiest, key=lambda row: (row["stream"], row["shard"]))


def _open_breakers(streams: Mapping[str, Any]) -> list[dict[str, str]]:
    return [
        {"stream": stream, "shard": shard or "whole stream", "state": state}
        for stream, each in sorted(streams.items())
        for shard, state in sorted(each["breakers"].items())
        if state != "closed"
    ]
