"""What can be seen of a producer from outside: where its user records are, and whether it is well.

Counts may be asked for by any thread, as a metrics server does. The loop changes what is counted meanwhile, so from
another thread they are of no single instant.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from kpl_core.durability.breaker_gate import WHOLE_STREAM
from kpl_core.durability.circuit_breaker import BreakerState, CircuitBreaker
from kpl_core.options.config import Config
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.pipeline.pipeline_statistics import PipelineStatistics
from kpl_core.producer.report import ProducerReport
from kpl_core.producer.stream_set import StreamSet
from kpl_core.records.user_record import require_stream

if TYPE_CHECKING:
    from kpl_core.durability.dead_letters import DeadLetterQueue
    from kpl_core.durability.spool import Spool
    from kpl_core.producer.coordinating import Coordinating
    from kpl_core.producer.durable_store import DurableStore

__all__ = ["ProducerView"]

_TRIES: Final = 100

T = TypeVar("T")


def _counted(count: Callable[[], T]) -> T:
    """Return what `count` returns, in whatever thread: the loop may add a stream or a request while it counts."""
    for _ in range(_TRIES):
        try:
            return count()
        except RuntimeError:
            # "dictionary changed size during iteration"; to count takes less time than there is between two changes.
            continue
    return count()


class ProducerView:
    """The part of `Producer` that changes nothing."""

    config: Config
    _streams: StreamSet | None
    _keeping: "DurableStore | None"
    _coordinating: "Coordinating | None"
    _buffer_limit: BufferLimit
    _open: dict[str, StreamPipeline]
    _listeners: list[Callable[[], None]]
    _state: str
    _complete: bool

    def on_progress(self, listener: Callable[[], None]) -> None:
        """Call `listener`, on the loop, whenever results or room may have come; be quick. What it raises is logged."""
        self._listeners.append(listener)

    def report(self) -> ProducerReport:
        """Say where every accepted user record is now."""
        if self._streams is None:
            return ProducerReport(accepted=0, delivered=0, failed={}, buffered=0, buffered_bytes=0, complete=True)
        report = _counted(partial(self._streams.report, complete=self._complete))
        keeping = self._keeping
        if keeping is None:
            return report
        return msgspec.structs.replace(
            report,
            accepted=report.accepted + keeping.found_records + keeping.found_letters,
            spooled=report.spooled + keeping.found_records - keeping.moved,
            dead_lettered=report.dead_lettered + keeping.found_letters + keeping.moved,
        )

    @property
    def buffer_limit(self) -> BufferLimit:
        """Return the bound on what is outstanding, with its counts."""
        return self._buffer_limit

    def max_record_bytes(self, stream: str) -> int:
        """Return the most bytes of key and data that `stream` takes in one record, as far as known.

        Raises:
            TypeError, InvalidUserRecord: no stream has such a name.
        """
        pipeline = self._open.get(stream)
        if pipeline is not None:
            return pipeline.max_record_bytes
        require_stream(stream)
        return self.config.for_stream(stream).known_max_record_size

    def statistics(self) -> dict[str, PipelineStatistics]:
        """Return each stream's counts."""
        return {} if self._streams is None else _counted(self._streams.statistics)

    def waiting_by_flow(self) -> dict[str | None, tuple[int, int]]:
        """Return how many user records, of how many bytes, each flow has in the fair queue; empty without one."""
        return {} if self._streams is None else _counted(self._streams.waiting_by_flow)

    def waits_by_flow(self) -> dict[str | None, float]:
        """Return how many seconds the oldest user record of each flow has waited in the fair queue."""
        return {} if self._streams is None else _counted(self._streams.waits_by_flow)

    def breakers(self) -> Mapping[tuple[str, str], CircuitBreaker]:
        """Return the circuit breakers by stream and shard; shard "" is the stream as a whole."""
        streams = self._streams
        if streams is None:
            return {}
        return _counted(streams.breakers)

    def unready(self) -> list[str]:
        """Return the reasons, each a sentence, for which traffic should go elsewhere; none: this producer is ready."""
        reasons = [] if self._state == "open" else [f"the producer is {self._state}"]
        for (stream, shard_id), breaker in self.breakers().items():
            # One shard in trouble is no reason to send the others' traffic away.
            if shard_id == WHOLE_STREAM and breaker.known_state is BreakerState.OPEN:
                reasons.append(f"the circuit breaker of stream {stream} is open")
        return reasons

    @property
    def coordination(self) -> "Coordinating | None":
        """Return the part that shares limits with other processes, None if none is configured."""
        return self._coordinating

    @property
    def spool(self) -> "Spool | None":
        """Return the open spool, None if none is configured; give it to `spool_source` for metrics."""
        keeping = self._keeping
        return None if keeping is None or keeping.spool is None else keeping.spool.spool

    @property
    def dead_letters(self) -> "DeadLetterQueue | None":
        """Return the queue of dead letters in the spool's file, None if there is none."""
        return None if self._keeping is None else self._keeping.queue
