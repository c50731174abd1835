"""The exporters of the three signals, and what they share: encode, split, key, queue, and count every item.

    OTEL_TRACES_EXPORTER=kinesis KPL_OTEL_STREAM=telemetry opentelemetry-instrument uvicorn app:app

The sender's thread starts with the first export, in the process that exports. A forked child starts empty.

Each exporter can have metrics of its own, by the names of OpenTelemetry's semantic conventions:

    otel.sdk.exporter.span.exported            and .log.exported, .metric_data_point.exported
    otel.sdk.exporter.span.inflight

What was lost carries `error.type`. The SDK's processors count everything that they hand over as processed, even if the
exporter returns FAILURE, so only these metrics show a loss. They are made where the SDK makes its own: with
OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED=true, or for a `meter_provider` that is given.
"""

import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, ClassVar, Final, Unpack

import msgspec
from opentelemetry._logs import get_logger_provider
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation, get_meter_provider
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk._logs.export import LogRecordExporter, LogRecordExportResult
from opentelemetry.sdk.metrics.export import AggregationTemporality, MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.metrics.view import Aggregation
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import get_tracer_provider

from kpl_core import Producer
from kpl_core.background.process_end import ProcessListener, flush_on_sigterm, keep_for_parent, listen
from kpl_core.background.sender import import_early
from kpl_integrations.otel.encoding import (
    Piece,
    encoder,
    items_in,
    keyed_parts,
    leaves_of,
    pieces,
    random_key,
    trace_parts,
)
from kpl_integrations.otel.options import ExporterArguments, ExporterOptions, MakeTransport, Signal, resolve_options
from kpl_integrations.otel.sender import (
    CLOSED,
    ENCODING_FAILED,
    FULL,
    SENDER_FAILED,
    TOO_LARGE,
    ExportCounts,
    Shipment,
    TelemetrySender,
    is_from_exporter,
    suppress_instrumentation,
)

_logger = logging.getLogger("kpl_integrations.otel")

_NOUNS: Final[dict[Signal, str]] = {"traces": "spans", "logs": "log records", "metrics": "data points"}


class _KinesisExporter:
    """What the SDK calls on every exporter. What is not given comes from the environment.

    Raises:
        ConfigError: an option is missing or out of its bounds.
        TypeError: there is no option of that name.
    """

    _signal: ClassVar[Signal]

    def __init__(self, stream: str | None = None, **arguments: Unpack[ExporterArguments]) -> None:
        options = resolve_options(self._signal, {"stream": stream, **arguments})
        self._exporter = SignalExporter(self._signal, options, arguments.get("transport"))
        if arguments.get("flush_on_sigterm"):
            flush_on_sigterm()
        _observe(self._signal, self._exporter.counts, arguments.get("meter_provider"))

    def force_flush(self, timeout_millis: float = 30_000) -> bool:
        """Return True if everything exported since the last flush arrived, within `timeout_millis`."""
        return self._exporter.force_flush(timeout_millis / 1_000)

    def shutdown(self, timeout_millis: float = 30_000) -> None:
        """Deliver what is there, for the lesser of `timeout_millis` and `shutdown_timeout_millis`."""
        self._exporter.shutdown(timeout_millis / 1_000)

    def counts(self) -> ExportCounts:
        """Return where every exported span, log record or data point is."""
        return self._exporter.counts()


