"""A pytest plugin that records which test runs which lines of the modules to mutate, and for how long.

Each process writes files of its own into the folder that `KPL_MUTATION_RECORD` names. pytest loads this file before
the packages are imported, so that no line is missed.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

from tests.mutation.coverage_map import name_of

FOLDER = Path(os.environ["KPL_MUTATION_RECORD"])
MODULES = json.loads((FOLDER / "modules.json").read_text(encoding="utf-8"))

_coverage = coverage.Coverage(
    data_file=str(FOLDER / f"lines-{os.getpid()}"),
    config_file=False,
    include=[str(Path(module).resolve()) for module in MODULES],
)
# Test -> seconds, setup included. A test is a function: its parameters and examples count together.
_seconds: dict[str, float] = {}
_failed: set[str] = set()


_coverage.start()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Count what runs meanwhile as this test's lines."""
    _coverage.switch_context(name_of(item.nodeid))
    try:
        return (yield)
    finally:
        _coverage.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Sum up the seconds, and note the tests that fail without a mutation."""
    test = name_of(report.nodeid)
    _seconds[test] = _seconds.get(test, 0.0) + report.duration
    if report.failed:
        _failed.add(test)


def pytest_unconfigure() -> None:
    """Write what this process has recorded."""
    _coverage.stop()
    _coverage.save()
    if "PYTEST_XDIST_WORKER" in os.environ:
        record = {"seconds": _seconds, "failed": sorted(_failed)}
        (FOLDER / f"tests-{os.getpid()}.json").write_text(json.dumps(record), encoding="utf-8")
