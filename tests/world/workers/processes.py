"""The workers of one gateway in the world, with the real supervisor: a worker is a task, and a crash cuts it off.

After a crash nothing that the worker does has an effect: its connections, its store and its counters are gone, and its
replacement opens a copy of its spool's file.
"""

import asyncio
import contextlib
import math
import os
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextvars import ContextVar, copy_context
from typing import Any, Self

import pytest

from kpl_core.coordination import CoordinationStore
from kpl_core.coordination.worker import CoordinationWorker
from kpl_core.producer import coordination_driver
from kpl_core.testing import FakeKinesis
from kpl_core.testing.fake_transport import FakeTransport
from kpl_integrations.ingest import IngestGateway
from kpl_integrations.ingest.workers import shared_quotas, supervisor
from kpl_integrations.ingest.workers.link import StopRequests, SupervisorLink, WorkerIdentity
from kpl_integrations.ingest.workers.record_counts import RecordCounts
from kpl_integrations.ingest.workers.shared_quotas import SharedQuotas
from kpl_integrations.ingest.workers.supervisor import Supervisor
from tests.world.network import StoreLink, Weather, World, WorldStore
from tests.world.world_loop import use_wall_clock

# The status of a process that SIGKILL ended.
KILLED = -9
CHANNEL_SECONDS = 0.0002


class WorldChannel:
    """One end of the connection of a worker and the supervisor: messages arrive in order, after some time."""

    # Of all channels.
    seconds = CHANNEL_SECONDS

    def __init__(self) -> None:
        self.other: WorldChannel
        self._messages: deque[tuple[float, bytes | None]] = deque()
        self._arrived = asyncio.Event()
        self._is_closed = False

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Return both ends."""
        one, other = cls(), cls()
        one.other, other.other = other, one
        return one, other

    @classmethod
    async def over(cls, end: Self) -> Self:
        """Return this end: it is a channel already."""
        return end

    def post(self, message: bytes) -> None:
        if not self._is_closed:
            self._send(message)

    async def send(self, message: bytes) -> None:
        self.post(message)

    offer = post

    async def receive(self) -> bytes | None:
        while not self._messages:
            self._arrived.clear()
            await self._arrived.wait()
        await asyncio.sleep(max(0.0, self._messages[0][0] - World.now()))
        message = self._messages[0][1]
        if message is not None:
            _ = self._messages.popleft()
        return message

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._send(None)

    def _send(self, message: bytes | None) -> None:
        messages = self.other._messages  # noqa: SLF001 - of the same class
        at = max(World.now() + self.seconds, messages[-1][0] if messages else -math.inf)
        messages.append((at, message))
        self.other._arrived.set()  # noqa: SLF001


class _Line(FakeTransport):
    """A process's way to Kinesis."""

    is_cut = False

    async def put_records(self, request: Any) -> Any:
        if self.is_cut:
            await asyncio.Event().wait()
        return await super().put_records(request)


