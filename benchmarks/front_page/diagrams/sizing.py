"""What decides the size of a gateway: clients, CPU, buffer, spool, shards."""

from benchmarks.front_page.colours import Colours, svg
from benchmarks.front_page.shapes import LADDER_STEP, ladder, markers, style

__all__ = ["draw"]

_STEPS = (
    ("clients", "box", ("a descriptor for each connection,", "256 MiB for incomplete bodies")),
    ("CPU", "core", ("a core for each worker:", "requests a second x µs of a request")),
    ("spool", "disk", ("disk: rate x record size", "x seconds of outage x 1.3")),
    ("buffer", "core", ("memory: 90 MiB + 4 x its bytes", "at normal load: rate x 0.2 s")),
    ("shards", "outside", ("1 MiB and 1,000 Kinesis records", "a second for each")),
)
_WIDTH, _HEIGHT = 520, LADDER_STEP * len(_STEPS) - 16
_TITLE = "What decides the size of a gateway: " + "; ".join(f"{name}: {' '.join(lines)}" for name, _, lines in _STEPS)


def draw(colours: Colours) -> str:
    """Return the SVG in these colours."""
    return svg(_WIDTH, _HEIGHT, title=_TITLE, style=style(colours), body=markers(colours) + ladder(_STEPS))
