"""Log a line every 10 ms for some seconds. Print when the first line came and when something was written to stderr.

It ends without the handler's own exit, which reports losses too.

python log_into_trouble.py <endpoint url> <seconds>
"""

import logging
import os
import sys
import time
from typing import Any

from kpl_integrations.logging_handler import KinesisHandler


class TimedStderr:
    """Notes when each text is written, and hands it on."""

    def __init__(self) -> None:
        self.stderr: Any = sys.stderr
        self.written_at: list[float] = []

    def write(self, text: str) -> None:
        self.written_at.append(time.monotonic())
        self.stderr.write(text)

    def flush(self) -> None:
        self.stderr.flush()


handler = KinesisHandler("logs", region="us-east-1", endpoint_url=sys.argv[1])
# The root logger: a report that were logged would come back to the handler.
logging.basicConfig(level=logging.DEBUG, handlers=[handler])
sys.stderr = stderr = TimedStderr()
started_at = time.monotonic()
while time.monotonic() < started_at + float(sys.argv[2]):
    logging.getLogger("program").info("x" * 200)
    time.sleep(0.01)
sys.stdout.write(" ".join(f"{at - started_at:.2f}" for at in stderr.written_at))
sys.stdout.flush()
stderr.flush()
os._exit(0)
