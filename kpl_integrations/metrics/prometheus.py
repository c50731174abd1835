"""The producer's metrics for Prometheus, in a registry of their own: nothing global is touched.

    metrics = PrometheusMetrics()
    producer = Producer(config, hooks=[metrics])
    metrics.watch(producer_source(producer))
    ...
    body, content_type = metrics.exposition()

The client's histograms lock; a fact comes once per request or Kinesis record, never per user
record, so that is cheap enough.
"""

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from kpl_core.hooks import Fact
from kpl_integrations.metrics.catalogue import METRICS, Kind
from kpl_integrations.metrics.sources import Source
from kpl_integrations.metrics.translation import Sample, Translation

__all__ = ["PrometheusMetrics"]


class PrometheusMetrics(Collector):
    """A hook and a collector. `registry` None: one of its own, so that two producers do not collide."""

    def __init__(
        self, registry: CollectorRegistry | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self._translation = Translation(clock)
        self._sources: list[Source] = []
        self._histograms = {
            metric.name: Histogram(
                metric.name, metric.meaning, metric.labels, registry=self.registry, buckets=metric.buckets
            )
            for metric in METRICS.values()
            if metric.kind is Kind.HISTOGRAM
        }
        # Looking a series up by its labels costs a lock and a copy; the few there are, are kept.
        self._series: dict[tuple[str, tuple[str, ...]], Histogram] = {}
        # What counters came to and gauges were told last. The client's own would lock for each.
        self._told: dict[tuple[str, tuple[str, ...]], float] = {}
        self.registry.register(self)

    def __call__(self, fact: Fact) -> None:
        """Take note of one fact."""
        told = self._told
        for sample in self._translation.samples(fact):
            name, labels, value = sample
            key = name, labels
            series = self._series.get(key)
            if series is not None:
                series.observe(value)
            elif name in self._histograms:
                histogram = self._histograms[name]
                series = self._series[key] = histogram.labels(*labels) if labels else histogram
                series.observe(value)
            elif METRICS[name].kind is Kind.COUNTER:
                told[key] = told.get(key, 0) + value
            else:
                told[key] = value

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

    def _read(self) -> Iterator[Sample]:
        yield from (Sample(name, labels, value) for (name, labels), value in list(self._told.items()))
        yield from self._translation.gauges()
        for source in self._sources:
            yield from source()
