"""The figures of a gateway: one definition for `/v1/stats`, the dashboard and `kpl top`, which reads it over HTTP.

Units: counts are user records since the start unless a name says otherwise, sizes are bytes, and rates are per
second. `RateTracker` turns two successive documents into rates. Pure: `now` is in seconds on a monotonic clock.
"""

from collections import deque
from typing import Final

import msgspec

# A worker whose last report is older hangs.
SILENT_SECONDS: Final = 10.0
_MOST_TENANTS: Final = 1_000
# The length of the sparkline, in updates.
_MOST_HISTORY: Final = 60


def process_name(worker: int | str, drains: str) -> str:
    """Return what logs and the dashboard call a process: "worker 2" or "the drainer of spool-2.db"."""
    return f"the drainer of {drains}" if drains else f"worker {worker}"


class TenantStats(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant: its requests, its accepted records, and its records that wait in the fair queue.

    `cpu_seconds` is measured only while CPU time is short, that is, while the event loop has a standing delay.
    """

    requests: int = 0
    accepted_records: int = 0
    waiting_records: int = 0
    waiting_bytes: int = 0
    cpu_seconds: float = 0.0
    refused: dict[str, int] = {}


class RecordStats(msgspec.Struct, frozen=True, kw_only=True):
    """The state of all user records; `accepted` is the sum of the others, without bytes.

    `lost` counts records that a worker had acknowledged when it died and that nothing stores: never too few, and too
    many by those that were in flight.
    """

    accepted: int = 0
    delivered: int = 0
    failed: dict[str, int] = {}
    spooled: int = 0
    dead_lettered: int = 0
    buffered: int = 0
    buffered_bytes: int = 0
    lost: int = 0


class BufferStats(msgspec.Struct, frozen=True, kw_only=True):
    """How many records and bytes the buffer has, and how many it may have."""

    outstanding_records: int = 0
    max_records: int = 0
    outstanding_bytes: int = 0
    max_bytes: int = 0

    @property
    def used_share(self) -> float:
        """The used share of the buffer, of its records or its bytes, whichever is larger; 0.0 without a buffer."""
        return max(
            self.outstanding_records / self.max_records if self.max_records else 0.0,
            self.outstanding_bytes / self.max_bytes if self.max_bytes else 0.0,
        )


class StreamStats(msgspec.Struct, frozen=True, kw_only=True):
    """One stream. `breakers` has circuit breaker states by shard; "" is the breaker of the whole stream."""

    accepted: int = 0
    delivered: int = 0
    failed: int = 0
    waiting: int = 0
    in_flight: int = 0
    buffered: int = 0
    breakers: dict[str, str] = {}


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """One of several processes; `deaths` counts its dead predecessors.

    `silent_seconds` is the age of its figures: a second at most, unless the process hangs. `drains` is the file of a
    process that takes no requests and only drains this file.
    """

    process_id: int
    state: str
    drains: str = ""
    silent_seconds: float = 0.0
    deaths: int = 0
    accepted: int = 0
    requests: int = 0


class StatsDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The document of `/v1/stats`. With a tenant's key it has only `state` and that tenant."""

    state: str
    tenants: dict[str, TenantStats] = {}
    records: RecordStats = RecordStats()
    room: BufferStats = BufferStats()
    # Requests by HTTP status, and rejected requests by reason.
    answers: dict[str, int] = {}
    refusals: dict[str, int] = {}
    streams: dict[str, StreamStats] = {}
    # The processes of a gateway with several, by number.
    workers: dict[str, WorkerStats] = {}

    @property
    def covers_gateway(self) -> bool:
        """Whether the document is about the whole gateway, not only one tenant: a gateway always has a buffer."""
        return self.room.max_records > 0

    def with_busiest_tenants(self) -> "StatsDocument":
        """Return the document with at most 1,000 tenants: those with the longest queues."""
        if len(self.tenants) <= _MOST_TENANTS:
            return self
        busiest = sorted(self.tenants.items(), key=lambda each: -each[1].waiting_bytes)
        return msgspec.structs.replace(self, tenants=dict(busiest[:_MOST_TENANTS]))

    def document_for(self, tenant_id: str) -> dict[str, object]:
        """Return the answer to one tenant: only its own figures."""
        return {"state": self.state, "tenants": {tenant_id: self.tenants.get(tenant_id, TenantStats())}}


class TenantView(msgspec.Struct, frozen=True):
    """One tenant with its rates."""

    tenant: str
    requests_per_second: float
    records_per_second: float
    refused_per_second: float
    waiting_records: int
    waiting_bytes: int


class StreamView(msgspec.Struct, frozen=True):
    """One stream with its rates. `breakers` has only breakers that are not closed; "" is the whole stream's."""

    stream: str
    accepted_per_second: float
    delivered_per_second: float
    failed: int
    waiting: int
    in_flight: int
    buffered: int
    breakers: dict[str, str]


class GatewayView(msgspec.Struct, frozen=True):
    """The figures of a gateway with rates since the previous update; 0 at the first. Busiest tenants come first."""

    url: str
    state: str
    accepted_per_second: float
    delivered_per_second: float
    failed_per_second: float
    answers_per_second: dict[str, float]
    refusals_per_second: dict[str, float]
    records: RecordStats | None
    room: BufferStats | None
    streams: list[StreamView]
    tenants: list[TenantView]
    delivered_history: list[float]


def per_second(count: float, before: float, seconds: float) -> float:
    """Return the rate between two counts; 0.0 if `seconds` is 0.

    A count below the one before it belongs to a restarted gateway, which counts from 0.
    """
    if seconds <= 0:
        return 0.0
    return (count - before if count >= before else count) / seconds


class RateTracker:
    """Compute rates from successive documents of one gateway."""

    def __init__(self, url: str = "") -> None:
        self._url = url
        self._before: StatsDocument | None = None
        self._updated_at = 0.0
        self._history: deque[float] = deque(maxlen=_MOST_HISTORY)

    def update(self, stats: StatsDocument, now: float) -> GatewayView:
        """Return `stats`, read at the monotonic instant `now`, with rates since the previous call."""
        seconds = 0.0 if self._before is None else now - self._updated_at
        before = self._before or stats
        self._before, self._updated_at = stats, now
        records, earlier = stats.records, before.records
        delivered = per_second(records.delivered, earlier.delivered, seconds)
        if seconds > 0:
            self._history.append(delivered)
        tenants = [
            _tenant(name, tenant, before.tenants.get(name, TenantStats()), seconds)
            for name, tenant in stats.tenants.items()
        ]
        return GatewayView(
            url=self._url,
            state=stats.state,
            accepted_per_second=per_second(records.accepted, earlier.accepted, seconds),
            delivered_per_second=delivered,
            failed_per_second=per_second(sum(records.failed.values()), sum(earlier.failed.values()), seconds),
            answers_per_second=_rates(stats.answers, before.answers, seconds),
            refusals_per_second=_rates(stats.refusals, before.refusals, seconds),
            records=records if stats.covers_gateway else None,
            room=stats.room if stats.covers_gateway else None,
            streams=[
                _stream(name, stream, before.streams.get(name, StreamStats()), seconds)
                for name, stream in sorted(stats.streams.items())
            ],
            tenants=sorted(
                tenants, key=lambda each: (-each.waiting_bytes, -each.records_per_second, -each.requests_per_second)
            ),
            delivered_history=list(self._history),
        )


def _rates(now: dict[str, int], before: dict[str, int], seconds: float) -> dict[str, float]:
    return {name: per_second(count, before.get(name, 0), seconds) for name, count in sorted(now.items())}


def _tenant(name: str, now: TenantStats, before: TenantStats, seconds: float) -> TenantView:
    return TenantView(
        tenant=name,
        requests_per_second=per_second(now.requests, before.requests, seconds),
        records_per_second=per_second(now.accepted_records, before.accepted_records, seconds),
        refused_per_second=per_second(sum(now.refused.values()), sum(before.refused.values()), seconds),
        waiting_records=now.waiting_records,
        waiting_bytes=now.waiting_bytes,
    )


def _stream(name: str, now: StreamStats, before: StreamStats, seconds: float) -> StreamView:
    return StreamView(
        stream=name,
        accepted_per_second=per_second(now.accepted, before.accepted, seconds),
        delivered_per_second=per_second(now.delivered, before.delivered, seconds),
        failed=now.failed,
        waiting=now.waiting,
        in_flight=now.in_flight,
        buffered=now.buffered,
        breakers={shard: state for shard, state in now.breakers.items() if state != "closed"},
    )
