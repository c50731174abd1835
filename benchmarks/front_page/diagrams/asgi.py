"""The parts of `kpl_integrations.asgi` around an application, from the server to Kinesis."""

from benchmarks.front_page.colours import Colours, svg
from benchmarks.front_page.shapes import LADDER_STEP, ladder, markers, style

__all__ = ["draw"]

_TITLE = (
    "The way of a request: the server, HealthEndpoints for /livez and /readyz, BackpressureMiddleware for a 503 when "
    "the buffer is full, RequestOutboxMiddleware if you want records published only with a status below 400, your "
    "routes with the producer in request.state.kinesis. KinesisLifespan opens the producer at the start of the "
    "application and drains it at the shutdown. The producer sends to Kinesis."
)
_STEPS = (
    ("server", "box", ("uvicorn, hypercorn, granian, gunicorn",)),
    ("health", "box", ("HealthEndpoints: /livez and /readyz,", "without a call to AWS")),
    ("backpressure", "box", ("BackpressureMiddleware: a full buffer", "is a 503 with Retry-After")),
    ("outbox", "box", ("RequestOutboxMiddleware, optional:", "publishes if the status is below 400")),
    ("routes", "box", ("yours: request.state.kinesis",)),
    ("producer", "core", ("KinesisLifespan opens it at the start", "and drains it at the shutdown")),
    ("Kinesis", "outside", ("all streams of one region and account",)),
)


def draw(colours: Colours) -> str:
    """Return the SVG in these colours."""
    height = LADDER_STEP * len(_STEPS) - 16
    return svg(520, height, title=_TITLE, style=style(colours), body=f"{markers(colours)}{ladder(_STEPS)}")
