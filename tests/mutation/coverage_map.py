"""Which tests run a line, nearest first.

Recorded once, and again for test files that have changed. Where a module has changed since, its lines are found again
by their text. Delete the folder to record all.
"""

import ast
import difflib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import coverage

from tests.mutation.mutations import Mutation, python_files

# The tests that are recorded take a quarter of an hour on two busy cores.
RECORDING_SECONDS = 3_600


@dataclass
class CoverageMap:
    """Test -> its seconds, and the lines that it runs in each module."""

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[str, set[int]]] = field(default_factory=dict)
    importers: dict[str, set[str]] = field(default_factory=dict)

    def tests_of(self, mutation: Mutation) -> list[str]:
        """Return the tests that run a mutation: those of the nearest file first, then those that run the fewest lines.

        What runs at import has no test of its own: all tests of the module run, then those of modules that import it.
        The tests in the file with its name are among the first: one that reads a table runs no line of the module.
        """
        wanted = set(mutation.lines)
        near = [test for test, lines in self.lines.items() if wanted & lines.get(mutation.path, set())]
        far: list[str] = []
        if mutation.at_import:
            near = [
                test for test, lines in self.lines.items() if lines.get(mutation.path) or _is_named(test, mutation.path)
            ]
            importers = self.importers.get(mutation.path, set())
            far = [test for test, lines in self.lines.items() if importers & lines.keys()]
        ranked = self._ranked(near, mutation.path)
        return ranked + [test for test in self._ranked(far, mutation.path) if test not in set(near)]

    def _ranked(self, tests: list[str], path: str) -> list[str]:
        """Rank files by their distance from the module and by their shortest test, and the tests of a file together."""
        sizes = {test: sum(map(len, self.lines[test].values())) for test in tests}
        by_file: dict[str, list[str]] = defaultdict(list)
        for test in tests:
            by_file[test.partition("::")[0]].append(test)

        def rank(file: str) -> tuple[int, int]:
            return _distance(file, path), min(sizes[test] for test in by_file[file])

        return [test for file in sorted(by_file, key=rank) for test in sorted(by_file[file], key=sizes.__getitem__)]


def name_of(nodeid: str) -> str:
    """Return a test's name without its parameters, which a mutation of a table may change."""
    return nodeid.partition("[")[0]


def _is_named(test: str, module: str) -> bool:
    """Return True if the test is in a file with the module's name, in the folder of the module's folder."""
    file = Path(test.partition("::")[0])
    return file.stem == f"test_{Path(module).stem}" and Path(module).parent.name in file.parts


def _distance(test_file: str, module: str) -> int:
    """Return 0 if the test has the module's name, 1 in the folder of the module's folder, 2 elsewhere."""
    path = Path(module)
    if path.stem in Path(test_file).stem:
        return 0
    return 1 if path.parent.name in Path(test_file).parts else 2


def read_map(folder: Path, root: Path, modules: list[str], suites: list[str], processes: int) -> CoverageMap:
    """Return the map in `folder`, after the tests that changed were run under coverage.

    Raises:
        RuntimeError: pytest did not run.
    """
    file = folder / "map.json"
    known: dict[str, Any] = {"sources": {}, "files": {}}
    if file.exists():
        known = json.loads(file.read_text(encoding="utf-8"))
    files = {path: root / path for path in python_files(root, suites) if Path(path).name.startswith("test_")}
    sources = {module: (root / module).read_text(encoding="utf-8").splitlines() for module in modules}
    moved = {module: moved_lines(known["sources"].get(module, []), lines) for module, lines in sources.items()}
    recorded = {name: _move(entry, moved) for name, entry in known["files"].items() if name in files}
    digests = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    changed = [name for name in files if recorded.get(name, {}).get("digest") != digests[name]]
    if changed:
        print(f"Recording which lines the tests of {len(changed)} files run", flush=True)
        for name, tests in _record(root, modules, changed, processes).items():
            recorded[name] = {"digest": digests[name], "tests": tests}
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"sources": sources, "files": recorded}), encoding="utf-8")
    result = CoverageMap(importers=_importers(root, modules))
    for entry in recorded.values():
        for test, (seconds, lines) in entry["tests"].items():
            result.seconds[test] = seconds
            result.lines[test] = {module: set(numbers) for module, numbers in lines.items()}
    return result


