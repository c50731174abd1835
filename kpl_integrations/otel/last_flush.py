"""The last flush of exporters that the environment made: the global providers hold what is on its way to them.

    opentelemetry-instrument uvicorn app:app

uvicorn ends the process by the signal that it caught, so the providers' own shutdown at exit never comes. These
flushes run at the hooks of `kpl_core.background.process_end`.
"""

import logging
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from opentelemetry._logs import get_logger_provider
from opentelemetry.metrics import get_meter_provider
from opentelemetry.trace import get_tracer_provider

from kpl_core.background.process_end import ProcessListener, listen
from kpl_integrations.otel.options import Signal

if TYPE_CHECKING:
    from kpl_integrations.otel.exporters import SignalExporter

_logger = logging.getLogger("kpl_integrations.otel")

# The share of a flush's time that is kept back for logging what did not arrive.
_ENDING_SHARE: Final = 0.1

_PROVIDERS: Final[dict[Signal, Callable[[], object]]] = {
    "traces": get_tracer_provider,
    "logs": get_logger_provider,
    "metrics": get_meter_provider,
}


class _GlobalProviders(ProcessListener):
    """Flushes the global provider of each signal, then the exporters of that signal."""

    def __init__(self) -> None:
        self.exporters: weakref.WeakSet[SignalExporter] = weakref.WeakSet()
        listen(self)

    def begin_last_flush(self, share: float = 1.0) -> Callable[[], object] | None:
        """Start with all signals at once, each within `share` of its exporters' shutdown timeout."""
        exporters = [each for each in list(self.exporters) if not each.is_closed]
        by_signal = {name: [each for each in exporters if each.signal == name] for name in _PROVIDERS}
        waits = [
            begin_in_thread(_flush(name, own), share * max(each.options.shutdown_timeout for each in own))
            for name, own in by_signal.items()
            if own
        ]
        return (lambda: [wait() for wait in waits]) if waits else None


_global_providers: Final = _GlobalProviders()


def flush_after_provider(exporter: "SignalExporter") -> None:
    """Flush `exporter` in last flushes, for as long as it is referenced."""
    _global_providers.exporters.add(exporter)


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


def _flush(signal: Signal, exporters: "list[SignalExporter]") -> Callable[[float], None]:
    def flush(deadline: float) -> None:
        begin_provider_flush(signal, _PROVIDERS[signal](), deadline)()
        for exporter in exporters:
            exporter.last_flush(max(0.0, deadline - time.monotonic()))

    return flush
