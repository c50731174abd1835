"""The sender: a producer in a thread and a loop of its own, fed through a bounded inbox.

The SDK's processors call an exporter from their own threads and heed neither its result nor a timeout
(opentelemetry-python issues 4555 and 4568), so retries, deadlines and the books are kept here.
"""

import contextlib
import logging
import threading
import time
from asyncio import Event as AsyncEvent
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from kpl_core import BufferFull, KplError, Producer, RecordResult
from kpl_core.producer.delivery import ResultCallback
from kpl_integrations.exit_safe_loop import ExitSafeLoop
from kpl_integrations.otel.counts import SENDER_FAILED, UNKNOWN
from kpl_integrations.otel.quietly import be_quiet

if TYPE_CHECKING:
    import asyncio

__all__ = ["Sender", "Shipment"]

_logger = logging.getLogger("kpl_integrations.otel")

# Of a shutdown's time, what is kept back for the connections and the thread to end in.
_ENDING_SHARE: Final = 0.1


class Shipment(NamedTuple):
    """One user record to send, and how many spans, log records or data points are in it."""

    partition_key: str
    data: bytes
    items: int

    @property
    def size_bytes(self) -> int:
        """Return what it takes of the buffer."""
        return len(self.partition_key) + len(self.data)


class _Generation(msgspec.Struct, eq=False):
    """What was offered between two flushes: how much of it has no result yet, and how much was lost."""

    pending: int = 0
    lost: int = 0


