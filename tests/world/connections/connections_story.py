"""A gateway behind its own HTTP connections in the world, with 5,000 records a second; all by one seed.

It is the story of the gateway, with a network in between (`connection.py`). Connections break, swallow what is sent, or
are cut off within an answer. Some clients send many requests before they read the first answer, or read none for
seconds.
"""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from kpl_integrations.ingest import IngestGateway
from kpl_integrations.ingest.fast_path.protocol import GatewayConnection
from kpl_integrations.ingest.http.uvicorn_server import uvicorn_server
from kpl_integrations.ingest.tenants import Tenant
from tests.support.consumers import read_everything
from tests.support.gateway_scene import JSON, STREAM, Answer
from tests.world.connections.connection import HIGH_WATER_BYTES, ConnectionLost, WorldConnection
from tests.world.connections.wrong_requests import DATA, STRAY, WRONG_REQUESTS, WrongClients
from tests.world.disk import Disk
from tests.world.gateway_story import QUIET_PER_SECOND, GatewayStory, GatewayTenant, run_gateway_story
from tests.world.invariants import Run
from tests.world.network import WHOLE, Less, World

BROKEN, CUT, BLACK_HOLES = "broken connections", "cut connections", "black holes"
SLOW_READERS, SLOW_SENDERS = "slow readers", "slow senders"
NETWORK_FAULTS: Final = (BROKEN, CUT, BLACK_HOLES, SLOW_READERS, SLOW_SENDERS)
PER_SECOND = 5_000.0
# No client waits for longer: its connection may be a black hole.
LONGEST_WAIT_SECONDS = 20.0
# The buffer may be nearly full when two answers are written, of 50 records each.
MOST_UNSENT_BYTES = HIGH_WATER_BYTES + 16_384
# One that is answered, and one that waits behind it.
MOST_OPEN_REQUESTS = 2
# After the longest time for which a connection stays open without a request, or for a client that does not read.
LAST_SECONDS = 120.0


class Network:
    """The server's part of all connections, and what befalls them."""

    def __init__(self, world: World, gateway: IngestGateway) -> None:
        self.world = world
        # Of its own, as for the pauses of a world.
        self.chance = random.Random(f"network of {world.seed}")
        without = world.less.without
        self.faults = [name for name in NETWORK_FAULTS if self.chance.random() < 0.4 and name not in without]
        self.seconds = self.chance.choice([0.0001, 0.02])
        self._gateway = gateway
        self.connections: list[WorldConnection] = []
        self.sends_slowly = False

    def start(self) -> None:
        """Make the gateway's connection class, in the loop that runs."""
        gateway = self._gateway
        gateway.read_turns.now = World.now
        kind = GatewayConnection.for_gateway(gateway, gateway.settings)
        server = uvicorn_server(gateway, kind, gateway.settings, None)
        self.server = server.server_state
        server.config.load()
        self._make: Callable[[], Any] = lambda: kind(config=server.config, server_state=self.server, app_state={})

    def connect(self) -> WorldConnection:
        """Return a new connection."""
        made = WorldConnection(self._make, seconds=self.seconds)
        self.connections.append(made)
        return made

    async def trouble(self, until: float) -> None:
        """Let faults come and go until then."""
        chance = self.chance
        while self.faults and self.world.now() < until:
            await asyncio.sleep(chance.expovariate(1.0))
            name, there = chance.choice(self.faults), [each for each in self.connections if each.is_open]
            if name == SLOW_SENDERS:
                self.sends_slowly = not self.sends_slowly
            elif there:
                # Only one with many requests under way has many answers to read.
                busy = [each for each in there if each.is_shared] if name == SLOW_READERS else []
                self._befall(name, chance.choice(busy or there))
        self.sends_slowly = False

    def _befall(self, name: str, connection: WorldConnection) -> None:
        if name == BROKEN:
            connection.break_off()
        elif name == CUT:
            connection.cuts_next = True
        elif name == BLACK_HOLES:
            connection.is_black_hole = True
        elif connection.is_reading:
            connection.read(on=False)
            loop = asyncio.get_running_loop()
            loop.call_later(self.chance.choice([0.5, 5.0, 1_000.0]), lambda: connection.read(on=True))


