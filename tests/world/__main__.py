"""The laws for many seeds: `python -m tests.world`. It prints a row for each kind, and failing seeds."""

import argparse
import logging
import math
import sys
import time
from random import randrange

from tests.world.kinds_of_faults import KINDS
from tests.world.lease_law import Outcome, run_law
from tests.world.world_loop import fix_hash_seed

SHOWN = 20
MOST_SEED = 1_000_000


HEAD = "| kind | runs | transitions | worst rate | most units in 1 s | longest above, intervals | least fair |\n"


def main() -> int:
    """Run each kind, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.world", description=__doc__)
    _ = parser.add_argument("--kind", choices=KINDS, help="only this kind")
    _ = parser.add_argument("--seed", type=int, default=randrange(MOST_SEED), help="the first seed; else any")
    _ = parser.add_argument("--transitions", type=int, default=0, help="at least so many, over all kinds")
    _ = parser.add_argument("--seconds", type=float, default=0.0, help="or for so many seconds of CPU time")
    given = parser.parse_args()
    logging.disable()
    names = [given.kind] if given.kind else list(KINDS)
    sys.stdout.write(f"The first seed is {given.seed}.\n\n{HEAD}|{' --- |' * HEAD.count(' | ')}{' --- |'}\n")
    failures: list[str] = []
    for name in names:
        row = _run(name, given.seed, given.seconds / len(names), given.transitions / len(names), failures)
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()
    sys.stderr.write("".join(f"{failure}\n" for failure in failures[:SHOWN]))
    if len(failures) > SHOWN:
        sys.stderr.write(f"and {len(failures) - SHOWN} more\n")
    return 1 if failures else 0


def _run(name: str, seed: int, seconds: float, transitions: float, failures: list[str]) -> str:
    """Run one kind with one seed after the other; return its row, and append to `failures`."""
    began, runs, total = time.process_time(), 0, Outcome(0, 0.0, 0.0, 0.0, math.inf)
    while not runs or time.process_time() - began < seconds or total.transitions < transitions:
        latest = run_law(name, seed + runs)
        false = latest.broken(KINDS[name])
        if false:
            failures.append(f"{'; '.join(false)}: python -m tests.world --kind '{name}' --seed {seed + runs}")
        runs += 1
        total = Outcome(
            total.transitions + latest.transitions,
            max(total.worst_rate, latest.worst_rate),
            max(total.most_units, latest.most_units),
            max(total.longest, latest.longest),
            min(total.fairness, latest.fairness),
        )
    return (
        f"| {name} | {runs} | {total.transitions:,} | {total.worst_rate:.3f} | {total.most_units:.3f} | "
        f"{total.longest:.2f} | {total.fairness:.2f} |"
    )


if __name__ == "__main__":
    fix_hash_seed("tests.world")
    sys.exit(main())
