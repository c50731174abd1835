"""Which of the gateway's workers a process is, and its connection to the supervisor: a socket pair.

A message is a line:

    supervisor -> worker      the worker's instructions (the first line, JSON)
                              report N       send a report now
                              stop SIGNAL    the supervisor received this signal
                              reload         read the tenants and the certificate again
                              accept N ...   accept from the sockets of these workers too, and from no others: they
                                             are dead, or do not listen yet
                              sum N {...}    the answer to `totals N`; N is 0 for a sum that another worker asked for,
                                             and for the first one, which follows the instructions
    worker -> supervisor      ready          it listens
                              leaving        it stops: other workers accept from its socket
                              report N {...} its counts, taken after request N arrived (`WorkerTotals`)
                              totals N       asks for the sum over all workers

The end of the stream means that the other process has ended. A line that a kill cut short is dropped.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from socket import socket
from typing import Final, Self

import anyio
import msgspec

from kpl_integrations.gateway_figures import process_name
from kpl_integrations.ingest.workers.record_counts import RecordCounts

# A report has about 200 bytes for each tenant. Larger lines are a mistake.
_MAX_MESSAGE_BYTES: Final = 1 << 28


class WorkerIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of one run of `kpl serve --workers`.

    Args:
        worker: its number, from 0; the process that replaces a dead one has the same number.
        count: how many processes share the rates, including those that only drain an orphaned spool.
        folder: the coordination folder of this run, readable by its user only.
        drains: the orphaned spool of a process that only drains it; "" for one that takes requests.
    """

    worker: int
    count: int
    folder: str
    drains: str = ""

    @property
    def name(self) -> str:
        """Return its name in stores, which no other run uses. A replacement takes over the dead worker's leases."""
        return f"{Path(self.folder).name}-{self.worker}"

    @property
    def process_name(self) -> str:
        """Return its name in logs, by which an operator finds it."""
        return process_name(self.worker, self.drains)


class Descriptors(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker inherits: its counters in shared memory, and the listening sockets of all workers by number."""

    counts: int
    sockets: list[int] = []

    @property
    def all(self) -> tuple[int, ...]:
        """All of them."""
        return (self.counts, *self.sockets)


class Channel:
    """One end of the connection. Messages contain no newline.

    It writes through a descriptor of its own. A failed write means that the other process has ended; the transport that
    reads must stay open, because the last messages of that process may still be in the socket.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sending: socket) -> None:
        self._reader, self._writer, self._sending = reader, writer, sending
        self._unsent = bytearray()
        self._send_unsent_task: asyncio.Task[None] | None = None

    @classmethod
    async def over(cls, end: socket) -> Self:
        """Return a channel over one end of a socket pair, and own it."""
        sending = end.dup()
        return cls(*await asyncio.open_unix_connection(sock=end, limit=_MAX_MESSAGE_BYTES), sending)

    def post(self, message: bytes) -> None:
        """Send a short message without waiting; do nothing if the other process has ended."""
        line = message + b"\n"
        if not self._unsent:
            try:
                line = line[self._sending.send(line) :]
            except BlockingIOError:
                pass
            except OSError:
                return
            if line:
                self._send_unsent_task = asyncio.create_task(self._send_unsent())
        self._unsent += line

    async def send(self, message: bytes) -> None:
        """Send a message; do nothing if the other process has ended. Cancellation does not cut a message short.

        It returns when the kernel has the whole message, so a process may exit after it.
        """
        self.post(message)
        if self._send_unsent_task is not None:
            await asyncio.shield(self._send_unsent_task)

    def offer(self, message: bytes) -> None:
        """Send a message without waiting, unless the other process has not taken the last ones: it may hang."""
        if not self._unsent:
            self.post(message)

    async def receive(self) -> bytes | None:
        """Return the next message, or None when the other process has ended."""
        try:
            line = await self._reader.readline()
        except OSError:
            return None
        return line[:-1] if line.endswith(b"\n") else None

    def close(self) -> None:
        """Close this end."""
        if self._send_unsent_task is not None:
            self._send_unsent_task.cancel()
        self._writer.close()
        self._sending.close()

    async def _send_unsent(self) -> None:
        try:
            while self._unsent:
                line = bytes(self._unsent)
                await asyncio.get_running_loop().sock_sendall(self._sending, line)
                del self._unsent[: len(line)]
        except OSError:
            self._unsent.clear()


class StopRequests:
    """Passes on what asks a worker to stop. Pure.

    A service manager may signal the worker directly while the supervisor passes on the same signal. That is one
    request. The supervisor's second one means "do not wait", as a second signal to a gateway of one process does.
    """

    def __init__(self, stop: Callable[[signal.Signals], object]) -> None:
        self._stop = stop
        self._is_stopping = False
        self._passed_on = 0

    def signalled(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Stop, once: this process received a signal, or its supervisor has ended."""
        if not self._is_stopping:
            self._is_stopping = True
            self._stop(number)

    def passed_on(self, number: signal.Signals) -> None:
        """Stop: the supervisor received a signal."""
        self._passed_on += 1
        if self._passed_on > 1:
            self._stop(number)
        else:
            self.signalled(number)


class SupervisorLink:
    """A worker's side: follows the supervisor while `run` runs, and asks it for the sum over all workers."""

    def __init__(self, channel: Channel, identity: WorkerIdentity, counts: RecordCounts) -> None:
        self.channel = channel
        self.identity = identity
        self.counts = counts
        # Accepts from the sockets of these workers; set before the worker listens.
        self.accept_from: Callable[[Collection[int]], object] = lambda _: None
        # Reads files again; set before the worker listens.
        self.reload: Callable[[], object] = lambda: None
        self.request = 0
        # Sends a report; set while the gateway is open.
        self.send_report: Callable[[], Awaitable[None]] | None = None
        # The last sum over all workers, as JSON; whichever worker asked for it.
        self.latest: bytes | None = None
        self._number = 0
        self._answered = anyio.Event()
        self._is_lost = False

    async def run(self, requests: StopRequests) -> None:
        """Handle the supervisor's messages until it has ended, which stops the worker."""
        try:
            while (message := await self.channel.receive()) is not None:
                kind, _, rest = message.partition(b" ")
                if kind == b"report" and self.send_report is not None:
                    self.request = int(rest)
                    await self.send_report()
                elif kind == b"stop":
                    requests.passed_on(signal.Signals(int(rest)))
                elif kind == b"reload":
                    self.reload()
                elif kind == b"accept":
                    self.accept_from([int(number) for number in rest.split()])
                elif kind == b"sum":
                    number, _, self.latest = rest.partition(b" ")
                    if int(number) == self._number:
                        self._answered.set()
        finally:
            self._is_lost = True
            self._answered.set()
            requests.signalled()

    async def first_sum(self) -> None:
        """Return when there is a sum, or the supervisor has ended. Call it before any question."""
        await self._answered.wait()

    async def ask_for_sum(self) -> bool:
        """Return True when `latest` answers this question, False if the supervisor has ended.

        One caller asks at a time, and sets a timeout.
        """
        if not self._is_lost:
            self._number += 1
            self._answered = anyio.Event()
            await self.channel.send(b"totals %d" % self._number)
            await self._answered.wait()
        return not self._is_lost
