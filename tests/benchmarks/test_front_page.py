"""The pictures of the first pages: what the comparison reads, and what the recording of a terminal shows."""

import sys
import xml.etree.ElementTree as ET

import pytest

from benchmarks.front_page import comparison, demo
from benchmarks.front_page.colours import DARK, LIGHT, SCHEMES, Colours, contrast
from benchmarks.front_page.comparison import PANELS, Panel
from benchmarks.front_page.diagrams import architecture
from benchmarks.front_page.terminal import Run, Screen, Style, outputs_of


def shown(*outputs: str) -> list[str]:
    screen = Screen()
    for output in outputs:
        screen.feed(output)
    return [" ".join(run.text for run in line) for line in screen.lines()]


def test_a_screen_shows_what_a_terminal_would() -> None:
    assert shown("one\r\ntwo") == ["one", "two"]
    assert shown("one\rtwo") == ["two"]
    assert shown("first\rFI") == ["FIrst"]
    assert shown("bar\r\nbar\r\n", "\x1b[1A\x1b[2K\x1b[1A\x1b[2Kresult") == ["result", "", ""]
    assert shown("\x1b[?25l", "kpl", "\x1b[?25h") == ["kpl"]


def test_a_screen_keeps_style_and_column_of_each_run() -> None:
    screen = Screen()
    screen.feed(
        "lost  \x1b[1m0\x1b[0m \x1b[2mrecords\x1b[0m\r\n\x1b[1;32mdone\x1b[0m \x1b[38;5;237m-\x1b[38;2;114;156;31m="
    )
    assert screen.lines() == [
        (Run(0, "lost", Style()), Run(6, "0", Style(is_bold=True)), Run(8, "records", Style(is_dim=True))),
        (
            Run(0, "done", Style("2", is_bold=True)),
            Run(5, "-", Style("#3a3a3a")),
            Run(6, "=", Style("#729c1f")),
        ),
    ]


@pytest.mark.parametrize("output", ["\x1b[2J", "\x1b[5m", "\x1b[38;5;12m", "\x1b7"])
def test_a_screen_refuses_a_code_that_it_would_show_wrongly(output: str) -> None:
    with pytest.raises(ValueError, match="not known"):
        shown(output)


def test_a_command_runs_in_a_terminal_of_the_given_width() -> None:
    program = "import os, sys; print(os.get_terminal_size().columns, sys.stdout.isatty(), '\\u2501' * 3)"
    outputs = outputs_of([sys.executable, "-c", program], columns=77, environment={"PYTHONIOENCODING": "utf-8"})
    assert shown(*(output for _, output in outputs)) == ["77 True \u2501\u2501\u2501", ""]
    assert [at for at, _ in outputs] == sorted(at for at, _ in outputs)
    with pytest.raises(ChildProcessError, match="ended with 3"):
        outputs_of([sys.executable, "-c", "raise SystemExit(3)"], columns=77, environment={})


def test_a_recording_shows_each_screen_in_its_time_and_ends_with_the_last() -> None:
    outputs = [(0.1 * number, f"\r\x1b[2Kdone {number}") for number in range(1, 401)]
    frames = demo.frames_of([*outputs, (40.1, "\r\x1b[2Klost 0 & <more>")])
    assert [at for at, _ in frames] == sorted({at for at, _ in frames})
    assert 20 <= len(frames) <= 32
    drawn = demo.draw(frames, columns=80)
    tree = ET.fromstring(drawn)  # noqa: S314 - our own
    groups = tree.findall("{*}g")
    assert [group.get("class") for group in groups][-1] == "last"
    assert len(groups) == len(frames)
    assert "".join(groups[-1].itertext()) == "lost 0 & <more>"
    # Without motion only the last screen is visible.
    still, _, moving = drawn.partition("@media (prefers-reduced-motion:no-preference)")
    assert ".f{opacity:0}" in still
    assert "animation" not in still
    assert moving.count("@keyframes") == len(frames)
    assert "infinite" not in drawn


@pytest.mark.parametrize("colours", SCHEMES, ids=lambda colours: colours.name)
@pytest.mark.parametrize("picture", [architecture, comparison], ids=lambda picture: picture.__name__.rpartition(".")[2])
def test_text_of_a_picture_has_the_contrast_of_wcag(picture, colours: Colours) -> None:
    ET.fromstring(picture.draw(colours))  # noqa: S314 - our own
    for words in (colours.ink, colours.muted):
        for behind in (colours.page, colours.surface, colours.brand_soft, colours.disk_soft):
            assert contrast(words, behind) >= 4.5, (words, behind)
    for line in (colours.brand, colours.disk, colours.line):
        assert contrast(line, colours.page) >= 3, line


def test_the_contrast_is_that_of_wcag() -> None:
    assert contrast("#000000", "#ffffff") == contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    assert contrast(LIGHT.page, LIGHT.page) == 1
    assert contrast("#ffffff", LIGHT.brand) >= 4.5
    assert contrast(DARK.ink, DARK.brand_soft) >= 4.5


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_a_panel_has_the_numbers_of_its_page(panel: Panel, monkeypatch: pytest.MonkeyPatch) -> None:
    run, bars = comparison.measured(panel)
    assert run.startswith("2026-")
    assert [bar.median for bar in bars] == sorted((bar.median for bar in bars), reverse=True)
    page = comparison.page_of(panel)
    for bar in bars:
        assert f"| {bar.program.name} | {bar.median:,.0f}" in page
        assert bar.smallest <= bar.median <= bar.largest
    # Another number on the page is another number in the picture.
    first = bars[0]
    monkeypatch.setattr(comparison, "page_of", lambda _: page.replace(f"{first.median:,.0f}", "9,876,543"))
    assert comparison.measured(panel)[1][0].median == 9_876_543


def test_a_row_that_is_gone_is_an_error_and_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    page = comparison.page_of(PANELS[1])
    monkeypatch.setattr(comparison, "page_of", lambda _: page.replace("| Amazon KPL (Java) |", "| KPL |"))
    with pytest.raises(ValueError, match="no row of numbers for 'Amazon KPL"):
        comparison.measured(PANELS[1])
    monkeypatch.setattr(comparison, "page_of", lambda _: page.replace("## Over TLS", "## TLS"))
    with pytest.raises(ValueError, match="no section '## Over TLS, beside the KPL: 100 B'"):
        comparison.measured(PANELS[1])
