"""python -m benchmarks.ingest_server APP ENDPOINT_URL [--cpu N]: run one server for `benchmarks.ingest`.

`gateway` is `kpl serve` without a limit on the shards' rate, because only the gateway is measured.
`protocol` is the least a server can do: an `asyncio.Protocol` that reads requests by httptools and answers a constant.
`putting` decodes and puts the record of each request besides, and checks nothing.
`bare` is a minimal ASGI application: it reads the request and answers 202. `fastapi` is a route as in the
framework's documentation, with pydantic models, into the same producer. `mounted` is the gateway in a FastAPI
application, on plain uvicorn, without the fast path. All on uvicorn with one worker, uvloop and httptools. Prints its
port, serves until its standard input closes.
"""

# ruff: noqa: PLC0415 - each process imports only its own server

import argparse
import asyncio
import dataclasses
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import anyio
import httptools
import msgspec
import uvicorn

from benchmarks.machine import pin_to
from benchmarks.workload import STREAM_NAME
from kpl_core import Config, Producer
from kpl_integrations.ingest import IngestGateway, load_settings
from kpl_integrations.ingest.admission.tenant_account import TenantFairness
from kpl_integrations.ingest.serving import GatewayServer, bound_socket
from kpl_integrations.ingest.tenants import OpenTenants, Tenant

APPS: Final = ("gateway", "protocol", "putting", "bare", "fastapi", "mounted")
_ANSWER: Final = b'{"ack":"queued","accepted":1}'
_CONSTANT: Final = (
    b"HTTP/1.1 202 Accepted\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_ANSWER) + _ANSWER
)
_UNLIMITED: Final[dict[str, Any]] = {
    "rate_limit_records_per_sec_per_shard": 1e12,
    "rate_limit_bytes_per_sec_per_shard": 1e15,
    "max_outstanding_records": 1_000_000,
    "max_outstanding_bytes": 1 << 30,
}


def _config(endpoint_url: str) -> Config:
    credentials: dict[str, Any] = {"aws_access_key_id": "x", "aws_secret_access_key": "x"}
    return Config(region="us-east-1", endpoint_url=endpoint_url, **credentials, **_UNLIMITED)


def gateway(endpoint_url: str) -> IngestGateway:
    directory = OpenTenants(Tenant(id="local"))
    settings = load_settings(region="us-east-1", endpoint_url=endpoint_url)
    config = dataclasses.replace(settings.producer_config(TenantFairness(directory)), **_UNLIMITED)
    config = dataclasses.replace(config, aws_access_key_id="x", aws_secret_access_key="x")  # noqa: S106 - the sink's
    return IngestGateway(settings, directory, config=config)


class _Record(msgspec.Struct):
    partition_key: str
    data: str


_RECORD: Final = msgspec.json.Decoder(_Record)


class BareProtocol(asyncio.Protocol):
    """Answers each request when it is complete, with a constant."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to read requests."""
        self._transport: Any = transport
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""

    def data_received(self, data: bytes) -> None:
        """Read a part of a request."""
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        """Read a part of a body."""
        self._body = self._body + body if self._body else body

    def on_message_complete(self) -> None:
        """Answer."""
        self._body = b""
        self._transport.write(_CONSTANT)


class PuttingProtocol(BareProtocol):
    """Puts the record of each request too, and checks nothing: what every gateway in Python has to do."""

    producer: Producer

    def on_message_complete(self) -> None:
        """Put and answer."""
        record = _RECORD.decode(self._body)
        _ = self.producer.put_nowait(STREAM_NAME, partition_key=record.partition_key, data=record.data.encode())
        super().on_message_complete()


async def bare(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401, ARG001 - ASGI
    while (await receive()).get("more_body", False):
        pass
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(_ANSWER)).encode())]
    await send({"type": "http.response.start", "status": 202, "headers": headers})
    await send({"type": "http.response.body", "body": _ANSWER})


def fastapi_app(endpoint_url: str) -> Any:  # noqa: ANN401 - FastAPI's own
    from fastapi import FastAPI
    from pydantic import BaseModel

    from kpl_integrations.asgi import KinesisLifespan
    from kpl_integrations.fastapi import ProducerDep

    class Record(BaseModel):
        partition_key: str
        data: str

    class Records(BaseModel):
        records: list[Record]

    app = FastAPI(lifespan=KinesisLifespan(_config(endpoint_url)))

    @app.post("/v1/streams/{stream}/records", status_code=202)
    async def put(stream: str, body: Record | Records, producer: ProducerDep) -> dict[str, Any]:
        records = body.records if isinstance(body, Records) else [body]
        for record in records:
            _ = await producer.put(stream, partition_key=record.partition_key, data=record.data.encode())
        return {"ack": "queued", "accepted": len(records)}

    return app


def mounted(endpoint_url: str) -> Any:  # noqa: ANN401 - FastAPI's own
    from fastapi import FastAPI

    served = gateway(endpoint_url)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with served:
            yield

    app = FastAPI(lifespan=lifespan)
    app.mount("/", served)
    return app


async def _serve(app: str, endpoint_url: str) -> None:
    parent_gone = anyio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), parent_gone.set)
    with bound_socket("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        async with anyio.create_task_group() as tasks:
            if app == "gateway":
                server = GatewayServer(gateway(endpoint_url), listening)
                tasks.start_soon(partial(server.run, started=lambda: print(port, flush=True)))
                await parent_gone.wait()
                server.stop(signal.SIGINT)
            elif app == "protocol":
                await _serve_protocol(BareProtocol, listening, parent_gone)
            elif app == "putting":
                async with Producer(_config(endpoint_url)) as PuttingProtocol.producer:
                    await _serve_protocol(PuttingProtocol, listening, parent_gone)
            else:
                plain = _plain_server(app, endpoint_url)
                tasks.start_soon(plain.serve, [listening])
                while not plain.started:  # noqa: ASYNC110 - uvicorn has no event for this
                    await anyio.sleep(0.01)
                print(port, flush=True)
                await parent_gone.wait()
                plain.should_exit = True


async def _serve_protocol(protocol: type[BareProtocol], listening: socket.socket, parent_gone: anyio.Event) -> None:
    async with await asyncio.get_running_loop().create_server(protocol, sock=listening):
        print(listening.getsockname()[1], flush=True)
        await parent_gone.wait()


def _plain_server(app: str, endpoint_url: str) -> uvicorn.Server:
    served: Any = bare if app == "bare" else {"fastapi": fastapi_app, "mounted": mounted}[app](endpoint_url)
    lifespan: Any = "off" if app == "bare" else "on"
    return uvicorn.Server(uvicorn.Config(served, log_config=None, access_log=False, lifespan=lifespan, ws="none"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("app", choices=APPS)
    parser.add_argument("endpoint_url")
    parser.add_argument("--cpu", type=int, default=None)
    arguments = parser.parse_args()
    pin_to(arguments.cpu)
    anyio.run(_serve, arguments.app, arguments.endpoint_url, backend_options={"use_uvloop": True})


if __name__ == "__main__":
    main()
