"""docs/cost.md: what a billion user records cost in payload units, computed with the real encoder."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kpl_core import Config, UserRecord
from kpl_core.records.aggregated_record import encode

PAGE = (Path(__file__).parents[2] / "docs" / "cost.md").read_text(encoding="utf-8")
ROWS = [
    tuple(int(cell.replace(",", "")) for cell in row)
    for row in re.findall(r"^\| ([\d,]+) B \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| (\d+) \|$", PAGE, re.MULTILINE)
]
UNIT_BYTES = 25 * 1_024
A_BILLION = 1_000_000_000


def _aggregated(data_bytes: int, count: int) -> int:
    return len(encode([UserRecord(f"{number:08d}", bytes(data_bytes)) for number in range(count)]))


def _fit(data_bytes: int) -> int:
    """Return how many user records share an aggregated record of the default size."""
    count = 1
    while _aggregated(data_bytes, count + 1) <= Config().aggregation_max_size:
        count += 1
    return count


@pytest.mark.parametrize(("data_bytes", "fit", "alone", "aggregated", "ratio"), ROWS)
def test_a_row_matches_the_encoder_and_the_meter(
    data_bytes: int, fit: int, alone: int, aggregated: int, ratio: int
) -> None:
    assert _fit(data_bytes) == fit
    assert alone == A_BILLION * math.ceil((8 + data_bytes) / UNIT_BYTES)
    units = math.ceil((len(Config().aggregate_partition_key) + _aggregated(data_bytes, fit)) / UNIT_BYTES)
    assert aggregated == round(A_BILLION * units / fit)
    assert ratio == round(alone / aggregated)


def test_the_table_has_its_rows() -> None:
    assert [row[0] for row in ROWS] == [100, 250, 1_000, 5_000, 20_000]


def test_the_core_imports_no_client_before_a_producer_is_opened() -> None:
    # In a separate process, because this one has imported everything already.
    program = "import kpl_core, sys; print(*sorted({'aiobotocore', 'aiohttp', 'botocore'} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True)
    assert ended.stdout.split() == []
