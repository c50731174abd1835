"""How processes share a limit: each reports to a store, any one divides, each applies its lease."""

from benchmarks.front_page.colours import Colours, svg, text
from benchmarks.front_page.shapes import box, markers, style, way

__all__ = ["draw"]

_WIDTH, _HEIGHT = 520, 372
_TITLE = (
    "How processes share a limit. Each process reports to the store what it wants and which plan it has applied. Any "
    "process that finds the plan outdated divides the limit and writes a new plan. Each process applies its lease to "
    "its own token buckets. The sum is never above the limit."
)
_PROCESSES = ((2, "40 %"), (182, "10 %"), (362, "40 %"))


def _process(x: int, letter: str, share: str) -> str:
    middle = x + 78
    return "".join(
        (
            box((x, 156), 172, f"process {letter}", "reports, divides", css="core"),
            box((x, 156), 270, f"lease: {share}", "token buckets", css="outside"),
            way(f"M{middle} 230V268"),
        )
    )


def draw(colours: Colours) -> str:
    """Return the SVG in these colours."""
    body = "".join(
        (
            markers(colours),
            box((100, 320), 2, "one store", "a report of each process, and one plan", css="disk"),
            way("M140 60C140 110 80 110 80 170", both=True) + way("M260 60V170", both=True),
            way("M380 60C380 110 440 110 440 170", both=True),
            text(8, 96, "1 report", "start"),
            text(270, 128, "2 divide", "start"),
            text(88, 254, "3 apply", "start"),
            *(_process(x, letter, share) for letter, (x, share) in zip("ABC", _PROCESSES, strict=True)),
            text(260, 356, "Unused capacity stays unassigned: here 10 %."),
        )
    )
    return svg(_WIDTH, _HEIGHT, title=_TITLE, style=style(colours), body=body)
