"""The mutation testing itself: which faults it makes, how it draws and ranks, and one whole run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.coverage_map import CoverageMap, moved_lines
from tests.mutation.mutations import Mutation, mutations_of, sample

ROOT = Path(__file__).parents[2]

# A function's body, and what its line becomes.
ROWS = [
    ("return a < b", {"return None", "return a <= b", "return a >= b"}),
    ("return a + 1", {"return None", "return a - 1", "return a + 2", "return a + 0"}),
    ("return a and not b", {"return None", "return a or not b", "return a and (b)"}),
    ("return a[0]", {"return None", "return a[-1]", "return a[1]"}),
    ("return a[:b]", {"return None", "return a[b:]"}),
    ("return min(a, b)", {"return None", "return max(a, b)"}),
    ("return a(b, 2)", {"return None", "return a(2, b)", "return a(b, 3)", "return a(b, 1)"}),
    ("a.b = b", {"pass"}),
    ("a, b = (b, a)", {"a, b = (a, b)"}),
    ("a(b)", {"pass"}),
    ("a += b", {"pass", "a -= b"}),
    ("return a if b else None", {"return None", "return a if not (b) else None"}),
    ("raise a", {"pass"}),
    ("return a(b, b)", {"return None"}),
    ("return False", {"return True"}),
    ("return zip(a, b, strict=True)", {"return None", "return zip(b, a, strict=True)"}),
    ('return f"{a + 1}"', {"return None"}),
    ("assert a < b", set()),
    ("c: int | None = b", set()),
]


def write(folder: Path, *bodies: str) -> None:
    functions = [f"def f{number}(a, b):\n    {body}\n" for number, body in enumerate(bodies)]
    (folder / "module.py").write_text("\n\n".join(functions), encoding="utf-8")


def changes(mutations: list[Mutation], root: Path) -> list[str]:
    return [mutation.diff(root).splitlines()[-1].removeprefix("+").strip() for mutation in mutations]


@pytest.mark.parametrize(("body", "expected"), ROWS)
def test_each_fault_replaces_one_piece_of_the_text(tmp_path, body, expected):
    write(tmp_path, body)
    found = changes(mutations_of(tmp_path, "module.py"), tmp_path)
    assert sorted(found) == sorted(expected)


def test_a_column_counts_characters_of_every_script(tmp_path):
    write(tmp_path, "return 'äöü€' < b")
    assert "return 'äöü€' <= b" in changes(mutations_of(tmp_path, "module.py"), tmp_path)


def test_the_draw_depends_on_the_seed_and_not_on_other_functions(tmp_path):
    bodies = [body for body, _ in ROWS]

    def draw(size: int, seed: int) -> list[tuple[str, str]]:
        drawn = sample(mutations_of(tmp_path, "module.py"), size, seed, tmp_path)
        return [(mutation.scope, mutation.diff(tmp_path)) for mutation in drawn]

    write(tmp_path, *bodies)
    drawn, other = draw(12, seed=1), draw(12, seed=2)
    assert drawn != other
    write(tmp_path, *bodies, "return 7")
    added = f"f{len(bodies)}"
    assert [each for each in draw(12 + 3, seed=1) if each[0] != added][:12] == drawn


def test_a_fault_that_python_refuses_is_not_drawn(tmp_path):
    write(tmp_path, "a(b, *a, c=1)", "return a(b for b in a)")
    everything = mutations_of(tmp_path, "module.py")
    assert all(mutation.compiles(tmp_path) for mutation in sample(everything, 100, 1, tmp_path))


def mutation(path: str, line: int, *, at_import: bool = False) -> Mutation:
    return Mutation(path, "f", (line,), 0, 0, "", "", "", at_import=at_import)


def test_the_nearest_tests_run_first_and_those_that_run_few_lines_before_those_that_run_many():
    lane, queue = "kpl_core/pipeline/lane.py", "kpl_core/fairness/queue.py"
    lines = {
        "tests/producer/test_producer.py::test_small": {lane: {5}},
        "tests/pipeline/test_pipeline.py::test_middle": {lane: {5}},
        "tests/pipeline/test_lane.py::test_large": {lane: {5, 6, 7}},
        "tests/pipeline/test_lane.py::test_small": {lane: {5, 6}},
        "tests/pipeline/test_lane.py::test_elsewhere": {lane: {7}},
        "tests/fairness/test_fair_queue.py::test_importer": {queue: {1}},
        "tests/pipeline/test_lane.py::test_table": {},
    }
    covered = CoverageMap(dict.fromkeys(lines, 1.0), lines, {lane: {queue}})
    names = [
        "tests/pipeline/test_lane.py::test_small",
        "tests/pipeline/test_lane.py::test_large",
        "tests/pipeline/test_pipeline.py::test_middle",
        "tests/producer/test_producer.py::test_small",
    ]
    assert covered.tests_of(mutation(lane, 5)) == names
    assert covered.tests_of(mutation(lane, 99)) == []
    at_import = covered.tests_of(mutation(lane, 1, at_import=True))
    assert set(at_import) == set(lines)
    assert at_import[-1] == "tests/fairness/test_fair_queue.py::test_importer"


def test_a_module_that_has_changed_keeps_the_tests_of_its_lines():
    before = ["a", "b", "c", "d"]
    assert moved_lines(before, before) == {1: [1], 2: [2], 3: [3], 4: [4]}
    # Line 2 became two lines, and a line was added at the end: they belong to the tests of the line before.
    assert moved_lines(before, ["a", "x", "y", "c", "d", "e"]) == {1: [1, 2, 3], 3: [4], 4: [5, 6]}
    assert moved_lines(before, ["n", "a", "b", "d"]) == {1: [2], 2: [3], 4: [4]}
    assert moved_lines([], before) == {}


MACHINE = """
STEPS = (2, 3)


def last_step(limit):
    step = 0
    while True:
        if step == limit:
            break
        step += 1
    return step


def is_over(step):
    return step > 3


def untested(step):
    return step
"""
CHECKS = """
from machine import STEPS, is_over, last_step


def test_the_last_step():
    assert last_step(STEPS[1]) == 3


def test_over():
    assert is_over(5)
"""


@pytest.mark.long
@pytest.mark.timeout(540)
def test_a_run_names_what_killed_each_fault_and_shows_those_that_survived(tmp_path):
    (tmp_path / "machine.py").write_text(MACHINE, encoding="utf-8")
    (tmp_path / "checks").mkdir()
    (tmp_path / "checks" / "test_machine.py").write_text(CHECKS, encoding="utf-8")
    command = [sys.executable, "-m", "tests.mutation", "--tests", "checks", "--processes", "1"]
    for line in (2, 8, 9, 15, 19):
        command += ["--at", f"machine.py:{line}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
    environment["PYTHONPATH"] = str(ROOT)
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=500
    )
    assert run.returncode == 1, run.stdout + run.stderr
    lines = run.stdout.splitlines()
    by_test = "machine.py:8 last_step: checks/test_machine.py::test_the_last_step"
    assert any("killed" in line and by_test in line for line in lines)
    assert any("killed" in line and "machine.py:9 last_step: a hang" in line for line in lines)
    assert any(
        "killed" in line and "machine.py:2 : checks/test_machine.py::test_the_last_step" in line for line in lines
    )
    assert any("survived" in line and "machine.py:19 untested: no test runs the line" in line for line in lines)
    assert "+    return step >= 3" in lines
    assert (tmp_path / "machine.py").read_text(encoding="utf-8") == MACHINE
