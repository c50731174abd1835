"""An application that configures no logging, unless LOG_LEVEL is set; KPL_ENDPOINT_URL says where Kinesis is.

Each worker that starts makes a file. GET /open is answered after a minute. POST /<anything> puts ten records: with
PUTS=lifespan through the producer of a `KinesisLifespan`, with PUTS=blocking through the process' `BlockingProducer`.
`wsgi` is the second for WSGI servers.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kpl_core import BlockingProducer, Config, SpoolOptions
from kpl_integrations.asgi import KinesisASGI, KinesisLifespan, producer_of

RECORDS = 10
SPOOL = SpoolOptions(path=os.environ["SPOOL"]) if "SPOOL" in os.environ else None
CONFIG = Config(region="us-east-1", endpoint_url=os.environ["KPL_ENDPOINT_URL"], spool=SPOOL)
CLOSE_SECONDS = float(os.environ.get("CLOSE_SECONDS", "1"))

if "LOG_LEVEL" in os.environ:
    logging.basicConfig(level=os.environ["LOG_LEVEL"], format="%(message)s")


def put(put_nowait: Callable[..., object]) -> None:
    """Put the records of a request."""
    for part in range(RECORDS):
        _ = put_nowait("orders", partition_key=str(part), data=b"an order")


def is_lifespan_wanted() -> bool:
    """Return True if the records go through the lifespan's producer."""
    return os.environ["PUTS"] == "lifespan"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answer an ASGI request, after its records were put."""
    if scope["type"] != "http":
        Path(f"started-{os.getpid()}").touch()  # noqa: ASYNC240 - at once
        message = "no lifespans"
        raise RuntimeError(message)
    if scope["path"] == "/open":
        await asyncio.sleep(60)
    if scope["method"] == "POST":
        producer = producer_of(scope) if is_lifespan_wanted() else BlockingProducer.shared(CONFIG)
        put(producer.put_nowait)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def wsgi(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
    """Answer a WSGI request, after its records were put."""
    if environ["REQUEST_METHOD"] == "POST":
        put(BlockingProducer.shared(CONFIG).put_nowait)
    start_response("200 OK", [("Content-Length", "0")])
    return []


if is_lifespan_wanted():
    app = KinesisASGI(app, KinesisLifespan(CONFIG, close_seconds=CLOSE_SECONDS))
