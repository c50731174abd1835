from kpl_core.rate_limiter.adaptive_refill import AdaptiveRefill
from kpl_core.rate_limiter.admission_gate import AdmissionGate, Overflow, RefusedWork, Verdict, Work
from kpl_core.rate_limiter.metric_samples import METRIC_NAMES, MetricSample, metric_samples
from kpl_core.rate_limiter.rejection_monitor import RejectionMonitor
from kpl_core.rate_limiter.sizing import HeadroomWarning, capacity_for, refill_for
from kpl_core.rate_limiter.token_bucket_limiter import TokenBucketLimiter

__all__ = [
    "METRIC_NAMES",
    "AdaptiveRefill",
    "AdmissionGate",
    "HeadroomWarning",
    "MetricSample",
    "Overflow",
    "RefusedWork",
    "RejectionMonitor",
    "TokenBucketLimiter",
    "Verdict",
    "Work",
    "capacity_for",
    "metric_samples",
    "refill_for",
]
