"""The way of a log record from your threads to Kinesis, and what happens to one that cannot arrive."""

from benchmarks.front_page.colours import Colours, svg, text
from benchmarks.front_page.shapes import box, markers, style, way

__all__ = ["draw"]

_WIDTH, _HEIGHT = 520, 392
_TITLE = (
    "The way of a log record. Your threads format it and append it to a queue, without waiting. One sender thread "
    "sends the queue to Kinesis. A record that finds the queue full is dropped and counted, or goes to the spool or "
    "the dead letters. A record that is not delivered in time goes to the spool, else it is lost and stderr says so."
)
_WAY, _END = (2, 210), (290, 228)


def draw(colours: Colours) -> str:
    """Return the SVG in these colours."""
    body = "".join(
        (
            markers(colours),
            box(_WAY, 2, "your threads", "format and append"),
            box(_WAY, 96, "queue", "64 MiB, ERROR first", css="core"),
            box(_WAY, 210, "sender", "a thread of its own", css="core"),
            box(_WAY, 324, "Kinesis", "its shards", css="outside"),
            way("M107 58V94") + way("M107 152V208") + way("M107 266V322"),
            box(_END, 86, "queue full", "dropped and counted,", "spooled or a dead letter", css="disk", height=76),
            box(
                _END,
                200,
                "not delivered in time",
                "with spool_path: spooled,",
                "else lost and counted",
                css="disk",
                height=76,
            ),
            box(_END, 324, "stderr and the stream", "say how many, and why"),
            way("M212 124H288", css="back") + way("M212 238H288", css="back"),
            way("M404 276V322", css="back"),
            text(250, 114, "overflow") + text(250, 228, "TTL"),
        )
    )
    return svg(_WIDTH, _HEIGHT, title=_TITLE, style=style(colours), body=body)
