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
    """One row of the table; `buckets` are the upper bounds of a histogram.

    A metric with `is_read` is read from a source or computed at a scrape; the others come from facts.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]
    meaning: str
    buckets: tuple[float, ...] = ()
    is_read: bool = False


_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_RATIOS: Final = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1_000.0)
_ATTEMPTS: Final = (1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0)

_ROWS: Final = (
    Metric(
        "kinesis_producer_accepted_records_total",
        Kind.COUNTER,
        (),
        "User records accepted, and those found in the spool at the start: delivered + failed + kept + outstanding.",
        is_read=True,
    ),
    Metric(
        "kinesis_producer_records_total",
        Kind.COUNTER,
        ("outcome", "reason", "tier"),
        "User records finished, spooled or dead-lettered (the last two come back); the reason is empty if delivered.",
    ),
    Metric(
        "kinesis_producer_lost_records_total",
        Kind.COUNTER,
        (),
        "User records that failed for good and that no spool or dead letter keeps; 0 from the start.",
    ),
    Metric("kinesis_producer_bytes_total", Kind.COUNTER, ("outcome",), "Key and data bytes of those user records."),
    Metric(
        "kinesis_producer_outstanding_records", Kind.GAUGE, (), "User records between put and result.", is_read=True
    ),
    Metric(
        "kinesis_producer_kept_records",
        Kind.GAUGE,
        ("place",),
        "User records in durable storage that are not being sent now; place is spooled or dead_lettered.",
        is_read=True,
    ),
    Metric("kinesis_producer_buffer_bytes", Kind.GAUGE, (), "Key and data bytes between put and result.", is_read=True),
    Metric(
        "kinesis_producer_delivery_seconds",
        Kind.HISTOGRAM,
        (),
        "From the arrival of the oldest user record of a Kinesis record to its final result.",
        _SECONDS,
    ),
    Metric(
        "kinesis_producer_queue_wait_seconds",
        Kind.HISTOGRAM,
        (),
        "From the arrival of the oldest user record of a PutRecords request until it was sent.",
        _SECONDS,
    ),
    Metric(
        "kinesis_producer_send_duration_seconds",
        Kind.HISTOGRAM,
        ("outcome",),
        "Duration of a PutRecords request; outcome is answered or failed.",
        _SECONDS,
    ),
    Metric(
        "kinesis_producer_attempts",
        Kind.HISTOGRAM,
        (),
        "Attempts until the final result, per Kinesis record.",
        _ATTEMPTS,
    ),
    Metric(
        "kinesis_producer_aggregation_ratio",
        Kind.HISTOGRAM,
        (),
        "User records per Kinesis record of a request.",
        _RATIOS,
    ),
    Metric(
        "kinesis_producer_shard_rate_limit",
        Kind.GAUGE,
        ("stream", "shard"),
        "Share, 0.05 to 1, of the configured shard limit that the adaptive rate uses.",
    ),
    Metric(
        "kinesis_coordinator_failures_total",
        Kind.COUNTER,
        ("reason",),
        "Sync rounds with a problem: slow, down, denied, garbage, clock, ...",
    ),
    Metric(
        "kinesis_producer_shard_utilisation",
        Kind.GAUGE,
        ("stream", "shard"),
        "Share of the shard's service limit that was used over the last 10 seconds.",
        is_read=True,
    ),
    Metric(
        "kinesis_producer_throttled_records_total",
        Kind.COUNTER,
        ("stream", "shard"),
        "Kinesis records that a shard throttled; shard is empty if it was not predicted.",
    ),
    Metric(
        "kinesis_producer_breaker_state",
        Kind.GAUGE,
        ("stream", "shard"),
        "State of the circuit breaker: 0 closed, 1 half-open, 2 open.",
        is_read=True,
    ),
    Metric(
        "kinesis_producer_dlq_records_total",
        Kind.COUNTER,
        ("reason",),
        "User records that became dead letters.",
        is_read=True,
    ),
    Metric("kinesis_producer_dlq_depth", Kind.GAUGE, (), "Dead letters stored.", is_read=True),
    Metric(
        "kinesis_producer_spool_bytes",
        Kind.GAUGE,
        (),
        "Bytes of the spooled records, as max_bytes counts them.",
        is_read=True,
    ),
    Metric("kinesis_producer_spool_records", Kind.GAUGE, (), "User records in the spool.", is_read=True),
    Metric(
        "kinesis_outbox_discarded_records_total",
        Kind.COUNTER,
        ("code",),
        "User records that a request discarded because of its status.",
        is_read=True,
    ),
    Metric("kinesis_log_records_total", Kind.COUNTER, (), "Log records given to a KinesisHandler.", is_read=True),
    Metric("kinesis_log_dropped_records_total", Kind.COUNTER, (), "Log records that the handler lost.", is_read=True),
    Metric("kinesis_log_buffered_records", Kind.GAUGE, (), "Log records without a result yet.", is_read=True),
    Metric(
        "kinesis_otel_exported_items_total",
        Kind.COUNTER,
        ("signal",),
        "Spans, data points and log records exported.",
        is_read=True,
    ),
    Metric("kinesis_otel_lost_items_total", Kind.COUNTER, ("signal",), "Those of them that were lost.", is_read=True),
    Metric(
        "kinesis_ingest_requests_total", Kind.COUNTER, ("code",), "Requests that the gateway answered.", is_read=True
    ),
    Metric(
        "kinesis_ingest_rejected_total",
        Kind.COUNTER,
        ("reason",),
        "Requests that the gateway rejected, by row of its admission table.",
        is_read=True,
    ),
    Metric(
        "kinesis_ingest_tenant_wait_seconds",
        Kind.GAUGE,
        ("tenant",),
        "Wait of a tenant's oldest record in the fair queue: the longest 20, and the longest of the others.",
        is_read=True,
    ),
    Metric("kinesis_ingest_waiting_records", Kind.GAUGE, (), "User records in the fair queue.", is_read=True),
    Metric("kinesis_ingest_waiting_tenants", Kind.GAUGE, (), "Tenants with records in the fair queue.", is_read=True),
    Metric(
        "kinesis_ingest_open",
        Kind.GAUGE,
        (),
        "1 while the gateway accepts requests and does not drain, else 0.",
        is_read=True,
    ),
    Metric(
        "kinesis_ingest_workers",
        Kind.GAUGE,
        (),
        "Running gateway processes; only with workers.",
        is_read=True,
    ),
    Metric(
        "kinesis_ingest_lost_records",
        Kind.GAUGE,
        (),
        "User records accepted by a worker that died and not recovered; only with workers.",
        is_read=True,
    ),
    Metric(
        "kinesis_coordinator_lease_age_seconds",
        Kind.GAUGE,
        (),
        "Age of the share summary in use.",
        is_read=True,
    ),
    Metric(
        "kinesis_coordinator_share",
        Kind.GAUGE,
        ("resource",),
        "Share, 0 to 1, of a common limit that this process may use now.",
        is_read=True,
    ),
    Metric("token_bucket_tokens_available", Kind.GAUGE, (), "Tokens in the bucket.", is_read=True),
    Metric("token_bucket_refill_events_total", Kind.COUNTER, (), "Times the bucket was refilled.", is_read=True),
    Metric("token_bucket_rejections_total", Kind.COUNTER, (), "Times the bucket refused a token.", is_read=True),
)

METRICS: Final = MappingProxyType({metric.name: metric for metric in _ROWS})
