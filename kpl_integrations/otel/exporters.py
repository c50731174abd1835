"""The exporters of the three signals, and what they share: encode, split, key, queue, and count every item.

    OTEL_TRACES_EXPORTER=kinesis KPL_OTEL_STREAM=telemetry opentelemetry-instrument uvicorn app:app

The sender's thread starts with the first export, in the process that exports. A forked child starts empty. On CPython
3.12 an idle thread starts with the exporter, because none can be started once the main thread has ended.

Each exporter can have metrics of its own, by the names of OpenTelemetry's semantic conventions:

    otel.sdk.exporter.span.exported            and .log.exported, .metric_data_point.exported
    otel.sdk.exporter.span.inflight

What was lost carries `error.type`. The SDK's processors count everything that they hand over as processed, even if the
exporter returns FAILURE, so only these metrics show a loss. They are made where the SDK makes its own: with
OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED=true, or for a `meter_provider` that is given.
"""

import inspect
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, ClassVar, Final, Unpack

import msgspec
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation, get_meter_provider
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk._logs.export import LogRecordExporter, LogRecordExportResult
from opentelemetry.sdk.metrics.export import AggregationTemporality, MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.metrics.view import Aggregation
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from kpl_core import Producer
from kpl_core.background.process_end import (
    ProcessListener,
    counted_at_exit,
    import_early,
    keep_for_parent,
    listen,
    seconds_to_close,
    spare_thread,
)
from kpl_core.background.sigterm import flush_on_sigterm
from kpl_core.background.stderr_report import StderrReport
from kpl_core.hooks import Fact, RequestCompleted
from kpl_integrations.otel.flushing import global_providers
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
from kpl_integrations.otel.telemetry_records import (
    TelemetryRecord,
    encoder,
    items_in,
    keyed_parts,
    leaves_of,
    random_key,
    telemetry_records,
    trace_keys,
)

_logger = logging.getLogger("kpl_integrations.otel")

