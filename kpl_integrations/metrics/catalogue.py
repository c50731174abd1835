"""All metrics in one table for all vendors: name, kind, labels and meaning.

Labels with an open number of values (`shard`, `stream`, `reason`) are bounded by `BoundedLabel`. No label is
a partition key or a message; `tenant` names only the tenants with the longest waits.
"""

from enum import StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple


class Kind(StrEnum):
    """How a value behaves over time."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """One row of the table; `buckets` are the upper bounds of a histogram."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    meaning: str
    buckets: tuple[float, ...] = ()


_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# Finer, because the dashboard reads p50 and p99 from them.
_DELIVERY_SECONDS: Final = tuple(sorted({*_SECONDS, 0.075, 0.15, 0.2, 0.35, 0.75, 1.5, 7.5, 15.0, 20.0, 60.0}))
_RATIOS: Final = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1_000.0)
_ATTEMPTS: Final = (1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0)


def _counter(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, Kind.COUNTER, labels, meaning)


def _gauge(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, labels, meaning)


def _histogram(name: str, meaning: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(name, Kind.HISTOGRAM, labels, meaning, buckets)


_ROWS: Final = (
    _counter(
        "kinesis_producer_accepted_records_total",
        "User records accepted, and those found in the spool at the start: delivered + failed + kept + outstanding.",
    ),
    _counter(
        "kinesis_producer_records_total",
        "User records finished, spooled or dead-lettered (the last two come back); the reason is empty if delivered.",
        "outcome",
        "reason",
        "tier",
    ),
    _counter(
        "kinesis_producer_lost_records_total",
        "User records that failed permanently and that no spool or dead letter keeps; 0 from the start.",
    ),
    _counter("kinesis_producer_bytes_total", "Key and data bytes of those user records.", "outcome"),
    _gauge("kinesis_producer_outstanding_records", "User records between put and result."),
    _gauge(
        "kinesis_producer_kept_records",
        "User records in durable storage that are not being sent now; place is spooled or dead_lettered.",
        "place",
    ),
    _gauge("kinesis_producer_buffer_bytes", "Key and data bytes between put and result."),
    _histogram(
        "kinesis_producer_delivery_seconds",
        "From the arrival of the oldest user record of a Kinesis record to its final result.",
        _DELIVERY_SECONDS,
    ),
    _histogram(
        "kinesis_producer_queue_wait_seconds",
        "From the arrival of the oldest user record of a PutRecords request until it was sent.",
        _SECONDS,
    ),
    _histogram(
        "kinesis_producer_send_duration_seconds",
        "Duration of a PutRecords request; outcome is answered or failed.",
        _SECONDS,
        "outcome",
    ),
    _histogram("kinesis_producer_attempts", "Attempts until the final result, per Kinesis record.", _ATTEMPTS),
    _histogram("kinesis_producer_aggregation_ratio", "User records per Kinesis record of a request.", _RATIOS),
    _gauge(
        "kinesis_producer_shard_rate_limit",
        "Share, 0.05 to 1, of the configured shard limit that the adaptive rate uses.",
        "stream",
        "shard",
    ),
    _counter(
        "kinesis_coordinator_failures_total",
        "Sync rounds with a problem: slow, down, denied, garbage, clock, ...",
        "reason",
    ),
    _gauge(
        "kinesis_producer_shard_utilisation",
        "Share of the shard's service limit that was used over the last 10 seconds; in other, the largest.",
        "stream",
        "shard",
    ),
    _counter(
        "kinesis_producer_throttled_records_total",
        "Kinesis records that a shard throttled; shard is empty if it was not predicted.",
        "stream",
        "shard",
    ),
    _gauge(
        "kinesis_producer_breaker_state",
        "State of the circuit breaker: 0 closed, 1 half-open, 2 open.",
        "stream",
        "shard",
    ),
    _counter("kinesis_producer_dlq_records_total", "User records that became dead letters.", "reason"),
    _gauge("kinesis_producer_dlq_depth", "Dead letters stored."),
    _gauge("kinesis_producer_spool_bytes", "Bytes of the spooled records, as max_bytes counts them."),
    _gauge("kinesis_producer_spool_records", "User records in the spool."),
    _gauge(
        "kinesis_producer_spool_failing",
        "1 while the spool cannot store, because its disk is full or fails or it has max_bytes, else 0.",
    ),
    _counter(
        "kinesis_producer_spool_bypassed_records_total",
        "User records that went straight to Kinesis because the spool could not store; 0 from the start.",
    ),
    _counter(
        "kinesis_outbox_discarded_records_total",
        "User records that a request discarded because of its status.",
        "code",
    ),
    _counter("kinesis_log_records_total", "Log records given to a KinesisHandler."),
    _counter("kinesis_log_dropped_records_total", "Log records that the handler lost."),
    _gauge("kinesis_log_buffered_records", "Log records without a result yet."),
    _counter("kinesis_otel_exported_items_total", "Spans, data points and log records exported.", "signal"),
    _counter("kinesis_otel_lost_items_total", "Those of them that were lost.", "signal"),
    _counter("kinesis_ingest_requests_total", "Requests that the gateway answered.", "code"),
    _counter(
        "kinesis_ingest_rejected_total", "Requests that the gateway rejected, by row of its admission table.", "reason"
    ),
    _gauge(
        "kinesis_ingest_tenant_wait_seconds",
        "Wait of a tenant's oldest record in the fair queue: the longest 20, and the longest of the others.",
        "tenant",
    ),
    _gauge("kinesis_ingest_waiting_records", "User records in the fair queue."),
    _gauge("kinesis_ingest_waiting_tenants", "Tenants with records in the fair queue."),
    _gauge("kinesis_ingest_paused_connections", "Connections that are not read now, because CPU time is short."),
    _counter("kinesis_ingest_read_pauses_total", "Pauses in the reading of connections, because CPU time was short."),
    _gauge("kinesis_ingest_open", "1 while the gateway accepts requests and does not drain, else 0."),
    _gauge(
        "kinesis_ingest_part",
        "Gateway processes whose part is in this state: ok, degraded, failed or not_configured; each exists from the "
        "start.",
        "part",
        "state",
    ),
    _gauge(
        "kinesis_ingest_certificate_days_left",
        "Days until the TLS certificate expires, below 0 after that; only with TLS.",
    ),
    _gauge("kinesis_ingest_workers", "Running gateway processes; only with workers."),
    _gauge(
        "kinesis_ingest_worker_silent_seconds",
        "Age of a worker's last report: a second at most, unless its process hangs; only with workers.",
        "worker",
    ),
    _gauge(
        "kinesis_ingest_lost_records",
        "User records that a worker had acknowledged when it died and that nothing stores; only with workers.",
    ),
    _gauge("kinesis_coordinator_lease_age_seconds", "Age of the share summary in use."),
    _gauge("kinesis_coordinator_share", "Share, 0 to 1, of a common limit that this process may use now.", "resource"),
    _gauge("token_bucket_tokens_available", "Tokens in the bucket."),
    _counter("token_bucket_refill_events_total", "Times the bucket was refilled."),
    _counter("token_bucket_rejections_total", "Times the bucket refused a token."),
)

METRICS: Final = MappingProxyType({metric.name: metric for metric in _ROWS})
