"""Log in a parent and in children made by every means; KPL_ENDPOINT_URL says where Kinesis is, SPOOL where a file.

python log_in_children.py fork | spawn | os.fork
"""

import logging
import multiprocessing
import os
import sys
import warnings

from kpl_integrations.logging_handler import KinesisHandler

# Python 3.12 and later warn of a fork beside the sender's thread, which this program tests.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)

LINES = 200
CHILDREN = 3


def configure() -> logging.Logger:
    logger = logging.getLogger("program")
    if not logger.handlers:
        handler = KinesisHandler(
            "logs",
            region="us-east-1",
            endpoint_url=os.environ["KPL_ENDPOINT_URL"],
            close_timeout=20,
            spool_path=os.environ.get("SPOOL"),
        )
        logger.addHandler(handler)
    return logger


def log_lines(who: str) -> None:
    logger = configure()
    for number in range(LINES):
        logger.warning("%s %d", who, number)


def main() -> None:
    means = sys.argv[1]
    # The sender is at work, or still starting, when the children come.
    log_lines("parent")
    if means == "os.fork":
        children = []
        for index in range(CHILDREN):
            child = os.fork()
            if not child:
                log_lines(f"child-{index}")
                return
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
    else:
        multiprocessing.set_start_method(means)
        processes = [multiprocessing.Process(target=log_lines, args=(f"child-{index}",)) for index in range(CHILDREN)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    log_lines("parent-again")


if __name__ == "__main__":
    main()
