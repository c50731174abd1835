"""The cost of a hook has a bound, in instruction counts that are the same on every machine and every run.

`python -m benchmarks.hooks_cost` shows the share of the producer's CPU time: well below 1 %.
"""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

# The most instructions per user record of 100 bytes. Its journey takes about 300.
BOUNDS = [("Prometheus", 2), ("OpenTelemetry metrics", 2.5), ("CloudWatch", 3), ("PutRecords spans", 1)]


@cache
def counted() -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.hooks_cost", "--counts"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    counts: dict[str, Any] = json.loads(process.stdout)
    return counts


@pytest.mark.parametrize(("hook", "most"), BOUNDS)
def test_a_hook_costs_a_user_record_a_handful_of_instructions(hook: str, most: float) -> None:
    assert counted()[hook]["instructions_per_record"] <= most


def test_every_hook_has_its_bound() -> None:
    assert [hook for hook, _ in BOUNDS] == list(counted())
