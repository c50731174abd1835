"""Makes 200 spans for an exporter that the environment configures, with logging that shows nothing.

It ends after 5 seconds, or SILENT_SECONDS, without any last report. Usage: silent_losses.py BYTES_OF_THE_FIRST_SPAN.
"""

import logging
import os
import sys
import time

from opentelemetry import trace

logging.getLogger().addHandler(logging.NullHandler())
tracer = trace.get_tracer("silent")
for number in range(200):
    with tracer.start_as_current_span("span") as span:
        if number == 0:
            span.set_attribute("large", "x" * int(sys.argv[1]))
time.sleep(float(os.environ.get("SILENT_SECONDS", "5")))
os._exit(0)