class KinesisSpanExporter(_KinesisExporter, SpanExporter):
    """Exports spans, the spans of one trace to one shard; give it to a `BatchSpanProcessor`.

    The keywords are `options.ExporterArguments`; what is not given comes from the environment. `partition_key` is
    "trace_id", "random", "resource" or a function of the span.

    Raises:
        ConfigError: an option is missing or out of its bounds.
        TypeError: there is no option of that name.
    """

    _signal = "traces"

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Queue spans to send; return FAILURE if some were refused. `counts` shows what became of the others."""
        is_taken = self._exporter.export(spans, timeout=self._exporter.options.timeout)
        return SpanExportResult.SUCCESS if is_taken else SpanExportResult.FAILURE


class KinesisLogRecordExporter(_KinesisExporter, LogRecordExporter):
    """Exports log records; give it to a `BatchLogRecordProcessor`. What is not given comes from the environment.

    What the exporter's own thread logs is not exported: with the root logger at DEBUG each request would make more.
    `partition_key` is "random", "resource" or a function of the log record; otherwise as `KinesisSpanExporter`.

    Raises:
        ConfigError: an option is missing or out of its bounds.
        TypeError: there is no option of that name.
    """

    _signal = "logs"

    def export(self, batch: Sequence[ReadableLogRecord]) -> LogRecordExportResult:
        """Queue log records to send; return FAILURE if some were refused."""
        records = [record for record in batch if not is_from_exporter(record.log_record.trace_id)]
        is_taken = self._exporter.export(records, timeout=self._exporter.options.timeout)
        return LogRecordExportResult.SUCCESS if is_taken else LogRecordExportResult.FAILURE


class KinesisMetricExporter(_KinesisExporter, MetricExporter):
    """Exports metrics; give it to a `PeriodicExportingMetricReader`. What is not given comes from the environment.

    `partition_key` is "random", "resource" or a function of a `MetricLeaf`, a metric with its resource and scope.
    `preferred_temporality` and `preferred_aggregation` are the SDK's; otherwise as `KinesisSpanExporter`.

    Raises:
        ConfigError: an option is missing or out of its bounds.
        TypeError: there is no option of that name.
    """

    _signal = "metrics"

    def __init__(
        self,
        stream: str | None = None,
        *,
        preferred_temporality: Mapping[type, AggregationTemporality] | None = None,
        preferred_aggregation: Mapping[type, Aggregation] | None = None,
        **arguments: Unpack[ExporterArguments],
    ) -> None:
        MetricExporter.__init__(
            self,
            preferred_temporality=dict(preferred_temporality or {}) or None,
            preferred_aggregation=dict(preferred_aggregation or {}) or None,
        )
        _KinesisExporter.__init__(self, stream, **arguments)

    def export(
        self,
        metrics_data: MetricsData,
        timeout_millis: float = 10_000,
        **_unknown: object,
    ) -> MetricExportResult:
        """Queue metrics to send; return FAILURE if some data points were refused."""
        timeout = min(timeout_millis / 1_000, self._exporter.options.timeout)
        is_taken = self._exporter.export(leaves_of(metrics_data), timeout=timeout)
        return MetricExportResult.SUCCESS if is_taken else MetricExportResult.FAILURE

    def shutdown(self, timeout_millis: float = 30_000, *, timeout: float | None = None, **_unknown: object) -> None:
        """Deliver what is there, for the lesser of `timeout_millis` and `shutdown_timeout_millis`.

        The SDK's periodic reader passes its remaining milliseconds as `timeout`.
        """
        super().shutdown(timeout_millis if timeout is None else timeout)


class SignalExporter(ProcessListener):
    """Exports one signal. `transport` makes the transport that replaces the network."""

    def __init__(self, signal: Signal, options: ExporterOptions, transport: MakeTransport | None) -> None:
        self.signal: Signal = signal
        self.options = options
        self._transport = transport
        if transport is None:
            import_early(options.config)
        self._encode = encoder(signal, options.encoding)
        self._sender: TelemetrySender | None = None
        self.is_closed = False
        self.begin_child()
        listen(self)
        # In last flushes too, for as long as it is referenced.
        _global_providers.exporters.add(self)

    def begin_child(self) -> None:
        """Start empty, as a forked child does."""
        self._starting = threading.Lock()
        if self._sender is not None:
            keep_for_parent(self._sender)
        self._sender = None
        # What was refused without a sender.
        self._refused: Counter[str] = Counter()

    def pause_for_fork(self, timeout: float) -> Callable[[], object]:
        """Stop the sender's thread while the process forks."""
        return (lambda: None) if self._sender is None else self._sender.pause(timeout)

    def export(self, leaves: Sequence[Any], *, timeout: float) -> bool:
        """Queue an export, waiting up to `timeout` seconds for room; return True if all of it was taken."""
        if not leaves:
            return True
        with suppress_instrumentation():
            sender = self._started()
            if sender is None:
                reason = CLOSED if self.is_closed else SENDER_FAILED
                self._refused[reason] += items_in(leaves)
                return False
            return self._queue(leaves, sender, time.monotonic() + timeout)

    def _queue(self, leaves: Sequence[Any], sender: TelemetrySender, deadline: float) -> bool:
        is_whole, open_items = True, items_in(leaves)
        try:
            for piece in self._pieces(leaves):
                open_items -= piece.items
                if piece.data is None:
                    sender.refused(piece.items, TOO_LARGE)
                    is_whole = False
                elif not sender.offer(Shipment(piece.key or random_key(), piece.data, piece.items), deadline=deadline):
                    sender.refused(piece.items, self._why_refused(sender))
                    is_whole = False
        finally:
            if open_items:
                # An attribute that cannot be encoded, or a key function that raised: the SDK logs it.
                sender.refused(open_items, ENCODING_FAILED)
        return is_whole

    def _pieces(self, leaves: Sequence[Any]) -> Iterator[Piece]:
        """Yield the export in pieces that fit."""
        max_bytes = self.options.max_data_bytes
        if self.options.partition_key == "trace_id" and self.options.encoding == "otlp_proto":
            parts = list(trace_parts(leaves))
            if all(len(part.data or b"") <= max_bytes for part in parts):
                yield from parts
                return
        for key, part in keyed_parts(leaves, self.options.partition_key):
            yield from pieces(part, self._encode, max_bytes=max_bytes, key=key)

    def _why_refused(self, sender: TelemetrySender) -> str:
        if self.is_closed:
            return CLOSED
        return SENDER_FAILED if sender.is_finished else FULL

    def force_flush(self, timeout: float) -> bool:
        """Return True if everything exported since the last flush arrived, within `timeout` seconds."""
        with suppress_instrumentation():
            return not self._refused if self._sender is None else self._sender.flush(timeout)

    def last_flush(self, timeout: float) -> None:
        """Flush before the process ends, for `timeout` seconds at most; log what did not arrive."""
        # An earlier flush may have reported a loss to the SDK's reader, which ignores it.
        if not self.force_flush(timeout) or self.counts().lost:
            self._log_losses()

    def shutdown(self, timeout: float) -> None:
        """Deliver what is there, for the lesser of `timeout` and the option `shutdown_timeout`; log what was lost."""
        with self._starting:
            was_closed, self.is_closed = self.is_closed, True
        if was_closed:
            return
        with suppress_instrumentation():
            if self._sender is not None:
                self._sender.close(max(0.0, min(timeout, self.options.shutdown_timeout)))
            if self.counts().lost:
                self._log_losses()

    def _log_losses(self) -> None:
        noun, counts = _NOUNS[self.signal], self.counts()
        _logger.warning("%s for stream %r did not all arrive: %s", noun, self.options.stream, counts)

    def counts(self) -> ExportCounts:
        """Return where everything is that was exported in this process."""
        sender = self._sender
        sent = ExportCounts(exported=0, delivered=0, lost={}, pending=0) if sender is None else sender.counts()
        lost = self._refused + Counter(sent.lost)
        return msgspec.structs.replace(sent, exported=sent.exported + self._refused.total(), lost=lost)

    def _started(self) -> TelemetrySender | None:
        """Return the sender, started on the first call; None after the end, or if no thread can be started."""
        with self._starting:
            if self.is_closed:
                return None
            if self._sender is None:
                sender = TelemetrySender(
                    self.options.stream,
                    max_bytes=self.options.max_buffer_bytes,
                    make_producer=self._make_producer,
                )
                try:
                    sender.start()
                except (RuntimeError, OSError):
                    # The interpreter finalizes and starts no threads, or no file descriptor is left.
                    return None
                self._sender = sender
            return self._sender

    def _make_producer(self) -> Producer:
        config = self.options.config
        return Producer(config, transport=None if self._transport is None else self._transport(config))


