"""How a worker asks the others for what they count at this moment: a datagram to each, and one back when it is told.

Sockets in the folder of the run, named like the snapshots. Whoever does not answer at once is not waited for: its last
snapshot is there.
"""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import anyio
from anyio.abc import UNIXDatagramSocket

__all__ = ["Asking"]

# A worker in the middle of a large request answers after it.
WAIT_SECONDS: Final = 0.25
_ASKED: Final = ".asked"
_ASKS: Final = ".asks"

_logger: Final = logging.getLogger("kpl_integrations.ingest.workers")


class Asking:
    """One worker's two sockets. Open it before the first snapshot is told."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._exits = contextlib.AsyncExitStack()
        self._sockets: tuple[UNIXDatagramSocket, UNIXDatagramSocket] | None = None
        self._number = 0
        self._one_at_a_time = anyio.Lock()

    async def __aenter__(self) -> Self:
        """Open the sockets, if this system can."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                asked = await stack.enter_async_context(await self._socket(_ASKED))
                asks = await stack.enter_async_context(await self._socket(_ASKS))
            except OSError as error:
                # Such as a folder whose path is longer than a socket's may be.
                _logger.warning("workers cannot ask each other (%s); sums are up to half a second old", error)
            else:
                self._sockets = asked, asks
            self._exits = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close them."""
        self._sockets = None
        await self._exits.__aexit__(kind, error, traceback)

    async def _socket(self, ending: str) -> UNIXDatagramSocket:
        return await anyio.create_unix_datagram_socket(local_path=self._path(self._name, ending))

    def _path(self, name: str, ending: str) -> str:
        return str(self._folder / f"{name}{ending}")

    async def run(self, tell: Callable[[], Awaitable[object]]) -> None:
        """Call `tell` whenever somebody asks, until cancelled."""
        while self._sockets is not None:
            asked, _ = self._sockets
            question, asker = await asked.receive()
            await tell()
            # Not over the socket that asks: both could be in the middle of sending.
            await _sent(asked, question, asker)

    async def ask(self, names: Iterable[str]) -> None:
        """Return when these workers have told what they count now, or after a moment."""
        if self._sockets is None:
            return
        _, asks = self._sockets
        async with self._one_at_a_time:
            self._number += 1
            question = b"%d" % self._number
            with anyio.move_on_after(WAIT_SECONDS):
                waiting = sum([await _sent(asks, question, self._path(name, _ASKED)) for name in names])
                while waiting:
                    answer, _ = await asks.receive()
                    # One to an earlier question came too late.
                    waiting -= answer == question


async def _sent(over: UNIXDatagramSocket, what: bytes, to: str) -> bool:
    """Send, if anybody is there: no socket, or nobody behind it, is one that died; a full line is not waited for."""
    with contextlib.suppress(OSError, anyio.BrokenResourceError), anyio.move_on_after(WAIT_SECONDS / 4):
        await over.sendto(what, to)
        return True
    return False
