"""Log to Kinesis through `logging.config.dictConfig`: plain words only, no object made by hand.

Beside the handler's own JSON, one handler has python-json-logger's, and loguru logs through one of them, too.

    pip install 'kpl-integrations[logging,local]' python-json-logger loguru
    python examples/logging_dictconfig.py

It starts a Kinesis of its own on this machine. `KPL_ENDPOINT_URL=http://127.0.0.1:4567` (see `kpl local`)
names another one, which has a stream `orders`.
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
    """Return what could as well stand in a YAML or TOML file."""
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
                # DEBUG and INFO go before an ERROR does.
                "overflow": "drop_lowest_level",
                # Seconds that the end of the program may take, if Kinesis does not answer.
                "close_timeout": 20.0,
            },
            # Any formatter will do.
            "audit": {
                "class": "kpl_integrations.logging_handler.KinesisHandler",
                "formatter": "json",
                "stream": STREAM,
                "region": "us-east-1",
                "endpoint_url": endpoint_url,
                # What cannot be sent in time waits in this file, and is sent later.
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
    """Say where Kinesis is: where KPL_ENDPOINT_URL points to, or here, as long as the block lasts."""
    endpoint_url = os.environ.get("KPL_ENDPOINT_URL")
    if endpoint_url is not None:
        yield endpoint_url
        return
    # The local Kinesis takes any; a request must be signed with some. And no proxy on the way to this machine.
    os.environ.update(AWS_ACCESS_KEY_ID="local", AWS_SECRET_ACCESS_KEY="local", NO_PROXY="127.0.0.1")  # noqa: S106
    with ThreadedLocalKinesis(LocalKinesis({STREAM: 4})) as local:
        yield local.endpoint_url


def work() -> None:
    """Log as any program does; nothing here knows of Kinesis."""
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
    assert isinstance(handler, KinesisHandler)  # noqa: S101 - it is one of those configured above
    return handler


if __name__ == "__main__":
    with kinesis() as url:
        logging.config.dictConfig(configuration(url))
        work()
        # loguru takes a handler as its sink; what was bound is in the record, as `extra`.
        loguru.logger.remove()
        loguru.logger.add(the_handler("root"), format="{message}")
        loguru.logger.bind(customer="c1").info("loguru says {}", "hello")
        for name in ("root", "audit"):
            # A program that just ends is flushed by itself; this one takes its Kinesis with it.
            the_handler(name).close()
            print(name, the_handler(name).counts())
