"""Trials: the tests of a mutation, in a child process that imports the mutated text in place of the file.

The parent has pytest and the third-party libraries imported, and none of our packages. A child is a fork of it, so it
starts at once. The working tree is never edited.
"""

import contextlib
import ctypes
import importlib
import os
import resource
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.mutation.coverage_map import name_of
from tests.support.changed_module import import_changed

LIBRARIES = (
    "anyio.pytest_plugin aiobotocore.session botocore.session cbor2 fastapi httpx msgspec opentelemetry.sdk.trace"
    " prometheus_client pybase64 pytest_timeout sortedcontainers sqlite3 trio.testing uvicorn"
)
# A hang is one when the tests take this many times as long as without the mutation, and these seconds more.
HANG_FACTOR = 4.0
HANG_SECONDS = 15.0
MEMORY_BYTES = 6 << 30
# The exit code of a child whose tests did not import the mutated text, so that they prove nothing.
NOT_IMPORTED = 71
# prctl(2): a process whose parent has ended becomes a child of this one, which ends it.
_PR_SET_CHILD_SUBREAPER = 36


def prepare() -> None:
    """Import what every trial imports, and take over the processes that a trial leaves behind.

    Examples are the same in each run. A failing one is not made smaller, because no person reads it.
    """
    for library in LIBRARIES.split():
        with contextlib.suppress(ImportError):
            importlib.import_module(library)
    checks = [HealthCheck.too_slow]
    phases = [Phase.explicit, Phase.generate]
    settings.register_profile(
        "mutation",
        derandomize=True,
        deadline=None,
        database=None,
        max_examples=50,
        phases=phases,
        suppress_health_check=checks,
    )
    os.environ["HYPOTHESIS_PROFILE"] = "mutation"
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class _Chosen:
    """A pytest plugin that keeps the chosen tests, in their order, and writes the name of the one that fails."""

    def __init__(self, tests: list[str], failed: IO[str]) -> None:
        self._places = {test: place for place, test in enumerate(tests)}
        self._failed = failed

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if name_of(item.nodeid) in self._places and "trio" not in item.nodeid]
        items[:] = sorted(chosen, key=lambda item: self._places[name_of(item.nodeid)])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.write(f"{name_of(report.nodeid)}\n")
            self._failed.flush()


@dataclass
class Trial:
    """A child process and its tests. `seconds` is what they take without a mutation."""

    tests: list[str]
    seconds: float
    folder: Path
    module: tuple[str, str] | None = None
    """The mutated module's path and text; None: nothing is mutated."""
    stop_at_first: bool = True
    process: int = 0
    started: float = 0.0

    @property
    def limit(self) -> float:
        """The seconds after which the tests hang."""
        return HANG_SECONDS + HANG_FACTOR * self.seconds

    @property
    def elapsed(self) -> float:
        """The seconds since the start."""
        return time.monotonic() - self.started

    @property
    def failed(self) -> list[str]:
        """The tests that have failed."""
        file = self.folder / "failed"
        return file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []

    @property
    def output(self) -> str:
        """What pytest wrote."""
        return (self.folder / "output").read_text(encoding="utf-8", errors="replace")

    def start(self) -> None:
        """Start the child process."""
        self.started = time.monotonic()
        self.process = os.fork()
        if not self.process:
            code = 70
            try:
                code = self._run()
            finally:
                os._exit(code)

    def end(self) -> None:
        """End the child's process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)

    def _run(self) -> int:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard))
        self.folder.mkdir(parents=True)
        nothing = os.open(os.devnull, os.O_RDONLY)
        output = os.open(self.folder / "output", os.O_CREAT | os.O_WRONLY, 0o600)
        for target, source in ((0, nothing), (1, output), (2, output)):
            os.dup2(source, target)
        loader = None
        if self.module is not None:
            loader = import_changed(*self.module)
        files = list(dict.fromkeys(test.partition("::")[0] for test in self.tests))
        # Not rewritten: pytest would load our packages from their files, because one of them is a plugin.
        options = [
            "-q",
            "--assert=plain",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist.plugin",
            f"--basetemp={self.folder / 'tmp'}",
        ]
        options += ["-x"] if self.stop_at_first else []
        with (self.folder / "failed").open("w", encoding="utf-8") as failed:
            code = int(pytest.main([*options, *files], plugins=[_Chosen(self.tests, failed)]))
        return code if loader is None or loader.was_used else NOT_IMPORTED


def end_orphans(known: set[int]) -> None:
    """End the processes that trials have left behind: children of this process that it has not started."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    if children.exists():
        for child in map(int, children.read_text(encoding="ascii").split()):
            if child not in known:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
