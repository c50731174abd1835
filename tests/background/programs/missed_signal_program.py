"""Log a line in a child whose main thread then waits for a semaphore; another thread receives SIGTERM for it.

python missed_signal_program.py <start method> <what the application runs>

Python runs a handler in the main thread only, and a signal that another thread receives interrupts no system call of
it: as one that comes just before the call. It prints the child's exit status.
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing.synchronize import Semaphore
from typing import Any

import trio

from kpl_core import Config
from kpl_integrations.logging_handler import KinesisHandler

CONFIG = Config(region="us-east-1", endpoint_url=os.environ["KPL_ENDPOINT_URL"], record_max_buffered_time_ms=25_000)
# How long the main thread waits at most, in seconds: long after the bound of a flush.
PATIENCE = 25

logger = logging.Logger("missed")  # noqa: LOG001 - no other handlers
logger.addHandler(KinesisHandler("records", config=CONFIG))


def log_and_wait(semaphore: Semaphore, application: str) -> None:
    """Log one line, inside of a trio event loop if the application has one, and wait."""
    if application == "trio":
        trio.run(log_in_trio)
    else:
        logger.warning("0/0")
    threading.Thread(target=receive_signal, daemon=True).start()
    semaphore.acquire(timeout=PATIENCE)


async def log_in_trio() -> None:
    """Log one line."""
    await trio.lowlevel.checkpoint()
    logger.warning("0/0")


def receive_signal() -> None:
    """Receive SIGTERM in this thread once the main thread waits."""
    time.sleep(0.5)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)


if __name__ == "__main__":
    context: Any = multiprocessing.get_context(sys.argv[1])
    free = context.Semaphore(0)
    child = context.Process(target=log_and_wait, args=(free, sys.argv[2]))
    child.start()
    child.join()
    sys.stdout.write(str(child.exitcode))
