"""Where the command begins, before there is a command."""

import logging
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from kpl_integrations.cli import main
from kpl_integrations.cli.failure import CommandFailure
from kpl_integrations.cli.terminal import complain, noted

# Whatever is written to it finds no room.
FULL = Path("/dev/full")
needs_a_full_disk = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")


class _InterruptedImport:
    """Ctrl-C, pressed while the command's modules are imported."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, *_: object) -> None:
        if name == self.name:
            raise KeyboardInterrupt


@pytest.mark.parametrize("module", ["entry", "app"])
def test_a_ctrl_c_while_the_command_starts_ends_it_without_a_traceback(monkeypatch, capfd, module):
    name = f"kpl_integrations.cli.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [_InterruptedImport(name), *sys.meta_path])
    assert main(["--version"]) == 130
    assert capfd.readouterr() == ("", "")


def status_of(*arguments: str, stdout: int) -> tuple[int, str]:
    """Run a command that writes to a descriptor; return its status and what it said on stderr."""
    command = (sys.executable, "-m", "kpl_integrations.cli", *arguments)
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=30, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("keys", "new", "--json")])
def test_a_reader_that_is_gone_is_status_141_of_every_output(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert status_of(*arguments, stdout=writer) == (141, "")
    finally:
        os.close(writer)


@needs_a_full_disk
@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("keys", "new", "--json")])
def test_an_output_without_room_is_one_sentence(arguments):
    full = os.open(FULL, os.O_WRONLY)
    try:
        status, said = status_of(*arguments, stdout=full)
    finally:
        os.close(full)
    assert (status, said.count("\n"), "No space left" in said) == (3, 1, True)


@needs_a_full_disk
def test_a_log_without_room_ends_nothing(monkeypatch):
    full = FULL.open("w", encoding="utf-8")
    try:
        monkeypatch.setattr(sys, "stderr", full)
        # Said by the spool's thread when its disk is full, and the log may be on the same disk.
        with noted("kpl_core", logging.WARNING):
            logging.getLogger("kpl_core.durability.spool").error("the disk is full")
        complain(CommandFailure("the command cannot go on"))
    finally:
        monkeypatch.undo()
        with suppress(OSError):
            full.close()
