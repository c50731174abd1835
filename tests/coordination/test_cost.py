"""The cost of coordination: calls counted over minutes of a settled fleet, and the table of the documentation."""

import re
from pathlib import Path

import pytest

from benchmarks.coordination_cost import measured, row

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "coordination.md"


@pytest.mark.parametrize("workers", [4, 20, 100])
def test_the_documented_table_agrees_with_the_counted_calls(workers: int) -> None:
    (documented,) = re.findall(rf"^\| {workers} \| .+ \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    cells, counted = (
        [float(cell.replace(",", "")) for cell in each.strip("| ").split(" | ")] for each in (documented, row(workers))
    )
    assert cells == pytest.approx(counted, rel=0.1, abs=1.0)


def test_a_calm_fleet_writes_and_reads_less_than_one_without_unassigned_capacity() -> None:
    calm, busy = measured(100, is_busy=False), measured(100, is_busy=True)
    assert calm.puts <= 0.2 * busy.puts
    assert calm.s3 <= 0.3 * busy.s3
    assert calm.dynamodb <= 0.3 * busy.dynamodb


def test_the_calls_per_worker_do_not_grow_with_the_fleet() -> None:
    for is_busy in (False, True):
        small, large = measured(100, is_busy=is_busy), measured(200, is_busy=is_busy)
        assert large.commands <= 2.1 * small.commands
        assert large.s3 <= 2.1 * small.s3
        assert large.dynamodb <= 2.2 * small.dynamodb


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_thousand_calm_workers_cost_at_most_800_dollars_a_month_on_s3() -> None:
    assert measured(1_000, is_busy=False).s3 <= 800.0
