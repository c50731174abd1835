"""Keeps a gateway's workers alive, adds up what they count, and stops them in order.

Each worker is a process that is started, not forked, with a listening socket of its own. One that dies is replaced
under the same number: at once if it lived for a while, with exponential backoff if it dies again and again. Until the
replacement listens, another worker accepts the connections of that socket. If no other runs, they wait; after eight
quick exits in a row the socket is closed until a worker listens. A worker whose supervisor has ended stops by itself.

Why this is not a standard supervisor: docs/decisions/0023 and 0041.
"""

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from socket import socket, socketpair
from subprocess import DEVNULL
from typing import Final

import anyio
import msgspec
from anyio.abc import Process, TaskGroup

from kpl_core.backoff_formula import ExponentialBackoff
from kpl_integrations.gateway_figures import SILENT_SECONDS
from kpl_integrations.ingest.http.listening import HAS_OWN_SOCKETS, bound_socket
from kpl_integrations.ingest.stats import GatewayTotals
from kpl_integrations.ingest.workers.link import Channel, Descriptors, WorkerIdentity
from kpl_integrations.ingest.workers.record_counts import CountsMemory
from kpl_integrations.ingest.workers.totals import DeadTotals, WorkerTotals, decode_report, encode, sum_of

# A process that lived shorter died of something that is still there.
_LONG_LIFE_SECONDS: Final = 10.0
_RESTART_BACKOFF: Final = ExponentialBackoff(base_seconds=0.25, cap_seconds=10.0)
# About 25 s of backoff. What kills workers for that long, such as a damaged spool, needs an operator.
_MAX_QUICK_DEATHS: Final = 8
# The status of a process that could not be started.
_NOT_STARTED: Final = 1
# A worker in the middle of a large request reports after it.
_REPORT_SECONDS: Final = 0.5
_LAST_MESSAGES_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 1.0

_logger: Final = logging.getLogger("kpl_integrations.ingest.workers")

# Takes a worker's identity and what it inherits, and returns its instructions: one line.
Instructions = Callable[[WorkerIdentity, Descriptors], bytes]


class WorkerFailed(Exception):  # noqa: N818 - reads as a sentence where it is raised
    """A worker could not start; it wrote the reason to stderr."""


class WorkerSocket:
    """One worker number's listening socket, which outlives the worker's process.

    Where each worker has its own socket, the kernel deals connections to it while it is open. Elsewhere the workers
    share one, so an abandoned socket need not be closed.
    """

    def __init__(self, listening: socket) -> None:
        self._socket = listening
        self._is_closed = False
        self._host, self._port = listening.getsockname()[:2]

    def descriptor(self) -> int:
        """Return the descriptor for the next process; bind the socket again if it was closed, which may raise OSError.

        A socket bound again does not listen before its worker does.
        """
        if self._is_closed:
            self._socket = bound_socket(self._host, self._port, is_shared=True)
            self._is_closed = False
        return self._socket.fileno()

    def abandon(self) -> None:
        """Refuse connections until a process listens, and reset those that wait: no worker runs that could answer."""
        if HAS_OWN_SOCKETS:
            self.close()

    def close(self) -> None:
        """Close the socket."""
        self._is_closed = True
        self._socket.close()


