"""Log 1,001 lines in the children of a pool, which ends them by SIGTERM; print what handles the signal in a child.

python pooled_program.py <start method> <what the application sets>
"""

import logging
import multiprocessing
import os
import signal
import sys

import trio

from kpl_core import Config
from kpl_integrations.logging_handler import KinesisHandler

LINES = 1_000
CONFIG = Config(region="us-east-1", endpoint_url=os.environ["KPL_ENDPOINT_URL"], record_max_buffered_time_ms=25_000)
OPTIONS = {"False": False, "True": True}

# In each child too: one that is not forked imports this module.
logger = logging.Logger("pooled")  # noqa: LOG001 - no other handlers
logger.addHandler(KinesisHandler("records", config=CONFIG, flush_on_sigterm=OPTIONS.get(sys.argv[2])))


def log(number: int) -> None:
    """Log one line, inside of a trio event loop if the application has one."""
    if sys.argv[2] == "trio" and not number % 50:
        trio.run(log_in_trio, number)
    else:
        logger.warning("0/%d", number)


async def log_in_trio(number: int) -> None:
    """Log one line."""
    await trio.lowlevel.checkpoint()
    logger.warning("0/%d", number)


def set_own_handler() -> None:
    """Handle SIGTERM in a child as an application may."""
    if sys.argv[2] == "a handler":
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def handler_name(number: int) -> str:
    """Log one line, as this child may have had none, and return what handles the signal in it."""
    log(number)
    handler = signal.getsignal(signal.SIGTERM)
    return getattr(handler, "__name__", str(handler))


if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(2, set_own_handler) as pool:
        pool.map(log, range(LINES), chunksize=50)
        sys.stdout.write(pool.apply(handler_name, (LINES,)))
