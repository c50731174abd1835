"""The decision table of the example, row by row, in virtual time."""

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.virtual_time import run_in_virtual_time


def _example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "policies_decision_table.py"
    spec = importlib.util.spec_from_file_location("policies_decision_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


EXAMPLE = _example()
# (hard rate cap, competing streams) and the policies: how many of 400 items each stream gets, in how many seconds.
EXPECTED: dict[tuple[bool, bool, str], tuple[dict[str, int], float]] = {
    (True, False, "rate limit only"): ({"only": 400}, (400 - 4) / 400),
    (True, True, "fairness, then rate limit"): ({"large": 300, "small": 100}, (400 - 4) / 400),
    (False, True, "fairness only"): ({"large": 300, "small": 100}, 0.0),
    # Each stream has its own limit. The weights only decide while both are ready.
    (True, True, "rate limit for each, then fairness for all"): ({"large": 200, "small": 200}, (200 - 2) / 100),
}


def test_the_table_has_the_four_rows():
    assert {(row.needs_hard_rate_cap, row.has_competing_streams, row.policies) for row in EXAMPLE.TABLE} == set(
        EXPECTED
    )


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("row", EXAMPLE.TABLE, ids=lambda row: row.scenario)
def test_a_row_of_the_table_holds(row, backend):
    expected, seconds = EXPECTED[row.needs_hard_rate_cap, row.has_competing_streams, row.policies]

    served, took = run_in_virtual_time(EXAMPLE.run, row, 400, backend=backend)

    assert took == pytest.approx(seconds)
    assert served == Counter(expected)
