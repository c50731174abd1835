"""Where an accepted record is: buffered, delivered, failed, spooled or a dead letter, and the ways between these."""

from benchmarks.front_page.colours import Colours, svg, text
from benchmarks.front_page.shapes import box, markers, style, way

__all__ = ["draw"]

_WIDTH, _HEIGHT = 520, 326
_TITLE = (
    "Where an accepted record is: in exactly one of five places. From the buffer it is delivered, or it fails, or it "
    "is spooled, or it becomes a dead letter. A spooled record is replayed, and a dead letter redriven; then Kinesis "
    "has it."
)
_PLACES = ((2, 118), (134, 118), (266, 118), (398, 120))


def draw(colours: Colours) -> str:
    """Return the SVG in these colours."""
    delivered, failed, spooled, letter = _PLACES
    body = "".join(
        (
            markers(colours),
            box((180, 160), 2, "accepted", "each record once", css="box"),
            box((180, 160), 94, "buffered", "in memory", css="core"),
            way("M260 58V92"),
            box(delivered, 202, "delivered", "in Kinesis", css="outside"),
            box(failed, 202, "failed", "and reported"),
            box(spooled, 202, "spooled", "on disk", css="disk"),
            box(letter, 202, "dead letter", "on disk", css="disk"),
            way("M180 122H61V200") + way("M210 150V200"),
            way("M310 150V200", css="back") + way("M340 122H458V200", css="back"),
            way("M325 258V292H84V260") + way("M458 258V316H40V260"),
            text(206, 286, "replayed") + text(390, 310, "redriven"),
        )
    )
    return svg(_WIDTH, _HEIGHT, title=_TITLE, style=style(colours), body=body)
