"""Compute figures from answers: the median of the rounds, its range, and ratios within a round."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.plan import Row
from benchmarks.rounds import Answer, Results

__all__ = ["Figure", "figure_of", "rate", "ratio_of"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A median over the rounds, with the smallest and the largest."""

    median: float
    smallest: float
    largest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Figure | None":
        """Return the figure of these values, None if there are none."""
        return cls(median(values), min(values), max(values)) if values else None

    def text(self, pattern: str = "{:,.0f}") -> str:
        """Return "median [smallest - largest]"."""
        return f"{pattern} [{pattern} - {pattern}]".format(self.median, self.smallest, self.largest)


def rate(row: Row, answer: Answer) -> float:
    """Return user records acknowledged per CPU-second of the producing process."""
    acknowledged = answer.figures.get("acknowledged", row.workload.record_count)
    return float(acknowledged / answer.figures["cpu_seconds"])


def figure_of(results: Results, row: Row, name: str = "") -> Figure | None:
    """Return the figure called `name` in the answers, the rate without a name."""
    if name:
        return Figure.of([answer.figures[name] for answer in results.of(row) if name in answer.figures])
    return Figure.of([rate(row, answer) for answer in results.of(row) if "cpu_seconds" in answer.figures])


def ratio_of(results: Results, row: Row, other: Row) -> Figure | None:
    """Return how many times the rate of `other` a row reached, round by round."""
    pairs = zip(results.answers[row.key], results.answers[other.key], strict=True)
    return Figure.of([rate(row, a) / rate(other, b) for a, b in pairs if not a.failure and not b.failure])
