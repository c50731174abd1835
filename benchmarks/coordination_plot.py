"""Draw two lines over time for each case, on a scale that shows both 1.0 and 16."""

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

__all__ = ["draw"]

_WIDTH = 940
_LEFT = 60
_PANEL = 150
_GAP = 40
_WINDOWS_PER_SECOND = 50
_MARKS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 15.0)
_STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #6e7781 }
  .title { font-weight: 600; font-size: 13px }
  .grid { stroke: #8c959f; stroke-width: 0.5; opacity: 0.5 } .limit { stroke: #d4a72c; stroke-width: 1.5 }
  path { fill: none; stroke-width: 1.6 } .ours { stroke: #1f6feb } .theirs { stroke: #cf222e; opacity: 0.8 }
  .ours-name { fill: #1f6feb } .theirs-name { fill: #cf222e }
"""


def draw(cases: Sequence[tuple[str, Sequence[float], Sequence[float]]]) -> str:
    """Return an SVG with a panel for each case: its name, our totals and the example's, one for each 20 ms."""
    title = "Total rate in each second as a share of the limit"
    height = len(cases) * (_PANEL + _GAP) + 40
    panels = [_panel(name, ours, theirs, 30 + row * (_PANEL + _GAP)) for row, (name, ours, theirs) in enumerate(cases)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{title}">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n"
        f'<text class="title" x="10" y="18">{title} (logarithmic)</text>\n'
        f'<text class="ours-name" x="560" y="18">leases</text>\n'
        f'<text class="theirs-name" x="620" y="18">the arithmetic of AWS&apos;s example</text>\n'
        f"{''.join(panels)}</svg>\n"
    )


def _height_of(share: float) -> float:
    low, high = math.log(_MARKS[0]), math.log(20.0)
    return (math.log(min(20.0, max(_MARKS[0], share))) - low) / (high - low)


def _panel(name: str, ours: Sequence[float], theirs: Sequence[float], top: int) -> str:
    bottom = top + _GAP / 2 + _PANEL
    seconds = len(ours) / _WINDOWS_PER_SECOND
    pieces = [f'<text class="title" x="{_LEFT}" y="{top + 14}">{escape(name)}</text>\n']
    for mark in _MARKS:
        y = bottom - _height_of(mark) * _PANEL
        css = "limit" if mark == 1.0 else "grid"
        pieces.append(f'<line class="{css}" x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}"/>')
        pieces.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{mark:g}</text>\n')
    for tick in range(0, int(seconds) + 1, 20):
        x = _LEFT + tick / seconds * (_WIDTH - 10 - _LEFT)
        pieces.append(f'<text x="{x:.1f}" y="{bottom + 14:.1f}" text-anchor="middle">{tick} s</text>\n')
    for css, totals in (("theirs", theirs), ("ours", ours)):
        # Four points a second are enough.
        scale = (_WIDTH - 10 - _LEFT) / len(totals)
        points = [
            f"{_LEFT + index * scale:.1f},{bottom - _height_of(totals[index]) * _PANEL:.1f}"
            for index in range(0, len(totals), _WINDOWS_PER_SECOND // 4)
        ]
        pieces.append(f'<path class="{css}" d="M{" L".join(points)}"/>\n')
    return "".join(pieces)
