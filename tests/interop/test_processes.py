"""No started process may outlive the test run, however the run ends."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.processes import ProcessFailed, answers, free_ports, own_process
from tests.support.waiting import wait_until

# Starts a child process that keeps a port, as the KCL does with its record processors.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", '''
import signal, socket, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
time.sleep(600)
''', sys.argv[1]])
time.sleep(600)
"""

KILLED = """
import pathlib, sys, time
from tests.support.processes import own_process
with own_process("stubborn", sys.argv[2:], logs=pathlib.Path(sys.argv[1])):
    time.sleep(600)
"""


def test_a_program_and_its_children_end_with_the_context_even_if_they_ignore_sigterm(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with own_process("stubborn", [sys.executable, "-c", STUBBORN, str(port)], logs=tmp_path) as process:
        process.wait_until(lambda: answers(port), what="answer")

    assert not process.running
    assert not answers(port)


def test_a_program_ends_when_the_tests_are_killed(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    tests = subprocess.Popen(
        [
            sys.executable,
            "-c",
            KILLED,
            str(tmp_path),
            *(sys.executable, "-c", STUBBORN, str(port)),
        ],
        cwd=Path(__file__).parents[2],
    )
    try:
        wait_until(lambda: answers(port), "the program to answer", seconds=20)
    finally:
        tests.kill()
        tests.wait()

    wait_until(lambda: not answers(port), "the program to end", seconds=20)


def test_a_program_that_ends_too_soon_is_reported_with_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such port')"]
    with own_process("hasty", command, logs=tmp_path) as process, pytest.raises(ProcessFailed, match="no such port"):
        process.wait_until(lambda: False, what="answer")


def test_a_program_ends_with_its_process_group(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import os; print(os.getpgrp(), flush=True); import time; time.sleep(600)"]
    with own_process("quiet", command, logs=tmp_path) as process:
        process.wait_until(lambda: process.log.read_text().strip() != "", what="process group")
    group = int(process.log.read_text().split()[0])

    assert group != os.getpgrp()
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGCONT)
        pytest.fail("the process group is still there")
