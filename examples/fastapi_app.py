"""A FastAPI application that puts orders: over HTTP with an outbox and backpressure, and over a WebSocket.

    pip install 'kpl-integrations[fastapi,local]' uvicorn websockets httpx2
    python examples/fastapi_app.py

It starts its own local Kinesis, serves the application for a moment, and sends requests to it.
`KPL_ENDPOINT_URL=http://127.0.0.1:4567` (see `kpl local`) selects another Kinesis with a stream `orders`.
In your project, put the application into its own module: `uvicorn orders.app:app --workers 2`.
"""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx2
import uvicorn
from fastapi import FastAPI, HTTPException, WebSocket
from websockets.asyncio.client import connect

from kpl_core import Config
from kpl_integrations.asgi import BackpressureMiddleware, RequestOutboxMiddleware
from kpl_integrations.fastapi import UNAVAILABLE_RESPONSES, KinesisRouter, ProducerDep
from kpl_integrations.local_kinesis import LocalKinesis

STREAM = "orders"


def application(config: Config) -> FastAPI:
    """Return the application. Its producer is created when the application starts, in the process that serves."""
    app = FastAPI()
    router = KinesisRouter(config, streams=[STREAM], startup="verify", close_seconds=10)
    # The lifespan, /livez and /readyz.
    app.include_router(router)
    # Records of a request are published if its response is below 500, and discarded otherwise.
    app.add_middleware(RequestOutboxMiddleware)
    # A full buffer becomes 503 with Retry-After. This middleware is the outermost, so it is added last.
    app.add_middleware(BackpressureMiddleware)

    @app.post("/orders/{number}", status_code=202, responses=UNAVAILABLE_RESPONSES)
    async def order(number: int, producer: ProducerDep) -> dict[str, int]:
        _ = producer.put_nowait(STREAM, partition_key=f"order-{number}", data=b'{"order": %d}' % number)
        if number == 13:  # noqa: PLR2004 - unlucky
            raise HTTPException(500, "the order could not be stored, so it must not be published")
        return {"order": number}

    @app.websocket("/orders")
    async def orders(socket: WebSocket, producer: ProducerDep) -> None:
        await socket.accept()
        async for text in socket.iter_text():
            result = await producer.put_nowait(STREAM, partition_key="socket", data=text.encode())
            await socket.send_json({"shard": result.shard_id})

    app.state.kinesis_lifespan = router.kinesis_lifespan
    return app


async def be_a_client(port: int) -> None:
    """Send ten orders over HTTP, one that fails, and one over a WebSocket."""
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        print("ready:", (await client.get("/readyz")).json()["status"])
        for number in [*range(10), 13]:
            answer = await client.post(f"/orders/{number}")
            print("order", number, answer.status_code)
    async with connect(f"ws://127.0.0.1:{port}/orders", proxy=None) as socket:
        await socket.send("from a socket")
        print("socket:", await socket.recv())


@asynccontextmanager
async def served(app: FastAPI) -> AsyncGenerator[int]:
    """Serve the application on a free port until the block ends."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", ws="websockets-sansio"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for this
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await serving


@asynccontextmanager
async def kinesis() -> AsyncGenerator[Config]:
    """Yield the options for the Kinesis of KPL_ENDPOINT_URL, or for a local one that runs until the block ends."""
    endpoint_url = os.environ.get("KPL_ENDPOINT_URL")
    if endpoint_url is not None:
        yield Config(endpoint_url=endpoint_url)
        return
    async with LocalKinesis({STREAM: 4}) as local:
        yield Config(
            region="us-east-1",
            endpoint_url=local.endpoint_url,
            # The local Kinesis accepts any credentials, but a request must be signed.
            aws_access_key_id="local",
            aws_secret_access_key="local",  # noqa: S106 - a dummy value
            # Use no proxy for this machine, even if HTTP_PROXY is set.
            botocore={"proxies": {}},
        )


async def main() -> None:
    """Run the example."""
    async with kinesis() as config:
        app = application(config)
        async with served(app) as port:
            await be_a_client(port)
        print("closed:", app.state.kinesis_lifespan.report)


if __name__ == "__main__":
    asyncio.run(main())