class WorkerProcess:
    """One process of a worker number, as the supervisor sees it, and as clients see it."""

    def __init__(self, crew: "Crew", identity: WorkerIdentity, channel: WorldChannel, counts: RecordCounts) -> None:
        self.crew, self.identity = crew, identity
        self.pid = crew.next_pid()
        self.returncode: int | None = None
        # While it takes requests.
        self.gateway: IngestGateway | None = None
        self.sharing: SharedQuotas | None = None
        # What it knew of the leases when its first tenant with a rate came.
        self.first_plans: object = None
        self.transport = _Line(crew.kinesis, latency_seconds=crew.latency_seconds)
        self.links: list[StoreLink] = []
        self._channel, self._counts = channel, counts
        self._ended = asyncio.Event()
        self.context = copy_context()
        self.context.run(PROCESS.set, self)
        self._calls: set[asyncio.Task[Any]] = set()
        self._task = asyncio.get_running_loop().create_task(self._run(), context=self.context)

    async def _run(self) -> None:
        _ = await self._channel.receive()
        channel: Any = self._channel
        link = SupervisorLink(channel, self.identity, self._counts)
        stopped = asyncio.Event()
        gateway = self.crew.gateway_of(self, link)
        obeying = asyncio.create_task(link.run(StopRequests(lambda _: stopped.set())))
        async with gateway:
            self.gateway = gateway
            self._channel.post(b"ready")
            _ = await stopped.wait()
            self._channel.post(b"leaving")
        self.gateway = None
        obeying.cancel()
        self._channel.close()
        self._end(0)

    def call(self, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a client's call in this process; a crash cancels it."""
        task = asyncio.get_running_loop().create_task(call, context=self.context)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    def crash(self) -> None:
        """End it as SIGKILL does."""
        self.gateway = None
        self._counts._counters = list(self._counts._counters)  # noqa: SLF001 - the shared memory stays as it is now
        self.transport.is_cut = True
        for link in self.links:
            link.is_cut = True
        self._channel.close()
        self.crew.crashed(self)
        self._end(KILLED)
        for task in (*self._calls, self._task):
            task.cancel()

    @property
    def is_alive(self) -> bool:
        return self.returncode is None

    def _end(self, status: int) -> None:
        self.returncode = status
        self._ended.set()

    # What the supervisor calls of a process

    async def wait(self) -> int:
        _ = await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        self.crash()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leave nothing open."""

    async def end(self) -> None:
        """Wait until the rest of a crashed process is gone."""
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


# The process in which the code runs.
PROCESS: ContextVar[WorkerProcess] = ContextVar("PROCESS")


class Crew:
    """The supervisor with its workers, their service, and their stores."""

    def __init__(
        self,
        world: World,
        kinesis: FakeKinesis,
        identities: list[WorkerIdentity],
        gateway_of: Callable[[WorkerProcess, SupervisorLink], IngestGateway],
        *,
        latency_seconds: float,
        weather: Weather,
        stores: dict[str, WorldStore],
    ) -> None:
        self.world, self.kinesis, self.latency_seconds, self.weather = world, kinesis, latency_seconds, weather
        self.gateway_of = gateway_of
        self.processes: list[WorkerProcess] = []
        # By URL, of all gateways.
        self.stores = stores
        self.supervisor = _WorldSupervisor(self, identities)

    def crashed(self, process: WorkerProcess) -> None:
        """Note that a process has ended without a word."""

    def next_pid(self) -> int:
        return 100 + len(self.processes)

    def serving(self) -> list[WorkerProcess]:
        """Return the processes that take requests."""
        return [each for each in self.processes if each.gateway is not None]

    def links(self) -> list[StoreLink]:
        """Return the ways of the living processes to their stores."""
        return [link for each in self.processes if each.is_alive for link in each.links]

    async def open_store(self, url: str, **_: Any) -> CoordinationStore:
        """Open a store of the world in the process that asks."""
        process = PROCESS.get()
        link = StoreLink(self.world, self.stores.setdefault(url, WorldStore(self.world)), self.weather)
        process.links.append(link)
        return link

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Let the workers use this world's stores and channels."""

        class Sharing(SharedQuotas):
            def __init__(self, *arguments: Any, **named: Any) -> None:
                super().__init__(*arguments, **named)
                PROCESS.get().sharing = self

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_quotas, "open_store", self.open_store)
            patch.setattr(coordination_driver, "open_store", self.open_store)
            patch.setattr(shared_quotas, "SharedQuotas", Sharing)
            patch.setattr(supervisor, "Channel", WorldChannel)
            use_wall_clock(patch, CoordinationWorker.__init__)
            patch.setattr(WorldChannel, "seconds", CHANNEL_SECONDS)
            yield


class _WorldSupervisor(Supervisor):
    """The supervisor, which starts tasks in place of processes."""

    def __init__(self, crew: Crew, identities: list[WorkerIdentity]) -> None:
        # Without sockets: clients of the world call a gateway directly.
        super().__init__([], lambda *_: b"{}", sockets=[], identities=identities, grace_seconds=120.0)
        self._crew = crew

    async def _start(self, worker: Any) -> Any:
        own, other = WorldChannel.pair()
        counts = RecordCounts.of_worker(os.dup(worker.memory.descriptor))
        process = WorkerProcess(self._crew, worker.identity, other, counts)
        self._crew.processes.append(process)
        return process, own, b"{}"
