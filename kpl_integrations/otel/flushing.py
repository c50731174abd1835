"""Flushes: what the SDK's providers hold, and then what the exporters have queued, within one deadline.

The SDK's `force_flush` ignores its timeout, and returns True even if data were lost. So the global providers get a
`force_flush` that returns True only if Kinesis has the data.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, Protocol

from opentelemetry._logs import get_logger_provider
from opentelemetry.metrics import get_meter_provider
from opentelemetry.trace import get_tracer_provider

from kpl_core.background.process_end import ProcessListener, WeakList, begin_working, listen
from kpl_integrations.otel.options import ExporterOptions, Signal
from kpl_integrations.otel.sender import ExportCounts

_logger = logging.getLogger("kpl_integrations.otel")

# The share of a flush's time that is kept back for logging what did not arrive.
_ENDING_SHARE: Final = 0.1

_PROVIDERS: Final[dict[Signal, Callable[[], object]]] = {
    "traces": get_tracer_provider,
    "logs": get_logger_provider,
    "metrics": get_meter_provider,
}
_VARIABLES: Final[dict[Signal, str]] = {
    "traces": "OTEL_PYTHON_TRACER_PROVIDER",
    "logs": "OTEL_PYTHON_LOGGER_PROVIDER",
    "metrics": "OTEL_PYTHON_METER_PROVIDER",
}


class FlushedExporter(Protocol):
    """What a flush asks of an exporter."""

    signal: Signal
    options: ExporterOptions
    is_closed: bool

    def counts(self) -> ExportCounts:
        """Return where everything is that was exported in this process."""

    def force_flush(self, timeout: float) -> bool:
        """Return True if everything exported since the last flush arrived, within `timeout` seconds."""

    def last_flush(self, timeout: float) -> None:
        """Flush before the process ends, for `timeout` seconds at most; log what did not arrive."""


class _GlobalProviders(ProcessListener):
    """The last flush of exporters that the environment made: the global providers hold what is on its way to them.

    uvicorn ends the process by the signal that it caught, so the providers' own shutdown at exit never comes. These
    flushes run at the hooks of `kpl_core.background.process_end`: first the global provider of each signal, then the
    exporters of that signal.
    """

    # The exporters decide.
    flushes_at_sigterm = False

    def __init__(self) -> None:
        self._exporters: WeakList[FlushedExporter] = WeakList()
        listen(self)

    def add(self, exporter: FlushedExporter) -> None:
        """Flush this exporter too, for as long as it is referenced."""
        self._exporters.add(exporter)
        # With this variable, reading the provider before it is set would set an empty one. The first export reads it.
        if _VARIABLES[exporter.signal] not in os.environ:
            self.confirm_flushes(exporter.signal)

    @property
    def open_count(self) -> int:
        """Return how many exporters are not shut down."""
        return sum(not each.is_closed for each in self._exporters.referenced())

    def confirm_flushes(self, signal: Signal) -> None:
        """Let the global provider's `force_flush` wait for all exporters of `signal`, once it is set."""
        confirm_flushes(_PROVIDERS[signal](), signal, lambda: self._open(signal))

    def _open(self, signal: Signal) -> list[FlushedExporter]:
        return [each for each in self._exporters.referenced() if each.signal == signal and not each.is_closed]

    def begin_last_flush(self, share: float = 1.0, seconds: float | None = None) -> Callable[[], object] | None:
        """Start with all signals at once, each within `seconds`, or `share` of its exporters' shutdown timeout."""

        def bound(exporters: list[FlushedExporter]) -> float:
            return share * max(each.options.shutdown_timeout for each in exporters) if seconds is None else seconds

        waits = [
            begin_in_thread(partial(_flush, name, own), bound(own)) for name in _PROVIDERS if (own := self._open(name))
        ]
        return (lambda: [wait() for wait in waits]) if waits else None


global_providers: Final = _GlobalProviders()


def begin_in_thread(flush: Callable[[float], object], seconds: float) -> Callable[[], object]:
    """Call `flush` with its deadline in a thread; return a function that waits for it, `seconds` from now at most."""
    began = time.monotonic()
    ended = begin_working(partial(flush, began + seconds * (1 - _ENDING_SHARE)))
    return lambda: ended.wait(max(0.0, began + seconds - time.monotonic()))


class _ConfirmedFlush:
    """A provider's `force_flush` that returns True only if Kinesis has all since the last one, within its timeout."""

    def __init__(
        self, signal: Signal, flush: Callable[[float], object], exporters: Callable[[], Iterable[FlushedExporter]]
    ) -> None:
        self._signal = signal
        self._flush = flush
        self._exporters = exporters
        # The SDK's reader flushes its exporter too and drops the answer, which reports a loss once.
        self._reported_losses = self._losses()

    def __call__(self, timeout_millis: float = 30_000) -> bool:
        deadline = time.monotonic() + timeout_millis / 1_000
        is_exported = _begin_export(self._signal, self._flush, deadline)()
        arrived = [each.force_flush(max(0.0, deadline - time.monotonic())) for each in self._exporters()]
        reported, self._reported_losses = self._reported_losses, self._losses()
        return is_exported and all(arrived) and reported >= self._reported_losses

    def _losses(self) -> int:
        return sum(each.counts().lost_total for each in self._exporters())


def confirm_flushes(provider: Any, signal: Signal, exporters: Callable[[], Iterable[FlushedExporter]]) -> None:  # noqa: ANN401 - of any signal
    """Make `provider.force_flush` return True only if Kinesis has what the exporters took, within its timeout."""
    flush = getattr(provider, "force_flush", None)
    # A provider that only the API made cannot flush.
    if flush is not None and not isinstance(flush, _ConfirmedFlush):
        provider.force_flush = _ConfirmedFlush(signal, flush, exporters)


def begin_provider_flush(signal: Signal, provider: object, deadline: float) -> Callable[[], bool]:
    """Let a provider export what it holds; return a function that waits until `deadline` and returns True if it did."""
    # A provider that only the API made holds nothing and cannot flush.
    force_flush = getattr(provider, "force_flush", None)
    return (lambda: True) if force_flush is None else _begin_export(signal, force_flush, deadline)


def _begin_export(signal: Signal, force_flush: Callable[[float], object], deadline: float) -> Callable[[], bool]:
    """Begin a flush in a thread: the SDK's processors ignore a timeout, and an export may wait for room."""
    is_done = threading.Event()

    def flush() -> None:
        try:
            is_whole = force_flush(max(0.0, deadline - time.monotonic()) * 1_000)
        except Exception:  # what another reader or processor raises must not cost our records
            if time.monotonic() < deadline:
                _logger.exception("the provider of %s could not flush everything", signal)
        else:
            # The SDK's log processors return nothing.
            if is_whole is not False:
                is_done.set()

    ended = begin_working(flush)

    def wait() -> bool:
        ended.wait(max(0.0, deadline - time.monotonic()))
        return is_done.is_set()

    return wait


def _flush(signal: Signal, exporters: list[FlushedExporter], deadline: float) -> None:
    begin_provider_flush(signal, _PROVIDERS[signal](), deadline)()
    for exporter in exporters:
        exporter.last_flush(max(0.0, deadline - time.monotonic()))
