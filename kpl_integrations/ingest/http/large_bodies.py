"""Handle large bodies in slices of a few milliseconds, one body at a time, with the event loop in between.

A body is large if its records, or its decompressed size, may take longer than that. Waiting bodies stand in line by
client, and the clients take turns, so that one client's large bodies delay those of others by one body at most. Small
bodies never wait here: they are decoded between the slices.
"""

import contextlib
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Generator
from typing import Final, TypeVar

import anyio
import anyio.lowlevel

from kpl_core.producer.internal import GroupPut
from kpl_integrations.ingest.admission.clients import ClientRoom
from kpl_integrations.ingest.admission.refusals import Refusal, Refused
from kpl_integrations.ingest.http.bodies import no_room

# A slice ends with the first step after this time, and a step takes about a millisecond.
SLICE_SECONDS: Final = 0.003
# After a slice the loop reads what has arrived, and in the next round it answers the requests that wait in a batch.
_LEAST_ROUNDS: Final = 2
# A shorter round had nothing to do.
_IDLE_SECONDS: Final = 0.000_05

T = TypeVar("T")


class LargeBodies:
    """The turns of large bodies."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._seconds = seconds
        self._clock = clock
        self._is_busy = False
        self._slice = anyio.Lock(fast_acquire=True)
        self._group: GroupPut | None = None
        self._lines: OrderedDict[str, deque[anyio.Event]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def turn(self, room: ClientRoom, size_bytes: int) -> AsyncIterator[None]:
        """Wait for a turn, and have it during the block. The body uses room of its client meanwhile.

        Raises:
            Refused: its client may use no more room, or the body has waited too long.
        """
        has_turn = False
        waiting = anyio.move_on_after(self._seconds)
        held = room.hold(waiting.cancel)
        if not held.try_take(size_bytes):
            raise no_room(room.room)
        try:
            with waiting:
                await self._acquire(room.client)
                has_turn = True
                # From now on it takes a bounded time.
                held.keep()
            if held.is_evicted:
                raise no_room(room.room, is_evicted=True)
            if not has_turn:
                detail = f"this body waited {self._seconds:g} s behind other large bodies; send it again later"
                raise Refused(Refusal.NO_ROOM, detail)
            yield
        finally:
            held.release()
            if has_turn:
                self._release()

    async def run(self, steps: Generator[None, None, T]) -> T:
        """Run all steps in slices, and return their result. After each slice, one of any body, is a pause."""
        clock = self._clock
        finished: list[T] = []
        # What comes before the slices, and after them, takes some milliseconds too.
        await self._pause(0.0)
        while not finished:
            async with self._slice:
                began = clock()
                try:
                    next(steps)
                    while clock() < began + SLICE_SECONDS:
                        next(steps)
                except StopIteration as end:
                    finished.append(end.value)
                await self._pause(clock() - began)
        return finished[0]

    async def _pause(self, seconds: float) -> None:
        """Let the event loop answer the requests that have arrived, and work for as long as a slice of `seconds` ran.

        If it has nothing to do, the pause ends after two rounds.
        """
        began = now = self._clock()
        rounds, is_busy = 0, True
        while rounds < _LEAST_ROUNDS or (is_busy and now < began + seconds):
            await anyio.lowlevel.checkpoint()
            rounds, before, now = rounds + 1, now, self._clock()
            is_busy = now - before > _IDLE_SECONDS

    async def put(self, group: GroupPut) -> None:
        """Put a group in slices; if this task is cancelled, all that are left at once."""
        self._group = group
        try:
            is_left = True
            await self._pause(0.0)
            while is_left:
                async with self._slice:
                    began = self._clock()
                    is_left = group.step()
                    await self._pause(self._clock() - began)
        finally:
            self.finish()

    def finish(self) -> None:
        """Put what is left of a group that is being put, because the gateway closes."""
        if self._group is not None:
            self._group.finish()
            self._group = None

    async def _acquire(self, client: str) -> None:
        if not self._is_busy:
            self._is_busy = True
            return
        turn = anyio.Event()
        self._lines.setdefault(client, deque()).append(turn)
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():
                self._release()
            else:
                line = self._lines[client]
                line.remove(turn)
                if not line:
                    del self._lines[client]
            raise

    def _release(self) -> None:
        """Give the turn to the next body of the client that has waited longest for one."""
        if not self._lines:
            self._is_busy = False
            return
        client, line = self._lines.popitem(last=False)
        line.popleft().set()
        if line:
            self._lines[client] = line
