"""What the three exporters share: encode, split, key, offer to the sender, and account for every item.

The sender's thread starts with the first export, in the process that exports; a fork begins anew.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from kpl_core import Producer
from kpl_integrations.early_imports import import_early
from kpl_integrations.otel.counts import CLOSED, ENCODING_FAILED, FULL, SENDER_FAILED, TOO_LARGE, ExportCounts
from kpl_integrations.otel.encoding import encoder
from kpl_integrations.otel.forks import begin_anew_in_children, inherit
from kpl_integrations.otel.global_flush import flush_in_last_flushes
from kpl_integrations.otel.options import ExporterArguments, ExporterOptions, MakeTransport, Signal, resolve_options
from kpl_integrations.otel.partition_key import keyed_parts, random_key
from kpl_integrations.otel.quietly import quietly
from kpl_integrations.otel.self_metrics import observe
from kpl_integrations.otel.sender import Sender, Shipment
from kpl_integrations.otel.splitting import Piece, items_in, pieces
from kpl_integrations.otel.trace_parts import trace_parts

__all__ = ["Shipping", "shipping_of"]

_logger = logging.getLogger("kpl_integrations.otel")

_NOUNS: Final[dict[Signal, str]] = {"traces": "spans", "logs": "log records", "metrics": "data points"}


def shipping_of(signal: Signal, stream: str | None, arguments: ExporterArguments) -> "Shipping":
    """Return what ships the exports of one signal, by the arguments of its exporter; make the metrics it is to have.

    Raises:
        ConfigError: an option is missing or out of its bounds.
        TypeError: there is no option of that name.
    """
    options = resolve_options(signal, {"stream": stream, **arguments})
    shipping = Shipping(signal, options, arguments.get("transport"))
    observe(signal, shipping.counts, arguments.get("meter_provider"))
    return shipping


class Shipping:
    """Ships the exports of one signal. `transport` makes what replaces the network."""

    def __init__(self, signal: Signal, options: ExporterOptions, transport: MakeTransport | None) -> None:
        self.signal: Signal = signal
        self.options = options
        self._transport = transport
        if transport is None:
            import_early(options.config)
        self._encode = encoder(signal, options.encoding)
        self._sender: Sender | None = None
        self.is_closed = False
        self.begin_anew()
        begin_anew_in_children(self)
        flush_in_last_flushes(self)

    def begin_anew(self) -> None:
        """Start empty, as a fork's child does."""
        self._starting = threading.Lock()
        if self._sender is not None:
            inherit(self._sender)
        self._sender = None
        # What found no sender.
        self._refused: Counter[str] = Counter()

    def park(self, timeout: float) -> Callable[[], object]:
        """Let the sender stand still while the process forks; return what ends that."""
        return (lambda: None) if self._sender is None else self._sender.park(timeout)

    def export(self, leaves: Sequence[Any], *, timeout: float) -> bool:
        """Offer an export, waiting for room for `timeout` seconds at most; say whether all of it was taken."""
        if not leaves:
            return True
        with quietly():
            sender = self._started()
            if sender is None:
                reason = CLOSED if self.is_closed else SENDER_FAILED
                self._refused[reason] += items_in(leaves)
                return False
            return self._offered(leaves, sender, time.monotonic() + timeout)

    def _offered(self, leaves: Sequence[Any], sender: Sender, deadline: float) -> bool:
        is_whole, open_items = True, items_in(leaves)
        try:
            for key, piece in self._keyed_pieces(leaves):
                open_items -= piece.items
                if piece.data is None:
                    sender.refused(piece.items, TOO_LARGE)
                    is_whole = False
                elif not sender.offer(Shipment(key or random_key(), piece.data, piece.items), deadline=deadline):
                    sender.refused(piece.items, self._why_not(sender))
                    is_whole = False
        finally:
            if open_items:
                # An attribute that cannot be encoded, or a key function that raised: the SDK logs it.
                sender.refused(open_items, ENCODING_FAILED)
        return is_whole

    def _keyed_pieces(self, leaves: Sequence[Any]) -> Iterator[tuple[str | None, Piece]]:
        """Yield the export in pieces that fit, each with its partition key (None: by chance)."""
        max_bytes = self.options.max_data_bytes
        if self.options.partition_key == "trace_id" and self.options.encoding == "otlp_proto":
            parts = list(trace_parts(leaves))
            if all(len(part.data) <= max_bytes for part in parts):
                yield from ((part.key, Piece(part.data, part.items)) for part in parts)
                return
        for key, part in keyed_parts(leaves, self.options.partition_key):
            for piece in pieces(part, self._encode, max_bytes=max_bytes):
                yield key, piece

    def _why_not(self, sender: Sender) -> str:
        if self.is_closed:
            return CLOSED
        return SENDER_FAILED if sender.is_finished else FULL

    def force_flush(self, timeout: float) -> bool:
        """Say whether everything exported since the last flush arrived, within `timeout` seconds."""
        with quietly():
            return not self._refused if self._sender is None else self._sender.flush(timeout)

    @property
    def last_flush_seconds(self) -> float:
        """Return how long its last flush may take: as long as a shutdown."""
        return self.options.shutdown_timeout

    def last_flush(self, timeout: float) -> None:
        """Flush before the process ends, for `timeout` seconds at most; say what did not arrive."""
        # Who flushed before, as the SDK's reader does, was told of a loss and told nobody.
        if not self.force_flush(timeout) or self.counts().lost:
            self._tell_of_losses()

    def shutdown(self, timeout: float) -> None:
        """Deliver what is there, for the lesser of `timeout` and the option `shutdown_timeout`; say what was lost."""
        with self._starting:
            was_closed, self.is_closed = self.is_closed, True
        if was_closed:
            return
        with quietly():
            if self._sender is not None:
                self._sender.close(max(0.0, min(timeout, self.options.shutdown_timeout)))
            if self.counts().lost:
                self._tell_of_losses()

    def _tell_of_losses(self) -> None:
        noun, counts = _NOUNS[self.signal], self.counts()
        _logger.warning("%s for stream %r did not all arrive: %s", noun, self.options.stream, counts)

    def counts(self) -> ExportCounts:
        """Return where everything is that was exported in this process."""
        delivered = kept = pending = 0
        lost = self._refused.copy()
        sender = self._sender
        if sender is not None:
            with sender.changed:
                delivered, kept, pending = sender.delivered, sender.kept, sender.pending
                lost.update(sender.lost)
        total = delivered + kept + pending + lost.total()
        return ExportCounts(exported=total, delivered=delivered, kept=kept, lost=lost, pending=pending)

    def _started(self) -> Sender | None:
        """Return the sender, started when first asked for; None after the end, or if no thread can be had."""
        with self._starting:
            if self.is_closed:
                return None
            if self._sender is None:
                sender = Sender(
                    self.options.stream,
                    max_bytes=self.options.max_buffer_bytes,
                    make_producer=self._make_producer,
                )
                try:
                    sender.start()
                except RuntimeError:
                    # The interpreter is about to end and starts no threads any more.
                    return None
                self._sender = sender
            return self._sender

    def _make_producer(self) -> Producer:
        config = self.options.config
        return Producer(config, transport=None if self._transport is None else self._transport(config))
