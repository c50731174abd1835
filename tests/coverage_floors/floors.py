"""The coverage that each folder keeps. `make coverage` compares its figures with the table in pyproject.toml.

A folder's figure is the share of covered statements and branches in its files and in all folders below it. Each folder
with statements has a floor, so a new folder needs one. The command prints the table, and ends with 1 for a broken rule:

    python -m tests.coverage_floors.floors REPORT    # what `coverage json` wrote
"""

import json
import math
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
TABLE = "[tool.coverage-floors]"


@dataclass(frozen=True, slots=True)
class Covered:
    """What the tests covered of one folder, or of one file."""

    statements: int = 0
    covered_statements: int = 0
    branches: int = 0
    covered_branches: int = 0

    def __add__(self, other: "Covered") -> "Covered":
        return Covered(
            self.statements + other.statements,
            self.covered_statements + other.covered_statements,
            self.branches + other.branches,
            self.covered_branches + other.covered_branches,
        )

    @property
    def percent(self) -> float:
        """The share of covered statements and branches, rounded down to 0.1 %."""
        covered, total = self.covered_statements + self.covered_branches, self.statements + self.branches
        return math.floor(1000 * covered / total) / 10


def floors_of(pyproject: str) -> dict[str, float]:
    """Return the floor of each folder, in percent."""
    floors: dict[str, float] = tomllib.loads(pyproject)["tool"]["coverage-floors"]
    return floors


def folders_of(report: Mapping[str, Any]) -> dict[str, Covered]:
    """Add up a report of `coverage json` for each folder that contains statements, also in folders below it."""
    folders: dict[str, Covered] = {}
    for path, file in report["files"].items():
        summary = file["summary"]
        if not summary["num_statements"]:
            continue
        covered = Covered(
            statements=summary["num_statements"],
            covered_statements=summary["covered_lines"],
            branches=summary["num_branches"],
            covered_branches=summary["covered_branches"],
        )
        for folder in PurePosixPath(path).parents[:-1]:
            folders[str(folder)] = folders.get(str(folder), Covered()) + covered
    return dict(sorted(folders.items()))


def broken_rules(folders: Mapping[str, Covered], floors: Mapping[str, float]) -> list[str]:
    """Return a sentence for each folder below its floor, folder without a floor and floor without a folder."""
    below = [
        f"{folder}: {covered.percent} % of its statements and branches are covered, the floor is {floors[folder]} %. "
        f"Add tests; `coverage report --include '{folder}/*'` lists the missing lines."
        for folder, covered in folders.items()
        if folder in floors and covered.percent < floors[folder]
    ]
    new = [
        f"{folder}: no floor for this folder, which has {covered.percent} %. Add one to {TABLE} in pyproject.toml."
        for folder, covered in folders.items()
        if folder not in floors
    ]
    gone = [
        f"{folder}: no such folder was measured, but it has a floor. Remove it from {TABLE} in pyproject.toml."
        for folder in floors
        if folder not in folders
    ]
    return below + new + gone


def table(folders: Mapping[str, Covered], floors: Mapping[str, float]) -> str:
    """Return one line for each folder: statements, branches, what is covered of both, and the floor."""
    width = max(map(len, folders), default=0)
    lines = [f"{'folder':<{width}} {'statements':>10} {'branches':>8} {'covered':>7} {'floor':>5}"]
    lines += [
        f"{folder:<{width}} {covered.statements:>10,} {covered.branches:>8,} {covered.percent:>7.1f} "
        f"{floors.get(folder, '-'):>5}"
        for folder, covered in folders.items()
    ]
    return "\n".join(lines)


def main(report_path: str) -> int:
    """Print the table and the broken rules of one report; return the exit code."""
    folders = folders_of(json.loads(Path(report_path).read_text(encoding="utf-8")))
    floors = floors_of(PYPROJECT.read_text(encoding="utf-8"))
    sys.stdout.write(table(folders, floors) + "\n")
    broken = broken_rules(folders, floors)
    sys.stderr.writelines(f"{sentence}\n" for sentence in broken)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
