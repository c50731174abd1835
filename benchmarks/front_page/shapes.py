"""The shapes of the diagrams: boxes with text, frames, arrows, and what they look like in a scheme.

A diagram is at most 520 units wide with text of 15 and 16 units, so that it can be read on a phone of 390 pixels.
"""

from collections.abc import Iterable

from benchmarks.front_page.colours import SANS, Colours, text

__all__ = ["LADDER_STEP", "area", "box", "ladder", "markers", "style", "way"]

#: The distance of two lines of text in a box.
LINE = 19
#: The distance of two steps of a ladder.
LADDER_STEP = 64


def style(colours: Colours) -> str:
    """Return the CSS of all shapes."""
    return (
        f" text {{ font: 15px {SANS}; fill: {colours.muted}; text-anchor: middle }}"
        f" .name {{ font-size: 16px; font-weight: 600; fill: {colours.ink} }} .start {{ text-anchor: start }}"
        f" .area {{ fill: none; stroke: {colours.line}; stroke-dasharray: 3 4 }}"
        f" .core {{ fill: {colours.brand_soft}; stroke: {colours.brand}; stroke-width: 2 }}"
        f" .box {{ fill: {colours.surface}; stroke: {colours.line} }}"
        f" .outside {{ fill: {colours.surface}; stroke: {colours.brand}; stroke-width: 2 }}"
        f" .disk {{ fill: {colours.disk_soft}; stroke: {colours.disk} }}"
        f" .way {{ fill: none; stroke: {colours.brand}; stroke-width: 2 }}"
        f" .back {{ fill: none; stroke: {colours.disk}; stroke-width: 2; stroke-dasharray: 6 4 }} "
    )


def _marker(name: str, colour: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
        f'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>\n'
    )


def markers(colours: Colours) -> str:
    """Return the heads of the arrows."""
    return f"<defs>\n{_marker('way', colours.brand)}{_marker('back', colours.disk)}</defs>\n"


def box(column: tuple[int, int], y: int, name: str, *lines: str, css: str = "box", height: int = 56) -> str:
    """Return a box in a column (left edge, width) with its name and more lines of text."""
    x, width = column
    first = y + (height - LINE * len(lines)) / 2 + 6
    return (
        f'<rect class="{css}" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>\n'
        + text(x + width / 2, first, name, "name")
        + "".join(text(x + width / 2, first + LINE * number, line) for number, line in enumerate(lines, 1))
    )


def area(column: tuple[int, int], y: int, height: int, *, css: str = "area") -> str:
    """Return a frame around other shapes."""
    x, width = column
    return f'<rect class="{css}" x="{x}" y="{y}" width="{width}" height="{height}" rx="10"/>\n'


def way(path: str, *, css: str = "way", both: bool = False) -> str:
    """Return an arrow along an SVG path: `way` is the ordinary one, `back` a dashed one."""
    start = f' marker-start="url(#{css})"' if both else ""
    return f'<path class="{css}" marker-end="url(#{css})"{start} d="{path}"/>\n'


def ladder(steps: Iterable[tuple[str, str, tuple[str, ...]]]) -> str:
    """Return boxes below each other, with an arrow from each to the next; beside each box its lines of text.

    A step has its name, its kind of box, and its lines.
    """
    parts = []
    for number, (name, css, lines) in enumerate(steps):
        y = 2 + LADDER_STEP * number
        parts.append(box((2, 136), y, name, css=css, height=44))
        first = y + 29 - (len(lines) - 1) * LINE / 2
        parts += [text(158, first + LINE * each, line, "start") for each, line in enumerate(lines)]
        if number:
            # The way to a disk is dashed.
            parts.append(way(f"M70 {y - 20}V{y - 2}", css="back" if css == "disk" else "way"))
    return "".join(parts)
