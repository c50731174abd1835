"""Where the command begins, before there is a command."""

import sys

import pytest

from kpl_integrations.cli import main


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
