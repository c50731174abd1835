"""How far a command is: a bar with rate and time left on a terminal, else lines or objects, or nothing."""

import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from rich.console import Console

from kpl_core.options.kinesis_limits import MIB
from kpl_integrations.cli.demo import limiting
from kpl_integrations.cli.options import ProgressWanted
from kpl_integrations.cli.progress import FIRST_SECONDS, LINE_SECONDS, ProgressLines, progress
from kpl_integrations.cli.terminal import Figure, print_figures
from tests.support.kpl_process import in_a_terminal, without_escape_codes
from tests.support.running_program import PACKAGES

Kpl = Callable[..., Any]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(
    capsys: pytest.CaptureFixture[str], clock: Clock, lines: ProgressLines, *steps: tuple[float, int]
) -> list[str]:
    """Return the lines that are printed when so much is done at these instants."""
    lines.get_time = clock
    task = lines.add_task("put", total=10 * MIB, unit="bytes", lines=0)
    for at, done in steps:
        clock.now = at
        lines.update(task, completed=done, lines=done // 100)
    return capsys.readouterr().err.splitlines()


def test_the_first_line_comes_after_two_seconds_and_then_one_every_ten(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    steps = [(second / 2, second * MIB // 8) for second in range(80)]
    found = shown(capsys, clock, ProgressLines(as_json=False, clock=clock), *steps)
    assert len(found) == 1 + int((39.5 - FIRST_SECONDS) / LINE_SECONDS)
    assert found[0] == "put: 5,242 lines, 0.5 of 10.0 MiB, 0.2 MiB/s, 38 s left"


def test_a_short_command_prints_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    assert shown(capsys, clock, ProgressLines(as_json=False, clock=clock), (0.0, 0), (1.9, 10 * MIB)) == []


def test_with_json_a_line_is_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    (line,) = shown(capsys, clock, ProgressLines(as_json=True, clock=clock), (0.0, 0), (1.0, 500_000), (2.0, 1_000_000))
    assert json.loads(line) == {
        "progress": "put",
        "lines": 10_000,
        "bytes": 1_000_000,
        "total": 10 * MIB,
        "per_second": 500_000.0,
        "seconds_left": 19,
    }


def test_records_have_their_bytes_a_second_and_what_limits_them(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    lines, objects = ProgressLines(as_json=False, clock=clock), ProgressLines(as_json=True, clock=clock)
    for each in (lines, objects):
        clock.now = 0.0
        each.get_time = clock
        task = each.add_task("drain", total=1_000, unit="records", bytes=0, limited_by="")
        for second in range(1, 5):
            clock.now = float(second)
            each.update(task, completed=100 * second, bytes=second * MIB, limited_by="the CPU (93%)")
    line, text = capsys.readouterr().err.splitlines()
    # The first line comes after two seconds, when the second step has no rate of its own yet.
    assert re.fullmatch(
        r"drain: 200 of 1,000 records, 100 records/s, 2\.0 MiB, 1\.0 MiB/s, limited by the CPU \(93%\), 8 s left", line
    )
    found = json.loads(text)
    assert (found["records"], found["bytes"], found["bytes_per_second"]) == (200, 2 * MIB, MIB)
    assert found["limited_by"] == "the CPU (93%)"


@pytest.mark.parametrize(
    ("shards", "cpu", "shown"),
    [(0.9, 0.95, "the shards (90%)"), (0.5, 0.95, "the CPU (95%)"), (0.5, 0.5, ""), (0.0, 0.0, "")],
)
def test_the_demo_shows_what_limits_it(shards: float, cpu: float, shown: str) -> None:
    assert limiting(shards, cpu) == shown


def test_a_tail_into_a_file_shows_on_the_terminal_what_it_has_read(stream) -> None:
    stream.store(*[(f"{number}", None, b"x" * 1_000) for number in range(300)])
    for wanted, more in ((True, ()), (False, ("--quiet",))):
        status, out, shown = with_stderr_on_a_terminal("tail", *stream.address, "--from-start", "--no-follow", *more)
        assert (status, out.count("xxx\n")) == (0, 300), shown
        assert bool(re.search(r"300 records, .*0\.3 MiB", shown)) is wanted, shown


def test_a_tail_on_a_terminal_shows_only_the_records(stream) -> None:
    stream.store(("key", None, b"a record"))
    assert "MiB" not in without_escape_codes(in_a_terminal("tail", *stream.address, "--from-start", "--no-follow").out)


def with_stderr_on_a_terminal(*arguments: str) -> tuple[int, str, str]:
    """Run a command with stdout in a pipe; return its status, its output, and what the terminal received."""
    terminal, slave = pty.openpty()
    command = [sys.executable, "-m", "kpl_integrations.cli", *arguments]
    variables = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "PYTHONPATH": PACKAGES}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=slave, text=True, env=variables) as process:
        os.close(slave)
        out, _ = process.communicate(timeout=30)
    shown = b""
    with suppress(OSError):  # the last process of the terminal has ended
        while chunk := os.read(terminal, 65_536):
            shown += chunk
    os.close(terminal)
    return process.returncode, out, without_escape_codes(shown.decode())


def test_what_is_quiet_or_hidden_shows_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_quiet, hidden in ((True, False), (False, True)):
        monkeypatch.setattr(ProgressWanted, "is_quiet", is_quiet)
        with progress(as_json=False, hidden=hidden) as bars:
            assert not isinstance(bars, ProgressLines)
            bars.update(bars.add_task("put", total=1, unit="records"), completed=1)
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_lines_and_bytes(stream, tmp_path):
    (tmp_path / "lines").write_text("a line that is not short\n" * 50_000)
    outcome = in_a_terminal("put", *stream.address, str(tmp_path / "lines"))
    assert outcome.status == 0
    assert re.search(r"[\d,]+ lines, \d\.\d of 1\.2 MiB", without_escape_codes(outcome.out))


def test_on_a_narrow_terminal_a_remark_has_several_lines_in_its_column(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = [Figure("shards_used", 0.84, "of 1 MiB/s each, which limits the rate", "84%"), Figure("lost", 0)]

    def printed(columns: int, output: io.StringIO) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr("sys.stdout", output)
        print_figures(figures, as_json=False)
        return without_escape_codes(output.getvalue()).splitlines()

    whole = ["shards used  84%  of 1 MiB/s each, which limits the rate", "lost         0"]
    assert printed(60, Terminal()) == printed(20, io.StringIO()) == whole
    assert printed(40, Terminal()) == [
        "shards used  84%  of 1 MiB/s each, which",
        "                  limits the rate",
        "lost         0",
    ]
    # Narrower than the column before it: the remark keeps 12 columns, and the terminal breaks the lines.
    assert max(len(line) for line in printed(10, Terminal())) <= 18 + 12


@pytest.mark.parametrize(("columns", "lines"), [(60, 2), (80, 1), (120, 1)])
def test_a_task_is_on_one_line_from_80_columns_on(monkeypatch: pytest.MonkeyPatch, columns: int, lines: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with progress(as_json=False) as bars:
        bars.update(bars.add_task("put and acknowledged", total=200_000, unit="records"), completed=199_999)
        bars.tasks[0].finished_speed = 7_937.0
        console = Console(width=columns, file=terminal)
        assert len(console.render_lines(bars.get_renderable())) == lines
        shown = "".join(segment.text for segment in console.render(bars.get_renderable()))
    assert ("199,999 of 200,000 records, 7,937 records/s" in shown) is (lines == 1)


def test_a_terminal_shows_no_bar_if_it_is_not_wanted(stream, tmp_path):
    (tmp_path / "lines").write_text("a line\n" * 10)
    outcome = in_a_terminal("put", *stream.address, str(tmp_path / "lines"), "--quiet")
    assert outcome.status == 0
    assert "\u2501" not in outcome.out


@pytest.mark.parametrize(
    "command",
    [
        ("put",),
        ("tail",),
        ("demo",),
        ("dlq", "redrive"),
        ("dlq", "purge"),
        ("dlq", "export"),
        ("spool", "drain"),
        ("spool", "export"),
    ],
)
def test_every_long_command_can_be_quiet(kpl: Kpl, command: tuple[str, ...]) -> None:
    assert "--quiet" in kpl(*command, "--help").out
