"""SIGTERM: what is queued is flushed first, and an application's own handler still runs."""

import signal
import subprocess
import sys

import pytest

from tests.programs.running_program import environment

BEGINNING = """
import signal, sys, threading
from kpl_core.background import process_end
from kpl_core.background.process_end import ProcessListener, flush_before_sigterm, flush_on_sigterm, listen

class Listener(ProcessListener):
    def begin_last_flush(self, share=1.0):
        return lambda: print("flushed", flush=True)

def say(*_):
    print("mine", flush=True)

def say_and_exit(*_):
    say()
    sys.exit(3)

def in_a_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()

listener = Listener()
"""
LISTEN = "listen(listener); "
TERMINATED = -signal.SIGTERM
# What the program does before SIGTERM, what it prints, and its exit status. A program that goes on is flushed once
# more when it exits.
PROGRAMS = [
    (LISTEN + "flush_before_sigterm()", "flushed\n", TERMINATED),
    ("flush_before_sigterm()", "", TERMINATED),
    (LISTEN + "signal.signal(signal.SIGTERM, say); flush_before_sigterm()", "mine\nflushed\n", 0),
    (LISTEN + "in_a_thread(flush_before_sigterm)", "", TERMINATED),
    (LISTEN + "flush_on_sigterm()", "flushed\n", TERMINATED),
    (LISTEN + "flush_on_sigterm(); flush_on_sigterm()", "flushed\n", TERMINATED),
    (LISTEN + "signal.signal(signal.SIGTERM, say); flush_on_sigterm()", "flushed\nmine\nflushed\n", 0),
    (LISTEN + "signal.signal(signal.SIGTERM, say_and_exit); flush_on_sigterm()", "flushed\nmine\nflushed\n", 3),
    (LISTEN + "signal.signal(signal.SIGTERM, signal.SIG_IGN); flush_on_sigterm()", "flushed\nflushed\n", 0),
]
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no SIGTERM to handle")


def end_of(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(("does", "prints", "status"), PROGRAMS)
def test_a_program_is_flushed_before_sigterm_and_its_own_handler_still_runs(
    does: str, prints: str, status: int
) -> None:
    ended = end_of(f"{BEGINNING}\n{does}\nsignal.raise_signal(signal.SIGTERM)")
    assert (ended.stdout, ended.stderr, ended.returncode) == (prints, "", status)


def test_the_opt_in_is_refused_outside_of_the_main_thread() -> None:
    ended = end_of(f"{BEGINNING}\nin_a_thread(flush_on_sigterm)")
    assert "Python sets signal handlers in the main thread only" in ended.stderr


def test_a_flush_that_never_ends_delays_the_signal_only_for_its_bound() -> None:
    program = (
        BEGINNING.replace('print("flushed", flush=True)', "__import__('time').sleep(3600)")
        + f"process_end._SIGTERM_SECONDS = 0.1; {LISTEN}flush_on_sigterm(); signal.raise_signal(signal.SIGTERM)"
    )
    assert end_of(program).returncode == -signal.SIGTERM
