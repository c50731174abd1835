"""The journey of a user record, step by step, and the ways back."""

from benchmarks.front_page.colours import Colours, svg, text
from benchmarks.front_page.shapes import LADDER_STEP, ladder, markers, style, way

__all__ = ["draw"]

_STEPS = (
    ("put", "box", ("check, hash the key, predict the shard", "a Delivery comes back")),
    ("fair queue", "box", ("only with flows, for a busy shard",)),
    ("aggregate", "core", ("50 KiB or 100 ms,", "one open record for each shard")),
    ("limit", "core", ("1,000 records and 1 MiB a second", "for each shard")),
    ("gate", "box", ("only with a circuit breaker",)),
    ("collect", "core", ("a request: 500 records, 1 MiB",)),
    ("send", "outside", ("PutRecords, the only I/O",)),
    ("classify", "core", ("one table: each answer",)),
    ("finish", "core", ("one result for many records,", "buffer space is free again")),
    ("store", "disk", ("spool or dead letters, if configured", "and it failed")),
)
_HEIGHT = LADDER_STEP * len(_STEPS) - 16
_TITLE = (
    "The journey of a user record: "
    + "; ".join(f"{name}: {' '.join(lines)}" for name, _, lines in _STEPS)
    + ". From classify a record goes back to limit after a backoff, or to aggregate if it was on the wrong shard. "
    "The disk puts it again."
)


def draw(colours: Colours) -> str:
    """Return the SVG in these colours."""
    body = "".join(
        (
            markers(colours),
            ladder(_STEPS),
            way("M340 472H452V216H420", css="back"),
            text(392, 464, "backoff"),
            way("M340 480H478V152H420", css="back"),
            text(404, 499, "wrong shard"),
            way("M440 600H508V24H466", css="back"),
        )
    )
    return svg(520, _HEIGHT, title=_TITLE, style=style(colours), body=body)
