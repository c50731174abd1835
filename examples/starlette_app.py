"""A Starlette application with a lifespan of its own, which the producer's wraps.

    pip install 'kpl-integrations[fastapi,local]' httpx2
    python examples/starlette_app.py

It starts a Kinesis of its own on this machine and speaks to itself without a server.
`KPL_ENDPOINT_URL=http://127.0.0.1:4567` (see `kpl local`) names another Kinesis, which has a stream `orders`.
"""

import os
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from kpl_core import Config
from kpl_integrations.asgi import BackpressureMiddleware, HealthEndpoints, KinesisLifespan, producer_of
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis

STREAM = "orders"


@asynccontextmanager
async def own_lifespan(app: Starlette) -> AsyncGenerator[dict[str, str]]:  # noqa: ARG001 - as Starlette calls it
    """Open what else the application needs; the producer is open before and closes after it."""
    yield {"greeting": "hello"}


async def order(request: Request) -> JSONResponse:
    """Put one order, and wait until Kinesis has it."""
    producer = producer_of(request.scope)
    result = await producer.put_nowait(STREAM, partition_key=request.path_params["number"], data=await request.body())
    return JSONResponse({"greeting": request.state.greeting, "stored": result.successful})


def application(lifespan: KinesisLifespan) -> Starlette:
    """Return the application."""
    return Starlette(
        routes=[Route("/orders/{number}", order, methods=["POST"])],
        middleware=[Middleware(HealthEndpoints), Middleware(BackpressureMiddleware)],
        lifespan=lifespan,
    )


@contextmanager
def kinesis() -> Generator[Config]:
    """Say where Kinesis is: where KPL_ENDPOINT_URL points to, or here, as long as the block lasts."""
    endpoint_url = os.environ.get("KPL_ENDPOINT_URL")
    if endpoint_url is not None:
        yield Config(endpoint_url=endpoint_url)
        return
    with ThreadedLocalKinesis(LocalKinesis({STREAM: 4})) as local:
        yield Config(
            region="us-east-1",
            endpoint_url=local.endpoint_url,
            # The local Kinesis takes any; a request must be signed with some.
            aws_access_key_id="local",
            aws_secret_access_key="local",  # noqa: S106 - opens nothing
            # No proxy on the way to this machine, whatever HTTP_PROXY says.
            botocore={"proxies": {}},
        )


if __name__ == "__main__":
    with kinesis() as local_or_named:
        kinesis_lifespan = KinesisLifespan(local_or_named, lifespan=own_lifespan)
        with TestClient(application(kinesis_lifespan)) as client:
            for number in range(5):
                print(client.post(f"/orders/{number}", content=b"{}").json())
            print(client.get("/readyz").json())
        print("closed:", kinesis_lifespan.report)
