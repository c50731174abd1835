"""The start of `kpl`, before a command runs."""

import logging
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import kpl_integrations
from kpl_integrations.cli import main
from kpl_integrations.cli.exit_code import CommandFailure
from kpl_integrations.cli.terminal import print_failure, show_logs

# Every write to it fails with "No space left on device".
FULL = Path("/dev/full")
needs_a_full_disk = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")


class _InterruptedImport:
    """Simulates Ctrl-C during the import of one module."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, *_: object) -> None:
        if name == self.name:
            raise KeyboardInterrupt


@pytest.mark.parametrize("module", ["app", "options"])
def test_ctrl_c_during_startup_prints_no_traceback(monkeypatch, capfd, module):
    name = f"kpl_integrations.cli.{module}"
    for imported in (name, "kpl_integrations.cli.app"):
        monkeypatch.delitem(sys.modules, imported, raising=False)
    monkeypatch.setattr(sys, "meta_path", [_InterruptedImport(name), *sys.meta_path])
    assert main(["--version"]) == 130
    assert capfd.readouterr() == ("", "")


STARTUP_INTERRUPTED = """
import sys

class Interrupted:
    def find_spec(self, name, *_):
        if not name.startswith("kpl_integrations"):
            raise KeyboardInterrupt

# All modules that are not part of the interpreter's own start must be imported again.
for name in set(sys.modules) - set(sys.builtin_module_names):
    if name not in ("__main__", "sys", "importlib._bootstrap", "importlib._bootstrap_external", "os", "io", "site"):
        sys.modules.pop(name)
sys.meta_path.insert(0, Interrupted())
from kpl_integrations.cli import main
sys.exit(main(["--version"]))
"""


def test_ctrl_c_during_the_first_import_prints_no_traceback():
    done = subprocess.run(
        (sys.executable, "-S", "-c", STARTUP_INTERRUPTED),
        cwd=Path(kpl_integrations.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def status_of(*arguments: str, stdout: int) -> tuple[int, str]:
    """Run a command that writes to a descriptor; return its status and its stderr."""
    command = (sys.executable, "-m", "kpl_integrations.cli", *arguments)
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=50, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("keys", "new", "--json")])
def test_a_closed_output_is_status_141(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert status_of(*arguments, stdout=writer) == (141, "")
    finally:
        os.close(writer)


@pytest.mark.long
@needs_a_full_disk
@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("keys", "new", "--json")])
def test_an_output_on_a_full_disk_is_one_sentence(arguments):
    full = os.open(FULL, os.O_WRONLY)
    try:
        status, error = status_of(*arguments, stdout=full)
    finally:
        os.close(full)
    assert (status, error.count("\n"), "No space left" in error) == (3, 1, True)


@needs_a_full_disk
def test_stderr_on_a_full_disk_ends_no_command(monkeypatch):
    full = FULL.open("w", encoding="utf-8")
    try:
        monkeypatch.setattr(sys, "stderr", full)
        # The spool's thread logs this when its disk is full, and stderr may be on the same disk.
        with show_logs("kpl_core", logging.WARNING):
            logging.getLogger("kpl_core.durability.spool").error("the disk is full")
        print_failure(CommandFailure("the command cannot continue"))
    finally:
        monkeypatch.undo()
        with suppress(OSError):
            full.close()
