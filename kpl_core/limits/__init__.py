"""The same ideas for programs without a producer: rate limiters, overflow rules, rate-limited async iterators."""

from kpl_core.limits.adaptive_refill import AdaptiveRefill
from kpl_core.limits.fair_merge import fair_merge
from kpl_core.limits.limiter import Limiter
from kpl_core.limits.overflow_limiter import Overflow, OverflowLimiter, RefusedWork, Verdict, Work
from kpl_core.limits.rate_limited import AnyStream, ScopedStream, Stream, rate_limited
from kpl_core.limits.rejection_monitor import RejectionMonitor
from kpl_core.limits.scoped_items import ScopedItems
from kpl_core.limits.token_bucket_limiter import (
    METRIC_NAMES,
    HeadroomWarning,
    MetricSample,
    TokenBucketLimiter,
    capacity_for,
    metric_samples,
    refill_for,
)

__all__ = [
    "METRIC_NAMES",
    "AdaptiveRefill",
    "AnyStream",
    "HeadroomWarning",
    "Limiter",
    "MetricSample",
    "Overflow",
    "OverflowLimiter",
    "RefusedWork",
    "RejectionMonitor",
    "ScopedItems",
    "ScopedStream",
    "Stream",
    "TokenBucketLimiter",
    "Verdict",
    "Work",
    "capacity_for",
    "fair_merge",
    "metric_samples",
    "rate_limited",
    "refill_for",
]
