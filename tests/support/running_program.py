"""Programs in processes of their own: start them, watch their output, end them."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import kpl_core
from tests.support.waiting import wait_until

TESTS = Path(__file__).parents[1]
# Where the packages are imported from: the checkout, or the place where the wheel is installed.
PACKAGES = str(Path(next(iter(kpl_core.__path__))).parent)


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a program, which can import every application under `tests/*/programs`."""
    paths = [PACKAGES, *(str(folder) for folder in sorted(TESTS.glob("*/programs")))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(more or {})}


def run(program: str, *arguments: str, more: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program, given by its path under `tests`, to its end."""
    return subprocess.run(
        [sys.executable, TESTS / program, *arguments],
        env=environment(more),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


class Running:
    """A process whose output goes to a file."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self.process = process
        self._output = output

    def said(self) -> str:
        """Return its output so far."""
        return self._output.read_text(encoding="utf-8")

    def wait_until_said(self, *words: str) -> None:
        """Wait until the output contains all words."""
        wait_until(lambda: all(word in self.said() for word in words), lambda: f"{words} in {self.said()}")

    def end(self, signal_number: int, *, within: float = 30.0) -> int:
        """Send a signal; return the exit status."""
        self.process.send_signal(signal_number)
        return self.process.wait(within)


@contextmanager
def running(
    command: list[str], output: Path, more: Mapping[str, str], *, folder: Path | None = None
) -> Iterator[Running]:
    """Start `python -m command` in a folder, by default this one, and terminate it at the end if it still runs."""
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], env=environment(more), cwd=folder, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            yield Running(process, output)
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
