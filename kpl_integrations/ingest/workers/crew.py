"""Keeps a gateway's workers alive, and ends them in order.

Each worker is a process with a socket of its own. One that dies is replaced under the same number, at once if it had
lived for a while, and more and more slowly if it dies again and again; the others do not notice. After eight such
deaths in a row its socket is closed until the next one listens, so that nobody waits for one that may never come. What
it is to be comes through its standard input: when that ends, because its crew is gone, it ends in order.
"""

import contextlib
import logging
import signal
import time
from collections.abc import Callable, Sequence
from socket import socket
from typing import Final

import anyio
import msgspec
from anyio.abc import Process

from kpl_core.backoff import ExponentialBackoff
from kpl_integrations.ingest.stats.totals import Totals
from kpl_integrations.ingest.workers.burial import Burial
from kpl_integrations.ingest.workers.door import Door
from kpl_integrations.ingest.workers.seat import Seat

__all__ = ["READY", "Crew", "WorkerFailed"]

READY: Final = b"ready\n"
# One that lived shorter died of something that is still there.
_LONG_LIFE_SECONDS: Final = 10.0
_RESTART_BACKOFF: Final = ExponentialBackoff(base_seconds=0.25, cap_seconds=10.0)
# Some 25 s of pauses: by then it is something that only a person can cure, such as a damaged spool.
_HOPELESS_DEATHS: Final = 8
# The status of a process that could not be started.
_NOT_STARTED: Final = 1

_logger: Final = logging.getLogger("kpl_integrations.ingest.workers")

# From a worker's seat and the number of its socket's file to the line it begins with.
Briefing = Callable[[Seat, int | None], bytes]


class WorkerFailed(Exception):  # noqa: N818 - reads as a sentence where it is raised
    """A worker could not begin; it said why on stderr. `status` is its exit status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"a worker could not begin and ended with status {status}")
        self.status = status


class Crew:
    """All workers of one gateway, from `run` until the last has ended.

    Args:
        command: starts a worker.
        briefing: what it is told first.
        sockets: one for each worker, listening; the crew closes them.
        seats: those of the first lives; those after the sockets' have none, and end when they are done.
        burial: keeps the books of the dead.
        grace_seconds: after a signal, how long a worker may take until it is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        briefing: Briefing,
        *,
        sockets: Sequence[socket],
        seats: Sequence[Seat],
        burial: Burial,
        grace_seconds: float,
    ) -> None:
        self._command = list(command)
        self._briefing = briefing
        self._doors = [Door(each) for each in sockets]
        self._seats = list(seats)
        self._burial = burial
        self._grace_seconds = grace_seconds
        self._alive: dict[int, Process] = {}
        self._stopped = anyio.Event()
        self._number = signal.SIGTERM
        self._unready = set(range(len(seats)))
        self._all_ready = anyio.Event()
        self._failed: int | None = None

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Pass a signal on to all workers; the first one ends the crew."""
        self._number = number
        self._stopped.set()
        # Theirs stay open: until they have closed, they answer. After that nobody may wait in a line without an end.
        self._close_sockets()
        for process in self._alive.values():
            _send(process, number)

    async def run(self, *, started: Callable[[], object] = lambda: None) -> Totals:
        """Serve until `stop`; return what became of all records.

        Raises:
            WorkerFailed: one could not begin; the others were ended.
        """
        try:
            async with anyio.create_task_group() as watching:
                watching.start_soon(self._end_late_ones)
                async with anyio.create_task_group() as tasks:
                    for place in range(len(self._seats)):
                        tasks.start_soon(self._keep, place)
                    await self._all_ready.wait()
                    if not self._stopped.is_set():
                        started()
                watching.cancel_scope.cancel()
        finally:
            self._close_sockets()
        if self._failed is not None:
            raise WorkerFailed(self._failed)
        return await self._burial.accounts()

    async def _keep(self, place: int) -> None:
        """Have a living process in this place until the crew stops."""
        seat = self._seats[place]
        door = self._doors[place] if place < len(self._doors) else None
        quick_deaths = status = 0
        while not self._stopped.is_set():
            began_at = time.monotonic()
            status = await self._live(place, seat, door)
            if self._stopped.is_set() or place in self._unready or (status == 0 and door is None):
                break
            await self._burial.bury(seat)
            quick_deaths = quick_deaths + 1 if time.monotonic() - began_at < _LONG_LIFE_SECONDS else 0
            if door is not None and quick_deaths >= _HOPELESS_DEATHS:
                door.shut()
            if door is not None and quick_deaths == _HOPELESS_DEATHS:
                text = "worker %d died %d times in a row; until another listens, the others get all connections"
                _logger.error(text, seat.worker, quick_deaths)
            pause = _RESTART_BACKOFF.longest_seconds(quick_deaths) if quick_deaths else 0.0
            _logger.warning("worker %d %s; another takes its place in %g s", seat.worker, _ended(status), pause)
            with anyio.move_on_after(pause):
                await self._stopped.wait()
            seat = msgspec.structs.replace(seat, life=seat.life + 1)
        else:
            return
        if status:
            # One that ended in order has told its totals; this one may have more than it told.
            await self._burial.bury(seat)
            if place in self._unready and not self._stopped.is_set():
                self._failed = status
                self.stop()
            else:
                _logger.warning("worker %d %s while it was to end", seat.worker, _ended(status))
        self._is_ready(place)

    async def _live(self, place: int, seat: Seat, door: Door | None) -> int:
        """Run one process to its end; return its status."""
        try:
            descriptor = None if door is None else door.descriptor()
            process = await anyio.open_process(
                self._command,
                stderr=None,
                # Ctrl-C reaches the crew, which passes it on: twice would mean "hurry".
                start_new_session=True,
                pass_fds=() if descriptor is None else (descriptor,),
            )
        except OSError as error:
            # No memory, files or processes left, perhaps for a moment only: the others live on.
            _logger.warning("worker %d could not be started: %s", seat.worker, error.strerror or error)
            return _NOT_STARTED
        self._alive[place] = process
        try:
            assert process.stdin is not None  # noqa: S101 - pipes are the default
            # One that died at once is seen by its status.
            with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await process.stdin.send(self._briefing(seat, descriptor))
            if self._stopped.is_set():
                _send(process, self._number)
            await self._await_ready(place, process)
            return await process.wait()
        finally:
            del self._alive[place]
            with anyio.CancelScope(shield=True):
                await process.aclose()

    async def _await_ready(self, place: int, process: Process) -> None:
        assert process.stdout is not None  # noqa: S101 - pipes are the default
        said = b""
        with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            while READY not in said:
                said += await process.stdout.receive()
            self._is_ready(place)

    def _is_ready(self, place: int) -> None:
        self._unready.discard(place)
        if not self._unready or self._stopped.is_set():
            self._all_ready.set()

    async def _end_late_ones(self) -> None:
        await self._stopped.wait()
        self._all_ready.set()
        await anyio.sleep(self._grace_seconds)
        for place, process in self._alive.items():
            worker = self._seats[place].worker
            _logger.error("worker %d did not end within %g s and is killed", worker, self._grace_seconds)
            _send(process, signal.SIGKILL)

    def _close_sockets(self) -> None:
        for each in self._doors:
            each.close()


def _send(process: Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def _ended(status: int) -> str:
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
