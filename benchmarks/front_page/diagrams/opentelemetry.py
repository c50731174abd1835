"""The way of telemetry from the SDK through an exporter to Kinesis, and what happens to data that cannot arrive."""

from benchmarks.front_page.colours import Colours, svg, text
from benchmarks.front_page.shapes import box, markers, style, way

__all__ = ["draw"]

_TITLE = (
    "The way of telemetry. The SDK collects spans, log records and metrics in batches. An exporter for each signal "
    "encodes a batch as OTLP and puts it into a buffer of 16 MiB. One sender thread sends to Kinesis and retries. Data "
    "that find no space in time or are too large are lost and counted. Data that are not delivered in time go to the "
    "spool, else they are lost and counted. One line on stderr and the counts of the exporter report each loss."
)
_WAY, _END = (2, 220), (300, 218)


def draw(colours: Colours) -> str:
    """Return the SVG in these colours."""
    body = "".join(
        (
            markers(colours),
            box(_WAY, 2, "OpenTelemetry SDK", "spans, logs, metrics"),
            box(_WAY, 96, "exporter of a signal", "OTLP, buffer of 16 MiB", css="core"),
            box(_WAY, 210, "sender", "one thread for all signals", css="core"),
            box(_WAY, 324, "Kinesis", "a stream for each signal", css="outside"),
            way("M112 58V94") + way("M112 152V208") + way("M112 266V322"),
            box(_END, 96, "no space, or too large", "lost and counted", css="disk"),
            box(
                _END,
                200,
                "not delivered in time",
                "with a spool: spooled,",
                "else lost and counted",
                css="disk",
                height=76,
            ),
            box(_END, 324, "stderr and counts()", "how much, and why"),
            way("M222 124H298", css="back") + way("M222 238H298", css="back"),
            way("M409 276V322", css="back"),
            text(260, 228, "TTL"),
        )
    )
    return svg(520, 382, title=_TITLE, style=style(colours), body=body)
