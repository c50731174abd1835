"""python -m benchmarks.otel_cost: measure the CPU and the bytes of a span, beside the OTLP/HTTP exporter.

Each exporter runs in a process of its own, behind the SDK's `BatchSpanProcessor`, in interleaved rounds. A span is the
only one of its trace, the worst case for the key `trace_id`, and has five attributes. The CPU time is that of the whole
process, from the first span to the answer for the last: the span itself, the processor, the exporter and the sending.
The bytes are those of the records' data, or of the request bodies. `none` is the SDK with an exporter that does
nothing.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from statistics import median
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from benchmarks.machine import describe_machine
from benchmarks.sink_process import REPOSITORY
from kpl_core import Config
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from kpl_integrations.otel import KinesisSpanExporter

WARMUP_SPANS: Final = 2_000
SPANS: Final = 20_000
ROUNDS: Final = 7
STREAM: Final = "spans"
RESOURCE: Final = Resource(
    {
        "service.name": "orders",
        "service.version": "2026.11.3",
        "service.instance.id": "6f1c1f0e-5d0c-4f2a-9d0e-0d6f0d5c7c11",
        "deployment.environment.name": "production",
        "host.name": "ip-10-0-12-34.ec2.internal",
        "cloud.provider": "aws",
        "cloud.region": "eu-central-1",
        "k8s.namespace.name": "shop",
        "k8s.pod.name": "orders-7d9f8b6c5d-x2x4z",
        "telemetry.sdk.language": "python",
        "telemetry.sdk.name": "opentelemetry",
    }
)


class _Discard(SpanExporter):
    def export(self, spans: object) -> SpanExportResult:  # noqa: ARG002
        return SpanExportResult.SUCCESS


def _otlp(otlp_url: str, _kinesis_url: str, *, compression: Compression) -> SpanExporter:
    return OTLPSpanExporter(f"{otlp_url}/v1/traces", compression=compression)


def _kinesis(_otlp_url: str, kinesis_url: str, **options: Any) -> SpanExporter:  # noqa: ANN401 - each of its own type
    # Its own limits would make it wait for the stream's 4 MB/s.
    config = Config(
        region="us-east-1",
        endpoint_url=kinesis_url,
        rate_limit_bytes_per_sec_per_shard=1e9,
        max_outstanding_bytes=1 << 28,
        max_outstanding_records=1_000_000,
    )
    return KinesisSpanExporter(STREAM, config=config, max_buffer_bytes=1 << 28, **options)


EXPORTERS: Final[dict[str, Callable[[str, str], SpanExporter]]] = {
    "none": lambda _otlp_url, _kinesis_url: _Discard(),
    "OTLP/HTTP": partial(_otlp, compression=Compression.NoCompression),
    "OTLP/HTTP, gzip": partial(_otlp, compression=Compression.Gzip),
    "Kinesis, trace_id": _kinesis,
    "Kinesis, random": partial(_kinesis, partition_key="random"),
    "Kinesis, trace_id, gzip": partial(_kinesis, compression="gzip"),
    "Kinesis, trace_id, zstd": partial(_kinesis, compression="zstd"),
}


def measure(name: str, otlp_url: str, kinesis_url: str) -> float:
    """Return the CPU microseconds of a span."""
    exporter = EXPORTERS[name](otlp_url, kinesis_url)
    provider = TracerProvider(resource=RESOURCE, shutdown_on_exit=False)
    processor = BatchSpanProcessor(exporter, max_queue_size=SPANS)
    provider.add_span_processor(processor)
    _make(provider, WARMUP_SPANS)
    processor.force_flush()
    began = time.process_time()
    _make(provider, SPANS)
    processor.force_flush()
    # The SDK's base class returns nothing.
    assert exporter.force_flush(60_000) is not False
    seconds = time.process_time() - began
    provider.shutdown()
    return seconds / SPANS * 1e6


def _make(provider: TracerProvider, count: int) -> None:
    tracer = provider.get_tracer("benchmarks")
    for number in range(count):
        with tracer.start_as_current_span("GET /orders/{number}") as span:
            span.set_attribute("http.request.method", "GET")
            span.set_attribute("url.path", f"/orders/{number}")
            span.set_attribute("http.route", "/orders/{number}")
            span.set_attribute("http.response.status_code", 200)
            span.set_attribute("server.address", "orders.example.com")


# The two services, in a process of their own


class _Sink(BaseHTTPRequestHandler):
    """Takes OTLP requests. A GET returns how many bytes came since the last one, from both exporters."""

    protocol_version = "HTTP/1.1"
    kinesis: ThreadedLocalKinesis
    otlp_bytes = 0

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        self.rfile.read(size)
        _Sink.otlp_bytes += size
        self._answer(b"")

    def do_GET(self) -> None:
        stored = self.kinesis.call(lambda fake, _now: sum(len(record.data) for record in fake.records(STREAM)))
        self._answer(json.dumps([_Sink.otlp_bytes, stored]).encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def serve() -> None:
    """Run both services until standard input closes; print their URLs."""
    with ThreadedLocalKinesis(LocalKinesis({STREAM: 4}, enforce_limits=False)) as kinesis:
        _Sink.kinesis = kinesis
        server = ThreadingHTTPServer(("127.0.0.1", 0), _Sink)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(json.dumps([f"http://127.0.0.1:{server.server_port}", kinesis.endpoint_url]), flush=True)
        sys.stdin.read()


def _run_round(names: list[str], figures: dict[str, list[tuple[float, float]]]) -> None:
    """Measure each exporter once, against services that start empty."""
    from urllib.request import urlopen  # noqa: PLC0415 - not in the measured process

    variables = {**os.environ, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_EC2_METADATA_DISABLED": "1"}
    for name in names:
        command = [sys.executable, "-m", "benchmarks.otel_cost"]
        with subprocess.Popen(
            [*command, "--serve"], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as services:
            assert services.stdin is not None
            assert services.stdout is not None
            urls = json.loads(services.stdout.readline())
            one = [*command, "--one", name, *urls]
            said = subprocess.run(
                one, cwd=REPOSITORY, env=variables, stdout=subprocess.PIPE, text=True, check=True, timeout=120
            )
            with urlopen(urls[0]) as answer:  # noqa: S310 - loopback
                size = sum(json.load(answer)) / (WARMUP_SPANS + SPANS)
            services.stdin.close()
        figures[name].append((float(said.stdout), size))


def main(arguments: list[str]) -> None:
    """Print the table."""
    if arguments[:1] == ["--serve"]:
        serve()
        return
    if arguments[:1] == ["--one"]:
        print(measure(*arguments[1:]))
        return
    names = list(EXPORTERS)
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        _run_round(names, figures)
    print("| exporter | CPU us/span | of OTLP/HTTP | B/span |\n| --- | ---: | ---: | ---: |")
    for name in names:
        times = [cpu for cpu, _ in figures[name]]
        ratios = [cpu / base for cpu, (base, _) in zip(times, figures["OTLP/HTTP"], strict=True)]
        size = median(size for _, size in figures[name])
        print(
            f"| {name} | {median(times):.1f} [{min(times):.1f} - {max(times):.1f}] "
            f"| {median(ratios):.2f} [{min(ratios):.2f} - {max(ratios):.2f}] | {size:.0f} |"
        )
    print(f"\n{describe_machine()}; {ROUNDS} interleaved rounds: median [least - most]")


if __name__ == "__main__":
    main(sys.argv[1:])
