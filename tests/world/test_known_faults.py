"""The list of known faults applies to the present code, and a simulation finds one; the page has a row for each."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.world.find_faults import LEASES, MODULE, changed_text, row_of
from tests.world.invariants import Run
from tests.world.kinds_of_faults import KINDS
from tests.world.known_faults import KNOWN_FAULTS, KnownFault
from tests.world.network import WHOLE, Less
from tests.world.simulate import STORIES, command_of, shrunk

PAGE = Path("docs/explanation/simulation.md")


@pytest.mark.parametrize("fault", KNOWN_FAULTS, ids=lambda fault: fault.name)
def test_a_known_fault_applies_to_the_present_code(fault: KnownFault) -> None:
    changed = changed_text(fault)
    compile(changed, fault.path, "exec")
    assert changed != Path(fault.path).read_text(encoding="utf-8")
    assert fault.story in STORIES or fault.story.removeprefix(LEASES) in KINDS


def test_the_page_says_of_each_known_fault_whether_it_is_found() -> None:
    rows = [line.split(" | ")[0].removeprefix("| ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    assert len(KNOWN_FAULTS) == len({fault.name for fault in KNOWN_FAULTS}) == 48
    assert [fault.name for fault in KNOWN_FAULTS if rows.count(fault.name) != 1] == []


def test_a_fault_that_is_put_in_is_found() -> None:
    command = [sys.executable, "-m", MODULE, "--only", "a transport that raises", "--seconds", "60"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "| a transport that raises ends the producer | c9ab7c00 | producer | " in said
    assert said.endswith("1 of 1 found\n")


def test_a_process_that_crashes_has_found_nothing() -> None:
    assert row_of(subprocess.CompletedProcess([], -9, "")) == "not found | | the process ended with -9"
    assert row_of(subprocess.CompletedProcess([], 0, "")) == "not found | |"
    assert row_of(subprocess.CompletedProcess([], 0, "2 | 0.5 | not drained")) == "2 | 0.5 | not drained"


def test_a_failed_run_is_shrunk_to_what_it_needs() -> None:
    def run(_name: str, _seed: int, less: Less) -> Run:
        """Return a run that fails while there are splits, two clients, and five seconds."""
        fails = "splits" not in less.without and less.clients >= 2 and less.seconds >= 5.0
        return Run(["stalls", "splits"], 0.0, 0, 0, Counter(), ["false"] * fails, 0, 0)

    least = shrunk("gateway", 7, WHOLE, run("", 0, WHOLE), run)
    assert least == Less(frozenset({"stalls"}), 5.0, 2)
    assert command_of("gateway", 7, least) == (
        'python -m tests.world.simulate --story gateway --seed 7 --without "stalls" --until 5 --clients 2'
    )
    assert command_of("spool", 8, WHOLE) == "python -m tests.world.simulate --story spool --seed 8"
