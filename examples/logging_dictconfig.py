"""Log to Kinesis through `logging.config.dictConfig`, with strings and numbers only, no objects.

One handler uses its own JSON, another that of python-json-logger, and loguru logs through one of them too.

    pip install 'kpl-integrations[local]' python-json-logger loguru
    python examples/logging_dictconfig.py

It starts its own local Kinesis. `KPL_ENDPOINT_URL=http://127.0.0.1:4567` (see `kpl local`)
selects another one with a stream `orders`.
"""

import logging
import logging.config
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import loguru

from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from kpl_integrations.logging_handler import KinesisHandler

STREAM = "orders"


def configuration(endpoint_url: str) -> dict[str, Any]:
    """Return the configuration, which could also come from a YAML or TOML file."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "json": {
                "()": "pythonjsonlogger.json.JsonFormatter",
                "format": "%(asctime)s %(levelname)s %(name)s %(message)s",
            }
        },
        "handlers": {
            "kinesis": {
                "class": "kpl_integrations.logging_handler.KinesisHandler",
                "level": "INFO",
                "stream": STREAM,
                "region": "us-east-1",
                "endpoint_url": endpoint_url,
                "json_format": "ecs",
                "partition_key": "extra:customer",
                # DEBUG and INFO are dropped before an ERROR.
                "overflow": "drop_lowest_level",
                # The longest time in seconds to end the program if Kinesis does not answer.
                "close_timeout": 20.0,
            },
            # Any formatter works.
            "audit": {
                "class": "kpl_integrations.logging_handler.KinesisHandler",
                "formatter": "json",
                "stream": STREAM,
                "region": "us-east-1",
                "endpoint_url": endpoint_url,
                # Records that cannot be sent in time wait in this file and are sent later.
                "spool_path": "audit.spool",
                "overflow": "spool",
                "oversize": "dlq",
                "close_timeout": 20.0,
            },
        },
        "loggers": {"audit": {"level": "INFO", "handlers": ["audit"], "propagate": False}},
        "root": {"level": "INFO", "handlers": ["kinesis"]},
    }


@contextmanager
def kinesis() -> Generator[str]:
    """Yield the options for the Kinesis of KPL_ENDPOINT_URL, or for a local one that runs until the block ends."""
    endpoint_url = os.environ.get("KPL_ENDPOINT_URL")
    if endpoint_url is not None:
        yield endpoint_url
        return
    # The local Kinesis accepts any credentials, but a request must be signed. Use no proxy for this machine.
    os.environ.update(AWS_ACCESS_KEY_ID="local", AWS_SECRET_ACCESS_KEY="local", NO_PROXY="127.0.0.1")  # noqa: S106
    with ThreadedLocalKinesis(LocalKinesis({STREAM: 4})) as local:
        yield local.endpoint_url


def work() -> None:
    """Log as any program does. This code does not depend on Kinesis."""
    logger = logging.getLogger("shop")
    logging.getLogger("audit").info("shop opened", extra={"by": "example"})
    for number in range(1_000):
        logger.info("order %d placed", number, extra={"customer": f"c{number % 10}"})
    try:
        number // 0
    except ZeroDivisionError:
        logger.exception("one thing failed")


def the_handler(logger: str) -> KinesisHandler:
    """Return a logger's only handler."""
    (handler,) = logging.getLogger(logger).handlers
    assert isinstance(handler, KinesisHandler)  # noqa: S101 - configured above
    return handler


if __name__ == "__main__":
    with kinesis() as url:
        logging.config.dictConfig(configuration(url))
        work()
        # loguru accepts a handler as its sink. Bound values become fields of the line.
        loguru.logger.remove()
        loguru.logger.add(the_handler("root"), format="{message}")
        loguru.logger.bind(customer="c1").info("loguru says {}", "hello")
        for name in ("root", "audit"):
            # The end of a program flushes the handler. Close it here, because the local Kinesis ends with this program.
            the_handler(name).close()
            print(name, the_handler(name).counts())
