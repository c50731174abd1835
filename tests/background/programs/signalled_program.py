"""Start processes that put without a pause, end each by SIGTERM at a random instant, and print what became of each.

python signalled_program.py <sender> <start> <signals>

`sender` is "producer", "handler" or "block". `start` is "alone" for a process with `flush_on_sigterm=True`, else the
start method of a child of multiprocessing with the default. Each line of output is a JSON object: the process' name,
how many puts had returned, its exit code, and the seconds from the signal to the end.
"""

import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.sharedctypes import Synchronized
from typing import Any

from kpl_core import BlockingProducer, Config
from kpl_core.background.process_end import begin_last_flushes
from kpl_integrations.logging_handler import KinesisHandler

CONFIG = Config(
    region="us-east-1",
    endpoint_url=os.environ["KPL_ENDPOINT_URL"],
    record_max_buffered_time_ms=25_000,
    record_ttl_ms=60_000,
)
# So many puts come without a pause, and then one in a millisecond: a Kinesis on the same machine keeps up.
TIGHT_PUTS = 3_000
LONGEST_DELAY_SECONDS = 0.15
START_SECONDS = 60.0

Put = Callable[[str], object]


def producer(flush_on_sigterm: bool | None) -> Put:
    opened = BlockingProducer(CONFIG, flush_on_sigterm=flush_on_sigterm).__enter__()
    return lambda text: opened.put("records", partition_key=text, data=text.encode())


def handler(flush_on_sigterm: bool | None, **options: Any) -> Put:
    logger = logging.Logger("signalled")  # noqa: LOG001 - no other handlers
    formatted = KinesisHandler("records", config=CONFIG, flush_on_sigterm=flush_on_sigterm, **options)
    formatted.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(formatted)
    return logger.warning


def block(flush_on_sigterm: bool | None) -> Put:
    return handler(flush_on_sigterm, overflow="block(30)", max_queue_records=100)


SENDERS: dict[str, Callable[[bool | None], Put]] = {"producer": producer, "handler": handler, "block": block}
# The sender of the parent, that its forked children use too if it can be used there.
inherited: list[Put] = []


def work(sender: str, name: str, returned: "Synchronized[int]", flush_on_sigterm: bool | None) -> None:
    """Put until a signal ends the process."""
    put = inherited[0] if inherited else SENDERS[sender](flush_on_sigterm)
    number = 0
    while True:
        put(f"{name}/{number}")
        number += 1
        returned.value = number
        if number > TIGHT_PUTS:
            time.sleep(0.001)


def end_at_random(pid: int, returned: "Synchronized[int]") -> float:
    """Send SIGTERM once the process puts; return when."""
    deadline = time.monotonic() + START_SECONDS
    while not returned.value:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(random.uniform(0.0, LONGEST_DELAY_SECONDS))
    os.kill(pid, signal.SIGTERM)
    return time.monotonic()


def alone(sender: str, name: str) -> tuple[int, int, float]:
    """Return how many puts returned, the exit code, and the seconds to the end of one process."""
    returned = multiprocessing.RawValue("Q", 0)
    pid = os.fork()
    if not pid:
        work(sender, name, returned, True)
    began = end_at_random(pid, returned)
    _, status = os.waitpid(pid, 0)
    return returned.value, os.waitstatus_to_exitcode(status), time.monotonic() - began


def in_child(method: str, sender: str, name: str) -> tuple[int, int, float]:
    """Return the same of a child of multiprocessing."""
    context: Any = multiprocessing.get_context(method)
    returned = context.RawValue("Q", 0)
    child = context.Process(target=work, args=(sender, name, returned, None))
    child.start()
    assert child.pid is not None
    began = end_at_random(child.pid, returned)
    child.join()
    assert child.exitcode is not None
    return returned.value, child.exitcode, time.monotonic() - began


def main(sender: str, start: str, signals: int) -> None:
    """End as many processes as the test asks for."""
    multiprocessing.set_forkserver_preload(["__main__"])
    if start == "fork" and sender != "producer":
        # A child starts empty, with the parent's handler.
        inherited.append(SENDERS[sender](True))
        inherited[0]("parent/0")
        for wait in begin_last_flushes():
            wait()
    for number in range(signals):
        name = str(number)
        returned, code, seconds = alone(sender, name) if start == "alone" else in_child(start, sender, name)
        ended = {"name": name, "returned": returned, "code": code, "seconds": round(seconds, 3)}
        sys.stdout.write(json.dumps(ended) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
