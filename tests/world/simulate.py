"""Simulate producers and gateways, seed by seed: `python -m tests.world.simulate`.

It prints what happened, and for each sentence that is false the command that repeats its run, once with the whole story
and once with as little of it as the sentence needs.
"""

import argparse
import asyncio
import gc
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from random import randrange
from typing import Any
from zlib import crc32

import pytest

from kpl_core.durability.circuit_breaker import TRANSITIONS, BreakerSignal, CircuitBreaker
from kpl_core.options.config import Config
from kpl_core.pipeline import retrier
from kpl_core.pipeline.classification import TABLE, Case, Row, classify
from kpl_integrations.ingest.admission.refusals import REFUSALS, Refusal, Refused
from tests.world.connections.connections_story import run_connections_story
from tests.world.gateway_story import run_gateway_story
from tests.world.invariants import Run
from tests.world.letters_story import run_letters_story
from tests.world.network import WHOLE, Less
from tests.world.producer_story import run_story
from tests.world.spool_story import run_spool_story
from tests.world.workers.workers_story import run_gateways_story, run_workers_story
from tests.world.world_loop import WorldStopped, fix_hash_seed

STORIES: Mapping[str, Callable[[int, Less], Run]] = {
    "producer": run_story,
    "spool": run_spool_story,
    "gateway": run_gateway_story,
    "workers": run_workers_story,
    "gateways": run_gateways_story,
    "dead letters": run_letters_story,
    "connections": run_connections_story,
}
OUTCOMES, BREAKER, ANSWERS = "what an outcome means", "the circuit breaker", "why a request is refused"
# The decision tables of the product, and the names of their rows.
TABLES: Mapping[str, tuple[str, ...]] = {
    OUTCOMES: tuple(row.outcome for row in TABLE),
    BREAKER: tuple(f"{state.value}: {signal.value}" for state, signal in TRANSITIONS),
    ANSWERS: tuple(refusal.value for refusal in REFUSALS),
}

MOST_SEED = 1_000_000
SHOWN = 20
COMMAND = "python -m tests.world.simulate"


def main() -> int:
    """Run one seed after the other, and return the exit status."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    _ = parser.add_argument("--seed", type=int, default=randrange(MOST_SEED), help="the first seed; else any")
    _ = parser.add_argument("--seconds", type=float, default=0.0, help="for so many seconds of CPU time; else one seed")
    _ = parser.add_argument("--story", choices=STORIES, help="only this one")
    _ = parser.add_argument("--without", default="", help="faults to leave out, with commas between them")
    _ = parser.add_argument("--until", type=float, default=WHOLE.seconds, help="end of faults and clients, seconds")
    _ = parser.add_argument("--clients", type=int, default=WHOLE.clients, help="the most clients")
    given = parser.parse_args()
    logging.disable()
    # What was imported is no garbage.
    gc.freeze()
    less = Less(frozenset(filter(None, given.without.split(","))), given.until, given.clients)
    names = [given.story] if given.story else list(STORIES)
    began, runs, failures = time.process_time(), list[Run](), list[str]()
    seed = given.seed
    # An interrupt ends the simulation, not its summary.
    with watched_tables() as reached, suppress(KeyboardInterrupt):
        while not runs or time.process_time() - began < given.seconds:
            for name in names:
                latest = run_of(name, seed, less)
                runs.append(latest)
                if latest.false and len(failures) < SHOWN:
                    failures += [f"{sentence}: {command_of(name, seed, less)}" for sentence in latest.false]
                    failures.append(f"with less: {command_of(name, seed, shrunk(name, seed, less, latest))}")
            seed += 1
    per_minute = 60.0 * sum(run.records for run in runs) / (time.process_time() - began)
    lines = [summary(runs), f"{per_minute:,.0f} records per minute of CPU time", rows_reached(reached)]
    sys.stdout.write("\n".join([*lines, f"The first seed is {given.seed}.\n"]))
    sys.stderr.write("".join(f"{failure}\n" for failure in failures))
    return 1 if failures else 0


def run_of(name: str, seed: int, less: Less = WHOLE) -> Run:
    """Run a story. An exception that ends it, or cancels it, is false too."""
    try:
        return STORIES[name](seed, less)
    except (Exception, asyncio.CancelledError, BaseExceptionGroup, WorldStopped) as error:  # noqa: BLE001 - of any part of the product
        return Run([], 0.0, 0, 0, Counter(), [f"the run ended with {error!r}"], 0, 0)


def shrunk(name: str, seed: int, less: Less, failed: Run, run: Callable[[str, int, Less], Run] = run_of) -> Less:
    """Return what can be left out of a failed run, one after the other, while anything is still false."""

    def or_before(tried: Less) -> Less:
        return tried if run(name, seed, tried).false else less

    for fault in failed.faults:
        less = or_before(less._replace(without=less.without | {fault}))
    for clients in (2, 1):
        less = or_before(less._replace(clients=min(less.clients, clients)))
    for seconds in (20.0, 10.0, 5.0, 2.0):
        less = or_before(less._replace(seconds=min(less.seconds, seconds)))
    return less


def command_of(name: str, seed: int, less: Less) -> str:
    """Return the command that repeats a run."""
    words = [COMMAND, "--story", name, "--seed", str(seed)]
    if less.without:
        words.append(f'--without "{",".join(sorted(less.without))}"')
    if less.seconds < WHOLE.seconds:
        words.append(f"--until {less.seconds:g}")
    if less.clients < WHOLE.clients:
        words.append(f"--clients {less.clients}")
    return " ".join(words)


def summary(runs: list[Run]) -> str:
    """Return how much was simulated, and which faults and outcomes there were."""
    faults = Counter(name for run in runs for name in run.faults)
    outcomes = sum((run.outcomes for run in runs), Counter[str]())
    steps, seconds = sum(run.steps for run in runs), sum(run.seconds for run in runs)
    trace = 0
    for run in runs:
        trace = crc32(run.trace.to_bytes(4, "big"), trace)
    return "\n".join(
        [
            f"{len(runs):,} runs, {seconds / 3_600:.1f} simulated hours, {steps:,} steps, trace {trace:08x}",
            f"{sum(run.records for run in runs):,} records in {sum(run.requests for run in runs):,} requests",
            f"outcomes: {', '.join(f'{count:,} {name}' for name, count in outcomes.most_common())}",
            f"runs with each fault: {', '.join(f'{name} {count}' for name, count in sorted(faults.items()))}",
        ]
    )


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


if __name__ == "__main__":
    fix_hash_seed("tests.world.simulate")
    sys.exit(main())
