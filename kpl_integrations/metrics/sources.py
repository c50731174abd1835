"""Sources: counts that the parts keep anyway, read at a scrape instead of being reported as facts.

Each function returns a source for a vendor's `watch`. A source is called for every scrape, on the
scraper's thread, and reads snapshots only. The number of series of each source is bounded.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Protocol

from kpl_core import Producer
from kpl_core.durability.circuit_breaker import BreakerState, CircuitBreaker
from kpl_core.durability.dead_letters import DeadLetterQueue
from kpl_core.durability.spool import Spool
from kpl_core.limits import METRIC_NAMES
from kpl_core.records.record_result import REASONS
from kpl_integrations.metrics.metrics_hook import OTHER, BoundedLabel, Sample, Source

_STATE_VALUES: Final = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}
_MAX_TENANTS: Final = 20
_MAX_RESOURCES: Final = 1_000


def producer_source(producer: Producer) -> Source:
    """Return accepted, outstanding and kept records; with delivered and failed ones they add up."""

    def read() -> Iterator[Sample]:
        report = producer.report()
        yield Sample("kinesis_producer_accepted_records_total", (), report.accepted)
        yield Sample("kinesis_producer_outstanding_records", (), report.buffered)
        yield Sample("kinesis_producer_kept_records", ("spooled",), report.spooled)
        yield Sample("kinesis_producer_kept_records", ("dead_lettered",), report.dead_lettered)
        yield Sample("kinesis_producer_buffer_bytes", (), producer.buffer_limit.outstanding_bytes)

    return read


class _SpoolState(Protocol):
    @property
    def can_store(self) -> bool: ...

    bypassed: int


def spool_state_source(state: _SpoolState) -> Source:
    """Return whether the spool cannot store, and the records that went straight to Kinesis; `Producer.spool_state`."""

    def read() -> Iterator[Sample]:
        yield Sample("kinesis_producer_spool_failing", (), float(not state.can_store))
        yield Sample("kinesis_producer_spool_bypassed_records_total", (), state.bypassed)

    return read


def spool_source(spool: Spool) -> Source:
    """Return the records and bytes in the spool."""

    def read() -> Iterator[Sample]:
        statistics = spool.statistics()
        yield Sample("kinesis_producer_spool_bytes", (), statistics.record_bytes)
        yield Sample("kinesis_producer_spool_records", (), statistics.records)

    return read


def dead_letter_source(queue: DeadLetterQueue) -> Source:
    """Return the number of stored dead letters, and of records that became dead letters, by reason."""

    def read() -> Iterator[Sample]:
        yield Sample("kinesis_producer_dlq_depth", (), queue.depth)
        # Every reason from the start: Prometheus sees no increase where a series begins with its first loss.
        for reason, count in {**dict.fromkeys(REASONS, 0), **queue.added}.items():
            yield Sample("kinesis_producer_dlq_records_total", (reason,), count)

    return read


def outbox_source(discarded: Mapping[int, int]) -> Source:
    """Return the records that requests discarded, by status: `discarded` of `RequestOutboxMiddleware`."""

    def read() -> Iterator[Sample]:
        for status, count in sorted(discarded.items()):
            yield Sample("kinesis_outbox_discarded_records_total", (str(status),), count)

    return read


class _LogCounts(Protocol):
    @property
    def emitted(self) -> int: ...

    @property
    def buffered(self) -> int: ...

    @property
    def dropped_total(self) -> int: ...


def log_handler_source(counts: Callable[[], _LogCounts]) -> Source:
    """Return how many log records a handler got, dropped, and still has; `counts` of `KinesisHandler`."""

    def read() -> Iterator[Sample]:
        now = counts()
        yield Sample("kinesis_log_records_total", (), now.emitted)
        yield Sample("kinesis_log_dropped_records_total", (), now.dropped_total)
        yield Sample("kinesis_log_buffered_records", (), now.buffered)

    return read


class _ExportCounts(Protocol):
    @property
    def exported(self) -> int: ...

    @property
    def lost_total(self) -> int: ...


def telemetry_source(counts: Callable[[], Mapping[str, _ExportCounts]]) -> Source:
    """Return the exported and lost spans, data points and log records; `counts` of `KinesisTelemetry`."""

    def read() -> Iterator[Sample]:
        for signal, now in counts().items():
            yield Sample("kinesis_otel_exported_items_total", (signal,), now.exported)
            yield Sample("kinesis_otel_lost_items_total", (signal,), now.lost_total)

    return read


def breaker_source(breakers: Callable[[], Mapping[tuple[str, str], CircuitBreaker]]) -> Source:
    """Return the state of each circuit breaker, by (stream, shard), as of its latest use."""

    def read() -> Iterator[Sample]:
        for labels, breaker in list(breakers().items()):
            yield Sample("kinesis_producer_breaker_state", labels, _STATE_VALUES[breaker.known_state])

    return read


class _MeteredLimiter(Protocol):
    def get_metrics(self) -> Mapping[str, float]:
        """Return tokens_available, total_rejections and total_refills, among others."""


def token_bucket_source(limiter: _MeteredLimiter) -> Source:
    """Return the metrics of a `TokenBucketLimiter`."""

    def read() -> Iterator[Sample]:
        metrics = limiter.get_metrics()
        for name, (_, key) in METRIC_NAMES.items():
            yield Sample(name, (), metrics[key])

    return read


def request_source(answers: Callable[[], Mapping[int, int]], refusals: Callable[[], Mapping[str, int]]) -> Source:
    """Return the gateway's answered requests by status, and its rejected requests by reason."""

    def read() -> Iterator[Sample]:
        for status, count in sorted(answers().items()):
            yield Sample("kinesis_ingest_requests_total", (str(status),), count)
        for reason, count in sorted(refusals().items()):
            yield Sample("kinesis_ingest_rejected_total", (reason,), count)

    return read


def tenant_wait_source(waits: Callable[[], Mapping[str, float]], *, most: int = _MAX_TENANTS) -> Source:
    """Return the `most` longest waits, seconds by tenant, and the longest of the others as "other".

    With `most=20`, ten thousand waiting tenants make 21 series. Tenants that do not wait have no series.
    """

    def read() -> Iterator[Sample]:
        waiting = [(wait, tenant) for tenant, wait in waits().items() if wait > 0]
        longest = heapq.nlargest(most + 1, waiting)
        for wait, tenant in longest[:most]:
            yield Sample("kinesis_ingest_tenant_wait_seconds", (tenant,), wait)
        for wait, _ in longest[most:]:
            yield Sample("kinesis_ingest_tenant_wait_seconds", (OTHER,), wait)

    return read


def coordinator_source(lease_age: Callable[[], float], shares: Callable[[], Mapping[str, float]]) -> Source:
    """Return the age of the lease in seconds, and this process' share, 0 to 1, of each resource.

    Above 1,000 resources, the smallest share of the others is "other".
    """
    bounded = BoundedLabel(_MAX_RESOURCES)

    def read() -> Iterator[Sample]:
        yield Sample("kinesis_coordinator_lease_age_seconds", (), lease_age())
        others: list[float] = []
        for resource, share in shares().items():
            label = bounded(resource)
            if label == OTHER:
                others.append(share)
            else:
                yield Sample("kinesis_coordinator_share", (label,), share)
        if others:
            yield Sample("kinesis_coordinator_share", (OTHER,), min(others))

    return read
