"""An application under test; KPL_ENDPOINT_URL says where Kinesis is."""

import logging
import os

from fastapi import FastAPI, Response, WebSocket

from kpl_core import Config
from kpl_integrations.asgi import BackpressureMiddleware, HealthEndpoints, KinesisLifespan, RequestOutboxMiddleware
from kpl_integrations.fastapi import ProducerDep
from kpl_integrations.logging_handler import KinesisHandler

CONFIG = Config(region="us-east-1", endpoint_url=os.environ["KPL_ENDPOINT_URL"])
logging.basicConfig(level=logging.INFO, format="%(process)d %(message)s")
if "LOG_STREAM" in os.environ:
    # Made, and logged to, before gunicorn forks.
    logging.getLogger("orders").addHandler(KinesisHandler(os.environ["LOG_STREAM"], config=CONFIG))
    logging.getLogger("orders").warning("loaded by %d", os.getpid())

app = FastAPI(lifespan=KinesisLifespan(CONFIG, close_seconds=10))
if "OUTBOX" in os.environ:
    app.add_middleware(RequestOutboxMiddleware)
app.add_middleware(BackpressureMiddleware)
app.add_middleware(HealthEndpoints)


@app.post("/orders/{number}")
async def order(number: int, producer: ProducerDep, status: int = 202) -> Response:
    for part in range(10):
        _ = producer.put_nowait("orders", partition_key=f"order-{number}", data=b"%d-%d" % (number, part))
    logging.getLogger("orders").warning("order %d by %d", number, os.getpid())
    return Response(status_code=status)


@app.websocket("/orders")
async def orders(socket: WebSocket, producer: ProducerDep) -> None:
    await socket.accept()
    async for text in socket.iter_text():
        result = await producer.put_nowait("orders", partition_key="socket", data=text.encode())
        await socket.send_json({"successful": result.successful})
