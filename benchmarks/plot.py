"""Draw bars of records per CPU-second as SVG, without a plotting library.

The SVG has no background and follows the reader's colour scheme; its colours keep their contrast on
white and on black where a viewer ignores that.
"""

from dataclasses import dataclass
from xml.sax.saxutils import escape

from benchmarks.figures import Figure, figure_of
from benchmarks.plan import OURS, Row
from benchmarks.rounds import Results
from benchmarks.table import checked_by_the_sink

__all__ = ["draw"]

_WIDTH = 940
_LABEL_WIDTH = 220
_BAR_WIDTH = 390
_BAR_HEIGHT = 20
_ROW_HEIGHT = 30
_PANEL_HEAD = 44
_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #6e7781 }
  .title { font-weight: 600 }
  .bar { fill: #8c959f } .ours { fill: #1f6feb } .faulty { opacity: 0.4 } .range { stroke: #d4a72c; stroke-width: 2 }
  @media (prefers-color-scheme: dark) { text { fill: #9da7b3 } .bar { fill: #6e7681 } .ours { fill: #388bfd } }
"""


@dataclass(frozen=True, slots=True)
class _Bar:
    label: str
    figure: Figure | None
    caption: str
    css: str


def draw(results: Results) -> str:
    """Return an SVG with a panel for each workload that was given to the alternatives."""
    panels: dict[str, list[Row]] = {}
    for row in results.rows:
        if row.kind == "peers":
            title = f"{'1 KiB' if row.workload.data_bytes == 1024 else f'{row.workload.data_bytes} B'} records, "
            title += f"{'10,000 keys' if row.workload.keys == '10k' else 'all-unique keys'}, 16 shards"
            panels.setdefault(title, []).append(row)
    pieces, top = [], 0
    for title, rows in panels.items():
        pieces.append(_panel(title, [_bar(results, row) for row in rows], top))
        top += _PANEL_HEAD + _ROW_HEIGHT * len(rows) + 10
    title = "User records per CPU-second of the producing process: median and range"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top + 24}" role="img" aria-label="{title}">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n{''.join(pieces)}"
        f'<text x="10" y="{top + 12}">{title}</text>\n</svg>\n'
    )


def _bar(results: Results, row: Row) -> _Bar:
    css = "bar ours" if row.subject == OURS else "bar"
    figure = figure_of(results, row)
    if figure is None:
        return _Bar(row.subject, None, f"not measured: {results.failure_of(row)}"[:80], css)
    checked = checked_by_the_sink(results, row)
    if checked == "all right":
        return _Bar(row.subject, figure, f"{figure.median:,.0f}", css)
    # Faded, because records that a consumer drops are not throughput.
    return _Bar(row.subject, figure, f"{figure.median:,.0f}  ({checked})", f"{css} faulty")


def _panel(title: str, bars: list[_Bar], top: int) -> str:
    largest = max((bar.figure.largest for bar in bars if bar.figure), default=1.0)
    lines = [f'<text class="title" x="10" y="{top + 28}">{escape(title)}</text>\n']
    for position, bar in enumerate(bars):
        y = top + _PANEL_HEAD + position * _ROW_HEIGHT
        middle = y + _BAR_HEIGHT / 2
        lines.append(f'<text x="{_LABEL_WIDTH - 8}" y="{middle + 5}" text-anchor="end">{escape(bar.label)}</text>\n')
        end = float(_LABEL_WIDTH)
        if bar.figure:
            smallest, length, end = (
                _LABEL_WIDTH * is_position + value * _BAR_WIDTH / largest
                for value, is_position in ((bar.figure.smallest, 1), (bar.figure.median, 0), (bar.figure.largest, 1))
            )
            lines.append(
                f'<rect class="{bar.css}" x="{_LABEL_WIDTH}" y="{y}" width="{length:.1f}" height="{_BAR_HEIGHT}"/>\n'
                f'<line class="range" x1="{smallest:.1f}" x2="{end:.1f}" y1="{middle}" y2="{middle}"/>\n'
            )
        lines.append(f'<text x="{end + 8:.1f}" y="{middle + 5}">{escape(bar.caption)}</text>\n')
    return "".join(lines)
