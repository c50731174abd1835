"""The producer's metrics for Prometheus, in a registry of their own: nothing global is touched.

    metrics = PrometheusMetrics()
    producer = Producer(config, hooks=[metrics])
    metrics.watch(producer_source(producer))
    ...
    body, content_type = metrics.exposition()

Values are kept here and read at a scrape: the client's own counters and histograms lock for each.
"""

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kpl_core.hooks import Fact
from kpl_integrations.metrics.catalogue import METRICS, Kind
from kpl_integrations.metrics.distribution import Distribution
from kpl_integrations.metrics.sources import Source
from kpl_integrations.metrics.told import Told
from kpl_integrations.metrics.translation import Labels, Sample, Translation

__all__ = ["PrometheusMetrics"]


class PrometheusMetrics(Collector):
    """A hook and a collector. `registry` None: one of its own, so that two producers do not collide."""

    def __init__(
        self, registry: CollectorRegistry | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self._recorded = _Recorded()
        self._translation = Translation(self._recorded, clock)
        self._sources: list[Source] = []
        self.registry.register(self)

    def __call__(self, fact: Fact) -> None:
        """Take note of one fact."""
        self._translation.tell(fact)

    def watch(self, source: Source) -> None:
        """Read `source` at every scrape. Give each kind of source at most once."""
        self._sources.append(source)

    def exposition(self) -> tuple[bytes, str]:
        """Return the body and the content type of an answer to a scrape."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def describe(self) -> Iterable[Family]:
        """Return nothing: the registry need not read the sources to learn the names."""
        return ()

    def collect(self) -> Iterator[Family]:
        """Yield what is read at a scrape; the registry calls it."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for name, labels, value in self._read():
            family = families.get(name)
            if family is None:
                metric = METRICS[name]
                kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
                family = families[name] = kind(name, metric.meaning, labels=metric.labels)
            family.add_metric(labels, value)
        yield from families.values()
        yield from self._recorded.histograms()

    def _read(self) -> Iterator[Sample]:
        yield from self._recorded.told()
        yield from self._translation.gauges()
        for source in self._sources:
            yield from source()


class _Recorded(Told):
    def __init__(self) -> None:
        super().__init__()
        # What has no labels is there from the beginning, at zero.
        self._distributions: dict[tuple[str, Labels], Distribution] = {
            (metric.name, ()): Distribution(metric.buckets)
            for metric in METRICS.values()
            if metric.kind is Kind.HISTOGRAM and not metric.labels
        }

    def observe(self, name: str, labels: Labels, value: float) -> None:
        """Give a histogram one observation."""
        key = name, labels
        distribution = self._distributions.get(key)
        if distribution is None:
            distribution = self._distributions[key] = Distribution(METRICS[name].buckets)
        distribution.observe(value)

    def histograms(self) -> Iterator[HistogramMetricFamily]:
        """Yield all of them as they are now."""
        families = {
            metric.name: HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
            for metric in METRICS.values()
            if metric.kind is Kind.HISTOGRAM
        }
        for (name, labels), distribution in list(self._distributions.items()):
            buckets = [(_le(bound), count) for bound, count in distribution.cumulative()]
            families[name].add_metric(labels, buckets, distribution.total)
        yield from families.values()


def _le(bound: float) -> str:
    """Return an upper bound as Prometheus writes it."""
    text: str = floatToGoString(bound)  # type: ignore[no-untyped-call]
    return text
