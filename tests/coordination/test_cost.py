"""The cost of coordination: calls counted over minutes of a settled fleet, and the table of the documentation."""

import re
from functools import cache
from pathlib import Path

import pytest

from benchmarks.coordination_cost import measured as measured_once, row

# Several tests compare the same fleets, and a fleet costs seconds. Nothing in it is random.
measured = cache(measured_once)
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "coordination-cost.md"


@pytest.mark.long
@pytest.mark.parametrize("workers", [4, 20, 100, 200])
def test_the_documented_table_agrees_with_the_counted_calls(workers: int) -> None:
    (documented,) = re.findall(rf"^\| {workers} \| .+ \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    cells, counted = (
        [float(cell.replace(",", "")) for cell in each.strip("| ").split(" | ")] for each in (documented, row(workers))
    )
    assert cells == pytest.approx(counted, rel=0.1, abs=0.1)


@pytest.mark.long
def test_a_calm_fleet_writes_and_reads_less_than_one_without_unassigned_capacity() -> None:
    calm, busy = measured(100, is_busy=False), measured(100, is_busy=True)
    assert calm.puts <= 0.2 * busy.puts
    assert calm.s3 <= 0.3 * busy.s3
    assert calm.dynamodb <= 0.3 * busy.dynamodb


@pytest.mark.long
@pytest.mark.parametrize("is_busy", [False, True], ids=["calm", "busy"])
def test_the_cost_per_worker_does_not_grow_from_100_to_200_workers(is_busy: bool) -> None:
    small, large = measured(100, is_busy=is_busy), measured(200, is_busy=is_busy)
    assert large.commands <= 2.1 * small.commands
    assert large.s3 <= 2.1 * small.s3
    assert large.dynamodb <= 2.1 * small.dynamodb


def test_the_cost_per_worker_of_a_calm_fleet_does_not_grow_from_20_to_100_workers() -> None:
    small, large = measured(20, is_busy=False), measured(100, is_busy=False)
    assert large.commands <= 5.0 * small.commands
    assert large.s3 <= 5.0 * small.s3
    assert large.dynamodb <= 5.0 * small.dynamodb


@pytest.mark.long
def test_a_worker_of_a_busy_fleet_above_20_reads_its_part_besides_the_head() -> None:
    """Up to 20 workers the head contains everything; above 20, a new plan takes two reads. DynamoDB charges by size."""
    small, large = measured(20, is_busy=True), measured(100, is_busy=True)
    assert large.commands <= 1.6 * 5.0 * small.commands
    assert large.puts <= 1.1 * 5.0 * small.puts
    assert large.s3 <= 5.0 * small.s3
    assert large.dynamodb <= 1.3 * 5.0 * small.dynamodb


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_thousand_calm_workers_cost_at_most_800_dollars_a_month_on_s3() -> None:
    assert measured(1_000, is_busy=False).s3 <= 800.0
