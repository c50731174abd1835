"""The exporters' sender: a bounded queue in front of a background sender, and the counts of every item.

The SDK's processors call an exporter from their own threads and ignore its result and its timeout
(opentelemetry-python issues 4555 and 4568). So retries, deadlines and counts are kept here.

The exporter must not trace or log its own work into the data that it exports. Instrumentations check a suppression key
in the context. Log records do not carry that key, and a batch processor drops their context, but they keep their trace
ID. So the exporter works inside a span that is not recorded, with a trace ID of its own.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final, NamedTuple

import msgspec
from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, Context, attach, detach, set_value
from opentelemetry.trace import NonRecordingSpan, SpanContext, set_span_in_context

from kpl_core import BufferFull, KplError, Producer, RecordResult
from kpl_core.background.process_end import SpareThread
from kpl_core.background.sender import BackgroundSender, SenderEnded, SenderStuck
from kpl_core.background.stderr_report import StderrReport
from kpl_core.producer.delivery import call_when_finished

_logger = logging.getLogger("kpl_integrations.otel")

# Why something did not arrive, beside the producer's error codes (Expired, Shutdown, ...).
CLOSED: Final = "Closed"
ENCODING_FAILED: Final = "EncodingFailed"
FULL: Final = "Full"
SENDER_FAILED: Final = "SenderFailed"
TOO_LARGE: Final = "TooLarge"
_UNKNOWN: Final = "Unknown"

# How many shipments the loop puts in one step, before its other work goes on.
_STEP_SHIPMENTS: Final = 250

# The share of a shutdown's time that is kept back for the connections and the thread to end.
_ENDING_SHARE: Final = 0.1

# Its flags say that it is not sampled.
_EXPORTER_SPAN: Final = SpanContext(
    trace_id=secrets.randbits(128) | 1, span_id=secrets.randbits(64) | 1, is_remote=False
)


@contextlib.contextmanager
def suppress_instrumentation() -> Iterator[None]:
    """Suppress tracing of the block, and mark what is logged in it, in any thread."""
    token = attach(_suppressing())
    try:
        yield
    finally:
        detach(token)


def is_from_exporter(trace_id: int | None) -> bool:
    """Return True for what was made by an exporter's own work; to export it would never end."""
    return trace_id == _EXPORTER_SPAN.trace_id


def _suppressing() -> Context:
    suppressed = set_value(_SUPPRESS_INSTRUMENTATION_KEY, value=True)
    return set_span_in_context(NonRecordingSpan(_EXPORTER_SPAN), suppressed)


class ExportCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of spans, log records or data points since the exporter was made, in this process.

    `exported = delivered + kept + lost + pending`, always. `Unknown` among the reasons means sent and never
    answered before the shutdown's time was over, so it may be stored. `kept` is in the spool or among the
    dead letters of `config`.
    """

    exported: int
    delivered: int
    kept: int = 0
    lost: Mapping[str, int]
    pending: int

    @property
    def lost_total(self) -> int:
        """Return how many were lost, for any reason."""
        return sum(self.lost.values())

    def __str__(self) -> str:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.lost.items()))
        lost = f"{self.lost_total:,} lost" + (f" ({reasons})" if reasons else "")
        return f"{self.exported:,} exported: {self.delivered:,} delivered, {lost}, {self.pending:,} pending"


class Shipment(NamedTuple):
    """One user record to send, and how many spans, log records or data points are in it."""

    partition_key: str
    data: bytes
    items: int

    @property
    def size_bytes(self) -> int:
        """Return how many bytes it takes of the buffer."""
        return len(self.partition_key) + len(self.data)


class TelemetrySender:
    """Sends shipments to one stream; used from any thread. Bounded by `max_bytes` of what has no result yet."""

    def __init__(
        self, stream: str, *, max_bytes: int, make_producer: Callable[[], Producer], report: StderrReport
    ) -> None:
        self._stream = stream
        self._report = report
        self._max_bytes = max_bytes
        self._changed = threading.Condition(lock := threading.RLock())
        self._inbox: deque[Shipment] = deque()
        self._taken = 0
        self._pending_bytes = 0
        self._delivered = self._kept = self._pending = 0
        self._lost: Counter[str] = Counter()
        # How many were lost when a flush last reported it.
        self._reported_losses = 0
        # An export waited and got no result. The next ones do not wait until something has been delivered.
        self._is_stuck = False
        # An export waited for a result and got none, and none has come since.
        self._is_unanswered = False
        self._is_closing = self.is_finished = False
        self._background = BackgroundSender(
            make_producer,
            self,
            name="kpl-otel-sender",
            lock=lock,
            # The thread is the exporter's own, so this stays in force.
            prepare_thread=lambda: attach(_suppressing()),
        )

    def start(self, spare: SpareThread | None) -> None:
        """Start the thread; raises as `BackgroundSender.start`."""
        self._background.start(spare)

    # From any thread

    def offer(self, shipment: Shipment, *, deadline: float) -> bool:
        """Take a shipment once there is room, by the monotonic instant `deadline`; return False if there was none."""
        size = shipment.size_bytes
        with self._changed:
            if not self._has_room(size):
                timeout = 0.0 if self._is_stuck else max(0.0, deadline - time.monotonic())
                self._is_stuck = not self._changed.wait_for(lambda: self._is_over() or self._has_room(size), timeout)
            if self._is_over() or not self._has_room(size):
                return False
            self._pending_bytes += size
            self._pending += shipment.items
            # After the counts, because a signal handler may raise here.
            self._inbox.append(shipment)
            self._background.wake()
        return True

    def refused(self, items: int, reason: str) -> None:
        """Count items that never entered the queue."""
        with self._changed:
            self._lost[reason] += items
        self._report.lost(reason, items)

    def shard_of(self, partition_key: str) -> str | None:
        """Return the shard of a partition key, None while the shards are unknown."""
        producer = self._background.producer
        return None if producer is None else producer.internal.predicted_shard(self._stream, partition_key)

    def flush(self, timeout: float) -> bool:
        """Wait until everything that was offered has its result; return True if all since the last flush arrived."""
        is_complete = self.wait_until_sent(timeout)
        with self._changed:
            reported, self._reported_losses = self._reported_losses, self._lost.total()
            return is_complete and reported == self._reported_losses

    def wait_for_export(self, timeout: float, *, is_batch_of_flush: bool) -> bool:
        """Wait as `wait_until_sent`.

        A flush of the SDK exports in batches. After one that got no result in time, the next do not wait.
        """
        with self._changed:
            if is_batch_of_flush and self._is_unanswered:
                return False
        is_sent = self.wait_until_sent(timeout)
        with self._changed:
            # The last result may have come since.
            self._is_unanswered = not is_sent and self._pending > 0
        return is_sent

    def wait_until_sent(self, timeout: float) -> bool:
        """Wait until everything that was offered has its result; return False if it has not in time."""
        try:
            return self._background.begin_flush(timeout)(timeout).complete
        except SenderStuck:
            return False
        except (SenderEnded, KplError):
            # It ended, and everything has its result; or this is the sender's own thread.
            return True

    def close(self, timeout: float) -> None:
        """Deliver what is there, for `timeout` seconds at most; what has no result then is lost."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        deadline = time.monotonic() + timeout * (1 - _ENDING_SHARE)
        with contextlib.suppress(SenderEnded, KplError):
            self._background.begin(partial(self._close_in_loop, deadline))
        # Also if it has ended: its last step gives what is left its reason.
        self._background.join(timeout)
        self._give_up(_UNKNOWN)

    def pause(self, timeout: float) -> Callable[[], object]:
        """Stop the thread while the process forks; see `BackgroundSender.pause`."""
        return self._background.pause(timeout)

    def counts(self) -> ExportCounts:
        """Return how many items were exported, delivered, kept and lost (by reason), and how many are pending."""
        with self._changed:
            delivered, kept, pending, lost = self._delivered, self._kept, self._pending, self._lost.copy()
        total = delivered + kept + pending + lost.total()
        return ExportCounts(exported=total, delivered=delivered, kept=kept, lost=lost, pending=pending)

    def _has_room(self, size: int) -> bool:
        # A shipment larger than the whole buffer passes alone.
        return self._pending_bytes + size <= self._max_bytes or not self._pending_bytes

    def _is_over(self) -> bool:
        return self._is_closing or self.is_finished

    def _give_up(self, reason: str, cause: str = "no answer before the end") -> None:
        with self._changed:
            if self.is_finished:
                return
            self.is_finished = True
            self._inbox.clear()
            if self._pending:
                self._lost[reason] += self._pending
                self._report.lost(f"{reason} ({cause})", self._pending)
            self._pending = self._pending_bytes = 0
            self._changed.notify_all()

    # In the sender's thread

    def drain(self, producer: Producer) -> None:
        """Put the next shipments of the inbox, as far as the producer has room, and come back for the others."""
        for _ in range(_STEP_SHIPMENTS):
            try:
                # In one step, because a close that is late empties the inbox in its own thread.
                shipment = self._inbox.popleft()
            except IndexError:
                return
            try:
                delivery = producer.put_nowait(self._stream, partition_key=shipment.partition_key, data=shipment.data)
            except BufferFull:
                # The producer's own bound is below ours; the sender comes back after progress.
                self._inbox.appendleft(shipment)
                producer.internal.make_room()
                return
            except KplError as error:
                self._settle(shipment, reason=type(error).__name__)
            else:
                call_when_finished(delivery, partial(self._has_result, shipment))
            self._taken += 1
        with self._changed:
            self._background.wake()

    def watch_drained(self) -> Callable[[], bool]:
        """Return a function that returns True once the producer has everything that is in the inbox now."""
        with self._changed:
            last = self._taken + len(self._inbox)
        return lambda: self._taken >= last

    def sender_ended(self) -> None:
        """Count what has no result as lost."""
        failure = self._background.failure
        try:
            if failure is not None:
                _logger.warning("nothing can be sent to stream %r: %s", self._stream, failure)
        finally:
            if failure is None:
                self._give_up(_UNKNOWN)
            else:
                self._give_up(SENDER_FAILED, str(failure))

    async def _close_in_loop(self, deadline: float) -> None:
        try:
            producer = await self._background.opened()
            await self._background.put_queued(max(0.0, deadline - time.monotonic()))
            await producer.close(timeout=max(0.0, deadline - time.monotonic()))
        finally:
            self._background.stop()

    def _has_result(self, shipment: Shipment, result: RecordResult) -> None:
        reason = None if result.successful or result.kept else result.error_code or _UNKNOWN
        if reason is not None:
            self._report.lost(f"{reason} ({result.error_message})", shipment.items)
        self._settle(shipment, reason=reason, is_kept=result.kept is not None)

    def _settle(self, shipment: Shipment, *, reason: str | None, is_kept: bool = False) -> None:
        with self._changed:
            if self.is_finished:
                return
            self._is_unanswered = False
            self._pending -= shipment.items
            self._pending_bytes -= shipment.size_bytes
            if reason is not None:
                self._lost[reason] += shipment.items
            elif is_kept:
                self._kept += shipment.items
            else:
                self._delivered += shipment.items
                self._is_stuck = False
            self._changed.notify_all()
