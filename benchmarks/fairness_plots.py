"""Draw two pictures of the fair queue for the documentation, in virtual time: `python -m benchmarks.fairness_plots`.

A server serves 1,000 items a second. One noisy flow offers 5,000, ten quiet ones 20 each, at random
instants; the queue holds 500. First without fairness, one queue for all; then with `FairQueue`. Then
three flows of weights 3, 2, 1, all backlogged. No real time is measured, so every machine draws the same.
"""

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.line_chart import Chart, Line, draw_charts
from kpl_core.fairness import FairQueue, QueueBounds

_PICTURE = Path(__file__).parents[1] / "docs" / "explanation" / "fairness.svg"
_SERVED_PER_SECOND = 1_000
_SECONDS = 10
_HELD = 500
_OFFERED = {"noisy": 5_000, **{f"quiet {number}": 20 for number in range(10)}}


class _Arrival(NamedTuple):
    at: float
    flow: str


class _Seen(NamedTuple):
    """The result of one item: its arrival and its wait; None if it was rejected."""

    arrival: _Arrival
    waited: float | None


def _arrivals() -> Iterator[_Arrival]:
    chance = random.Random(7)  # the same picture each time
    all_of_them = (
        _Arrival(chance.uniform(0, _SECONDS), flow)
        for flow, per_second in _OFFERED.items()
        for _ in range(per_second * _SECONDS)
    )
    return iter(sorted(all_of_them))


def _simulate(push: Callable[[_Arrival], list[_Arrival] | None], pop: Callable[[], _Arrival | None]) -> list[_Seen]:
    """Serve one item each millisecond. `push` returns the evicted items, or None if the item is rejected."""
    seen: list[_Seen] = []
    arrivals = deque(_arrivals())
    for tick in range(_SERVED_PER_SECOND * _SECONDS):
        now = tick / _SERVED_PER_SECOND
        while arrivals and arrivals[0].at <= now:
            arrival = arrivals.popleft()
            left = push(arrival)
            seen += [_Seen(refused, None) for refused in ([arrival] if left is None else left)]
        served = pop()
        if served is not None:
            seen.append(_Seen(served, now - served.at))
    return seen


def _one_for_all() -> list[_Seen]:
    queue: deque[_Arrival] = deque()

    def push(arrival: _Arrival) -> list[_Arrival] | None:
        if len(queue) >= _HELD:
            return None
        queue.append(arrival)
        return []

    return _simulate(push, lambda: queue.popleft() if queue else None)


def _fair() -> list[_Seen]:
    queue: FairQueue[_Arrival] = FairQueue(bounds=QueueBounds(max_items=_HELD))
    return _simulate(
        lambda arrival: queue.push_evicting(arrival, arrival.flow, 1), lambda: queue.pop() if queue else None
    )


def _waits(seen: list[_Seen]) -> list[tuple[float, float]]:
    """Return the longest wait of any quiet flow's item, by half second of its arrival, in milliseconds."""
    longest: defaultdict[float, float] = defaultdict(float)
    for arrival, waited in seen:
        if arrival.flow != "noisy" and waited is not None:
            window = arrival.at // 0.5 * 0.5
            longest[window] = max(longest[window], waited * 1_000)
    return sorted(longest.items())


def _refused_percent(seen: list[_Seen]) -> float:
    quiet = [each for each in seen if each.arrival.flow != "noisy"]
    return 100 * sum(each.waited is None for each in quiet) / len(quiet)


def _shares() -> list[Line]:
    weights = {"weight 3": 3, "weight 2": 2, "weight 1": 1}
    queue: FairQueue[str] = FairQueue(weight_of=lambda flow: weights[str(flow)])
    for flow in weights:
        for _ in range(600):
            queue.push(flow, flow, 1)
    served = dict.fromkeys(weights, 0)
    points: dict[str, list[tuple[float, float]]] = {flow: [(0.0, 0.0)] for flow in weights}
    for number in range(1, 1_001):
        served[queue.pop()] += 1
        if number % 20 == 0:
            for flow, count in served.items():
                points[flow].append((number, count))
    return [Line(flow, line) for flow, line in points.items()]


def main() -> None:
    """Write docs/explanation/fairness.svg and print its figures."""
    fifo, fair = _one_for_all(), _fair()
    _PICTURE.parent.mkdir(parents=True, exist_ok=True)
    charts = [
        Chart(
            "The longest wait of a quiet flow beside a noisy one",
            "seconds",
            "milliseconds",
            [Line("one queue for all", _waits(fifo)), Line("fair queue", _waits(fair))],
        ),
        Chart("Three backlogged flows", "items served in all", "items of the flow", _shares()),
    ]
    _PICTURE.write_text(
        draw_charts(charts, label="The effect of fair queuing on waiting times and shares"), encoding="utf-8"
    )
    for name, seen in {"one queue for all": fifo, "fair queue": fair}.items():
        longest = max(wait for _, wait in _waits(seen))
        print(
            f"{name}: {_refused_percent(seen):.1f} % of the quiet flows' items rejected, longest wait {longest:.0f} ms"
        )


if __name__ == "__main__":
    main()
