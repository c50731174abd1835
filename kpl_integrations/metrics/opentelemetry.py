"""The producer's metrics through OpenTelemetry's API: any SDK, any exporter, and nothing if there is none.

    metrics = OpenTelemetryMetrics()
    producer = Producer(config, hooks=[metrics])
    metrics.watch(producer_source(producer))

Counters and gauges are kept here and observed when a reader collects. Of a histogram the API takes one observation
after the other, and the SDK 5 us for each, as much as the whole journey of a user record. So the two that elsewhere
count Kinesis records count answers here: the longest delivery and the most attempts of the records it finished.
"""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from opentelemetry.metrics import CallbackOptions, Histogram, MeterProvider, Observation, get_meter_provider

from kpl_core.hooks import Fact, RequestCompleted
from kpl_integrations.metrics.catalogue import METRICS, Kind, Metric
from kpl_integrations.metrics.sources import Source
from kpl_integrations.metrics.told import Told
from kpl_integrations.metrics.translation import Labels, Sample, Translation

__all__ = ["OpenTelemetryMetrics"]

_SECONDS: Final = "_seconds"
_BYTES: Final = ("_bytes", "_bytes_total")
# Told with each Kinesis record, observed with each request.
_OF_AN_ANSWER: Final = frozenset({"kinesis_producer_delivery_seconds", "kinesis_producer_attempts"})


class OpenTelemetryMetrics:
    """A hook; `meter_provider` None is the global one, also if it is set later.

    The names are those of Prometheus without `_total`, which an exporter to Prometheus appends itself.
    """

    def __init__(
        self, meter_provider: MeterProvider | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        histograms: dict[str, Histogram] = {}
        self._sources: list[Source] = []
        meter = (meter_provider or get_meter_provider()).get_meter("kpl_integrations.metrics")
        for metric in METRICS.values():
            name, unit = _name(metric.name), _unit(metric.name)
            if metric.kind is Kind.HISTOGRAM:
                meaning = f"{metric.meaning} The greatest of an answer." * (metric.name in _OF_AN_ANSWER)
                histograms[metric.name] = meter.create_histogram(
                    name, unit, meaning or metric.meaning, explicit_bucket_boundaries_advisory=metric.buckets
                )
            elif metric.kind is Kind.GAUGE:
                meter.create_observable_gauge(name, [self._observer(metric)], unit, metric.meaning)
            else:
                meter.create_observable_counter(name, [self._observer(metric)], unit, metric.meaning)
        self._recorded = _Recorded(histograms)
        self._translation = Translation(self._recorded, clock)

    def __call__(self, fact: Fact) -> None:
        """Take note of one fact."""
        self._translation.tell(fact)
        if isinstance(fact, RequestCompleted):
            self._recorded.observe_answer()

    def watch(self, source: Source) -> None:
        """Read `source` whenever a reader collects. Give each kind of source at most once."""
        self._sources.append(source)

    def _observer(self, metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_options: CallbackOptions) -> Iterable[Observation]:
            # What finished after the last request, as all does that is left at a producer's end.
            self._recorded.observe_answer()
            return [
                Observation(value, dict(zip(metric.labels, labels, strict=True)))
                for name, labels, value in self._samples()
                if name == metric.name
            ]

        return observe

    def _samples(self) -> Iterable[Sample]:
        yield from self._recorded.told()
        yield from self._translation.gauges()
        for source in self._sources:
            yield from source()


class _Recorded(Told):
    def __init__(self, histograms: dict[str, Histogram]) -> None:
        super().__init__()
        self._record = {name: histogram.record for name, histogram in histograms.items()}
        # The SDK takes a third longer for attributes that are empty than for none.
        self._attributes: dict[Labels, dict[str, str] | None] = {(): None}
        # Facts come on the producer's loop, a reader collects on a thread of its own.
        self._holding = threading.Lock()
        self._greatest: dict[str, float] = {}

    def observe(self, name: str, labels: Labels, value: float) -> None:
        """Give a histogram one observation, now or with the answer."""
        if name in _OF_AN_ANSWER:
            with self._holding:
                if value > self._greatest.get(name, -1.0):
                    self._greatest[name] = value
            return
        if labels not in self._attributes:
            self._attributes[labels] = dict(zip(METRICS[name].labels, labels, strict=True))
        self._record[name](value, self._attributes[labels])

    def observe_answer(self) -> None:
        """Observe the greatest of what was told since the last time, if anything was."""
        with self._holding:
            greatest, self._greatest = self._greatest, {}
        for name, value in greatest.items():
            self._record[name](value)


def _name(name: str) -> str:
    return name.removesuffix("_total")


def _unit(name: str) -> str:
    if name.endswith(_SECONDS):
        return "s"
    return "By" if name.endswith(_BYTES) else "1"
