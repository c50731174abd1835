"""Log with structlog to Kinesis: bound values become fields of the JSON in the stream.

    pip install 'kpl-integrations[local]' structlog
    python examples/structlog_app.py

It starts its own local Kinesis. `KPL_ENDPOINT_URL=http://127.0.0.1:4567` (see `kpl local`)
selects another one with a stream `orders`.
"""

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager

import structlog

from kpl_core import Config
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from kpl_integrations.logging_handler import KinesisHandler

STREAM = "orders"


def configure(handler: logging.Handler) -> None:
    """Pass structlog's events to logging, and logging's records to the handler."""
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.contextvars.merge_contextvars,
            # The event becomes the message, everything else `extra`.
            structlog.stdlib.render_to_log_kwargs,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
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
    with kinesis() as config:
        kinesis_handler = KinesisHandler(STREAM, config=config, partition_key="extra:customer", close_timeout=20)
        configure(kinesis_handler)
        log = structlog.get_logger("shop")
        for number in range(100):
            log.bind(customer=f"c{number % 10}").info("order placed", order=number)
        kinesis_handler.close()
        print(kinesis_handler.counts())
