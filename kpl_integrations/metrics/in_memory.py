"""Metrics kept in dictionaries: for tests, and to see what a vendor would be told.

Every observation of a histogram is kept as it is, so memory grows with each request: not for a process that runs on.
"""

import time
from collections.abc import Callable

from kpl_core.hooks import Fact
from kpl_integrations.metrics.catalogue import METRICS
from kpl_integrations.metrics.sources import Source
from kpl_integrations.metrics.told import Told
from kpl_integrations.metrics.translation import Labels, Sample, Translation

__all__ = ["InMemoryMetrics"]


class InMemoryMetrics:
    """A hook: `Producer(config, hooks=[metrics])`, then `metrics.value(name, label=...)`."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._recorded = _Recorded()
        self._translation = Translation(self._recorded, clock)
        self._sources: list[Source] = []

    def __call__(self, fact: Fact) -> None:
        """Take note of one fact."""
        self._translation.tell(fact)

    def watch(self, source: Source) -> None:
        """Read `source` whenever a value is asked for."""
        self._sources.append(source)

    def samples(self) -> list[Sample]:
        """Return every value there is; of a histogram the number of its observations."""
        told = self._recorded.told()
        told += [Sample(name, labels, len(values)) for (name, labels), values in self._recorded.observations.items()]
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
        return list(self._recorded.observations.get((name, labels), ()))


class _Recorded(Told):
    def __init__(self) -> None:
        super().__init__()
        self.observations: dict[tuple[str, Labels], list[float]] = {}

    def observe(self, name: str, labels: Labels, value: float) -> None:
        """Keep the value as it is."""
        self.observations.setdefault((name, labels), []).append(value)


def _known(name: str, labels: dict[str, str]) -> dict[str, str]:
    unknown = labels.keys() - set(METRICS[name].labels)
    if unknown:
        message = f"{name} has the labels {METRICS[name].labels}, not {sorted(unknown)}"
        raise KeyError(message)
    return labels
