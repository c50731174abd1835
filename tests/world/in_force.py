"""What is in force in a fleet: the rates of all token buckets together, and the units sent in any second.

Load is a fluid. A worker with more load than its rate spends the saved tokens at once, then sends at its rate. So the
units sent are a line with jumps, and the most in any second is exact: it is at a bend, or one second after one.
"""

from collections import deque
from collections.abc import Mapping

from kpl_core.coordination.store_objects import Pair

WINDOW_SECONDS = 1.0
_ROUNDING = 1e-6


class LineOfUnits:
    """The units sent so far, over time, and the most within a window."""

    def __init__(self) -> None:
        self._bends: deque[tuple[float, float]] = deque([(0.0, 0.0)])
        self._units = self._flow = 0.0
        self._at = 0.0
        # The next bend whose window is not yet complete.
        self._checked = -1.0
        self.most = 0.0

    def _before(self, at: float) -> float:
        """Return the units sent before `at`, without a jump at that instant."""
        bends = self._bends
        if at <= bends[0][0]:
            return bends[0][1]
        while len(bends) > 1 and bends[1][0] < at:
            bends.popleft()
        (start, units), (end, then) = bends[0], bends[1] if len(bends) > 1 else (self._at, self._units)
        return units if end <= start else units + (then - units) * (at - start) / (end - start)

    def advance(self, now: float) -> None:
        began, units = self._at, self._units
        for bend, _ in [each for each in self._bends if began < each[0] + WINDOW_SECONDS < now]:
            at = bend + WINDOW_SECONDS
            self.most = max(self.most, units + self._flow * (at - began) - self._before(bend))
        self._at, self._units = now, units + self._flow * (now - began)
        self.most = max(self.most, self._units - self._before(now - WINDOW_SECONDS))

    def change(self, *, jump: float, flow: float) -> None:
        """Send `jump` units at once, and change the flow by `flow`; after `advance`."""
        self._bends.append((self._at, self._units))
        self._units += jump
        if jump:
            self._bends.append((self._at, self._units))
        self._flow += flow
        self.most = max(self.most, self._units - self._before(self._at - WINDOW_SECONDS))


class FleetGauge:
    """The sums over all workers, as shares of each resource's limit."""

    def __init__(self, limits: Mapping[str, Pair]) -> None:
        self.limits = limits
        self._lines = {resource: LineOfUnits() for resource in limits}
        self._rates = {resource: [0.0, 0.0] for resource in limits}
        self._ratio = self._since = self._above = 0.0
        # The highest sum of rates that lasted, and the seconds for which a sum was above the limit in one piece.
        self.worst_rate = self.longest_above = 0.0

    def change(self, resource: str, now: float, *, rates: Pair, jump: float, flow: float) -> None:
        """Add to the rates and to the flow of a resource, both units a second, and send `jump` units now."""
        self.look(now)
        line, sums = self._lines[resource], self._rates[resource]
        line.advance(now)
        line.change(jump=jump, flow=flow)
        sums[0] += rates[0]
        sums[1] += rates[1]
        self._ratio = max(map(self.rate, self.limits))

    def look(self, now: float) -> None:
        """Count the time since the last look. Between two changes at one instant no time passes."""
        lasted, self._since = now - self._since, now
        if lasted <= 0.0:
            return
        self.worst_rate = max(self.worst_rate, self._ratio)
        self._above = self._above + lasted if self._ratio > 1.0 + _ROUNDING else 0.0
        self.longest_above = max(self.longest_above, self._above)

    def rate(self, resource: str) -> float:
        """Return the sum of the rates, as a share of the limit."""
        return max(total / limit for total, limit in zip(self._rates[resource], self.limits[resource], strict=True))

    @property
    def most_units(self) -> float:
        """The most units in any second, as a share of one second's limit."""
        return max(line.most / self.limits[resource][0] for resource, line in self._lines.items())
