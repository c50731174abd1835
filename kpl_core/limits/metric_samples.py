"""The limiter's metrics by the names that dashboards know; exporters turn them into their own kind."""

from typing import Final, Literal, NamedTuple

from kpl_core.limits.token_bucket_limiter import TokenBucketLimiter

__all__ = ["METRIC_NAMES", "MetricSample", "metric_samples"]

MetricKind = Literal["gauge", "counter"]

# exported name: (kind, key of `get_metrics`)
METRIC_NAMES: Final[dict[str, tuple[MetricKind, str]]] = {
    "token_bucket_tokens_available": ("gauge", "tokens_available"),
    "token_bucket_refill_events_total": ("counter", "total_refills"),
    "token_bucket_rejections_total": ("counter", "total_rejections"),
}


class MetricSample(NamedTuple):
    """One metric as it is now."""

    name: str
    kind: MetricKind
    value: float


def metric_samples(
    limiter: TokenBucketLimiter,
    *,
    refused_share: float | None = None,
    refused_share_name: str = "ticket_routing_api_429_rate",
) -> tuple[MetricSample, ...]:
    """Return a limiter's samples and, if given, the share of requests its downstream refuses, 0 to 1.

    `AdaptiveRefill.refused_share` knows that share; `refused_share_name` names the downstream.
    """
    metrics = limiter.get_metrics()
    samples = [MetricSample(name, kind, metrics[key]) for name, (kind, key) in METRIC_NAMES.items()]
    if refused_share is not None:
        samples.append(MetricSample(refused_share_name, "gauge", refused_share))
    return tuple(samples)
