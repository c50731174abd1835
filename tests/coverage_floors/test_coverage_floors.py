"""The rules of `make coverage`: each folder has a floor and stays above it."""

import json
from pathlib import Path

import pytest

import kpl_core
import kpl_integrations
from tests.coverage_floors.floors import PYPROJECT, Covered, broken_rules, floors_of, folders_of, main, table

FLOORS = floors_of(PYPROJECT.read_text(encoding="utf-8"))


def report(**lines: tuple[int, int]) -> dict[str, object]:
    """Return what `coverage json` writes of files given as `folder__file=(statements, covered)`."""
    return {
        "files": {
            f"{name.replace('__', '/')}.py": {
                "summary": {"num_statements": total, "covered_lines": covered, "num_branches": 0, "covered_branches": 0}
            }
            for name, (total, covered) in lines.items()
        }
    }


def test_a_folder_counts_its_files_and_those_of_the_folders_below_it() -> None:
    folders = folders_of(report(core__a=(10, 10), core__queue__b=(30, 15), core__queue__inner__c=(60, 30)))
    assert {folder: (each.statements, each.percent) for folder, each in folders.items()} == {
        "core": (100, 55.0),
        "core/queue": (90, 50.0),
        "core/queue/inner": (60, 50.0),
    }


def test_statements_and_branches_count_alike() -> None:
    assert Covered(statements=30, covered_statements=30, branches=10, covered_branches=5).percent == 87.5


def test_a_figure_is_rounded_down_so_that_it_never_hides_a_missed_floor() -> None:
    assert Covered(statements=10_000, covered_statements=9_499).percent == 94.9


def test_a_folder_below_its_floor_breaks_the_rule() -> None:
    (sentence,) = broken_rules({"core": Covered(1000, 949)}, {"core": 95})
    assert sentence.startswith("core: 94.9 % of its statements and branches are covered, the floor is 95 %. Add tests")


def test_a_folder_exactly_at_its_floor_passes() -> None:
    assert broken_rules({"core": Covered(1000, 950)}, {"core": 95}) == []


def test_a_new_folder_without_a_floor_breaks_the_rule() -> None:
    (sentence,) = broken_rules({"core": Covered(10, 10), "core/new": Covered(10, 10)}, {"core": 95})
    assert sentence == (
        "core/new: no floor for this folder, which has 100.0 %. Add one to [tool.coverage-floors] in pyproject.toml."
    )


def test_a_floor_for_a_folder_that_is_gone_breaks_the_rule() -> None:
    (sentence,) = broken_rules({"core": Covered(10, 10)}, {"core": 95, "core/old": 90})
    assert sentence.startswith("core/old: no such folder was measured, but it has a floor. Remove it")


def test_a_folder_without_statements_needs_no_floor() -> None:
    assert folders_of(report(core__data____init__=(0, 0))) == {}


def test_the_table_has_a_line_for_each_folder_with_its_floor() -> None:
    lines = table({"core": Covered(2000, 1990, 500, 450), "core/new": Covered(4, 4)}, {"core": 95}).splitlines()
    assert [line.split() for line in lines] == [
        ["folder", "statements", "branches", "covered", "floor"],
        ["core", "2,000", "500", "97.6", "95"],
        ["core/new", "4", "0", "100.0", "-"],
    ]


@pytest.mark.parametrize(("covered", "code"), [(1000, 0), (0, 1)])
def test_the_command_ends_with_1_if_a_folder_misses_its_floor(
    covered: int, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = report(**{f"{folder.replace('/', '__')}__file": (1000, covered) for folder in FLOORS})
    path = tmp_path / "coverage.json"
    path.write_text(json.dumps(figures), encoding="utf-8")
    assert main(str(path)) == code
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 1 + len(FLOORS)
    assert len(printed.err.splitlines()) == (0 if covered else len(FLOORS))


def test_each_folder_of_the_packages_has_a_floor_and_no_other() -> None:
    packages = [Path(next(iter(package.__path__))) for package in (kpl_core, kpl_integrations)]
    folders = {str(path.parent.relative_to(package.parent)) for package in packages for path in package.rglob("*.py")}
    assert set(FLOORS) == folders


def test_the_core_keeps_95_percent_and_the_adapters_named_in_the_docs_90() -> None:
    assert FLOORS["kpl_core"] >= 95
    adapters = {"asgi", "ingest", "logging_handler", "otel"}
    assert {name: FLOORS[f"kpl_integrations/{name}"] >= 90 for name in adapters} == dict.fromkeys(adapters, True)