class Sender:
    """Sends shipments to one stream; used from any thread.

    `delivered`, `kept`, `lost` and `pending` count items, and are read under `changed`.
    """

    def __init__(self, stream: str, *, max_bytes: int, make_producer: Callable[[], Producer]) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._make_producer = make_producer
        self.changed = threading.Condition()
        self._inbox: deque[tuple[Shipment, _Generation]] = deque()
        self._pending_bytes = 0
        self.delivered = self.kept = self.pending = 0
        self.lost: Counter[str] = Counter()
        self._generation = _Generation()
        self._older: list[_Generation] = []
        # Somebody waited in vain; nobody waits again before something has left.
        self._is_stuck = False
        self._is_closing = self._is_ready = self.is_finished = False
        self._is_drain_scheduled = self._is_flush_wanted = False
        self._deadline = 0.0
        self._flushing: set[asyncio.Task[object]] = set()
        self._loop = ExitSafeLoop()
        self._thread = threading.Thread(target=self._run, name="kpl-otel-sender", daemon=True)

    def start(self) -> None:
        """Start the thread; RuntimeError if the interpreter starts none any more."""
        self._thread.start()

    # In anybody's thread

    def offer(self, shipment: Shipment, *, deadline: float) -> bool:
        """Take a shipment as soon as there is room, until the monotonic instant `deadline`; say whether."""
        size = shipment.size_bytes
        with self.changed:
            if not self._has_room(size):
                timeout = 0.0 if self._is_stuck else max(0.0, deadline - time.monotonic())
                self._is_stuck = not self.changed.wait_for(lambda: self._is_over() or self._has_room(size), timeout)
            if self._is_over() or not self._has_room(size):
                return False
            self._inbox.append((shipment, self._generation))
            self._pending_bytes += size
            self.pending += shipment.items
            self._generation.pending += 1
            self._wake()
        return True

    def refused(self, items: int, reason: str) -> None:
        """Count what never came as far as the inbox."""
        with self.changed:
            self.lost[reason] += items
            self._generation.lost += items

    def flush(self, timeout: float) -> bool:
        """Wait until all that was offered before has its result; say whether all since the last flush arrived."""
        with self.changed:
            mine = [*self._older, self._generation]
            self._older = mine
            self._generation = _Generation()
            self._is_flush_wanted = True
            self._wake()
            is_settled = self.changed.wait_for(
                lambda: self.is_finished or not any(each.pending for each in mine), timeout
            )
            is_whole = is_settled and not any(each.lost or each.pending for each in mine)
            self._older = [each for each in self._older if each.pending]
        return is_whole

    def close(self, timeout: float) -> None:
        """Deliver what is there, for `timeout` seconds at most; what has no result then is lost."""
        with self.changed:
            self._deadline = time.monotonic() + timeout
            self._is_closing = True
            self.changed.notify_all()
            if self._is_ready:
                self._call(self._stop.set)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        self._give_up(UNKNOWN)

    def park(self, timeout: float) -> Callable[[], object]:
        """Let the thread stand still, between two steps of its loop, while the process forks; return what ends that.

        A child that is forked in the middle of an import has half a module for ever.
        """
        parked, released = threading.Event(), threading.Event()

        def stand_still() -> None:
            parked.set()
            released.wait(2 * timeout)

        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._call(stand_still)
            parked.wait(timeout)
        return released.set

    def _has_room(self, size: int) -> bool:
        # What is larger than the whole buffer passes alone.
        return self._pending_bytes + size <= self._max_bytes or not self._pending_bytes

    def _is_over(self) -> bool:
        return self._is_closing or self.is_finished

    def _wake(self) -> None:
        if self._is_ready and not self._is_drain_scheduled:
            self._is_drain_scheduled = True
            self._call(self._drain)

    def _call(self, callback: Callable[[], object]) -> None:
        # A loop that is closed has nobody left who listens.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def _give_up(self, reason: str) -> None:
        """Whatever has no result now never gets one."""
        with self.changed:
            if self.is_finished:
                return
            self.is_finished = True
            self._inbox.clear()
            if self.pending:
                self.lost[reason] += self.pending
            self.pending = self._pending_bytes = 0
            self.changed.notify_all()

    # In its own thread

    def _run(self) -> None:
        be_quiet()
        reason = SENDER_FAILED
        try:
            self._loop.run_until_complete(self._main())
            reason = UNKNOWN
        except KplError as error:
            _logger.warning("nothing can be sent to stream %r: %s", self._stream, error)
        finally:
            self._give_up(reason)
            self._loop.close()

    async def _main(self) -> None:
        self._stop = AsyncEvent()
        async with self._make_producer() as producer:
            self._producer = producer
            producer.on_progress(self._progressed)
            with self.changed:
                self._is_ready = True
                is_closing = self._is_closing
                self._wake()
            if not is_closing:
                await self._stop.wait()
            self._drain()
            left = self._deadline - time.monotonic()
            await producer.close(timeout=max(0.0, left * (1 - _ENDING_SHARE)))

    def _progressed(self) -> None:
        if self._inbox and not self._is_drain_scheduled:
            self._drain()

    def _drain(self) -> None:
        """Put what is in the inbox, as far as the producer has room."""
        with self.changed:
            self._is_drain_scheduled = False
            is_flush_wanted, self._is_flush_wanted = self._is_flush_wanted, False
        while self._inbox:
            shipment, generation = self._inbox[0]
            try:
                delivery = self._producer.put_nowait(
                    self._stream, partition_key=shipment.partition_key, data=shipment.data
                )
            except BufferFull:
                # The producer's own bound is below ours; `_progressed` comes back.
                break
            except KplError as error:
                self._inbox.popleft()
                self._settled(shipment, generation, reason=type(error).__name__)
            else:
                self._inbox.popleft()
                ResultCallback(delivery, partial(self._has_result, shipment, generation))
        if is_flush_wanted:
            # Its wait is ours; it is asked only to close what is open.
            task: asyncio.Task[object] = self._loop.create_task(self._producer.flush(timeout=0))
            self._flushing.add(task)
            task.add_done_callback(self._flushing.discard)

    def _has_result(self, shipment: Shipment, generation: _Generation, result: RecordResult) -> None:
        reason = None if result.successful or result.kept else result.error_code or UNKNOWN
        self._settled(shipment, generation, reason=reason, is_kept=result.kept is not None)

    def _settled(
        self, shipment: Shipment, generation: _Generation, *, reason: str | None, is_kept: bool = False
    ) -> None:
        with self.changed:
            if self.is_finished:
                return
            self.pending -= shipment.items
            self._pending_bytes -= shipment.size_bytes
            generation.pending -= 1
            if reason is not None:
                self.lost[reason] += shipment.items
                generation.lost += shipment.items
            elif is_kept:
                self.kept += shipment.items
            else:
                self.delivered += shipment.items
                self._is_stuck = False
            self.changed.notify_all()
