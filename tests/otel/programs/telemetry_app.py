"""An application that knows nothing of Kinesis; `opentelemetry-instrument` and the environment do."""

import logging

from fastapi import FastAPI
from opentelemetry import metrics, trace

app = FastAPI()
orders = metrics.get_meter("orders").create_counter("orders")
tracer = trace.get_tracer("orders")


@app.get("/orders/{number}")
def order(number: int) -> dict[str, int]:
    with tracer.start_as_current_span("price", attributes={"order": number}):
        logging.getLogger("orders").warning("order %d", number)
        orders.add(1)
    return {"order": number}
