"""Exports one item of each signal to an endpoint that does not answer, and ends by the end of the script.

Usage: three_signals.py ENDPOINT SHUTDOWN_MILLIS. It prints the monotonic instant at which the script ends.
"""

import sys
import time

from opentelemetry._logs import LogRecord

from kpl_integrations.otel import kinesis_telemetry

telemetry = kinesis_telemetry(
    "telemetry", region="us-east-1", endpoint_url=sys.argv[1], shutdown_timeout_millis=float(sys.argv[2])
)
telemetry.tracer_provider.get_tracer("t").start_span("s").end()
telemetry.logger_provider.get_logger("t").emit(LogRecord(body="line"))
telemetry.meter_provider.get_meter("t").create_counter("c").add(1)
sys.stdout.write(f"{time.monotonic()}\n")
