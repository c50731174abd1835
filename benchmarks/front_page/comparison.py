"""The measured comparison as bars. The pages about speed keep the numbers; this reads them, so that both agree.

Bars of panels with and without TLS are not comparable. A bar without retries, limits and
deadlines is an outline, because it does less work for a record.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from benchmarks.front_page.colours import SANS, Colours, svg, text

__all__ = ["PANELS", "Bar", "Panel", "Program", "draw", "measured", "page_of"]

_DOCS = Path(__file__).parents[2] / "docs"
_WIDTH = 520
_LABELS = 196
_BARS = 226
_ROW = 27
_BAR = 18
_TITLE = "Measured: user records of 100 B that each producer sends per CPU-second, in one run. "
_LEGEND = (
    "Records of 100 B per CPU-second of the producing process.",
    "Bold: kpl-integrations. Outlined: no retries, limits and",
    "deadlines, or misrouted. Line: smallest to largest round.",
    "One run on two cores, one of them for the sink.",
)


@dataclass(frozen=True, slots=True)
class Program:
    """A producer: its name on the page, and in the picture."""

    name: str
    label: str
    is_ours: bool = False
    is_bare: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One table of a page, and a regular expression for the run: named groups `date` and perhaps `machine`."""

    title: str
    page: str
    section: str
    run: str
    programs: tuple[Program, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """Records per CPU-second. Without a range `smallest` and `largest` are the median; `remark` is from the sink."""

    program: Program
    median: float
    smallest: float
    largest: float
    remark: str


_RUN = r"\* (?P<date>\d{4}-\d\d-\d\d), (?P<machine>[^,]+), 2 cores"
PANELS = (
    Panel(
        "Over TLS, the wheel with C",
        "benchmarks/results.md",
        "Over TLS, beside the KPL: 100 B",
        _RUN,
        (
            Program("expert Go producer", "Go, by an expert", is_bare=True),
            Program("kpl_core, compiled put_many()", "kpl_core put_many", is_ours=True),
            Program("bare Go producer", "Go, with AWS's SDK", is_bare=True),
            Program("kpl_core, compiled put_nowait()", "kpl_core put_nowait", is_ours=True),
            Program("kpl_core, compiled put()", "kpl_core await put", is_ours=True),
        ),
    ),
    Panel(
        "Over TLS, pure Python",
        "benchmarks/results.md",
        "Over TLS, beside the KPL: 100 B",
        _RUN,
        (
            Program("kpl_core, put_many()", "kpl_core put_many", is_ours=True),
            Program("kpl_core, put_nowait()", "kpl_core put_nowait", is_ours=True),
            Program("raw boto3", "boto3", is_bare=True),
            Program("Amazon KPL (Java)", "Amazon's KPL"),
        ),
    ),
    Panel(
        "Plain HTTP, pure Python",
        "benchmarks/results.md",
        "Beside the alternatives: 100 B",
        _RUN,
        (
            Program("kpl_core", "kpl_core put_many", is_ours=True),
            Program("async-kinesis, aggregating", "async-kinesis, aggr."),
            Program("aws-kinesis-agg, per shard", "aws-kinesis-agg", is_bare=True),
            Program("raw boto3", "boto3", is_bare=True),
            Program("raw aiobotocore", "aiobotocore", is_bare=True),
            Program("async-kinesis", "async-kinesis"),
            Program("aiokpl", "aiokpl"),
        ),
    ),
)


def page_of(panel: Panel) -> str:
    """Return the text of the page that has the numbers."""
    return (_DOCS / panel.page).read_text(encoding="utf-8")


def measured(panel: Panel) -> tuple[str, list[Bar]]:
    """Return the run, such as "2026-11-23, AMD EPYC", and the bars, the longest first.

    Raises:
        ValueError: the page has no such section, run or row.
    """
    text_of_page = page_of(panel)
    section = re.search(rf"^## {re.escape(panel.section)}.*?(?=^## |\Z)", text_of_page, re.MULTILINE | re.DOTALL)
    run = re.search(panel.run, text_of_page)
    if section is None or run is None:
        message = f"docs/{panel.page} has no section '## {panel.section}', or does not say when it was measured"
        raise ValueError(message)
    machine = (run["machine"] or "").replace("(R)", "").removesuffix(" Processor")
    bars = [_bar(program, section[0]) for program in panel.programs]
    return ", ".join(filter(None, (run["date"], machine))), sorted(bars, key=lambda bar: -bar.median)


def _bar(program: Program, section: str) -> Bar:
    row = re.search(rf"^\| {re.escape(program.name)} \| (.+) \|$", section, re.MULTILINE)
    figure = row and re.match(r"(?P<median>[\d,]+)(?: \[(?P<smallest>[\d,]+) - (?P<largest>[\d,]+)\])?", row[1])
    if not row or not figure:
        message = f"no row of numbers for {program.name!r} in {section.partition(chr(10))[0]!r}"
        raise ValueError(message)
    median, smallest, largest = (
        float((figure[name] or figure["median"]).replace(",", "")) for name in ("median", "smallest", "largest")
    )
    misrouted = re.search(r"\d+ % misrouted", row[1])
    return Bar(program, median, smallest, largest, misrouted[0] if misrouted else "")


def _style(colours: Colours) -> str:
    return (
        f" text {{ font: 15px {SANS}; fill: {colours.muted} }}"
        f" .title {{ font-size: 16px; font-weight: 600; fill: {colours.ink} }}"
        f" .label {{ text-anchor: end }} .mine {{ font-weight: 600; fill: {colours.ink} }}"
        f" .bar {{ fill: {colours.line} }} .ours {{ fill: {colours.brand} }}"
        f" .outlined {{ fill: {colours.brand_soft}; stroke: {colours.line} }}"
        f" .range {{ stroke: {colours.disk}; stroke-width: 2 }} .halo {{ stroke: {colours.page}; stroke-width: 6 }} "
    )


def _panel(panel: Panel, top: int) -> tuple[str, int]:
    """Return the panel and its lower edge."""
    run, bars = measured(panel)
    largest = max(bar.largest for bar in bars)
    pieces = [text(4, top + 18, panel.title, "title"), text(4, top + 38, run)]
    y = top + 50
    for bar in bars:
        ours = bar.program.is_ours
        css = "ours" if ours else "outlined" if bar.program.is_bare or bar.remark else "bar"
        length, smallest, end = (value / largest * _BARS for value in (bar.median, bar.smallest, bar.largest))
        middle = y + _BAR / 2
        pieces.append(text(_LABELS - 8, middle + 5, bar.program.label, "label mine" if ours else "label"))
        pieces.append(f'<rect class="{css}" x="{_LABELS}" y="{y}" width="{length:.1f}" height="{_BAR}" rx="2"/>\n')
        if bar.largest > bar.smallest:
            line = f'd="M{_LABELS + smallest:.1f} {middle:g}H{_LABELS + end:.1f}"'
            pieces.append(f'<path class="halo" {line}/><path class="range" {line}/>\n')
        caption = f"{_short(bar.median)}{f', {bar.remark}' if bar.remark else ''}"
        pieces.append(text(round(_LABELS + max(length, end) + 6, 1), middle + 5, caption, "mine" if ours else ""))
        y += _ROW
    return "".join(pieces), y


def _short(value: float) -> str:
    """Return the number to three digits."""
    return f"{float(f'{value:.3g}'):,.0f}"


def _spoken() -> str:
    """Return all numbers for a screen reader."""
    parts = []
    for panel in PANELS:
        run, bars = measured(panel)
        numbers = ", ".join(
            f"{bar.program.label} {_short(bar.median)}{f' ({bar.remark})' if bar.remark else ''}" for bar in bars
        )
        parts.append(f"{panel.title} ({run}): {numbers}.")
    return _TITLE + " ".join(parts)


def draw(colours: Colours) -> str:
    """Return the SVG in these colours.

    Raises:
        ValueError: a page does not have what the picture shows.
    """
    pieces, y = [], 0
    for panel in PANELS:
        drawn, y = _panel(panel, y)
        pieces.append(drawn)
        y += 14
    for line in _LEGEND:
        y += 20
        pieces.append(text(4, y, line))
    return svg(_WIDTH, y + 12, title=_spoken(), style=_style(colours), body="".join(pieces))
