"""Every metric there is: its name, kind, labels and meaning, in one table for all vendors.

A label with many values in the world (`shard`, `stream`, `reason`) is bounded by
`BoundedLabel` in each vendor; nothing is ever labelled by key, tenant id or message.
"""

from enum import StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple

__all__ = ["METRICS", "Kind", "Metric"]


class Kind(StrEnum):
    """How a value behaves over time."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """One row of the table; `buckets` are the upper bounds of a histogram.

    What `is_read` is looked up in a source or worked out when somebody looks; the others are told by facts.
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
        "User records accepted, and those the spool held before: delivered + failed + kept + outstanding.",
        is_read=True,
    ),
    Metric(
        "kinesis_producer_records_total",
        Kind.COUNTER,
        ("outcome", "reason", "tier"),
        "User records with their final result; spooled and dead-lettered ones come back. No reason: delivered.",
    ),
    Metric("kinesis_producer_bytes_total", Kind.COUNTER, ("outcome",), "Key and data bytes of those user records."),
    Metric(
        "kinesis_producer_outstanding_records", Kind.GAUGE, (), "User records between put and result.", is_read=True
    ),
    Metric(
        "kinesis_producer_kept_records",
        Kind.GAUGE,
        ("place",),
        "User records kept and not on their way now; place is spooled or dead_lettered.",
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
        "Attempts until the final result, each Kinesis record.",
        _ATTEMPTS,
    ),
    Metric(
        "kinesis_producer_aggregation_ratio",
        Kind.HISTOGRAM,
        (),
        "User records for each Kinesis record of a request.",
        _RATIOS,
    ),
    Metric(
        "kinesis_producer_shard_rate_limit",
        Kind.GAUGE,
        ("stream", "shard"),
        "Share, 0.05 to 1, of the configured limit that the adaptive rate uses of the shard.",
    ),
    Metric(
        "kinesis_coordinator_failures_total",
        Kind.COUNTER,
        ("reason",),
        "Meetings with the others in which something was wrong: slow, down, denied, garbage, clock, ...",
    ),
    Metric(
        "kinesis_producer_shard_utilisation",
        Kind.GAUGE,
        ("stream", "shard"),
        "Share of the shard's service limit that was delivered over the last 10 seconds.",
        is_read=True,
    ),
    Metric(
        "kinesis_producer_throttled_records_total",
        Kind.COUNTER,
        ("stream", "shard"),
        "Kinesis records that a shard refused for throughput; shard is empty if it was not predicted.",
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
        "kinesis_ingest_requests_total", Kind.COUNTER, ("code",), "Requests that the gateway answered.", is_read=True
    ),
    Metric(
        "kinesis_ingest_rejected_total",
        Kind.COUNTER,
        ("reason",),
        "Requests that the gateway refused, by row of its admission table.",
        is_read=True,
    ),
    Metric(
        "kinesis_ingest_tenant_wait_seconds",
        Kind.GAUGE,
        ("tenant",),
        "How long a tenant's oldest record has waited for its turn: the longest waits, and the most of the others.",
        is_read=True,
    ),
    Metric("kinesis_ingest_waiting_records", Kind.GAUGE, (), "User records in the fair queue.", is_read=True),
    Metric("kinesis_ingest_waiting_tenants", Kind.GAUGE, (), "Tenants with records in the fair queue.", is_read=True),
    Metric(
        "kinesis_ingest_open",
        Kind.GAUGE,
        (),
        "1 while the gateway takes requests and does not drain, else 0.",
        is_read=True,
    ),
    Metric(
        "kinesis_ingest_workers",
        Kind.GAUGE,
        (),
        "Gateway processes that take part; only with workers.",
        is_read=True,
    ),
    Metric(
        "kinesis_ingest_lost_records",
        Kind.GAUGE,
        (),
        "User records accepted by a worker that died, not found since; only with workers.",
        is_read=True,
    ),
    Metric(
        "kinesis_coordinator_lease_age_seconds",
        Kind.GAUGE,
        (),
        "Since the summary of the shares that holds now was made.",
        is_read=True,
    ),
    Metric(
        "kinesis_coordinator_share",
        Kind.GAUGE,
        ("resource",),
        "Share, 0 to 1, of a common limit that is this process' own now.",
        is_read=True,
    ),
    Metric("token_bucket_tokens_available", Kind.GAUGE, (), "Tokens in the bucket.", is_read=True),
    Metric("token_bucket_refill_events_total", Kind.COUNTER, (), "Times the bucket was refilled.", is_read=True),
    Metric("token_bucket_rejections_total", Kind.COUNTER, (), "Times the bucket refused a token.", is_read=True),
)

METRICS: Final = MappingProxyType({metric.name: metric for metric in _ROWS})
