"""A forked child flushes the global provider and ends at once. Usage: flushing_child.py COUNT."""

import os
import sys
import warnings

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from kpl_integrations.otel import KinesisSpanExporter

# Python 3.12 and later warn of a fork beside the sender's thread, which this program tests.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)

count = int(sys.argv[1])
provider = TracerProvider()
trace.set_tracer_provider(provider)
provider.add_span_processor(BatchSpanProcessor(KinesisSpanExporter()))
children = []
for child in range(3):
    pid = os.fork()
    if pid == 0:
        for number in range(count):
            trace.get_tracer("child").start_span(f"child-{child} {number}").end()
        sys.stdout.write(f"{provider.force_flush(10_000)}\n")
        sys.stdout.flush()
        os._exit(0)
    children.append(pid)
for pid in children:
    os.waitpid(pid, 0)
os._exit(0)
