"""What `kpl top` shows: two looks at a gateway make rates; pure."""

from collections import deque
from typing import Final

import msgspec

from kpl_integrations.cli.top.gateway_stats import GatewayStats
from kpl_integrations.gateway_figures import RecordStats, Room, StreamStats, TenantStats

__all__ = ["GatewayView", "StreamView", "TenantView", "Watch"]

# Of what the sparkline shows, one value for each look.
_LOOKS: Final = 60


class TenantView(msgspec.Struct, frozen=True):
    """One tenant: rates are a second's."""

    tenant: str
    requests_per_second: float
    records_per_second: float
    refused_per_second: float
    waiting_records: int
    waiting_bytes: int


class StreamView(msgspec.Struct, frozen=True):
    """One stream: rates are a second's. `breakers` that are not closed, by shard; "" is the whole stream's."""

    stream: str
    accepted_per_second: float
    delivered_per_second: float
    failed: int
    waiting: int
    in_flight: int
    buffered: int
    breakers: dict[str, str]


class GatewayView(msgspec.Struct, frozen=True):
    """One look; rates are those since the look before, 0 at the first. Tenants stand busiest first."""

    url: str
    state: str
    accepted_per_second: float
    delivered_per_second: float
    failed_per_second: float
    answers_per_second: dict[str, float]
    refusals_per_second: dict[str, float]
    records: RecordStats | None
    room: Room | None
    streams: list[StreamView]
    tenants: list[TenantView]
    delivered_history: list[float]


class Watch:
    """Remembers the look before."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._before: GatewayStats | None = None
        self._looked_at = 0.0
        self._history: deque[float] = deque(maxlen=_LOOKS)

    def look(self, stats: GatewayStats, now: float) -> GatewayView:
        """Return what `stats`, asked for at the monotonic instant `now`, shows beside those before."""
        before = self._before
        rate = _Rate(now - self._looked_at if before is not None else 0.0)
        before = before or stats
        self._before, self._looked_at = stats, now
        records, known = stats.records or RecordStats(), before.records or RecordStats()
        delivered = rate(records.delivered, known.delivered)
        if rate.is_known:
            self._history.append(delivered)
        tenants = [
            _tenant(name, tenant, before.tenants.get(name, TenantStats()), rate)
            for name, tenant in stats.tenants.items()
        ]
        return GatewayView(
            url=self._url,
            state=stats.state,
            accepted_per_second=rate(records.accepted, known.accepted),
            delivered_per_second=delivered,
            failed_per_second=rate(sum(records.failed.values()), sum(known.failed.values())),
            answers_per_second={
                code: rate(count, before.answers.get(code, 0)) for code, count in sorted(stats.answers.items())
            },
            refusals_per_second={
                reason: rate(count, before.refusals.get(reason, 0)) for reason, count in sorted(stats.refusals.items())
            },
            records=stats.records,
            room=stats.room,
            streams=[
                _stream(name, stream, before.streams.get(name, StreamStats()), rate)
                for name, stream in sorted(stats.streams.items())
            ],
            tenants=sorted(
                tenants, key=lambda each: (-each.waiting_bytes, -each.records_per_second, -each.requests_per_second)
            ),
            delivered_history=list(self._history),
        )


class _Rate:
    """Makes a rate of two counts; a gateway that was started anew counts from 0 again."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.is_known = seconds > 0

    def __call__(self, now: int, before: int) -> float:
        if not self.is_known:
            return 0.0
        return round((now - before if now >= before else now) / self._seconds, 1)


def _tenant(name: str, now: TenantStats, before: TenantStats, rate: _Rate) -> TenantView:
    return TenantView(
        tenant=name,
        requests_per_second=rate(now.requests, before.requests),
        records_per_second=rate(now.accepted_records, before.accepted_records),
        refused_per_second=rate(sum(now.refused.values()), sum(before.refused.values())),
        waiting_records=now.waiting_records,
        waiting_bytes=now.waiting_bytes,
    )


def _stream(name: str, now: StreamStats, before: StreamStats, rate: _Rate) -> StreamView:
    return StreamView(
        stream=name,
        accepted_per_second=rate(now.accepted, before.accepted),
        delivered_per_second=rate(now.delivered, before.delivered),
        failed=now.failed,
        waiting=now.waiting,
        in_flight=now.in_flight,
        buffered=now.buffered,
        breakers={shard: state for shard, state in now.breakers.items() if state != "closed"},
    )