class _Worker:
    """One worker number: its socket and counters, its process if one runs, and what that reported last."""

    def __init__(self, identity: WorkerIdentity, listening: WorkerSocket | None, memory: CountsMemory) -> None:
        self.identity = identity
        self.socket = listening
        self.memory = memory
        self.is_ready = False
        # A process runs or is being started: it may have all sockets.
        self.has_process = False
        # How many of its processes in a row died soon.
        self.quick_deaths = 0
        # Its process accepts connections, and was not asked to stop.
        self.is_accepting = False
        # The workers from whose sockets its process accepts too.
        self.accepts_from: list[int] = []
        self.process: Process | None = None
        self.channel: Channel | None = None
        self.report: WorkerTotals | None = None
        self.reported_at = 0.0
        self.is_silent = False
        # The last request that a report answered.
        self.answered = 0
        self.changed = anyio.Event()

    def take_report(self, message: bytes) -> None:
        number, _, body = message.removeprefix(b"report ").partition(b" ")
        try:
            self.report = decode_report(body)
        except msgspec.DecodeError as error:
            # A new version may have been installed while this supervisor runs.
            _logger.error("the report of %s cannot be read: %s", self.identity.process_name, error)  # noqa: TRY400
        else:
            self.reported_at = time.monotonic()
        self.answered = int(number)
        self.notify()

    def aged_report(self) -> WorkerTotals | None:
        """Return the last report with its age, None without one."""
        age = time.monotonic() - self.reported_at
        return None if self.report is None else msgspec.structs.replace(self.report, age_seconds=age)

    def log_silence(self) -> None:
        """Log once that the process has stopped to report, and once that it reports again."""
        report = self.aged_report()
        was_silent, self.is_silent = self.is_silent, report is not None and report.age_seconds > SILENT_SECONDS
        if report is None or was_silent == self.is_silent:
            return
        if self.is_silent:
            text = (
                "%s has not reported for %.0f s: if it hangs, take a stack (`py-spy dump --pid %d`) and kill it; "
                "another one takes its place"
            )
            _logger.warning(text, self.identity.process_name, report.age_seconds, report.process_id)
        else:
            _logger.info("%s reports again", self.identity.process_name)

    def notify(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()

    async def reported(self, request: int) -> None:
        """Return when a report answers this request; at once if no process runs that has reported before."""
        while self.channel is not None and self.report is not None and self.answered < request:
            await self.changed.wait()

    @property
    def is_dead(self) -> bool:
        return self.process is None or self.process.returncode is not None

    def post(self, message: bytes) -> None:
        if self.channel is not None:
            self.channel.post(message)


class Supervisor:
    """All workers of one gateway, from `run` until the last has ended.

    Args:
        command: starts a worker.
        instructions: returns what a worker is sent first.
        sockets: one for each worker that takes requests, listening; the supervisor closes them.
        identities: of all workers. Those beyond the sockets drain an orphaned spool, and exit when it is empty.
        grace_seconds: how long a worker may take to stop until it is killed.

    Raises:
        OSError: there is no memory for the counters of the workers.
    """

    def __init__(
        self,
        command: Sequence[str],
        instructions: Instructions,
        *,
        sockets: Sequence[socket],
        identities: Sequence[WorkerIdentity],
        grace_seconds: float,
    ) -> None:
        self._command = list(command)
        self._instructions = instructions
        self._grace_seconds = grace_seconds
        self._sockets = [WorkerSocket(each) for each in sockets]
        unbound = [None] * (len(identities) - len(sockets))
        self._memories = [CountsMemory() for _ in identities]
        parts = zip(identities, [*self._sockets, *unbound], self._memories, strict=True)
        self._workers = [_Worker(*each) for each in parts]
        self._dead = DeadTotals()
        self._request = 0
        self._signals: list[signal.Signals] = []
        self._stopping = anyio.Event()
        self._all_ready = anyio.Event()
        self._failed: int | None = None

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Pass a signal on to all workers; the first one stops the gateway."""
        self._signals.append(number)
        self._stopping.set()
        # The workers have descriptors of their own, and answer until they close them. Then no connection may wait here.
        self._close_sockets()
        for worker in self._workers:
            worker.post(b"stop %d" % number)

    def reload(self) -> None:
        """Let all workers read their tenants and their certificate again, as for SIGHUP."""
        for worker in self._workers:
            worker.post(b"reload")

    def totals(self) -> GatewayTotals:
        """Return the sum over all workers, as they reported it last."""
        return sum_of([report for each in self._workers if (report := each.aged_report()) is not None], self._dead)

    async def run(self, *, started: Callable[[], object] = lambda: None) -> GatewayTotals:
        """Serve until `stop`; return the sum over all workers. `started` is called when all are ready.

        Raises:
            WorkerFailed: a worker could not start; the others were stopped.
        """
        try:
            async with anyio.create_task_group() as background:
                background.start_soon(self._kill_late_workers)
                background.start_soon(self._log_silent_workers)
                async with anyio.create_task_group() as tasks:
                    for worker in self._workers:
                        tasks.start_soon(self._run_and_restart, worker, background)
                    await self._all_ready.wait()
                    if not self._stopping.is_set():
                        started()
                background.cancel_scope.cancel()
        finally:
            self._close_sockets()
            for memory in self._memories:
                memory.close()
        if self._failed is not None:
            message = f"a worker could not start and exited with status {self._failed}; its message is above"
            raise WorkerFailed(message)
        return self.totals()

    async def _run_and_restart(self, worker: _Worker, background: TaskGroup) -> None:
        """Run one process after the other under this worker's number, until the supervisor stops."""
        name = worker.identity.process_name
        while not self._stopping.is_set():
            started_at = time.monotonic()
            worker.has_process = True
            status = await self._run_process(worker, background)
            worker.has_process = False
            if status == 0 and self._stopping.is_set():
                # It ended in order, and its last report is final.
                break
            if status == 0 and worker.socket is None:
                # Its spool is drained. It is no worker any more: a report that ages would look like one that hangs.
                if worker.report is not None:
                    self._dead.add_ended(worker.report)
                worker.report = None
                break
            lost = self._dead.add(worker.identity.worker, worker.report, worker.memory.read())
            worker.report = None
            if lost:
                _logger.error("%s died with %d acknowledged records, which are lost", name, lost)
            if self._stopping.is_set():
                _logger.warning("%s %s while stopping", name, _ended(status))
                break
            if not worker.is_ready:
                self._failed = status
                # SIGINT: the others need not wait for load balancers to notice.
                self.stop(signal.SIGINT)
                break
            is_quick = time.monotonic() - started_at < _LONG_LIFE_SECONDS
            worker.quick_deaths = worker.quick_deaths + 1 if is_quick else 0
            backoff_seconds = _RESTART_BACKOFF.longest_seconds(worker.quick_deaths) if worker.quick_deaths else 0.0
            _logger.warning("%s %s; it is replaced in %g s", name, _ended(status), backoff_seconds)
            if worker.socket is not None and worker.quick_deaths == _MAX_QUICK_DEATHS:
                text = "%s died %d times in a row; the other workers get its connections until it listens"
                _logger.error(text, name, worker.quick_deaths)
            self._abandon_sockets()
            with anyio.move_on_after(backoff_seconds):
                await self._stopping.wait()
        self._set_ready(worker)

    def _abandon_sockets(self) -> None:
        """Close the sockets of all workers that die again and again, if no process runs that has a socket.

        One that runs has the sockets of all. It would keep them open: closed here, no process would accept from them.
        """
        workers = [(each, each.socket) for each in self._workers if each.socket is not None]
        if not any(each.has_process for each, _ in workers):
            for each, listening in workers:
                if each.quick_deaths >= _MAX_QUICK_DEATHS:
                    listening.abandon()

    async def _run_process(self, worker: _Worker, background: TaskGroup) -> int:
        """Run one process to its end; return its exit status."""
        try:
            worker.process, own, instructions = await self._start(worker)
        except OSError as error:
            # There may be no memory, files or processes left for a moment; the other workers are not affected.
            _logger.warning("%s could not be started: %s", worker.identity.process_name, error.strerror or error)
            return _NOT_STARTED
        async with worker.process, anyio.create_task_group() as tasks:
            worker.channel = channel = await Channel.over(own)
            worker.answered = 0
            # Nothing awaits in between: a signal is sent once, here or by `stop`.
            channel.post(instructions)
            channel.post(b"sum 0 " + encode(self.totals()))
            for number in self._signals:
                worker.post(b"stop %d" % number)
            tasks.start_soon(self._receive, worker, channel, background)
            status = await worker.process.wait()
            self._set_accepting(worker, is_accepting=False)
            # What it sent last is in the socket's buffer, and the end of the stream follows.
            tasks.cancel_scope.deadline = anyio.current_time() + _LAST_MESSAGES_SECONDS
        channel.close()
        worker.channel = worker.process = None
        worker.notify()
        return status

    async def _start(self, worker: _Worker) -> tuple[Process, socket, bytes]:
        """Start a process; return it with this end of its connection, and its instructions."""
        own, other = socketpair()
        with contextlib.ExitStack() as copies:
            copies.enter_context(other)
            try:
                descriptors = Descriptors(counts=worker.memory.descriptor, sockets=self._copies(worker, copies))
                process = await anyio.open_process(
                    self._command,
                    stdin=other.fileno(),
                    stdout=DEVNULL,
                    stderr=None,
                    # Ctrl-C reaches the supervisor only, which passes it on.
                    start_new_session=True,
                    pass_fds=descriptors.all,
                )
            except OSError:
                own.close()
                raise
            return process, own, self._instructions(worker.identity, descriptors)

    def _copies(self, worker: _Worker, copies: contextlib.ExitStack) -> list[int]:
        """Return descriptors of all sockets for a process that is about to start, open until `copies` is closed.

        `stop` closes the sockets at any moment, and their numbers may then belong to other files. Sockets that were
        closed before are bound again: then no process runs that has the old ones.
        """
        made = []
        for each in self._sockets if worker.socket is not None else []:
            made.append(os.dup(each.descriptor()))
            copies.callback(os.close, made[-1])
        return made

    async def _receive(self, worker: _Worker, channel: Channel, background: TaskGroup) -> None:
        """Handle a worker's messages until its process has ended."""
        while (message := await channel.receive()) is not None:
            if message == b"ready":
                self._set_ready(worker)
                # Not if it has died since.
                is_accepting = worker.socket is not None and not worker.is_dead
                self._set_accepting(worker, is_accepting=is_accepting)
            elif message == b"leaving":
                self._set_accepting(worker, is_accepting=False)
            elif message.startswith(b"totals "):
                background.start_soon(self._answer, channel, message.removeprefix(b"totals "))
            elif message.startswith(b"report "):
                is_first = worker.report is None
                worker.take_report(message)
                if is_first and worker.report is not None and (lost := self._dead.missing(worker.report)):
                    text = "%s did not find %d acknowledged records in its spool, which are lost"
                    _logger.error(text, worker.identity.process_name, lost)
        # The system closes a dead process's files before it tells the status, for which a thread waits on Python 3.11.
        self._set_accepting(worker, is_accepting=False)
        worker.channel = None
        worker.notify()

    async def _answer(self, channel: Channel, question: bytes) -> None:
        """Send the sum to a worker that asked, when all have reported again, or after 0.5 s."""
        self._request += 1
        request = self._request
        for worker in self._workers:
            worker.post(b"report %d" % request)
        with anyio.move_on_after(_REPORT_SECONDS):
            for worker in self._workers:
                await worker.reported(request)
        totals = encode(self.totals())
        for worker in self._workers:
            if worker.channel is not None and worker.channel is not channel:
                worker.channel.offer(b"sum 0 " + totals)
        await channel.send(b"sum %s " % question + totals)

    def _set_accepting(self, worker: _Worker, *, is_accepting: bool) -> None:
        """Note whether a worker accepts connections, and give the sockets of those that do not to those that do.

        Two may accept from one socket for a moment: a connection goes to one of them.
        """
        worker.is_accepting = is_accepting
        if not is_accepting:
            worker.accepts_from = []
        if self._stopping.is_set() or not HAS_OWN_SOCKETS:
            return
        accepting = [each for each in self._workers if each.is_accepting]
        silent = [each.identity.worker for each in self._workers if each.socket is not None and not each.is_accepting]
        for place, each in enumerate(accepting):
            numbers = silent[place :: len(accepting)]
            if numbers != each.accepts_from:
                each.accepts_from = numbers
                each.post(b"accept " + " ".join(map(str, numbers)).encode())

    def _set_ready(self, worker: _Worker) -> None:
        worker.is_ready = True
        if self._stopping.is_set() or all(each.is_ready for each in self._workers):
            self._all_ready.set()

    async def _log_silent_workers(self) -> None:
        # A worker that stops may be silent.
        while not self._stopping.is_set():
            await anyio.sleep(_LOOK_SECONDS)
            for worker in self._workers:
                worker.log_silence()

    async def _kill_late_workers(self) -> None:
        await self._stopping.wait()
        self._all_ready.set()
        await anyio.sleep(self._grace_seconds)
        for worker in self._workers:
            if worker.process is not None:
                text = "%s did not stop within %g s and is killed"
                _logger.error(text, worker.identity.process_name, self._grace_seconds)
                with contextlib.suppress(ProcessLookupError):
                    worker.process.kill()

    def _close_sockets(self) -> None:
        for each in self._sockets:
            each.close()


def _ended(status: int) -> str:
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
