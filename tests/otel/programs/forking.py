"""Exports before, during and after a fork; every span must arrive once. Usage: forking.py COUNT."""

import os
import sys
import warnings

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from kpl_integrations.otel import KinesisSpanExporter

# Python 3.12 and later warn of a fork beside the sender's thread, which this program tests.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)

count = int(sys.argv[1])
exporter = KinesisSpanExporter()
provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(exporter))
tracer = provider.get_tracer("forking")


def spans(who: str) -> None:
    for number in range(count):
        tracer.start_span(f"{who} {number}").end()


spans("parent")
provider.force_flush()
children = []
for child in range(2):
    pid = os.fork()
    if pid == 0:
        spans(f"child-{child}")
        provider.shutdown()
        os._exit(0 if exporter.counts().delivered == count else 1)
    children.append(pid)
spans("parent-again")
provider.shutdown()
statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
sys.exit(any(statuses) or exporter.counts().delivered != 2 * count)
