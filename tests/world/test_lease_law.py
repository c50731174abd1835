"""What is in force in a fleet, for each kind of fault. `make laws` runs ten million transitions."""

import os
import subprocess
import sys

import pytest

from tests.world.kinds_of_faults import KINDS
from tests.world.lease_law import run_law

# Of all kinds together: four or five seeds of each, in about 24 seconds of CPU time.
TRANSITIONS = 160_000


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_in_force_is_within_the_bounds_of_each_kind(kind):
    assert run_law(kind, 1).broken(KINDS[kind]) == []


def test_a_store_that_loses_a_report_counts_its_worker_in_the_plan_after_the_next_report():
    """This seed was above the limit for longer than the bound once was: 1.42 intervals, by 2.5 %."""
    kind = "a store that loses its last writes"
    assert run_law(kind, 1002).broken(KINDS[kind]) == []


def test_newcomers_beside_a_dead_worker_use_no_more_than_it_leaves():
    """Two newcomers counted as one, because the plan still had the dead worker: 1.13 times the limit."""
    kind = "crashes and restarts"
    assert run_law(kind, 4).broken(KINDS[kind]) == []


def test_a_worker_that_pauses_before_its_first_plan_gets_no_more_than_every_plan_reserves():
    """It applied a plan with a fifth of the limit for newcomers when two others had replaced it: 1.15."""
    kind = "pauses"
    assert run_law(kind, 596).broken(KINDS[kind]) == []


def test_a_worker_that_opens_a_resource_at_the_end_of_its_warm_up_waits_for_its_report():
    """One slow answer made its report late, and another worker had its share already: 1.32."""
    kind = "resources opened late"
    assert run_law(kind, 4).broken(KINDS[kind]) == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_what_is_in_force_is_within_the_bounds_for_many_seeds():
    command = [sys.executable, "-m", "tests.world", "--seed", "1", "--transitions", str(TRANSITIONS)]
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
