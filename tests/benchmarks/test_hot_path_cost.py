"""The cost of the hot path has bounds, in counts that are the same on every machine and every run.

A bound is slightly above the count of CPython 3.11, which is the highest of the supported versions. A
change that needs more raises the bound and explains the benefit; `make bench` shows the cost in time.
The counting runs in a separate process, without coverage's tracer and pytest's objects.
"""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]

# profile, what is counted, most per user record, why it matters
BOUNDS = [
    ("10k", "put_python_calls", 2.5, "a put is two plain calls"),
    ("10k", "put_instructions", 215, "a put whose route is known"),
    ("10k", "journey_instructions", 265, "put, request, answer, result"),
    ("10k", "bytes", 200, "an outstanding user record, over its data; the promise is 400"),
    ("10k", "tracked", 0.05, "no object per user record that a collection must visit"),
    ("10k", "cycles", 0, "nothing left for the collector"),
    ("unique", "put_python_calls", 5.5, "hash and search once for each new key"),
    ("unique", "put_instructions", 345, "a put that must be routed"),
    ("unique", "journey_instructions", 395, "put, request, answer, result"),
    ("unique", "bytes", 250, "an outstanding user record with its key, over its data"),
    ("unique", "tracked", 0.05, "no object per user record that a collection must visit"),
    ("unique", "cycles", 0, "nothing left for the collector"),
    ("alone", "put_instructions", 380, "aggregation off: what an aggregated record costs falls on each user record"),
    ("alone", "journey_instructions", 930, "put, request, answer, result"),
    ("alone", "bytes", 620, "an outstanding user record that is a Kinesis record of its own, over its data"),
    ("alone", "cycles", 0, "nothing left for the collector"),
]


@cache
def counted() -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.put_cost"]
    process = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True)
    counts: dict[str, Any] = json.loads(process.stdout)
    return counts


@pytest.mark.long
@pytest.mark.parametrize(("profile", "name", "most", "why"), BOUNDS)
def test_a_user_record_costs_no_more_than_its_bound(profile: str, name: str, most: float, why: str) -> None:
    assert counted()[profile][name] <= most, why
