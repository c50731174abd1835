"""Send logs and traces to the gateway with the OTLP/HTTP exporters of the OpenTelemetry SDK.

    kpl serve --local
    python examples/ingest/opentelemetry_client.py http://127.0.0.1:8080

An application configured by its environment needs no code:

    OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:8080
    OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf
    OTEL_EXPORTER_OTLP_COMPRESSION=gzip
    OTEL_EXPORTER_OTLP_HEADERS=authorization=Bearer%20kpl_...

needs: pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http
"""

import os
import sys

from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor


def main() -> None:
    """Send 100 spans and 100 log records. The exporters retry what the gateway cannot accept yet."""
    endpoint = (sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080").rstrip("/")
    headers = {
        "authorization": f"Bearer {os.environ.get('GATEWAY_API_KEY', 'local')}",
        # All data of this service go to one shard, in order. Without this header each request gets a random key.
        "x-partition-key": "checkout-1",
    }
    resource = Resource.create({"service.name": "checkout", "service.instance.id": "checkout-1"})

    tracers = TracerProvider(resource=resource)
    spans = OTLPSpanExporter(f"{endpoint}/v1/traces", headers=headers, compression=Compression.Gzip)
    tracers.add_span_processor(BatchSpanProcessor(spans))
    loggers = LoggerProvider(resource=resource)
    logs = OTLPLogExporter(f"{endpoint}/v1/logs", headers=headers, compression=Compression.Gzip)
    loggers.add_log_record_processor(BatchLogRecordProcessor(logs))

    tracer, logger = tracers.get_tracer("example"), loggers.get_logger("example")
    for number in range(100):
        with tracer.start_as_current_span(f"order {number}"):
            logger.emit(body=f"order {number} taken")
    is_sent = tracers.force_flush() and loggers.force_flush()
    tracers.shutdown()
    loggers.shutdown()
    print(f"100 spans and 100 log records are {'sent' if is_sent else 'not all sent'}")


main()
