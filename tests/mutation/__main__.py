"""`make mutants`: break the machines on purpose, one small fault at a time, and see whether a test fails.

    make mutants                                               a sample of 400, drawn by the seed
    make mutants ARGS="--sample 60 --seed 7 --minutes 10"
    make mutants ARGS="--at kpl_core/pipeline/send_queue.py:116"   every mutation of a line, a file or a folder

The tests that run the changed line run in a child process, nearest first. The survivors are printed with their diff,
then a table. docs/testing.md explains the survivors.
"""

import argparse
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.mutation.coverage_map import CoverageMap, read_map
from tests.mutation.mutations import Mutation, mutations_of, python_files, sample
from tests.mutation.trial import NOT_IMPORTED, Trial, end_orphans, prepare

SCOPE = [
    "kpl_core/pipeline",
    "kpl_core/fairness",
    "kpl_core/durability",
    "kpl_core/coordination",
    "kpl_core/transport",
    "kpl_integrations/ingest/admission",
    "kpl_integrations/logging_handler/sender.py",
]
SUITES = [
    "tests/pipeline",
    "tests/fairness",
    "tests/durability",
    "tests/coordination",
    "tests/transport",
    "tests/producer",
    "tests/faults",
    "tests/ingest/admission",
    "tests/ingest/fast_path",
    "tests/ingest/routes",
    "tests/ingest/streams",
    "tests/logging_handler",
]
# The nearest tests run first, for so many of their seconds. If all of these pass, the next ones run, and so on.
STAGE_SECONDS = (3.0, 30.0, 120.0)


@dataclass
class Verdict:
    """What became of a mutation: `killed` by a test or a hang, `survived`, or `undecided`, which counts as survived."""

    mutation: Mutation
    outcome: str
    by: str


