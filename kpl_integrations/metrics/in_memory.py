"""Metrics kept in dictionaries: for tests, for a dashboard of one's own, and to see what a vendor would be told."""

import time
from collections.abc import Callable

from kpl_core.hooks import Fact
from kpl_integrations.metrics.catalogue import METRICS, Kind
from kpl_integrations.metrics.sources import Source
from kpl_integrations.metrics.translation import Sample, Translation

__all__ = ["InMemoryMetrics"]

_Key = tuple[str, tuple[str, ...]]


class InMemoryMetrics:
    """A hook: `Producer(config, hooks=[metrics])`, then `metrics.value(name, label=...)`."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._translation = Translation(clock)
        self._sources: list[Source] = []
        self._values: dict[_Key, float] = {}
        self._observations: dict[_Key, list[float]] = {}

    def __call__(self, fact: Fact) -> None:
        """Take note of one fact."""
        for name, labels, value in self._translation.samples(fact):
            match METRICS[name].kind:
                case Kind.COUNTER:
                    self._values[name, labels] = self._values.get((name, labels), 0) + value
                case Kind.GAUGE:
                    self._values[name, labels] = value
                case Kind.HISTOGRAM:
                    self._observations.setdefault((name, labels), []).append(value)

    def watch(self, source: Source) -> None:
        """Read `source` whenever a value is asked for."""
        self._sources.append(source)

    def samples(self) -> list[Sample]:
        """Return every value there is; of a histogram the number of its observations."""
        told = [Sample(name, labels, value) for (name, labels), value in self._values.items()]
        told += [Sample(name, labels, len(values)) for (name, labels), values in self._observations.items()]
        told += self._translation.gauges()
        return told + [sample for source in self._sources for sample in source()]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the values of a metric over all series with these labels; 0 if there is none.

        Raises:
            KeyError: there is no such metric, or it has no such label.
        """
        places = {METRICS[name].labels.index(label): value for label, value in _known(name, labels).items()}
        return sum(
            sample.value
            for sample in self.samples()
            if sample.name == name and all(sample.labels[place] == value for place, value in places.items())
        )

    def observations(self, name: str, *labels: str) -> list[float]:
        """Return what a histogram observed, in order."""
        return list(self._observations.get((name, labels), ()))


def _known(name: str, labels: dict[str, str]) -> dict[str, str]:
    unknown = labels.keys() - set(METRICS[name].labels)
    if unknown:
        message = f"{name} has the labels {METRICS[name].labels}, not {sorted(unknown)}"
        raise KeyError(message)
    return labels
