"""Which rows of the product's decision tables some runs have reached."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from kpl_core.durability.circuit_breaker import TRANSITIONS, BreakerSignal, CircuitBreaker
from kpl_core.options.config import Config
from kpl_core.pipeline import retrier
from kpl_core.pipeline.classification import TABLE, Case, Row, classify
from kpl_integrations.ingest.admission.refusals import REFUSALS, Refusal, Refused

OUTCOMES, BREAKER, ANSWERS = "what an outcome means", "the circuit breaker", "why a request is refused"
# All rows of each table, by name.
TABLES: Mapping[str, tuple[str, ...]] = {
    OUTCOMES: tuple(row.outcome for row in TABLE),
    BREAKER: tuple(f"{state.value}: {signal.value}" for state, signal in TRANSITIONS),
    ANSWERS: tuple(refusal.value for refusal in REFUSALS),
}


@contextmanager
def watched_tables() -> Iterator[dict[str, set[str]]]:
    """Note the rows that are reached in this block, by table."""
    reached: dict[str, set[str]] = {name: set() for name in TABLES}
    signal_of, refused = CircuitBreaker._signal, Refused.__init__  # noqa: SLF001 - the one place of each signal

    def watched_classify(case: Case, config: Config) -> Row:
        row = classify(case, config)
        reached[OUTCOMES].add(row.outcome)
        return row

    def watched_signal(self: CircuitBreaker, signal: BreakerSignal) -> None:
        reached[BREAKER].add(f"{self.known_state.value}: {signal.value}")
        signal_of(self, signal)

    def watched_refused(self: Refused, refusal: Refusal, *arguments: Any, **named: Any) -> None:
        reached[ANSWERS].add(refusal.value)
        refused(self, refusal, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrier, "classify", watched_classify)
        patch.setattr(CircuitBreaker, "_signal", watched_signal)
        patch.setattr(Refused, "__init__", watched_refused)
        yield reached


def rows_reached(reached: Mapping[str, set[str]]) -> str:
    """Return a line for each table: how many of its rows were reached, and which were not."""
    lines = []
    for name, rows in TABLES.items():
        missing = [row for row in rows if row not in reached[name]]
        lines.append(f"{name}: {len(rows) - len(missing)} of {len(rows)} rows; not: {'; '.join(missing) or 'none'}")
    return "\n".join(lines)
