"""Metrics in dictionaries, for tests.

It keeps every observation of every histogram, so its memory grows with each request. Do not use it in a
long-running process.
"""

import time
from collections.abc import Callable

from kpl_integrations.metrics.catalogue import METRICS
from kpl_integrations.metrics.metrics_hook import Labels, MetricsHook, Sample


class InMemoryMetrics(MetricsHook):
    """A hook: `Producer(config, hooks=[metrics])`, then `metrics.value(name, label=...)`."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._observations: dict[tuple[str, Labels], list[float]] = {}

    def observe(self, name: str, labels: Labels, value: float) -> None:
        """Keep the observed value."""
        self._observations.setdefault((name, labels), []).append(value)

    def samples(self) -> list[Sample]:
        """Return all values; the value of a histogram is the number of its observations."""
        counts = [Sample(name, labels, len(values)) for (name, labels), values in self._observations.items()]
        return super().samples() + counts

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of a metric over all series with these labels; 0 if there is none.

        Raises:
            KeyError: the metric does not exist, or does not have one of these labels.
        """
        known = METRICS[name].labels
        unknown = labels.keys() - set(known)
        if unknown:
            message = f"{name} has the labels {known}, not {sorted(unknown)}"
            raise KeyError(message)
        places = {known.index(label): value for label, value in labels.items()}
        return sum(
            sample.value
            for sample in self.samples()
            if sample.name == name and all(sample.labels[place] == value for place, value in places.items())
        )

    def observations(self, name: str, *labels: str) -> list[float]:
        """Return the observations of a histogram in order."""
        return list(self._observations.get((name, labels), ()))
