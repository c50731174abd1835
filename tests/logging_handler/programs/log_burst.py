"""Log `count` lines of 210 bytes in a tight loop, and end as any program does; print what it took.

python log_burst.py <endpoint url> <count> <cold or warm> <options of the handler as JSON>
"""

import json
import logging
import sys
import time

from kpl_integrations.logging_handler import KinesisHandler

url, count, start, options = sys.argv[1], int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
handler = KinesisHandler("logs", region="us-east-1", endpoint_url=url, **options)
logger = logging.Logger("program")  # noqa: LOG001 - used by this program only
logger.addHandler(handler)
if start == "warm":
    logger.info("warm")
    handler.flush()
text = "x" * 200
started = time.perf_counter()
for number in range(count):
    logger.info("%09d %s", number, text)
ended = time.perf_counter()
sys.stdout.write(f"emit_us={(ended - started) / count * 1e6:.2f} delivered={handler.counts().delivered}")
