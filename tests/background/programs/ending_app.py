"""An application whose server is ended by a signal. It puts through the senders that SENDERS names.

`app` is for ASGI servers, with a `KinesisLifespan` if LIFESPAN is 1, and `wsgi` for WSGI servers. POST /<number> puts
five records through each sender. Nothing leaves by itself within the test: records are batched for 25 seconds, and
the span processor waits for a minute.
"""

import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

from kpl_core import BlockingProducer, Config
from kpl_integrations.asgi import KinesisASGI, KinesisLifespan
from kpl_integrations.logging_handler import KinesisHandler

RECORDS = 5
CONFIG = Config(
    region="us-east-1",
    endpoint_url=os.environ["KPL_ENDPOINT_URL"],
    record_max_buffered_time_ms=float(os.environ.get("LINGER_MS", "25000")),
    record_ttl_ms=60_000,
)
FLUSH_ON_SIGTERM = os.environ.get("FLUSH_ON_SIGTERM") == "1"
Put = Callable[[str], object]


def _producer() -> Put:
    producer = BlockingProducer(CONFIG, flush_on_sigterm=FLUSH_ON_SIGTERM).__enter__()
    return lambda text: producer.put_nowait("producer", partition_key=text, data=text.encode())


def _handler() -> Put:
    logger = logging.Logger("ending")  # noqa: LOG001 - no other handlers
    logger.addHandler(KinesisHandler("handler", config=CONFIG, flush_on_sigterm=FLUSH_ON_SIGTERM))
    return logger.warning


def _exporter() -> Put:
    from kpl_integrations.otel import kinesis_telemetry  # noqa: PLC0415 - slow to import

    telemetry = kinesis_telemetry("exporter", config=CONFIG, flush_on_sigterm=FLUSH_ON_SIGTERM)
    tracer = telemetry.tracer_provider.get_tracer("ending")
    return lambda text: tracer.start_span(text).end()


SENDERS: dict[str, Callable[[], Put]] = {"producer": _producer, "handler": _handler, "exporter": _exporter}
puts = [SENDERS[name]() for name in os.environ["SENDERS"].split(",")]


def put(number: str) -> None:
    """Put five records through each sender."""
    for part in range(RECORDS):
        for each in puts:
            each(f"{number}-{part}")


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answer an ASGI request, after it was put."""
    if scope["type"] != "http":
        message = "no lifespans"
        raise RuntimeError(message)
    if scope["method"] == "POST":
        put(scope["path"][1:])
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def wsgi(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
    """Answer a WSGI request, after it was put."""
    if environ["REQUEST_METHOD"] == "POST":
        put(environ["PATH_INFO"][1:])
    start_response("200 OK", [("Content-Length", "0")])
    return []


if os.environ.get("LIFESPAN") == "1":
    app = KinesisASGI(app, KinesisLifespan(CONFIG))
