"""Metrics through OpenTelemetry's API: they work with any SDK and exporter, and do nothing without one.

    metrics = OpenTelemetryMetrics()
    producer = Producer(config, hooks=[metrics])
    metrics.watch(producer_source(producer))

Counters and gauges are kept here and observed when a reader collects. The API accepts observations of a
histogram only one by one, and the SDK takes 5 us for each, as long as the whole journey of a user record.
So `delivery_seconds` and `attempts`, which other vendors observe per Kinesis record, are observed here per
PutRecords answer: the longest delivery and the most attempts among the records that it finished.
"""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from opentelemetry.metrics import CallbackOptions, Histogram, MeterProvider, Observation, get_meter_provider

from kpl_core.hooks import Fact, RequestCompleted
from kpl_integrations.metrics.catalogue import METRICS, Kind, Metric
from kpl_integrations.metrics.metrics_hook import Labels, MetricsHook

_BYTES: Final = ("_bytes", "_bytes_total")
# Reported per Kinesis record, observed per request.
_OBSERVED_PER_ANSWER: Final = frozenset({"kinesis_producer_delivery_seconds", "kinesis_producer_attempts"})


class OpenTelemetryMetrics(MetricsHook):
    """A producer's hook. Without `meter_provider` it uses the global one, even if that is set later.

    The metric names are those of Prometheus without `_total`, which an exporter to Prometheus appends.
    """

    def __init__(
        self, meter_provider: MeterProvider | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(clock)
        self._histograms: dict[str, Histogram] = {}
        # The SDK takes a third longer for empty attributes than for None.
        self._attributes: dict[Labels, dict[str, str] | None] = {(): None}
        # Facts arrive on the producer's event loop; a reader collects on its own thread.
        self._maxima_lock = threading.Lock()
        self._maxima: dict[str, float] = {}
        meter = (meter_provider or get_meter_provider()).get_meter("kpl_integrations.metrics")
        for metric in METRICS.values():
            name, unit = metric.name.removesuffix("_total"), _unit(metric.name)
            if metric.kind is Kind.HISTOGRAM:
                suffix = " The greatest value of an answer." if metric.name in _OBSERVED_PER_ANSWER else ""
                self._histograms[metric.name] = meter.create_histogram(
                    name, unit, metric.meaning + suffix, explicit_bucket_boundaries_advisory=metric.buckets
                )
            else:
                is_gauge = metric.kind is Kind.GAUGE
                create = meter.create_observable_gauge if is_gauge else meter.create_observable_counter
                create(name, [self._observer(metric)], unit, metric.meaning)

    def __call__(self, fact: Fact) -> None:
        """Record the values that a fact adds."""
        super().__call__(fact)
        if isinstance(fact, RequestCompleted):
            self._observe_maxima()

    def observe(self, name: str, labels: Labels, value: float) -> None:
        """Observe a value now, or remember it until the end of the answer."""
        if name in _OBSERVED_PER_ANSWER:
            with self._maxima_lock:
                if value > self._maxima.get(name, -1.0):
                    self._maxima[name] = value
            return
        if labels not in self._attributes:
            self._attributes[labels] = dict(zip(METRICS[name].labels, labels, strict=True))
        self._histograms[name].record(value, self._attributes[labels])

    def _observe_maxima(self) -> None:
        with self._maxima_lock:
            maxima, self._maxima = self._maxima, {}
        for name, value in maxima.items():
            self._histograms[name].record(value)

    def _observer(self, metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_options: CallbackOptions) -> Iterable[Observation]:
            # Include records that finished after the last request, as at the end of a producer.
            self._observe_maxima()
            return [
                Observation(value, dict(zip(metric.labels, labels, strict=True)))
                for name, labels, value in self.samples()
                if name == metric.name
            ]

        return observe


def _unit(name: str) -> str:
    if name.endswith("_seconds"):
        return "s"
    return "By" if name.endswith(_BYTES) else "1"
