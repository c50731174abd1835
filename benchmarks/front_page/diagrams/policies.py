"""Fairness and a rate limit, one behind the other."""

from benchmarks.front_page.colours import Colours, svg
from benchmarks.front_page.shapes import box, markers, style, way

__all__ = ["draw"]

_TITLE = (
    "Each flow has a queue of its own. Fairness takes the next item from the flow that has had least for its weight: "
    "gold with weight 3 gets three items for each one of trial. The rate limit behind it decides how much passes in "
    "total: tokens_per_second, and at most burst_tokens at once. Then come an API, a consumer or a shard."
)
_FLOWS = (("gold", "weight 3", 2), ("trial", "weight 1", 180), ("a new tenant", "weight 1", 358))
_WHOLE = (60, 400)


def draw(colours: Colours) -> str:
    """Return the SVG in these colours."""
    body = "".join(
        (
            markers(colours),
            *(box((x, 160), 2, name, weight) for name, weight, x in _FLOWS),
            way("M82 58L190 94") + way("M260 58V94") + way("M438 58L330 94"),
            box(_WHOLE, 96, "fairness: what is next", "the flow that has had least for its weight", css="core"),
            way("M260 152V188"),
            box(_WHOLE, 190, "rate limit: how much in total", "tokens_per_second, burst_tokens at once", css="core"),
            way("M260 246V282"),
            box(_WHOLE, 284, "what is shared", "an API, a consumer, a shard", css="outside"),
        )
    )
    return svg(520, 342, title=_TITLE, style=style(colours), body=body)
