"""The end of a process whose exporters the environment made: only the global providers hold what is on its way.

    opentelemetry-instrument uvicorn app:app

uvicorn ends the process by the signal it was sent, so the providers' own shutdown, at exit, never comes. Here the
exporters take part in the last flush, at the end of a lifespan (`last_flush`) or before the signal (`last_signal`).
"""

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final, Protocol

from opentelemetry._logs import get_logger_provider
from opentelemetry.metrics import get_meter_provider
from opentelemetry.trace import get_tracer_provider

from kpl_integrations.last_flush import take_part
from kpl_integrations.otel.options import Signal

__all__ = ["flush_in_last_flushes", "hand_over", "in_background"]

_logger = logging.getLogger("kpl_integrations.otel")

# Of a flush's time, what is kept back for saying what did not arrive.
_ENDING_SHARE: Final = 0.1

_PROVIDERS: Final[dict[Signal, Callable[[], object]]] = {
    "traces": get_tracer_provider,
    "logs": get_logger_provider,
    "metrics": get_meter_provider,
}


class _Exporting(Protocol):
    signal: Signal
    is_closed: bool

    @property
    def last_flush_seconds(self) -> float:
        """Return how long its last flush may take."""

    def last_flush(self, timeout: float) -> None:
        """Flush for `timeout` seconds at most, and say what did not arrive."""


class GlobalFlush:
    """Flushes the exporters there are, each after the global provider of its signal."""

    def __init__(self) -> None:
        self.exporters: weakref.WeakSet[_Exporting] = weakref.WeakSet()

    def begin_last_flush(self) -> Callable[[], object] | None:
        """Begin with all signals at once (`last_flush`)."""
        exporters = [each for each in list(self.exporters) if not each.is_closed]
        by_signal = {name: [each for each in exporters if each.signal == name] for name in _PROVIDERS}
        waits = [
            in_background(_flush(name, own), max(each.last_flush_seconds for each in own))
            for name, own in by_signal.items()
            if own
        ]
        return (lambda: [wait() for wait in waits]) if waits else None


_global_flush: Final = GlobalFlush()
take_part(_global_flush)


def flush_in_last_flushes(exporter: _Exporting) -> None:
    """Let an exporter take part, as long as anybody refers to it."""
    _global_flush.exporters.add(exporter)


def in_background(flush: Callable[[float], object], seconds: float) -> Callable[[], None]:
    """Call `flush` with its deadline in a thread of its own; return what waits for it, `seconds` from now at most."""
    began = time.monotonic()
    deadline = began + seconds * (1 - _ENDING_SHARE)
    thread = threading.Thread(target=flush, args=(deadline,), name="kpl-otel-last-flush", daemon=True)
    thread.start()
    return lambda: thread.join(max(0.0, began + seconds - time.monotonic()))


def hand_over(signal: Signal, provider: object, deadline: float) -> Callable[[], bool]:
    """Let a provider export what it holds; return what waits for that until `deadline`, and says whether it is done.

    In a thread: the SDK's processors heed no timeout, and an export may wait for room, or for one that does.
    """
    # A provider that only the API made holds nothing and cannot flush.
    force_flush = getattr(provider, "force_flush", None)
    if force_flush is None:
        return lambda: True
    is_done = threading.Event()

    def flush() -> None:
        try:
            force_flush(max(0.0, deadline - time.monotonic()) * 1_000)
        except Exception:  # another's reader or processor: what it raises must not cost us ours
            if time.monotonic() < deadline:
                _logger.exception("the provider of %s could not flush all it has", signal)
        else:
            is_done.set()

    thread = threading.Thread(target=flush, name="kpl-otel-flush", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # The interpreter is about to end and starts no threads any more.
        flush()
        return is_done.is_set

    def wait() -> bool:
        thread.join(max(0.0, deadline - time.monotonic()))
        return is_done.is_set()

    return wait


def _flush(signal: Signal, exporters: list[_Exporting]) -> Callable[[float], None]:
    def flush(deadline: float) -> None:
        hand_over(signal, _PROVIDERS[signal](), deadline)()
        for exporter in exporters:
            exporter.last_flush(max(0.0, deadline - time.monotonic()))

    return flush
