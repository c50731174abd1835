"""python -m benchmarks.logging_exit: measure a logging program with a dead endpoint, beside watchtower.

500,000 records of 210 bytes, logged as fast as possible, to an endpoint that accepts connections and never
answers, and to one that refuses them. Then the program ends. Memory is the growth of the process while it
logged. The exit time is from its last line of code to its end.
"""

# ruff: noqa: PLC0415 - each process imports only the one it measures

import argparse
import atexit
import logging
import os
import re
import resource
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

RECORDS: Final = 500_000
TEXT: Final = "x" * 200
CLOSE_SECONDS: Final = 5.0
SETTLED_BYTES: Final = 100_000


def _kinesis_handler(url: str) -> logging.Handler:
    from kpl_integrations.logging_handler import KinesisHandler

    return KinesisHandler("logs", region="us-east-1", endpoint_url=url, close_timeout=CLOSE_SECONDS)


def _watchtower(url: str) -> logging.Handler:
    import boto3
    import watchtower

    client = boto3.client("logs", region_name="us-east-1", endpoint_url=url)
    return watchtower.CloudWatchLogHandler(
        log_group_name="g", log_stream_name="s", boto3_client=client, create_log_group=False, create_log_stream=False
    )


HANDLERS: Final = {"KinesisHandler": _kinesis_handler, "watchtower": _watchtower}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def settled_bytes() -> int:
    """Return the resident size once it has not changed for a second, when the client's modules are loaded."""
    last, now = 0, resident_bytes()
    while abs(now - last) > SETTLED_BYTES:
        time.sleep(1)
        last, now = now, resident_bytes()
    return now


def program(name: str, url: str) -> None:
    """Log, then end."""
    # The function registered first runs last, and logging registered its shutdown when it was imported.
    atexit.unregister(logging.shutdown)
    atexit.register(lambda: print(time.time(), flush=True))
    atexit.register(logging.shutdown)
    warnings.simplefilter("default")
    handler = HANDLERS[name](url)
    logger = logging.getLogger("program")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    logger.info("%09d %s", 0, "warm")
    before = highest = settled_bytes()
    for number in range(1, RECORDS):
        logger.info("%09d %s", number, TEXT)
        if not number % 10_000:
            highest = max(highest, resident_bytes())
    print(f"{max(highest, resident_bytes()) - before} {time.time()}", flush=True)


@contextmanager
def _endpoint(kind: str) -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if kind == "black hole":
            listener.listen(128)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", nargs=2, metavar=("HANDLER", "URL"))
    arguments = parser.parse_args()
    if arguments.program:
        program(*arguments.program)
        return
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "NO_PROXY": "127.0.0.1"}
    print("| endpoint | handler | grew by MB | exit s | of it the interpreter's | output |")
    print("|---|---|---|---|---|---|")
    for kind in ("black hole", "refusing"):
        for name in HANDLERS:
            with _endpoint(kind) as url:
                ran = subprocess.run(
                    [sys.executable, "-m", "benchmarks.logging_exit", "--program", name, url],
                    env={**os.environ, **keys},
                    capture_output=True,
                    text=True,
                    check=False,
                )
                ended_at = time.time()
            grew, last_line_at, logging_ended_at = ran.stdout.split()
            lines = [line for line in ran.stderr.splitlines() if re.search(r"lost|Warning|fail", line)]
            said = f"{lines[0][-150:]} ({len(lines)} lines)" if lines else "nothing"
            took, teardown = ended_at - float(last_line_at), ended_at - float(logging_ended_at)
            print(f"| {kind} | {name} | {int(grew) / 1e6:.1f} | {took:.2f} | {teardown:.2f} | {said} |", flush=True)


if __name__ == "__main__":
    main()
