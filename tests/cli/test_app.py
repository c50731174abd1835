import re
from pathlib import Path

import pytest

from kpl_integrations.cli.exit_code import ExitCode
from tests.support.kpl_process import run

GUIDE = Path(__file__).parents[2] / "docs" / "howto" / "cli.md"


def test_version_is_printed(kpl):
    outcome = kpl("--version")
    assert (outcome.status, outcome.err) == (0, "")
    assert re.match(r"kpl (\d+\.\d+|\(from a folder)", outcome.out)


def test_help_lists_all_commands(kpl):
    outcome = kpl("--help")
    assert outcome.status == 0
    names = re.findall(r"^│ ([a-z]+) ", outcome.out, re.MULTILINE)
    assert names[:2] == ["demo", "local"]
    assert {"put", "tail", "serve", "top", "doctor", "dlq", "keys"} <= set(names)
    guide = GUIDE.read_text()
    assert [name for name in names if f"`kpl {name}`" not in guide and f"kpl {name} " not in guide] == []


@pytest.mark.parametrize("command", ["demo", "local", "put", "tail", "top", "doctor"])
def test_the_guide_describes_every_option(kpl, command):
    options = set(re.findall(r"--[a-z-]+", kpl(command, "--help").out)) - {"--help"}
    section = GUIDE.read_text().partition(f"## `kpl {command}`\n")[2].partition("\n## ")[0]
    assert options <= set(re.findall(r"--[a-z-]+", section))


def test_the_guide_has_the_table_of_exit_codes():
    rows = dict(re.findall(r"^\| (\d+) \| (.+?) \|$", GUIDE.read_text(), re.MULTILINE))
    assert {int(status) for status in rows} == set(ExitCode)


@pytest.mark.parametrize("command", [(), ("demo",), ("dlq", "list"), ("keys", "new")])
def test_help_shows_flags_without_a_type(kpl, command):
    outcome = kpl(*command, "--help")
    assert (outcome.status, "--help" in outcome.out, "bool" in outcome.out) == (0, True, False)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_options(shell, monkeypatch):
    monkeypatch.setenv("_KPL_COMPLETE", f"complete_{shell}")
    for typed, expected in (("kpl sp", "spool"), ("kpl put --qu", "--quiet")):
        monkeypatch.setenv("COMP_WORDS", typed)
        monkeypatch.setenv("COMP_CWORD", str(typed.count(" ")))
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", typed)
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        assert expected in run().out