# The share of a flush's time that is kept back for logging what did not arrive.
_ENDING_SHARE: Final = 0.1

_PROVIDERS: Final[dict[Signal, Callable[[], object]]] = {
    "traces": get_tracer_provider,
    "logs": get_logger_provider,
    "metrics": get_meter_provider,
}


class _GlobalProviders(ProcessListener):
    """The last flush of exporters that the environment made: the global providers hold what is on its way to them.

    uvicorn ends the process by the signal that it caught, so the providers' own shutdown at exit never comes. These
    flushes run at the hooks of `kpl_core.background.process_end`: first the global provider of each signal, then the
    exporters of that signal.
    """

    def __init__(self) -> None:
        self.exporters: weakref.WeakSet[SignalExporter] = weakref.WeakSet()
        listen(self)

    def begin_last_flush(self, share: float = 1.0) -> Callable[[], object] | None:
        """Start with all signals at once, each within `share` of its exporters' shutdown timeout."""
        exporters = [each for each in list(self.exporters) if not each.is_closed]
        by_signal = {name: [each for each in exporters if each.signal == name] for name in _PROVIDERS}
        waits = [
            begin_in_thread(partial(_flush, name, own), share * max(each.options.shutdown_timeout for each in own))
            for name, own in by_signal.items()
            if own
        ]
        return (lambda: [wait() for wait in waits]) if waits else None


