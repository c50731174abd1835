"""How far a command is: a bar with rate and time left on a terminal, else lines or objects, or nothing."""

import io
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from kpl_core.options.kinesis_limits import MIB
from kpl_integrations.cli.options import ProgressWanted
from kpl_integrations.cli.progress import FIRST_SECONDS, LINE_SECONDS, ProgressLines, progress
from kpl_integrations.cli.terminal import Figure, print_figures
from tests.support.kpl_process import in_a_terminal, without_escape_codes

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
