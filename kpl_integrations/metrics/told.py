"""What counters came to and gauges were told last, in a dictionary: a vendor's own would lock for each."""

from kpl_integrations.metrics.translation import Labels, Sample

__all__ = ["Told"]


class Told:
    """The part of a `Recorder` that all vendors share; written by one thread, read by any."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, Labels], float] = {}

    def add(self, name: str, labels: Labels, value: float) -> None:
        """Add to a counter."""
        key = name, labels
        self._values[key] = self._values.get(key, 0) + value

    def show(self, name: str, labels: Labels, value: float) -> None:
        """Say what a gauge shows from now on."""
        self._values[name, labels] = value

    def told(self) -> list[Sample]:
        """Return all of them as they are now."""
        return [Sample(name, labels, value) for (name, labels), value in list(self._values.items())]
