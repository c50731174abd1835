"""The producer as a FastAPI dependency and router; the rest is `kpl_integrations.asgi`.

app = FastAPI(lifespan=KinesisLifespan(config))

@app.post("/orders")
async def order(producer: ProducerDep) -> None:
    producer.put_nowait("orders", partition_key="42", data=b"...")
"""

from typing import Annotated, Any, Final, Unpack

import msgspec
from fastapi import APIRouter, Depends, Response
from starlette.requests import HTTPConnection

from kpl_core import Config, Producer
from kpl_integrations.asgi.connection_state import producer_of
from kpl_integrations.asgi.health import health_of, readiness_body
from kpl_integrations.asgi.lifespan import KinesisLifespan, LifespanOptions

__all__ = ["UNAVAILABLE_RESPONSES", "KinesisRouter", "ProducerDep", "get_producer"]

# For `responses=` of routes behind BackpressureMiddleware, so that OpenAPI tells of the 503.
UNAVAILABLE_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    503: {
        "description": "Backpressure: no room for the records; come again after Retry-After seconds",
        "headers": {"Retry-After": {"schema": {"type": "integer"}}},
        "content": {
            "application/problem+json": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "type": {"type": "string"},
                        "title": {"type": "string"},
                        "status": {"type": "integer"},
                        "detail": {"type": "string"},
                        "code": {"type": "string", "enum": ["buffer-full", "shutting-down"]},
                    },
                }
            }
        },
    }
}


async def get_producer(connection: HTTPConnection) -> Producer:
    """Return the application's producer, in HTTP and WebSocket routes alike.

    A coroutine, because FastAPI calls any other dependency in a thread: 0.1 ms a request, and a wait for one of 40.
    Behind `RequestOutboxMiddleware` it is the request's outbox, which takes the same puts.

    Raises:
        MissingProducer: no lifespan opened one; the message says why and what to do.
    """
    return producer_of(connection.scope)


ProducerDep = Annotated[Producer, Depends(get_producer)]


class KinesisRouter(APIRouter):
    """A router whose lifespan opens the producer, and that answers `/livez` and `/readyz`.

    `app.include_router(KinesisRouter(config))`; FastAPI merges its state with the application's own.
    `options` are `KinesisLifespan`'s, which is `kinesis_lifespan` here.
    """

    def __init__(
        self, config: Config | None = None, *, has_health_routes: bool = True, **options: Unpack[LifespanOptions]
    ) -> None:
        self.kinesis_lifespan = KinesisLifespan(config, **options)
        super().__init__(lifespan=self.kinesis_lifespan)
        if has_health_routes:
            self.add_api_route("/livez", _livez, tags=["health"])
            self.add_api_route("/readyz", _readyz, tags=["health"], responses={503: {"description": "Not ready"}})


async def _livez() -> dict[str, str]:
    """Say that the loop turns."""
    return {"status": "alive"}


async def _readyz(connection: HTTPConnection) -> Response:
    """Say whether records are taken, and whether there is room; asks nobody outside."""
    status, body = readiness_body(health_of(connection.scope).readiness())
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")
