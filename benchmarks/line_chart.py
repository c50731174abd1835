"""Draw line charts as SVG without a plotting library, in colours that follow the reader's scheme."""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

__all__ = ["Chart", "Line", "draw_charts"]

_WIDTH = 760
_HEIGHT = 220
_LEFT = 70
_RIGHT = 150
_TOP = 48
_BOTTOM = 46
_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #6e7781 } .title { font-weight: 600 }
  .axis { stroke: #8c959f; fill: none } .line { fill: none; stroke-width: 2 }
  .c0 { stroke: #1f6feb } .c1 { stroke: #bf8700 } .c2 { stroke: #1a7f37 }
  .c3 { stroke: #cf222e } .c4 { stroke: #8250df }
  .limit { stroke: #8c959f; stroke-dasharray: 5 4 }
  @media (prefers-color-scheme: dark) { text { fill: #9da7b3 } .c0 { stroke: #58a6ff } .c1 { stroke: #d29922 } }
"""


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: points in the units of the axes, and its name at its right end. A limit is dashed."""

    name: str
    points: Sequence[tuple[float, float]]
    is_limit: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """One pair of axes, both from 0, with its curves."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]


def draw_charts(charts: Sequence[Chart], *, label: str) -> str:
    """Return one SVG with the charts one below the other; `label` is the text for screen readers."""
    height = _HEIGHT + _TOP + _BOTTOM
    panels = "".join(_panel(chart, number * height) for number, chart in enumerate(charts))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {len(charts) * height}" role="img" '
        f'aria-label="{escape(label)}">\n<title>{escape(label)}</title>\n<style>{_STYLE}</style>\n{panels}</svg>\n'
    )


def _panel(chart: Chart, top: int) -> str:
    largest_x = max(x for line in chart.lines for x, _ in line.points) or 1.0
    largest_y = max(y for line in chart.lines for _, y in line.points) * 1.05 or 1.0
    bottom = top + _TOP + _HEIGHT
    width = _WIDTH - _LEFT - _RIGHT

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + x / largest_x * width, bottom - y / largest_y * _HEIGHT

    pieces = [
        f'<text class="title" x="10" y="{top + 20}">{escape(chart.title)}</text>\n',
        f'<path class="axis" d="M{_LEFT} {top + _TOP}V{bottom}H{_LEFT + width}"/>\n',
        f'<text x="{_LEFT + width}" y="{bottom + 34}" text-anchor="end">{escape(chart.x_label)}</text>\n',
        f'<text x="{_LEFT}" y="{top + _TOP - 6}">{escape(chart.y_label)}</text>\n',
    ]
    for share in (0.0, 0.5, 1.0):
        x, _ = place(largest_x * share, 0)
        pieces.append(f'<text x="{x:.0f}" y="{bottom + 18}" text-anchor="middle">{_short(largest_x * share)}</text>\n')
        value = largest_y / 1.05 * share
        _, y = place(0, value)
        pieces.append(f'<text x="{_LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{_short(value)}</text>\n')
    for number, line in enumerate(chart.lines):
        points = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in line.points)
        css = "limit" if line.is_limit else f"c{number % 5}"
        end_x, end_y = place(*line.points[-1])
        pieces.append(f'<polyline class="line {css}" points="{points}"/>\n')
        pieces.append(f'<text x="{end_x + 6:.0f}" y="{end_y + 4:.0f}">{escape(line.name)}</text>\n')
    return "".join(pieces)


def _short(value: float) -> str:
    """Return the number to three digits, without an exponent."""
    return f"{float(f'{value:.3g}'):,.10g}"
