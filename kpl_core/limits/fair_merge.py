"""Merge several streams into one, each with a share of the output by its weight.

The order is that of the fair queue (start-time fair queuing, `fairness/queue.py`, every item costs 1). While all
streams are ready, the next item comes from the stream with the smallest `emitted / weight`; on a tie, from the one
with the lowest position.

The seed's merge refills one stream after the other in its selecting loop. We differ: a task of its own reads every
stream into a bounded buffer. So

* a stalled stream does not delay the others,
* an idle stream earns no credit,
* the buffered items of a stream that ended or raised are still delivered, and the other streams go on.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, Generic, NoReturn, TypeVar

import anyio
from anyio.lowlevel import checkpoint

from kpl_core.fairness import FairQueue
from kpl_core.limits.rate_limited import AnyStream, opened, require_description
from kpl_core.limits.scoped_items import ScopedItems
from kpl_core.options.policy import FairnessPolicy

T = TypeVar("T")

# What the caller's block may raise, apart from a cancellation. `sys.exit` must keep its own exit status.
_OF_THE_BLOCK: Final = (Exception, SystemExit, KeyboardInterrupt, GeneratorExit)


def fair_merge(
    streams: Sequence[AnyStream[T]] | Mapping[str, AnyStream[T]], policy: FairnessPolicy | None = None
) -> Callable[[], ScopedItems[T]]:
    """Return a description of the fair merge of `streams`. Each stream's items pass unchanged and in order.

        async with fair_merge({"gold": gold, "trial": trial}, FairnessPolicy({"gold": 3}))() as items:
            async for item in items: ...

        async for item in fair_merge(...)(): ...                              # read to its end
        async with aclosing(fair_merge(...)()) as items: ...                  # may be left early

    It buffers at most `max_buffer_per_flow` items of each stream. Leaving the block, by its end, an exception or a
    cancellation, closes every stream and drops the buffered items.

    A stream that raises does not end the others. When all their items are delivered, the iteration raises an
    ExceptionGroup of the streams' exceptions, each with a note that names its stream.

    Args:
        streams: the descriptions, in order or by name. The position or the name is the flow in the policy's weights.
        policy: weights and buffer size; equal weights and 16 items by default.

    Raises:
        TypeError: one of `streams` is not a description.
    """
    pairs: Iterable[tuple[str | int, AnyStream[T]]] = (
        streams.items() if isinstance(streams, Mapping) else enumerate(streams)
    )
    named = dict(pairs)
    for flow, stream in named.items():
        require_description(f"stream {flow!r}", stream)
    applied = FairnessPolicy() if policy is None else policy

    @asynccontextmanager
    async def merged() -> AsyncIterator[AsyncIterator[T]]:
        merge = _Merge(named, applied)
        raised: BaseException | None = None
        async with anyio.create_task_group() as tasks:
            for place in range(len(named)):
                tasks.start_soon(merge.read, place)
            try:
                yield merge
            except _OF_THE_BLOCK as error:
                # Raised below: the task group would wrap it in a group.
                raised = error
            finally:
                merge.close()
                tasks.cancel_scope.cancel()
        if raised is not None:
            raise raised

    return partial(ScopedItems, merged)


class _Source(Generic[T]):
    """One stream, as its reader task sees it."""

    def __init__(self, flow: str | int, stream: AnyStream[T], free: int) -> None:
        self.flow = flow
        self.stream = stream
        # Free places in the buffer. The reader takes an item from the stream only if there is one.
        self.free = free
        # Set while the reader waits for a free place.
        self.room: anyio.Event | None = None
        # The reader was woken and has not run yet.
        self.is_due = True


class _Merge(AsyncIterator[T]):
    """The running merge. One task reads each stream; the iteration takes items from the fair queue."""

    def __init__(self, streams: Mapping[str | int, AnyStream[T]], policy: FairnessPolicy) -> None:
        self._sources = [_Source(flow, stream, policy.max_buffer_per_flow) for flow, stream in streams.items()]
        # A reader wakes when half of its buffer is free, so that it reads several items per wake-up.
        self._worth_reading = (policy.max_buffer_per_flow + 1) // 2
        self._queue = FairQueue[tuple[_Source[T], T]](
            weight_of=lambda place: policy.weight_of(self._sources[place].flow), flows=range(len(self._sources))
        )
        self._reading = len(self._sources)
        self._due = len(self._sources)
        self._changed = anyio.Event()
        self._failures: list[Exception] = []
        self._is_closed = False

    async def read(self, place: int) -> None:
        """Read one stream into the queue until it ends."""
        source = self._sources[place]
        try:
            self._start_turn(source)
            async with opened(source.stream()) as items:
                async for item in items:
                    self._queue.push((source, item), place, 1)
                    source.free -= 1
                    self._changed.set()
                    if not source.free:
                        source.room = anyio.Event()
                        await source.room.wait()
                        self._start_turn(source)
        except Exception as error:  # noqa: BLE001 - the iteration raises it after the other items
            error.add_note(f"raised by stream {source.flow!r} of a fair_merge")
            self._failures.append(error)
        finally:
            self._start_turn(source)
            self._reading -= 1
            self._changed.set()

    def _start_turn(self, source: _Source[T]) -> None:
        source.room = None
        if source.is_due:
            source.is_due = False
            self._due -= 1

    async def __anext__(self) -> T:
        # Woken readers run first, so that a stream that is always ready is always in the queue.
        await checkpoint()
        while self._due:
            await checkpoint()
        while not self._queue:
            if self._is_closed:
                raise anyio.ClosedResourceError
            if not self._reading:
                self._end()
            if self._changed.is_set():
                self._changed = anyio.Event()
            await self._changed.wait()
        source, item = self._queue.pop()
        source.free += 1
        if source.room is not None and not source.is_due and source.free >= self._worth_reading:
            source.is_due = True
            self._due += 1
            source.room.set()
        return item

    def _end(self) -> NoReturn:
        failures, self._failures = self._failures, []
        if failures:
            message = f"{len(failures)} of {len(self._sources)} merged streams failed"
            raise ExceptionGroup(message, failures)
        raise StopAsyncIteration

    def close(self) -> None:
        """Drop the buffered items and end the iteration."""
        self._is_closed = True
        self._queue.drain()
        self._changed.set()
