"""Log `count` records of 210 bytes to an endpoint, and end as any program does; print what it took.

It prints `handlers_ended_at` when logging has shut down and the interpreter begins to finalize.

python log_and_exit.py <endpoint url> <count> <close timeout>
"""

import atexit
import logging
import resource
import sys
import time
from pathlib import Path


def say_end() -> None:
    sys.stdout.write(f" handlers_ended_at={time.time()}")
    sys.stdout.flush()


# The first registered runs last. logging registered its shutdown when it was imported, and the handler registers
# its own after that.
atexit.unregister(logging.shutdown)
atexit.register(say_end)
atexit.register(logging.shutdown)

from kpl_integrations.logging_handler import KinesisHandler  # noqa: E402


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    url, count, close_timeout = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    handler = KinesisHandler(
        "logs", region="us-east-1", endpoint_url=url, close_timeout=close_timeout, notice_seconds=0.5
    )
    logger = logging.getLogger("program")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    # The client's modules are the program's own size, not the size of what waits.
    logger.info("%09d %s", 0, "warm")
    while handler._sender is None or handler._sender.background.producer is None:  # noqa: SLF001 - nothing else says so
        time.sleep(0.01)
    handler.flush()
    before = highest = resident_bytes()
    started = time.perf_counter()
    text = "x" * 200
    for number in range(1, count):
        logger.info("%09d %s", number, text)
        if not number % 5_000:
            highest = max(highest, resident_bytes())
    took = time.perf_counter() - started
    highest = max(highest, resident_bytes())
    sys.stdout.write(f"growth_bytes={highest - before} emit_us={took / count * 1e6:.2f} ends_at={time.time()}")
    sys.stdout.flush()


main()