class NetworkClient:
    """The clients of a tenant: each has a connection for its request, or all share one (`shares`)."""

    def __init__(self, network: Network, tenant: str, *, shares: bool) -> None:
        self._network, self._tenant, self._shares = network, tenant, shares
        self._idle: list[WorldConnection] = []
        self._heads: dict[tuple[str, ...], bytes] = {}

    def _connection(self) -> WorldConnection:
        while self._idle:
            connection = self._idle[-1] if self._shares else self._idle.pop()
            if connection.is_open and (self._shares or connection.is_idle):
                return connection
            if self._shares:
                _ = self._idle.pop()
        connection = self._network.connect()
        if self._shares:
            connection.is_shared = True
            self._idle.append(connection)
        return connection

    async def post(self, records: list[dict[str, str]], *, ack: str, idempotency_key: str = "") -> Answer:
        """Post records.

        Raises:
            ConnectionLost: no answer comes.
        """
        body = msgspec.json.encode({"records": records})
        key = f"idempotency-key: {idempotency_key}\r\n" if idempotency_key else ""
        head = (
            f"POST /v1/streams/{STREAM}/records?ack={ack} HTTP/1.1\r\nhost: gateway\r\ncontent-type: {JSON}\r\n"
            f"authorization: Bearer {self._tenant}\r\n{key}content-length: {len(body)}\r\n\r\n"
        )
        connection, chance = self._connection(), self._network.chance
        slow = self._network.sends_slowly and not self._shares
        try:
            answer = await connection.ask(
                head.encode() + body, pieces=3 if slow else 1, between=chance.uniform(0.0, 2.0) if slow else 0.0
            )
        except asyncio.CancelledError:
            connection.leave(reset=chance.random() < 0.5)
            raise
        if connection.is_open and not self._shares:
            self._idle.append(connection)
        return answer


class ConnectedTenant(GatewayTenant):
    """A tenant whose clients reach the gateway through the network."""

    def __init__(self, story: "ConnectionsStory", tenant: Tenant, per_second: float) -> None:
        super().__init__(story, tenant, per_second)
        shares = per_second > QUIET_PER_SECOND and story.network.chance.random() < 0.5
        self.client = NetworkClient(story.network, tenant.id, shares=shares)

    async def answer_to(self, records: list[dict[str, str]]) -> Answer | None:
        """Return the answer; None: the client has stopped to wait, or its connection is lost."""
        self.tokens.held += len(records)
        patience = LONGEST_WAIT_SECONDS if self.patience_seconds is None else self.patience_seconds
        try:
            async with asyncio.timeout(patience):
                answer: Answer = await self.client.post(records, ack=self.ack, **self.fields_of(records))
        except (TimeoutError, ConnectionLost):
            return None
        finally:
            # They are counted when the last byte has arrived, which may be seconds after the first.
            self.tokens.held -= len(records)
            self.tokens.add(-len(records), self.story.world.now())
        self.heard(answer, len(records))
        return answer


class ConnectionsStory(GatewayStory):
    """The story."""

    seconds = 10.0
    has_events = False

    def __init__(self, world: World, disk: Disk, folder: Path) -> None:
        super().__init__(world, disk, folder)
        self.most_records = 1_000_000
        self.network_names = self.network.faults.copy()
        self.wrong = WrongClients(self.network, world.seed)
        self.has_wrong_requests = WRONG_REQUESTS not in world.less.without and self.wrong.are_there
        if self.has_wrong_requests:
            self.network_names.append(WRONG_REQUESTS)
            self.directory.change(STRAY)

    def clients_of(self, tenants: list[Tenant]) -> list[GatewayTenant]:
        self.network = Network(self.world, self.gateway)
        rate = PER_SECOND / max(1, len(tenants) - 1)
        return [
            ConnectedTenant(self, tenant, rate if number else QUIET_PER_SECOND) for number, tenant in enumerate(tenants)
        ]

    async def network_faults(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            _ = tasks.create_task(self.network.trouble(self.until))
            if self.has_wrong_requests:
                _ = tasks.create_task(self.wrong.send_until(self.until))

    async def tell(self) -> list[str]:
        self.network.start()
        return await super().tell()

    async def disconnected(self) -> list[str]:
        """Close all connections as a server does, and return what is false of them."""
        false = self.wrong.false
        network = self.network
        for connection in list(network.server.connections):
            connection.shutdown()
        await asyncio.sleep(LAST_SECONDS)
        if network.server.connections or network.server.tasks:
            false.append(f"{len(network.server.connections)} connections, {len(network.server.tasks)} tasks are left")
        for each in network.connections:
            false += each.false
            if each.end.most_unsent_bytes > MOST_UNSENT_BYTES:
                false.append(f"{each.end.most_unsent_bytes:,} bytes were kept for a client that does not read")
            if each.end.most_open_requests > MOST_OPEN_REQUESTS:
                false.append(f"{each.end.most_open_requests} requests of a connection were read before an answer")
        return false

    def violations(self) -> list[str]:
        stored = [read.data for read in read_everything(self.kinesis, STREAM) if DATA in read.data]
        return super().violations() + [f"{len(stored)} records of refused requests are stored"] * bool(stored)


def run_connections_story(seed: int, less: Less = WHOLE) -> Run:
    """Run the story of a seed."""
    return run_gateway_story(seed, less, ConnectionsStory)
