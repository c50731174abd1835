"""Clients in the world that send what a gateway refuses, each request for a reason of its own.

Beside the load and the faults of a run each must hear that reason, or one that any request may hear then. Nothing of it
may be stored.
"""

import asyncio
import random
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from kpl_integrations.ingest.admission.refusals import REFUSALS, Refusal
from kpl_integrations.ingest.tenants import Tenant
from tests.support.gateway_scene import JSON, STREAM, Answer
from tests.world.connections.connection import ConnectionLost

if TYPE_CHECKING:
    from tests.world.connections.connections_story import Network

WRONG_REQUESTS: Final = "wrong requests"
# It may write to the one stream of the world, and to one that does not exist.
STRAY: Final = Tenant(id="stray", streams=(STREAM, "missing"))
# Longer than the gateway waits for a body.
PATIENCE_SECONDS: Final = 60.0
DATA: Final = b"not to be stored"
# What any request may hear: over a bound of its client, or no capacity for anybody.
_ANY_TIME: Final = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}


def _request(
    body: bytes = b'{"partition_key": "k", "data": "%b"}' % DATA,
    *,
    line: str = f"POST /v1/streams/{STREAM}/records HTTP/1.1",
    fields: Mapping[str, str | None] = MappingProxyType({}),
) -> bytes:
    """Return a request of the tenant, with these fields in the place of others; without those that are None."""
    given = {
        "host": "gateway",
        "content-type": JSON,
        "authorization": f"Bearer {STRAY.id}",
        "content-length": str(len(body)),
        **fields,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in given.items() if value is not None)
    return f"{line}\r\n{head}\r\n".encode() + body


WRONG: Final[Mapping[Refusal, bytes]] = MappingProxyType(
    {
        Refusal.NO_CREDENTIALS: _request(fields={"authorization": None}),
        Refusal.BAD_CREDENTIALS: _request(fields={"authorization": "Bearer nobody"}),
        Refusal.FORBIDDEN: _request(line="POST /v1/streams/another/records HTTP/1.1"),
        Refusal.UNKNOWN_STREAM: _request(line="POST /v1/streams/missing/records HTTP/1.1"),
        Refusal.UNKNOWN_PATH: _request(line="POST /v1/records HTTP/1.1"),
        Refusal.METHOD: _request(line=f"PUT /v1/streams/{STREAM}/records HTTP/1.1"),
        Refusal.TOO_LARGE: _request(fields={"content-length": str(1 << 30)}),
        Refusal.SLOW_BODY: _request(fields={"content-length": "1000"}),
        Refusal.UNSUPPORTED: _request(fields={"content-type": "text/html"}),
        Refusal.MALFORMED: _request(b'{"partition_key": "k", "data": "%b"' % DATA),
        Refusal.BAD_RECORDS: _request(b'{"partition_key": "", "data": "%b"}' % DATA),
        Refusal.BAD_PARAMETER: _request(line=f"POST /v1/streams/{STREAM}/records?ack=never HTTP/1.1"),
        Refusal.BAD_HTTP: _request(fields={"host": "gateway\r\nhost: another"}),
        Refusal.SLOW_HEAD: _request()[:60],
        Refusal.LARGE_HEAD: _request(fields={"x": "x" * 40_000}),
        Refusal.TRANSFER_CODING: _request(fields={"content-length": None, "transfer-encoding": "gzip"}),
        Refusal.HTTP_VERSION: _request(line=f"POST /v1/streams/{STREAM}/records HTTP/2.0"),
    }
)


class WrongClients:
    """They send one request after the other, each on a connection of its own."""

    def __init__(self, network: "Network", seed: int) -> None:
        self._network = network
        self._chance = random.Random(f"wrong requests of {seed}")
        self.are_there = self._chance.random() < 0.4
        self.false: list[str] = []

    async def send_until(self, until: float) -> None:
        """Send until then, and wait for all answers."""
        async with asyncio.TaskGroup() as tasks:
            while self._network.world.now() < until:
                await asyncio.sleep(self._chance.expovariate(4.0))
                _ = tasks.create_task(self._reuse_a_key() if self._chance.random() < 0.1 else self._send_wrong())

    async def _send_wrong(self) -> None:
        refusal = self._chance.choice(list(WRONG))
        answer = await self._ask(WRONG[refusal])
        if answer is not None and answer.status not in {REFUSALS[refusal].status, *_ANY_TIME}:
            self.false.append(f"{refusal.value}: answered {answer.status} {answer.body[:200]!r}")

    async def _reuse_a_key(self) -> None:
        """Send a good request, and another one with its key while that is known."""
        fields = {"idempotency-key": f'"{self._chance.random()}"'}
        first = await self._ask(_request(b'{"partition_key": "k", "data": "good"}', fields=fields))
        if first is None or first.status >= HTTPStatus.BAD_REQUEST:
            return
        second = await self._ask(_request(fields=fields))
        if second is not None and second.status not in {REFUSALS[Refusal.KEY_REUSED].status, *_ANY_TIME}:
            self.false.append(f"a key was used twice: answered {second.status} {second.body[:200]!r}")

    async def _ask(self, request: bytes) -> Answer | None:
        connection = self._network.connect()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                return await connection.ask(request)
        except (TimeoutError, ConnectionLost):
            return None
        finally:
            if connection.is_open:
                connection.leave(reset=False)
