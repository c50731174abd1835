"""A Starlette application with its own lifespan, wrapped by the producer's.

    pip install 'kpl-integrations[fastapi,local]' httpx2
    python examples/starlette_app.py

It starts its own local Kinesis and calls the application without a server.
`KPL_ENDPOINT_URL=http://127.0.0.1:4567` (see `kpl local`) selects another Kinesis with a stream `orders`.
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
    """Open the application's other resources. The producer opens before them and closes after them."""
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
    """Yield the options for the Kinesis of KPL_ENDPOINT_URL, or for a local one that runs until the block ends."""
    endpoint_url = os.environ.get("KPL_ENDPOINT_URL")
    if endpoint_url is not None:
        yield Config(endpoint_url=endpoint_url)
        return
    with ThreadedLocalKinesis(LocalKinesis({STREAM: 4})) as local:
        yield Config(
            region="us-east-1",
            endpoint_url=local.endpoint_url,
            # The local Kinesis accepts any credentials, but a request must be signed.
            aws_access_key_id="local",
            aws_secret_access_key="local",  # noqa: S106 - a dummy value
            # Use no proxy for this machine, even if HTTP_PROXY is set.
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
