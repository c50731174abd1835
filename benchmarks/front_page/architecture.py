"""The architecture: adapters in front of one shared core, and what the core talks to.

The picture is 520 units wide with text of 15 and 16 units, so that it can be read on a phone of 390 pixels.
"""

from benchmarks.front_page.colours import SANS, Colours, svg, text

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


def _style(colours: Colours) -> str:
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


def _box(column: tuple[int, int], y: int, name: str, *lines: str, css: str = "box", height: int = 56) -> str:
    x, width = column
    first = y + (height - 19 * len(lines)) / 2 + 6
    return (
        f'<rect class="{css}" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>\n'
        + text(x + width / 2, first, name, "name")
        + "".join(text(x + width / 2, first + 19 * number, line) for number, line in enumerate(lines, 1))
    )


def _way(path: str, *, css: str = "way", both: bool = False) -> str:
    start = f' marker-start="url(#{css})"' if both else ""
    return f'<path class="{css}" marker-end="url(#{css})"{start} d="{path}"/>\n'


def _adapters() -> str:
    return "".join(
        (
            _box((14, 324), 8, "your Python program", height=40),
            _box(_THIRD, 8, "any program", height=40),
            '<rect class="area" x="2" y="76" width="516" height="182" rx="10"/>\n',
            text(188, 101, "kpl_integrations: adapters", "name start"),
            _box(_FIRST, 114, "FastAPI, ASGI", "outbox, 503"),
            _box(_FIRST, 186, "logging", "does not block"),
            _box(_SECOND, 114, "OpenTelemetry", "three signals"),
            _box(_SECOND, 186, "kpl command", "put, tail, dlq"),
            _box(_THIRD, 114, "HTTP gateway", "tenants, quotas,", "JSON, OTLP,", "PutRecords", height=128),
            _way("M92 48V74") + _way("M260 48V74") + _way("M428 48V74"),
            _way("M176 48V290"),
            text(184, 280, "put()", "start"),
            _way("M92 242V290") + _way("M260 242V290"),
            _way("M428 242V275H326V290"),
        )
    )


def _core() -> str:
    return "".join(
        (
            '<rect class="core" x="2" y="292" width="344" height="348" rx="10"/>\n',
            text(14, 317, "kpl_core: one shared core", "name start"),
            _box(_LEFT, 332, "buffer", "backpressure"),
            _box(_MIDDLE, 332, "fair queue", "for each tenant"),
            _box(_MIDDLE, 412, "aggregator", "KPL format"),
            _box(_MIDDLE, 492, "limiter", "for each shard"),
            _box(_MIDDLE, 572, "sender", "PutRecords"),
            _box(_LEFT, 572, "classifier", "one table"),
            _box(_LEFT, 492, "retrier", "backoff"),
            _box(_LEFT, 412, "one result", "for each record"),
            _way("M164 360H180") + _way("M257 388V410") + _way("M257 468V490") + _way("M257 548V570"),
            _way("M182 600H166"),
            _way("M30 600H16V440H28"),
            _way("M97 572V550", css="back") + _way("M164 520H180", css="back"),
        )
    )


def _outside() -> str:
    return "".join(
        (
            _box(_BESIDE, 332, "hooks", "metrics, traces", css="outside"),
            _box(_BESIDE, 472, "coordination", "one budget for", "many processes", css="outside", height=76),
            _box(_FIRST, 668, "spool", "and dead letters", css="disk"),
            _box(_MIDDLE, 668, "Kinesis", "its shards", css="outside"),
            _box(_BESIDE, 668, "kpl local", "for your tests", css="outside"),
            _way("M346 360H360"),
            _way("M362 520H334"),
            _way("M97 628V666", css="back", both=True),
            _way("M257 628V666"),
            _way("M332 600H440V666"),
        )
    )


def draw(colours: Colours) -> str:
    """Return the SVG in these colours."""
    markers = _marker("way", colours.brand) + _marker("back", colours.disk)
    body = f"<defs>\n{markers}</defs>\n{_adapters()}{_core()}{_outside()}"
    return svg(_WIDTH, _HEIGHT, title=_TITLE, style=_style(colours), body=body)
