"""Many streams into one, each getting its weight's share of the consumer's attention.

The order is the fair queue's (start-time fair queuing, fair_queue.py, every item costing one):
while all streams are ready it is the smallest `emitted / weight`, the lowest position on ties.

Where we differ from the seed's merge, which refills one stream after the other inside the
selecting loop: every stream is read by a task of its own into a bounded buffer, so that

* a stream that stalls delays nobody,
* an idle stream earns no credit for the time it was away,
* what a stream had buffered when it ended or raised is still delivered, and the others go on.
"""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final, Generic, NoReturn, TypeVar

import anyio
from anyio.lowlevel import checkpoint

from kpl_core.fairness import FairQueue
from kpl_core.limits.description import AnyStream, ScopedStream, opened, require_description
from kpl_core.options.policy import FairnessPolicy

__all__ = ["fair_merge"]

T = TypeVar("T")

# Whatever the block raises, but a cancellation: `sys.exit` in it ends the process with its own status, too.
_OF_THE_BLOCK: Final = (Exception, SystemExit, KeyboardInterrupt, GeneratorExit)


def fair_merge(
    streams: Sequence[AnyStream[T]] | Mapping[str, AnyStream[T]], policy: FairnessPolicy | None = None
) -> ScopedStream[T]:
    """Describe the fair merge of `streams`; items pass through untouched, in order within each stream.

        async with fair_merge({"gold": gold, "trial": trial}, FairnessPolicy({"gold": 3}))() as items:
            async for item in items: ...

    At most `max_buffer_per_flow` items of each stream are held. Leaving the block, by its end, an
    exception or a cancellation, closes every stream; what was buffered then is dropped.

    A stream that raises ends alone. Once everything else is delivered, the iteration raises an
    ExceptionGroup of what the streams raised, each with a note that names its stream.

    Args:
        streams: descriptions, in order or by name: the flows that the policy's weights name.
        policy: weights and buffer; equal weights and 16 items by default.

    Raises:
        TypeError: one of `streams` is no description.
    """
    pairs: Iterable[tuple[str | int, AnyStream[T]]] = (
        streams.items() if isinstance(streams, Mapping) else enumerate(streams)
    )
    named = dict(pairs)
    for flow, stream in named.items():
        require_description(f"stream {flow!r}", stream)
    obeyed = FairnessPolicy() if policy is None else policy

    @asynccontextmanager
    async def merged() -> AsyncIterator[AsyncIterator[T]]:
        merge = _Merge(named, obeyed)
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

    return merged


class _Source(Generic[T]):
    """One stream, its reader's side of the merge."""

    __slots__ = ("flow", "free", "is_due", "room", "stream")

    def __init__(self, flow: str | int, stream: AnyStream[T], free: int) -> None:
        self.flow = flow
        self.stream = stream
        # Places in the buffer; the reader takes an item from the stream only if there is one.
        self.free = free
        # Set while the reader waits for a place.
        self.room: anyio.Event | None = None
        # The reader was told to go on, and has not had its turn yet.
        self.is_due = True


class _Merge(AsyncIterator[T]):
    """The running merge. One task reads each stream; whoever iterates takes turns from the fair queue."""

    def __init__(self, streams: Mapping[str | int, AnyStream[T]], policy: FairnessPolicy) -> None:
        self._sources = [_Source(flow, stream, policy.max_buffer_per_flow) for flow, stream in streams.items()]
        # Half of the buffer free wakes a reader: it then reads several items a turn.
        self._worth_reading = (policy.max_buffer_per_flow + 1) // 2
        self._queue = FairQueue[tuple[_Source[T], T]](
            weight_of=lambda place: policy.weight_of(self._sources[place].flow), flows=range(len(self._sources))
        )
        self._reading = len(self._sources)
        self._due = len(self._sources)
        self._news = anyio.Event()
        self._failures: list[Exception] = []
        self._is_closed = False

    async def read(self, place: int) -> None:
        """Read one stream into the queue until it ends."""
        source = self._sources[place]
        try:
            self._has_turn(source)
            async with opened(source.stream()) as items:
                async for item in items:
                    self._queue.push((source, item), place, 1)
                    source.free -= 1
                    self._news.set()
                    if not source.free:
                        source.room = anyio.Event()
                        await source.room.wait()
                        self._has_turn(source)
        except Exception as error:  # noqa: BLE001 - the iteration raises it when the others are done
            error.add_note(f"raised by stream {source.flow!r} of a fair_merge")
            self._failures.append(error)
        finally:
            self._has_turn(source)
            self._reading -= 1
            self._news.set()

    def _has_turn(self, source: _Source[T]) -> None:
        source.room = None
        if source.is_due:
            source.is_due = False
            self._due -= 1

    async def __anext__(self) -> T:
        # Readers that can go on do so first: a stream that is always ready must always be in the queue.
        await checkpoint()
        while self._due:
            await checkpoint()
        while not self._queue:
            if self._is_closed:
                raise anyio.ClosedResourceError
            if not self._reading:
                self._end()
            if self._news.is_set():
                self._news = anyio.Event()
            await self._news.wait()
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
        """Drop what is buffered and refuse to go on."""
        self._is_closed = True
        self._queue.drain()
        self._news.set()
