"""gunicorn --preload loads the application once and forks. Each worker creates its own producer and sender.

    pip install 'kpl-integrations[fastapi,local]' gunicorn uvicorn-worker httpx2
    python examples/gunicorn_preload.py

It starts its own local Kinesis and gunicorn with two workers, and sends requests to them.
`KPL_ENDPOINT_URL=http://127.0.0.1:4567` (see `kpl local`) selects another Kinesis with a stream `orders`.
To run only the application:
`KPL_ENDPOINT_URL=... gunicorn --preload --worker-class uvicorn_worker.UvicornWorker gunicorn_preload:app`.
"""

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx2
from fastapi import FastAPI

from kpl_core import Config
from kpl_integrations.asgi import KinesisLifespan
from kpl_integrations.fastapi import ProducerDep
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from kpl_integrations.logging_handler import KinesisHandler

STREAM = "orders"
LOG = logging.getLogger("shop")


def application(config: Config) -> FastAPI:
    """Return the application. It opens no connection before the fork."""
    app = FastAPI(lifespan=KinesisLifespan(config))

    @app.post("/orders/{number}")
    async def order(number: int, producer: ProducerDep) -> int:
        _ = producer.put_nowait(STREAM, partition_key=str(number), data=b"%d" % number)
        LOG.warning("order %d", number)
        return os.getpid()

    return app


@contextmanager
def served(endpoint_url: str) -> Generator[str]:
    """Run gunicorn on a free port until the block ends; yield the application's URL."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
    command = [sys.executable, "-m", "gunicorn", "--preload", "--workers", "2", "--bind", address]
    command += ["--worker-class", "uvicorn_worker.UvicornWorker", "--no-control-socket", "--log-level", "error"]
    more = {"KPL_ENDPOINT_URL": endpoint_url}
    here = str(Path(__file__).parent)
    server = subprocess.Popen([*command, "gunicorn_preload:app"], cwd=here, env=os.environ | more)  # noqa: S603
    try:
        while server.poll() is None:
            try:
                httpx2.get(f"http://{address}/docs", trust_env=False)
                break
            except httpx2.TransportError:
                time.sleep(0.05)
        yield f"http://{address}"
    finally:
        server.terminate()
        server.wait(45)


def be_a_client(url: str) -> None:
    """Send a hundred orders and print how many processes answered."""
    answered_by = {httpx2.post(f"{url}/orders/{number}", trust_env=False, timeout=30).json() for number in range(100)}
    print("orders: 100, answered by", len(answered_by), "process(es)")


def main() -> None:
    """Run the example."""
    endpoint_url = os.environ.get("KPL_ENDPOINT_URL")
    if endpoint_url is not None:
        with served(endpoint_url) as url:
            be_a_client(url)
        return
    # The local Kinesis accepts any credentials, but a request must be signed. Use no proxy for this machine.
    local_only = {"AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ.update(local_only, NO_PROXY="127.0.0.1")
    with ThreadedLocalKinesis(LocalKinesis({STREAM: 4})) as local:
        with served(local.endpoint_url) as url:
            be_a_client(url)
        # Both workers have ended, and all their orders and log lines are stored.
        print("Kinesis records stored:", local.call(lambda fake, _: len(fake.records(STREAM))))


if __name__ == "__main__":
    main()
else:
    CONFIG = Config(endpoint_url=os.environ.get("KPL_ENDPOINT_URL"))
    LOG.addHandler(KinesisHandler(STREAM, config=CONFIG, close_timeout=20))
    # The master logs too. It sends its own log lines, once.
    LOG.warning("loaded")
    app = application(CONFIG)
