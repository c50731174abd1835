"""Prometheus metrics of a FastAPI service: a `/metrics` route, and a port for each of several gunicorn workers.

    pip install 'kpl-integrations[fastapi,prometheus,local]' gunicorn uvicorn-worker httpx2
    python examples/fastapi_metrics.py

It starts its own local Kinesis and gunicorn with two workers, sends requests and prints what a scrape of each worker
finds. `KPL_ENDPOINT_URL=http://127.0.0.1:4567` (see `kpl local`) selects another Kinesis with a stream `orders`.

One worker: scrape `/metrics`. Several workers: a scrape of `/metrics` reaches any of them, so let Prometheus scrape the
ports METRICS_PORT, METRICS_PORT + 1, ..., one for each worker.
"""

import errno
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
from fastapi import FastAPI, Response
from prometheus_client import start_http_server

from kpl_core import Config
from kpl_integrations.asgi import KinesisLifespan
from kpl_integrations.fastapi import ProducerDep
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from kpl_integrations.metrics.prometheus import PrometheusMetrics
from kpl_integrations.metrics.sources import producer_source

STREAM, WORKERS = "orders", 2


def own_port(first: int, registry: Any) -> Any:  # noqa: ANN401 - prometheus_client's
    """Serve the metrics of this worker on the first free port from `first` on; return the server."""
    for port in range(first, first + 64):
        try:
            return start_http_server(port, "127.0.0.1", registry)[0]
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    message = f"no port from {first} on is free"
    raise RuntimeError(message)


def application() -> FastAPI:
    """Return the application. Each worker has its own producer and metrics."""
    metrics = PrometheusMetrics(per_process=True)

    @asynccontextmanager
    async def own_lifespan(_: FastAPI) -> AsyncIterator[None]:
        # The producer is open here; start-up jobs can put too.
        metrics.watch(producer_source(kinesis.producer))
        first = os.environ.get("METRICS_PORT")
        server = own_port(int(first), metrics.registry) if first else None
        yield
        if server is not None:
            server.shutdown()
            server.server_close()

    config = Config.from_env(region="us-east-1", aws_access_key_id="local", aws_secret_access_key="local")  # noqa: S106
    kinesis = KinesisLifespan(config, hooks=[metrics], lifespan=own_lifespan)
    app = FastAPI(lifespan=kinesis)

    @app.post("/orders/{number}", status_code=202)
    async def order(number: int, producer: ProducerDep) -> None:
        _ = producer.put_nowait(STREAM, partition_key=str(number), data=b"%d" % number)

    @app.get("/metrics")
    async def scraped() -> Response:
        body, content_type = metrics.exposition()
        return Response(body, media_type=content_type)

    return app


def free_ports(count: int) -> int:
    """Return the first of so many successive free ports."""
    while True:
        # Systems take the ports of clients from 32,768 on, so that none of these is gone before it is used.
        first = random.randrange(20_000, 30_000)  # noqa: S311 - a port, not a secret
        others = [socket.socket() for _ in range(count)]
        try:
            for number, each in enumerate(others):
                each.bind(("127.0.0.1", first + number))
        except OSError:
            continue
        else:
            return first
        finally:
            for each in others:
                each.close()


def main(endpoint_url: str) -> None:
    """Run two workers, send 200 orders, and scrape each worker."""
    first = free_ports(WORKERS + 1)
    url, metrics_port = f"http://127.0.0.1:{first}", first + 1
    command = [sys.executable, "-m", "gunicorn", "--workers", str(WORKERS), "--bind", f"127.0.0.1:{first}"]
    command += ["--worker-class", "uvicorn_worker.UvicornWorker", "--no-control-socket", "--log-level", "error"]
    environment = os.environ | {"KPL_ENDPOINT_URL": endpoint_url, "METRICS_PORT": str(metrics_port)}
    here = str(Path(__file__).parent)
    with (
        subprocess.Popen([*command, "fastapi_metrics:application()"], cwd=here, env=environment) as server,  # noqa: S603
        httpx2.Client(trust_env=False) as client,
    ):
        try:
            counts = _put_and_scrape(client, url, metrics_port)
        finally:
            server.terminate()
    print(f"accepted by each worker: {sorted(counts)}; together {sum(counts)}")


def _put_and_scrape(client: httpx2.Client, url: str, metrics_port: int) -> list[int]:
    ends_at = time.monotonic() + 60
    while True:
        try:
            for number in range(WORKERS):
                client.get(f"http://127.0.0.1:{metrics_port + number}")
            break
        except httpx2.TransportError:
            if time.monotonic() > ends_at:
                raise
            time.sleep(0.1)
    for number in range(200):
        # A new connection reaches any worker.
        client.post(f"{url}/orders/{number}", headers={"connection": "close"}).raise_for_status()
    counts = []
    for number in range(WORKERS):
        text = client.get(f"http://127.0.0.1:{metrics_port + number}").text
        lines = [line for line in text.splitlines() if line.startswith("kinesis_producer_accepted_records_total ")]
        counts.append(int(sum(float(line.rpartition(" ")[2]) for line in lines)))
    return counts


if __name__ == "__main__":
    given = os.environ.get("KPL_ENDPOINT_URL")
    if given is not None:
        main(given)
    else:
        with ThreadedLocalKinesis(LocalKinesis({STREAM: 2})) as kinesis_here:
            main(kinesis_here.endpoint_url)
