"""Simulate a producer, one with a spool, and a gateway, seed by seed: `python -m tests.world.simulate`.

It prints what happened, and for each sentence that is false the command that repeats its run.
"""

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from random import randrange

from tests.world.gateway_story import run_gateway_story
from tests.world.invariants import Run
from tests.world.producer_story import run_story
from tests.world.spool_story import run_spool_story
from tests.world.world_loop import fix_hash_seed

STORIES: Mapping[str, Callable[[int], Run]] = {
    "producer": run_story,
    "spool": run_spool_story,
    "gateway": run_gateway_story,
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
    given = parser.parse_args()
    logging.disable()
    names = [given.story] if given.story else list(STORIES)
    began, runs, failures = time.process_time(), list[Run](), list[str]()
    seed = given.seed
    while not runs or time.process_time() - began < given.seconds:
        for name in names:
            latest = told(name, seed)
            failures += [f"{sentence}: {COMMAND} --story {name} --seed {seed}" for sentence in latest.false]
            runs.append(latest)
        seed += 1
    sys.stdout.write(f"{summary(runs)}\nThe first seed is {given.seed}.\n")
    sys.stderr.write("".join(f"{failure}\n" for failure in failures[:SHOWN]))
    return 1 if failures else 0


def told(name: str, seed: int) -> Run:
    """Run a story. An exception that ends it is false too."""
    try:
        return STORIES[name](seed)
    except Exception as error:  # noqa: BLE001 - of any part of the product
        return Run([], 0.0, 0, 0, Counter(), [f"the run ended with {error!r}"])


def summary(runs: list[Run]) -> str:
    """Return how much was simulated, and which faults and outcomes there were."""
    faults = Counter(name for run in runs for name in run.faults)
    outcomes = sum((run.outcomes for run in runs), Counter[str]())
    return "\n".join(
        [
            f"{len(runs):,} runs, {sum(run.seconds for run in runs) / 3_600:.1f} simulated hours",
            f"{sum(run.records for run in runs):,} records in {sum(run.requests for run in runs):,} requests",
            f"outcomes: {', '.join(f'{count:,} {name}' for name, count in outcomes.most_common())}",
            f"runs with each fault: {', '.join(f'{name} {count}' for name, count in sorted(faults.items()))}",
        ]
    )


if __name__ == "__main__":
    fix_hash_seed("tests.world.simulate")
    sys.exit(main())