# The SDK's default timeout of a flush.
_FLUSH_SECONDS: Final = 30.0
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
        self.signal_exporter = SignalExporter(self._signal, options, arguments.get("transport"))
        self.signal_exporter.flushes_at_sigterm = arguments.get("flush_on_sigterm") is not False
        flush_on_sigterm(arguments.get("flush_on_sigterm"))
        _observe(self._signal, self.signal_exporter.counts, arguments.get("meter_provider"))

    def force_flush(self, timeout_millis: float = 30_000) -> bool:
        """Return True if everything exported since the last flush arrived, within `timeout_millis`."""
        return self.signal_exporter.force_flush(timeout_millis / 1_000)

    def shutdown(self, timeout_millis: float = 30_000) -> None:
        """Deliver what is there, for the lesser of `timeout_millis` and `shutdown_timeout_millis`."""
        self.signal_exporter.shutdown(timeout_millis / 1_000)

    def counts(self) -> ExportCounts:
        """Return where every exported span, log record or data point is."""
        return self.signal_exporter.counts()


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
        is_taken = self.signal_exporter.export(spans, timeout=self.signal_exporter.options.timeout)
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
        is_taken = self.signal_exporter.export(records, timeout=self.signal_exporter.options.timeout)
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
        timeout = min(timeout_millis / 1_000, self.signal_exporter.options.timeout)
        is_taken = self.signal_exporter.export(leaves_of(metrics_data), timeout=timeout)
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
        self._encode = encoder(signal, options.encoding, options.compression)
        self._sender: TelemetrySender | None = None
        self.is_closed = False
        self.begin_child()
        listen(self)
        # In last flushes too, for as long as it is referenced.
        global_providers.add(self)

    def begin_child(self) -> None:
        """Start empty, as a forked child does."""
        # Reentrant, because a signal handler may export and shut down too.
        self._starting = threading.RLock()
        if self._sender is not None:
            keep_for_parent(self._sender)
        self._sender = None
        # What was refused without a sender.
        self._refused: Counter[str] = Counter()
        self._logged: ExportCounts | None = None
        noun = _NOUNS[self.signal]
        self._report = StderrReport(f"kpl_integrations.otel: {noun} to stream {self.options.stream!r}", noun)
        # The first export of a short program comes after its main thread has ended.
        self._spare = None if self.is_closed else spare_thread("kpl-otel-sender", self)

    def undelivered(self) -> tuple[int, str]:
        """Return how many items have been exported and have no result."""
        return self.counts().pending, f"{_NOUNS[self.signal]} to stream {self.options.stream!r}"

    def end_by_signal(self) -> None:
        """Log what did not arrive."""
        counts = self.counts()
        if counts.pending or counts.lost:
            self._log_losses()

    def pause_for_fork(self, timeout: float) -> Callable[[], object]:
        """Stop the sender's thread while the process forks."""
        return (lambda: None) if self._sender is None else self._sender.pause(timeout)

    def export(self, leaves: Sequence[Any], *, timeout: float) -> bool:
        """Queue an export, waiting up to `timeout` seconds for room; return True if all of it was taken.

        If it is synchronous, or part of a flush of the SDK, wait for the result too; return True if nothing was lost.
        """
        if not leaves:
            return True
        flush_seconds = _flush_seconds()
        wait_until = time.monotonic() + (timeout if flush_seconds is None else flush_seconds)
        deadline = min(wait_until, time.monotonic() + timeout)
        with suppress_instrumentation():
            sender = self._started()
            if sender is None:
                reason = CLOSED if self.is_closed else SENDER_FAILED
                with self._starting:
                    self._refused[reason] += items_in(leaves)
                self._report.lost(reason, items_in(leaves))
                return False
            lost_before = sender.counts().lost_total
            is_taken = self._queue(leaves, sender, deadline)
            if flush_seconds is None and not self.options.synchronous:
                return is_taken
            left = max(0.0, wait_until - time.monotonic())
            is_sent = sender.wait_for_export(left, is_batch_of_flush=flush_seconds is not None)
            return is_taken and is_sent and sender.counts().lost_total == lost_before

    def _queue(self, leaves: Sequence[Any], sender: TelemetrySender, deadline: float) -> bool:
        is_whole, open_items = True, items_in(leaves)
        try:
            for record in self._records(leaves, sender.shard_of):
                open_items -= record.items
                if record.data is None:
                    sender.refused(record.items, TOO_LARGE)
                    is_whole = False
                elif not sender.offer(
                    Shipment(record.key or random_key(), record.data, record.items), deadline=deadline
                ):
                    sender.refused(record.items, self._why_refused(sender))
                    is_whole = False
        finally:
            if open_items:
                # An attribute that cannot be encoded, or a key function that raised: the SDK logs it.
                sender.refused(open_items, ENCODING_FAILED)
        return is_whole

    def _records(self, leaves: Sequence[Any], shard_of: Callable[[str], str | None]) -> Iterator[TelemetryRecord]:
        """Yield the export as user records that fit."""
        max_bytes, choice = self.options.max_data_bytes, self.options.partition_key
        if choice == "trace_id":
            keys = trace_keys(leaves, shard_of)
            choice = lambda span: keys[span.context.trace_id]  # noqa: E731
        for key, part in keyed_parts(leaves, choice):
            yield from telemetry_records(part, self._encode, max_bytes=max_bytes, key=key)

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
        """Deliver what is there, for the lesser of `timeout` and the option `shutdown_timeout`; log what was lost.

        At the exit of the process, the SDK shuts its providers down one after the other. Then `shutdown_timeout` is the
        bound of all exporters together, and includes their last flush.
        """
        with self._starting:
            was_closed, self.is_closed = self.is_closed, True
            if self._spare is not None:
                self._spare.end()
        if was_closed:
            return
        with suppress_instrumentation():
            if self._sender is not None:
                bound = seconds_to_close(self.options.shutdown_timeout, global_providers.open_count + 1)
                with counted_at_exit():
                    self._sender.close(max(0.0, min(timeout, bound)))
            if self.counts().lost:
                self._log_losses()

    def _log_losses(self) -> None:
        self._report.write()
        noun, counts = _NOUNS[self.signal], self.counts()
        before, self._logged = self._logged, counts
        if counts != before:
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
                    report=self._report,
                )
                # Before its start, because a signal handler that interrupts this must not start another.
                self._sender = sender
                is_started = False
                try:
                    sender.start(self._spare)
                    is_started = True
                except (RuntimeError, OSError):
                    # The interpreter finalizes and starts no threads, or no file descriptor is left.
                    return None
                finally:
                    if not is_started:
                        self._sender = None
                # A configuration file sets the providers after it made the exporters.
                global_providers.confirm_flushes(self.signal)
            return self._sender

    def _make_producer(self) -> Producer:
        config = self.options.config
        transport = None if self._transport is None else self._transport(config)
        producer = Producer(config, transport=transport, hooks=[self._note_request])
        producer.internal.log_no_loss()
        return producer

    def _note_request(self, fact: Fact) -> None:
        if isinstance(fact, RequestCompleted):
            if fact.error_code is None:
                self._report.request_answered()
            else:
                self._report.request_failed(f"{fact.error_code}: {fact.error_message}")


def _flush_seconds() -> float | None:
    """Return the timeout of the `force_flush` that makes this export, None if none does.

    The SDK's processors export in a flush and then return True. Only the stack shows an exporter that it must wait.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "force_flush":
            millis = frame.f_locals.get("timeout_millis")
            return _FLUSH_SECONDS if millis is None else millis / 1_000
        frame = frame.f_back
    return None


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
