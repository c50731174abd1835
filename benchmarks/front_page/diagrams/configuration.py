"""Where the options of a producer act: each step of a record's journey, with the options that change it."""

from benchmarks.front_page.colours import Colours, svg
from benchmarks.front_page.shapes import LADDER_STEP, ladder, markers, style

__all__ = ["draw"]

# Each step, its kind of box, and its options in lines.
STEPS = (
    ("buffer", "box", ("max_outstanding_records", "max_outstanding_bytes, tiers")),
    ("fair queue", "box", ("fairness: only with flows",)),
    ("aggregator", "core", ("aggregation_enabled, aggregation_max_size", "record_max_buffered_time_ms")),
    ("limiter", "core", ("rate_limit_..._per_sec_per_shard, coordination", "burst_seconds, adaptive_rate")),
    ("breaker", "box", ("breaker: only if you configure one",)),
    ("collector", "core", ("collection_max_count, collection_max_size",)),
    ("sender", "core", ("max_in_flight_requests, wire_path", "request_timeout_ms, connect_timeout_ms")),
    ("classifier", "core", ("consumer, non_retryable_error_codes", "fail_if_throttled")),
    ("retrier", "core", ("retry_backoff_base_ms, record_ttl_ms", "ordering")),
    ("disk", "disk", ("spool, dead_letters",)),
)
_WIDTH, _HEIGHT = 520, LADDER_STEP * len(STEPS) - 16
_TITLE = "Where the options of a producer act, step by step: " + "; ".join(
    f"{name}: {', '.join(options)}" for name, _, options in STEPS
)


def draw(colours: Colours) -> str:
    """Return the SVG in these colours."""
    return svg(_WIDTH, _HEIGHT, title=_TITLE, style=style(colours), body=markers(colours) + ladder(STEPS))
