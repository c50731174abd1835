"""The architecture: adapters in front of one shared core, and what the core talks to.

The picture is 520 units wide with text of 15 and 16 units, so that it can be read on a phone of 390 pixels.
"""

from benchmarks.front_page.colours import Colours, svg, text
from benchmarks.front_page.shapes import area, box, markers, style, way

__all__ = ["draw"]

_WIDTH, _HEIGHT = 520, 728
_TITLE = (
    "Architecture: adapters for FastAPI, logging, OpenTelemetry, the kpl command and an HTTP gateway put records into "
    "one shared core. The core queues fairly, aggregates, limits and sends to Kinesis, classifies each answer, "
    "retries, and returns one result for each record. Beside it: coordination, hooks, spool and dead letters, and a "
    "local Kinesis."
)
# Left edge and width of the columns: those of the adapters, and those of the core with what is beside it.
_FIRST, _SECOND, _THIRD = (14, 156), (182, 156), (350, 156)
_LEFT, _MIDDLE, _BESIDE = (30, 134), (182, 150), (362, 156)


def _adapters() -> str:
    return "".join(
        (
            box((14, 324), 8, "your Python program", height=40),
            box(_THIRD, 8, "any program", height=40),
            area((2, 516), 76, 182),
            text(188, 101, "kpl_integrations: adapters", "name start"),
            box(_FIRST, 114, "FastAPI, ASGI", "outbox, 503"),
            box(_FIRST, 186, "logging", "does not block"),
            box(_SECOND, 114, "OpenTelemetry", "three signals"),
            box(_SECOND, 186, "kpl command", "put, tail, dlq"),
            box(_THIRD, 114, "HTTP gateway", "tenants, quotas,", "JSON, OTLP,", "PutRecords", height=128),
            way("M92 48V74") + way("M260 48V74") + way("M428 48V74"),
            way("M176 48V290"),
            text(184, 280, "put()", "start"),
            way("M92 242V290") + way("M260 242V290"),
            way("M428 242V275H326V290"),
        )
    )


def _core() -> str:
    return "".join(
        (
            area((2, 344), 292, 348, css="core"),
            text(14, 317, "kpl_core: one shared core", "name start"),
            box(_LEFT, 332, "buffer", "backpressure"),
            box(_MIDDLE, 332, "fair queue", "for each tenant"),
            box(_MIDDLE, 412, "aggregator", "KPL format"),
            box(_MIDDLE, 492, "limiter", "for each shard"),
            box(_MIDDLE, 572, "sender", "PutRecords"),
            box(_LEFT, 572, "classifier", "one table"),
            box(_LEFT, 492, "retrier", "backoff"),
            box(_LEFT, 412, "one result", "for each record"),
            way("M164 360H180") + way("M257 388V410") + way("M257 468V490") + way("M257 548V570"),
            way("M182 600H166"),
            way("M30 600H16V440H28"),
            way("M97 572V550", css="back") + way("M164 520H180", css="back"),
        )
    )


def _outside() -> str:
    return "".join(
        (
            box(_BESIDE, 332, "hooks", "metrics, traces", css="outside"),
            box(_BESIDE, 472, "coordination", "one budget for", "many processes", css="outside", height=76),
            box(_FIRST, 668, "spool", "and dead letters", css="disk"),
            box(_MIDDLE, 668, "Kinesis", "its shards", css="outside"),
            box(_BESIDE, 668, "kpl local", "for your tests", css="outside"),
            way("M346 360H360"),
            way("M362 520H334"),
            way("M97 628V666", css="back", both=True),
            way("M257 628V666"),
            way("M332 600H440V666"),
        )
    )


def draw(colours: Colours) -> str:
    """Return the SVG in these colours."""
    body = f"{markers(colours)}{_adapters()}{_core()}{_outside()}"
    return svg(_WIDTH, _HEIGHT, title=_TITLE, style=style(colours), body=body)
