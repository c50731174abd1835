"""Runs the `kpl` command in a separate process, with pipes or a terminal; it ends with its test."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

import kpl_integrations

__all__ = ["Outcome", "in_a_terminal", "of_program", "run", "started", "without_escape_codes"]

_SECONDS = 30
_COMMAND = (sys.executable, "-m", "kpl_integrations.cli")
_ESCAPE_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Outcome(NamedTuple):
    """Exit status and output of a command."""

    status: int
    out: str
    err: str


def _environment() -> dict[str, str]:
    """Return the environment of a process: this one's with a fixed width, and warnings as errors."""
    # The process imports the packages from the same folder as this test.
    folder = str(Path(kpl_integrations.__file__).parents[1])
    return os.environ | {"PYTHONPATH": folder, "PYTHONWARNINGS": "error", "COLUMNS": "100", "TERM": "xterm-256color"}


class Running(NamedTuple):
    """A running command with three pipes."""

    process: subprocess.Popen[str]
    stdin: IO[str]
    stdout: IO[str]
    stderr: IO[str]

    def end(self, number: signal.Signals | None = None) -> int:
        """Send a signal, if given, and wait for the exit status; stdin stays open."""
        if number is not None:
            self.process.send_signal(number)
        return self.process.wait(_SECONDS)


@contextmanager
def started(*arguments: str) -> Iterator[Running]:
    """Start a command and kill it at the end of the block."""
    process = subprocess.Popen(
        [*_COMMAND, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(),
    )
    with process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            yield Running(process, process.stdin, process.stdout, process.stderr)
        finally:
            process.kill()


def run(*arguments: str, stdin: str = "") -> Outcome:
    """Run a command with pipes to its end."""
    with started(*arguments) as running:
        out, err = running.process.communicate(stdin, timeout=_SECONDS)
        return Outcome(running.end(), out, err)


def of_program(*command: str) -> Outcome:
    """Run any program to its end."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_SECONDS, env=_environment())
    return Outcome(done.returncode, done.stdout, done.stderr)


def in_a_terminal(*arguments: str, after: str = "", typed: str = "") -> Outcome:
    """Run a command in a terminal; `out` is everything that the terminal received, with escape codes.

    When the terminal has received `after`, the test types `typed`: \\x03 is Ctrl-C, \\x04 Ctrl-D.
    """
    child, terminal = pty.fork()
    if child == 0:  # pragma: no cover - another process
        with suppress(OSError):
            os.execve(sys.executable, [*_COMMAND, *arguments], _environment())  # noqa: S606 - no shell is wanted
        os._exit(127)
    shown = b""
    try:
        while select.select([terminal], [], [], _SECONDS)[0]:
            shown += os.read(terminal, 65_536)
            if typed and after.encode() in shown:
                os.write(terminal, typed.encode())
                typed = ""
        os.kill(child, signal.SIGKILL)
    except OSError:  # the last process of the terminal has ended
        pass
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    return Outcome(os.waitstatus_to_exitcode(status), shown.decode(), "")


def without_escape_codes(shown: str) -> str:
    """Return terminal output without escape codes."""
    return _ESCAPE_CODES.sub("", shown)
