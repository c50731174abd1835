"""A signal that is about to end the process: what is on its way goes first, and nobody's own handling is touched."""

import signal
import subprocess
import sys

import pytest

from tests.frameworks.running_program import environment

BEGINNING = """
import signal, threading
from kpl_integrations.last_flush import take_part
from kpl_integrations.last_signal import flush_before_sigterm

class Part:
    def begin_last_flush(self):
        return lambda: print("flushed", flush=True)

part = Part()
"""
ELSEWHERE = "thread = threading.Thread(target=flush_before_sigterm); thread.start(); thread.join()"
# What the program does, what it says, and how it ends.
PROGRAMS = [
    ("take_part(part); flush_before_sigterm()", "flushed\n", -signal.SIGTERM),
    ("flush_before_sigterm()", "", -signal.SIGTERM),
    ("take_part(part); signal.signal(signal.SIGTERM, lambda *_: print('mine')); flush_before_sigterm()", "mine\n", 0),
    (f"take_part(part); {ELSEWHERE}", "", -signal.SIGTERM),
]


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGTERM to handle")
@pytest.mark.parametrize(("does", "says", "status"), PROGRAMS)
def test_what_takes_part_is_flushed_where_the_signal_would_end_the_process(does, says, status):
    program = f"{BEGINNING}\n{does}\nsignal.raise_signal(signal.SIGTERM)"
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.stdout, ended.stderr, ended.returncode) == (says, "", status)


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGTERM to handle")
def test_a_flush_that_never_ends_holds_the_signal_up_for_its_bound_only():
    program = (
        BEGINNING.replace('print("flushed", flush=True)', "__import__('time').sleep(3600)")
        + "from kpl_integrations import last_signal; last_signal._SECONDS = 0.1; take_part(part)\n"
        + "flush_before_sigterm(); signal.raise_signal(signal.SIGTERM)"
    )
    ended = subprocess.run([sys.executable, "-c", program], env=environment(), timeout=60, check=False)
    assert ended.returncode == -signal.SIGTERM


def test_it_imports_nothing_that_might_not_be_installed():
    program = (
        "import sys; import kpl_integrations; before = set(sys.modules); import kpl_integrations.last_signal; "
        "print({name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.strip() in {"{'kpl_integrations'}", "set()"}
