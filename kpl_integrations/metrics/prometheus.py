"""Metrics for Prometheus, in a registry of their own; the global registry is not used.

    metrics = PrometheusMetrics()
    producer = Producer(config, hooks=[metrics])
    metrics.watch(producer_source(producer))
    ...
    body, content_type = metrics.exposition()

Values are kept here and converted at a scrape: the client library's own counters and histograms take a
lock for each value.
"""

import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Final
from weakref import WeakSet

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kpl_core import ConfigError
from kpl_integrations.metrics.catalogue import METRICS, Kind
from kpl_integrations.metrics.metrics_hook import Labels, MetricsHook

# The library finds equal names only for collectors that describe themselves, and describing would read the sources.
_used: Final[WeakSet[CollectorRegistry]] = WeakSet()


class PrometheusMetrics(MetricsHook, Collector):
    """A producer's hook and a Prometheus collector.

    Without `registry` it makes its own, so that two producers do not collide.

    Raises:
        ConfigError: the registry has one already, so that each series would be there twice; or the client library is in
            its multiprocess mode. That mode merges files which only its own counters write, and these metrics are not
            among them. With `per_process`, each process exposes its own.
    """

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        *,
        per_process: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(clock)
        if not per_process and (folder := os.environ.get("PROMETHEUS_MULTIPROC_DIR")):
            message = (
                f"PROMETHEUS_MULTIPROC_DIR is {folder!r}, and the multiprocess mode cannot have these metrics; give "
                "each process a port or path of its own and pass per_process=True, or use OpenTelemetryMetrics"
            )
            raise ConfigError(message)
        self.registry = CollectorRegistry() if registry is None else registry
        if self.registry in _used:
            message = (
                "this registry has a PrometheusMetrics already; use that one for all producers, or another registry"
            )
            raise ConfigError(message)
        _used.add(self.registry)
        # A histogram without labels exists from the start, with zero observations.
        self._distributions: dict[tuple[str, Labels], _Distribution] = {
            (metric.name, ()): _Distribution(metric.buckets)
            for metric in METRICS.values()
            if metric.kind is Kind.HISTOGRAM and not metric.labels
        }
        self.registry.register(self)

    def observe(self, name: str, labels: Labels, value: float) -> None:
        """Add one observation to a histogram."""
        key = name, labels
        distribution = self._distributions.get(key)
        if distribution is None:
            distribution = self._distributions[key] = _Distribution(METRICS[name].buckets)
        distribution.observe(value)

    def exposition(self) -> tuple[bytes, str]:
        """Return the body and the content type of the response to a scrape."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def describe(self) -> Iterable[Family]:
        """Return nothing, so that registering this collector does not read the sources."""
        return ()

    def collect(self) -> Iterator[Family]:
        """Yield all metric families; the registry calls this at a scrape."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for name, labels, value in self.samples():
            family = families.get(name)
            if family is None:
                metric = METRICS[name]
                kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
                family = families[name] = kind(name, metric.meaning, labels=metric.labels)
            family.add_metric(labels, value)
        yield from families.values()
        yield from self._histograms()

    def _histograms(self) -> Iterable[HistogramMetricFamily]:
        families = {
            metric.name: HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
            for metric in METRICS.values()
            if metric.kind is Kind.HISTOGRAM
        }
        for (name, labels), distribution in list(self._distributions.items()):
            buckets = [(_le(bound), count) for bound, count in distribution.cumulative()]
            families[name].add_metric(labels, buckets, distribution.total)
        return families.values()


class _Distribution:
    """A histogram without a lock: an observation costs one bisection and two additions.

    `bounds` are ascending, inclusive upper bounds. One thread writes, any thread reads.
    """

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        # The last count is for values above all bounds.
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[float, int]]:
        """Return (bound, number of values up to it) for each bound and for infinity."""
        return list(zip((*self._bounds, float("inf")), accumulate(self._counts.copy()), strict=True))


def _le(bound: float) -> str:
    """Return an upper bound as Prometheus writes it."""
    text: str = floatToGoString(bound)  # type: ignore[no-untyped-call]
    return text
