"""The producer as a FastAPI dependency and router; everything else is in `kpl_integrations.asgi`.

app = FastAPI(lifespan=KinesisLifespan(config))

@app.post("/orders")
async def order(producer: ProducerDep) -> None:
    producer.put_nowait("orders", partition_key="42", data=b"...")
"""

from typing import Annotated, Any, Final, TypeVar, Unpack

import msgspec
from fastapi import APIRouter, Depends, Response
from starlette.requests import HTTPConnection

from kpl_core import Config, Producer, Topic, TopicProducer
from kpl_integrations.asgi.health import health_of, readiness_body
from kpl_integrations.asgi.lifespan import KinesisLifespan, LifespanOptions
from kpl_integrations.asgi.protocol import producer_of

T = TypeVar("T")

# For `responses=` of routes behind BackpressureMiddleware, so that OpenAPI documents the 503.
UNAVAILABLE_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    503: {
        "description": "Backpressure: no record can be accepted now; retry after Retry-After seconds",
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
                        "code": {"type": "string", "enum": ["buffer-full", "not-spooled", "shutting-down"]},
                    },
                }
            }
        },
    }
}


async def get_producer(connection: HTTPConnection) -> Producer:
    """Return the application's producer, in HTTP and WebSocket routes alike.

    A coroutine, because FastAPI calls a plain function in one of 40 threads, which costs 0.1 ms and may wait. Behind
    `RequestOutboxMiddleware` it returns the request's outbox, which has the same put methods.

    Raises:
        MissingProducer: the application has no producer; the message explains the cause.
    """
    return producer_of(connection.scope)


ProducerDep = Annotated[Producer, Depends(get_producer)]


def topic_dependency(topic: Topic[T]) -> Any:  # noqa: ANN401 - what `Depends` returns
    """Return the dependency that binds a topic to the request's producer or outbox.

    `Orders = Annotated[TopicProducer[Order], topic_dependency(orders)]`
    """

    async def bound(producer: ProducerDep) -> TopicProducer[T]:
        return topic.bind(producer)

    return Depends(bound)


class KinesisRouter(APIRouter):
    """A router that opens the producer in its lifespan and answers `/livez` and `/readyz`.

    `app.include_router(KinesisRouter(config))`; FastAPI merges its state into the application's. `options` are those
    of `KinesisLifespan`; the lifespan is the attribute `kinesis_lifespan`.
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
    """Return 200 while the event loop runs."""
    return {"status": "alive"}


async def _readyz(connection: HTTPConnection) -> Response:
    """Return 200 if the producer accepts records, 503 otherwise; makes no call to AWS."""
    status, body = readiness_body(health_of(connection.scope).readiness())
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")
