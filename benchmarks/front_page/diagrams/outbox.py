"""The outbox of a request: when its records are published, discarded or refused."""

from benchmarks.front_page.colours import Colours, svg, text
from benchmarks.front_page.shapes import box, markers, style, way

__all__ = ["draw"]

_TITLE = (
    "The outbox of a request. A put in the request reserves space in the buffer and waits in the outbox; without "
    "space it raises BufferFull, and NotSpooled if the spool refuses it. When the response begins with a status below "
    "400, the records are published before it leaves, and the producer sends them to Kinesis. With 400 or above, or "
    "after an exception, they are discarded and counted."
)
_WAY, _END = (2, 210), (290, 228)


def draw(colours: Colours) -> str:
    """Return the SVG in these colours."""
    body = "".join(
        (
            markers(colours),
            box(_WAY, 2, "put", "in a request"),
            box(_WAY, 96, "outbox", "space is reserved", css="core"),
            box(_WAY, 210, "published", "as the response begins", css="core"),
            box(_WAY, 304, "Kinesis", "sent by the producer", css="outside"),
            way("M107 58V94") + way("M107 152V208") + way("M107 266V302"),
            box(_END, 2, "raised at the put", "BufferFull or NotSpooled", css="disk"),
            box(_END, 96, "discarded", "and counted, by status", css="disk"),
            way("M212 30H288", css="back") + way("M212 124H288", css="back"),
            text(250, 22, "no space") + text(250, 116, "\u2265 400"),
            text(120, 186, "status below 400", "start"),
        )
    )
    return svg(520, 362, title=_TITLE, style=style(colours), body=body)
