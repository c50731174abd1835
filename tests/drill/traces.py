"""The trace of a request: the span that the gateway exports to a collector of the drill, and the records with it."""

import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

_NAMED = {"tenant": "kpl.tenant", "stream": "aws.kinesis.stream_name"}


class Sent(NamedTuple):
    """A request of a client in a sampled trace of its own, and the status of its answer; 0 without one."""

    at: float
    request_id: str
    trace_id: str
    records: int
    status: int

    @property
    def is_accepted(self) -> bool:
        """Whether the gateway took its records."""
        return 200 <= self.status < 300


def new_trace() -> tuple[str, str]:
    """Return the id of a new trace, and a `traceparent` in it."""
    trace_id = secrets.token_hex(16)
    return trace_id, f"00-{trace_id}-{secrets.token_hex(8)}-01"


def carries(data: bytes, trace_id: str) -> bool:
    """Return True if a record has the trace."""
    with suppress(ValueError):
        return trace_id in str(json.loads(data).get("traceparent"))
    return False


class Collector:
    """Takes spans by OTLP over HTTP. `environment` lets `opentelemetry-instrument kpl serve` send them."""

    def __init__(self, port: int) -> None:
        self._spans: dict[str, Span] = {}
        self.environment = {
            "KPL_INGEST_OPENTELEMETRY_TRACES": "true",
            "OTEL_SERVICE_NAME": "gateway",
            "OTEL_TRACES_EXPORTER": "otlp_proto_http",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
            "OTEL_METRICS_EXPORTER": "none",
            "OTEL_LOGS_EXPORTER": "none",
            "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "fastapi,logging",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }

    def take(self, body: bytes) -> None:
        """Take the spans of one request."""
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self._spans |= {span.trace_id.hex(): span for span in scope.spans}

    def span(self, trace_id: str) -> str | None:
        """Return what the gateway's span of a trace says; None if it has not arrived."""
        span = self._spans.get(trace_id)
        if span is None:
            return None
        known = {each.key: each.value for each in span.attributes}
        named = [f"{name} {known[key].string_value}" for name, key in _NAMED.items() if key in known]
        took = f"{(span.end_time_unix_nano - span.start_time_unix_nano) / 1e6:.1f} ms"
        return ", ".join([f"{span.name} {known['http.response.status_code'].int_value}", took, *named])


@contextmanager
def collector() -> Iterator[Collector]:
    """Run a collector on loopback for the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print no line."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Collector(server.server_port)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield found
        server.shutdown()