_global_providers: Final = _GlobalProviders()


def begin_in_thread(flush: Callable[[float], object], seconds: float) -> Callable[[], None]:
    """Call `flush` with its deadline in a thread; return a function that waits for it, `seconds` from now at most."""
    began = time.monotonic()
    return _begin(partial(flush, began + seconds * (1 - _ENDING_SHARE)), began + seconds)


def begin_provider_flush(signal: Signal, provider: object, deadline: float) -> Callable[[], bool]:
    """Let a provider export what it holds; return a function that waits until `deadline` and returns True if it did.

    This needs a thread: the SDK's processors ignore a timeout, and an export may wait for room.
    """
    # A provider that only the API made holds nothing and cannot flush.
    force_flush = getattr(provider, "force_flush", None)
    if force_flush is None:
        return lambda: True
    is_done = threading.Event()

    def flush() -> None:
        try:
            force_flush(max(0.0, deadline - time.monotonic()) * 1_000)
        except Exception:  # what another reader or processor raises must not cost our records
            if time.monotonic() < deadline:
                _logger.exception("the provider of %s could not flush everything", signal)
        else:
            is_done.set()

    wait_for_thread = _begin(flush, deadline)

    def wait() -> bool:
        wait_for_thread()
        return is_done.is_set()

    return wait


def _begin(work: Callable[[], object], deadline: float) -> Callable[[], None]:
    """Start `work` in a thread; return a function that waits for it until `deadline`."""
    thread = threading.Thread(target=work, name="kpl-otel-flush", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # The interpreter finalizes and starts no threads.
        work()
        return lambda: None
    return lambda: thread.join(max(0.0, deadline - time.monotonic()))


def _flush(signal: Signal, exporters: list[SignalExporter], deadline: float) -> None:
    begin_provider_flush(signal, _PROVIDERS[signal](), deadline)()
    for exporter in exporters:
        exporter.last_flush(max(0.0, deadline - time.monotonic()))


_ENABLED: Final = "OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED"
_COMPONENTS: Final[dict[Signal, tuple[str, str]]] = {
    "traces": ("span", "kinesis_span_exporter"),
    "logs": ("log", "kinesis_log_exporter"),
    "metrics": ("metric_data_point", "kinesis_metric_exporter"),
}
_numbers: Final = {signal: count() for signal in _COMPONENTS}


def _observe(signal: Signal, counts: Callable[[], ExportCounts], meter_provider: MeterProvider | None) -> None:
    """Make the metrics of one exporter, if they are enabled."""
    if meter_provider is None:
        if os.environ.get(_ENABLED, "").strip().lower() != "true":
            return
        meter_provider = get_meter_provider()
    noun, component = _COMPONENTS[signal]
    attributes = {"otel.component.type": component, "otel.component.name": f"{component}/{next(_numbers[signal])}"}

    def exported(_options: CallbackOptions) -> Iterator[Observation]:
        now = counts()
        yield Observation(now.delivered, attributes)
        for reason, lost in now.lost.items():
            yield Observation(lost, {**attributes, "error.type": reason})

    def inflight(_options: CallbackOptions) -> Iterator[Observation]:
        yield Observation(counts().pending, attributes)

    meter = meter_provider.get_meter("kpl_integrations.otel")
    meter.create_observable_counter(
        f"otel.sdk.exporter.{noun}.exported",
        [exported],
        unit=f"{{{noun}}}",
        description="Delivered, or lost for a reason.",
    )
    meter.create_observable_up_down_counter(
        f"otel.sdk.exporter.{noun}.inflight", [inflight], unit=f"{{{noun}}}", description="Exported, no result yet."
    )
