"""The producer's metrics through OpenTelemetry's API: any SDK, any exporter, and nothing if there is none.

metrics = OpenTelemetryMetrics()
producer = Producer(config, hooks=[metrics])
metrics.watch(producer_source(producer))
"""

import time
from collections.abc import Callable, Iterable
from typing import Final

from opentelemetry.metrics import CallbackOptions, Histogram, MeterProvider, Observation, get_meter_provider

from kpl_core.hooks import Fact
from kpl_integrations.metrics.catalogue import METRICS, Kind, Metric
from kpl_integrations.metrics.sources import Source
from kpl_integrations.metrics.translation import Sample, Translation

__all__ = ["OpenTelemetryMetrics"]

_SECONDS: Final = "_seconds"
_BYTES: Final = ("_bytes", "_bytes_total")


class OpenTelemetryMetrics:
    """A hook; `meter_provider` None is the global one, also if it is set later.

    The names are those of Prometheus without `_total`, which an exporter to Prometheus appends itself.
    """

    def __init__(
        self, meter_provider: MeterProvider | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._translation = Translation(clock)
        self._sources: list[Source] = []
        # What counters came to and gauges were told last: to be observed, because to add costs an SDK more than
        # everything else here.
        self._told: dict[tuple[str, tuple[str, ...]], float] = {}
        self._histograms: dict[str, Histogram] = {}
        # A histogram wants its attributes as a mapping; there are few, and they are kept.
        self._attributes: dict[tuple[str, ...], dict[str, str]] = {}
        meter = (meter_provider or get_meter_provider()).get_meter("kpl_integrations.metrics")
        for metric in METRICS.values():
            name, unit = _name(metric.name), _unit(metric.name)
            if metric.kind is Kind.HISTOGRAM:
                self._histograms[metric.name] = meter.create_histogram(
                    name, unit, metric.meaning, explicit_bucket_boundaries_advisory=metric.buckets
                )
            elif metric.kind is Kind.GAUGE:
                meter.create_observable_gauge(name, [self._observer(metric)], unit, metric.meaning)
            else:
                meter.create_observable_counter(name, [self._observer(metric)], unit, metric.meaning)

    def __call__(self, fact: Fact) -> None:
        """Take note of one fact."""
        for name, labels, value in self._translation.samples(fact):
            histogram = self._histograms.get(name)
            if histogram is not None:
                attributes = self._attributes.get(labels)
                if attributes is None:
                    attributes = self._attributes[labels] = dict(zip(METRICS[name].labels, labels, strict=True))
                histogram.record(value, attributes)
            elif METRICS[name].kind is Kind.COUNTER:
                self._told[name, labels] = self._told.get((name, labels), 0) + value
            else:
                self._told[name, labels] = value

    def watch(self, source: Source) -> None:
        """Read `source` whenever a reader collects. Give each kind of source at most once."""
        self._sources.append(source)

    def _observer(self, metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_options: CallbackOptions) -> Iterable[Observation]:
            return [
                Observation(value, dict(zip(metric.labels, labels, strict=True)))
                for name, labels, value in self._samples()
                if name == metric.name
            ]

        return observe

    def _samples(self) -> Iterable[Sample]:
        yield from (Sample(name, labels, value) for (name, labels), value in list(self._told.items()))
        yield from self._translation.gauges()
        for source in self._sources:
            yield from source()


def _name(name: str) -> str:
    return name.removesuffix("_total")


def _unit(name: str) -> str:
    if name.endswith(_SECONDS):
        return "s"
    return "By" if name.endswith(_BYTES) else "1"