def moved_lines(before: list[str], now: list[str]) -> dict[int, list[int]]:
    """Return the line number before -> the line numbers now. A new line belongs to the line before it."""
    moved: dict[int, list[int]] = defaultdict(list)
    last = 0
    for block in difflib.SequenceMatcher(None, before, now, autojunk=False).get_matching_blocks():
        if moved:
            moved[max(moved)] += range(last + 1, block.b + 1)
        for offset in range(block.size):
            moved[block.a + offset + 1].append(block.b + offset + 1)
        last = block.b + block.size
    return moved


def _move(entry: dict[str, Any], moved: dict[str, dict[int, list[int]]]) -> dict[str, Any]:
    """Return what was recorded of a test file, with the line numbers of now."""

    def now(lines: dict[str, list[int]]) -> dict[str, list[int]]:
        return {
            module: [new for number in numbers for new in moved[module].get(number, ())]
            for module, numbers in lines.items()
            if module in moved
        }

    tests = {test: (seconds, now(lines)) for test, (seconds, lines) in entry["tests"].items()}
    return {"digest": entry["digest"], "tests": tests}


def _record(root: Path, modules: list[str], files: list[str], processes: int) -> dict[str, dict[str, Any]]:
    """Return file -> test -> (seconds, module -> lines) of the tests that pass."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-p", "tests.mutation.recorder", "-p", "no:cacheprovider", "--quiet"]
        command += ["-m", "not long", "-k", "not trio", "-n", str(processes), *files]
        environment = {**os.environ, "KPL_MUTATION_RECORD": place, "HYPOTHESIS_PROFILE": "coverage"}
        environment.pop("COVERAGE_FILE", None)
        with (folder / "output").open("w+") as output:
            try:
                code = subprocess.call(
                    command, cwd=root, env=environment, stdout=output, stderr=output, timeout=RECORDING_SECONDS
                )
            except subprocess.TimeoutExpired:
                code = -1
            output.seek(0)
            told = output.read()
        if code not in (0, 1):
            # -1: it took too long.
            message = f"pytest ended with {code} while the lines were recorded:\n{told[-3000:]}"
            raise RuntimeError(message)
        seconds: dict[str, float] = {}
        failed: set[str] = set()
        for record in folder.glob("tests-*.json"):
            told_record = json.loads(record.read_text(encoding="utf-8"))
            seconds |= told_record["seconds"]
            failed |= set(told_record["failed"])
        if failed:
            print(f"{len(failed)} tests failed without a mutation and are left out: {', '.join(sorted(failed))}")
        lines = _lines(root, folder)
    found: dict[str, dict[str, Any]] = {name: {} for name in files}
    for test in seconds.keys() - failed:
        of_test = {module: sorted(numbers) for module, numbers in lines.get(test, {}).items()}
        found[test.partition("::")[0]][test] = (round(seconds[test], 3), of_test)
    return found


def _lines(root: Path, folder: Path) -> dict[str, dict[str, set[int]]]:
    """Return test -> module -> the lines it runs, from the files of all processes."""
    lines: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for file in folder.glob("lines-*"):
        data = coverage.CoverageData(str(file))
        data.read()
        for measured in data.measured_files():
            module = str(Path(measured).relative_to(root.resolve()))
            for number, tests in data.contexts_by_lineno(measured).items():
                for test in filter(None, tests):
                    lines[test][module].add(number)
    return lines


def _importers(root: Path, modules: list[str]) -> dict[str, set[str]]:
    """Return module -> the modules that import it, among those that are measured."""
    importers: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for node in ast.walk(ast.parse((root / module).read_bytes())):
            if isinstance(node, ast.ImportFrom) and node.module:
                importers[f"{node.module.replace('.', '/')}.py"].add(module)
    return importers