@dataclass
class Runner:
    """Runs the trials, a few at a time, until all mutations have a verdict or the time is over."""

    root: Path
    tests: CoverageMap
    processes: int
    folder: Path
    verdicts: list[Verdict] = field(default_factory=list)
    _running: dict[int, tuple[Mutation, Trial, list[list[str]]]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def run(self, mutations: list[Mutation], until: float) -> None:
        """Try all mutations. None starts after `until`, an instant of `time.monotonic`."""
        waiting = mutations[::-1]
        while self._running or (waiting and time.monotonic() < until):
            while waiting and len(self._running) < self.processes and time.monotonic() < until:
                mutation = waiting.pop()
                self._nearest(mutation)
            if self._running:
                self._wait()
        self._check_killers()

    def _nearest(self, mutation: Mutation) -> None:
        tests = self.tests.tests_of(mutation)
        if not tests:
            self._decide(mutation, "survived", "no test runs the line")
            return
        stages = []
        for most in STAGE_SECONDS:
            ends = itertools.accumulate(self.tests.seconds[test] for test in tests)
            count = max(1, sum(end <= most for end in ends))
            stages.append(tests[:count])
            tests = tests[count:]
        self._start(mutation, [stage for stage in stages if stage])

    def _start(self, mutation: Mutation, stages: list[list[str]]) -> None:
        tests, *rest = stages
        seconds = sum(self.tests.seconds[test] for test in tests)
        module = (mutation.path, mutation.source(self.root))
        trial = Trial(tests, seconds, self.folder / str(next(self._numbers)), module)
        trial.start()
        self._running[trial.process] = (mutation, trial, rest)

    def _wait(self) -> None:
        """Wait until a trial ends or hangs, and decide about its mutation."""
        process, status = os.waitpid(-1, os.WNOHANG)
        if process in self._running:
            self._ended(process, os.waitstatus_to_exitcode(status))
        elif not process:
            time.sleep(0.02)
            for process, (mutation, trial, _) in list(self._running.items()):
                if trial.elapsed > trial.limit:
                    self._stop(process)
                    self._decide_hang(mutation, trial)

    def _stop(self, process: int) -> None:
        _, trial, _ = self._running.pop(process)
        trial.end()
        end_orphans(set(self._running))
        shutil.rmtree(trial.folder / "tmp", ignore_errors=True)

    def _ended(self, process: int, code: int) -> None:
        mutation, trial, rest = self._running[process]
        self._stop(process)
        if code == 0 and rest:
            self._start(mutation, rest)
        elif code == 0:
            self._decide(mutation, "survived", "all its tests pass")
        elif code == NOT_IMPORTED:
            self._decide(mutation, "undecided", "its tests did not import the mutated text")
        elif trial.failed:
            self._decide(mutation, "killed", trial.failed[0])
        else:
            # The module or a test file cannot be imported, or the process ended.
            self._decide(mutation, "killed", f"exit code {code}: {trial.output.strip()[-200:]}")

    def _decide_hang(self, mutation: Mutation, trial: Trial) -> None:
        """A hang kills only if the same tests, without the mutation, end in half the time now."""
        control = Trial(trial.tests, trial.seconds, self.folder / str(next(self._numbers)))
        control.start()
        while control.elapsed < trial.limit / 2:
            process, status = os.waitpid(control.process, os.WNOHANG)
            if process:
                control.end()
                outcome = "undecided" if status else "killed"
                self._decide(mutation, outcome, f"a hang of {trial.limit:.0f} s")
                return
            time.sleep(0.02)
        control.end()
        os.waitpid(control.process, 0)
        self._decide(mutation, "undecided", f"slow without the mutation too: {trial.limit / 2:.0f} s")

    def _decide(self, mutation: Mutation, outcome: str, by: str) -> None:
        self.verdicts.append(Verdict(mutation, outcome, by))
        where = f"{mutation.path}:{mutation.lines[0]}"
        print(f"{len(self.verdicts):4} {outcome:9} {where} {mutation.scope}: {by}", flush=True)
        if outcome != "killed":
            print(mutation.diff(self.root), flush=True)

    def _check_killers(self) -> None:
        """Run every test that killed, without a mutation. What fails then has killed nothing."""
        killers = {verdict.by for verdict in self.verdicts if verdict.outcome == "killed"} & self.tests.seconds.keys()
        if not killers:
            return
        seconds = sum(self.tests.seconds[test] for test in killers)
        control = Trial(sorted(killers), seconds, self.folder / "killers", stop_at_first=False)
        control.start()
        while not os.waitpid(control.process, os.WNOHANG)[0]:
            if control.elapsed > control.limit:
                print("the tests that killed do not end without a mutation")
                control.end()
                os.waitpid(control.process, 0)
                break
            time.sleep(0.1)
        control.end()
        for verdict in self.verdicts:
            if verdict.by in control.failed:
                verdict.outcome = "undecided"
                print(f"undecided: {verdict.by} fails without the mutation too\n{verdict.mutation.diff(self.root)}")


def table(verdicts: list[Verdict]) -> str:
    """Return a row for each folder: mutants, killed, survived, percent."""
    rows = Counter((str(Path(verdict.mutation.path).parent), verdict.outcome == "killed") for verdict in verdicts)
    lines = [f"{'folder':42} {'mutants':>7} {'killed':>7} {'survived':>8} {'%':>6}"]
    for folder in [*sorted({folder for folder, _ in rows}), ""]:
        killed, survived = (
            sum(count for (name, was), count in rows.items() if was is wanted and (not folder or name == folder))
            for wanted in (True, False)
        )
        share = 100 * killed / max(1, killed + survived)
        lines.append(f"{folder or 'total':42} {killed + survived:7} {killed:7} {survived:8} {share:6.1f}")
    return "\n".join(lines)


def main() -> int:
    """Return 0 if at least the goal's share was killed, else 1."""
    parser = argparse.ArgumentParser(prog="make mutants", description="Break the code; see whether tests fail.")
    parser.add_argument("--seed", type=int, default=33)
    parser.add_argument("--sample", type=int, default=400, help="how many mutations")
    parser.add_argument("--minutes", type=float, default=90, help="no trial starts later than this")
    parser.add_argument("--processes", type=int, default=2, help="trials at a time")
    parser.add_argument("--goal", type=float, default=97, help="the least percentage killed")
    parser.add_argument("--at", action="append", default=[], metavar="PATH[:LINE]", help="all mutations there")
    parser.add_argument("--tests", action="append", metavar="PATH", help="only these tests; default: those of SUITES")
    parser.add_argument("--map", type=Path, default=Path(".mutants"), help="the folder of the map of lines and tests")
    options = parser.parse_args()
    root, until = Path(), time.monotonic() + 60 * options.minutes
    places = [place.partition(":")[::2] for place in options.at]
    paths = python_files(root, [path for path, _ in places] or SCOPE)
    everything = [found for path in paths for found in mutations_of(root, path)]
    if places:
        lines = {(path, int(line)) for path, line in places if line}
        whole = {file for path, line in places if not line for file in python_files(root, [path])}
        everything = [
            found
            for found in everything
            if found.path in whole or any((found.path, line) in lines for line in found.lines)
        ]
    chosen = sample(everything, len(everything) if places else options.sample, options.seed, root)
    measured = sorted({*paths, *python_files(root, SCOPE)})
    tests = read_map(options.map, root, measured, options.tests or SUITES, options.processes)
    prepare()
    print(f"{len(chosen)} of {len(everything)} mutations, seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(root, tests, options.processes, Path(folder))
        runner.run(chosen, until)
    print(table(runner.verdicts))
    if len(runner.verdicts) < len(chosen):
        print(f"{len(chosen) - len(runner.verdicts)} mutations were not tried in {options.minutes:g} minutes")
    killed = sum(verdict.outcome == "killed" for verdict in runner.verdicts)
    return int(100 * killed < options.goal * len(runner.verdicts))


if __name__ == "__main__":
    sys.exit(main())
