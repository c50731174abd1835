"""The gateway of `kpl demo`: it serves on loopback, and the demo's requests are answered after delivery."""

import base64
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

import aiohttp
import anyio
import msgspec

from kpl_core import Producer
from kpl_integrations.cli.connection import Connection
from kpl_integrations.cli.demo import STREAM, DemoRecords, Load
from kpl_integrations.cli.exit_code import CommandFailure
from kpl_integrations.cli.put import RequestTotals
from kpl_integrations.ingest import IngestGateway, IngestSettings
from kpl_integrations.ingest.serving import GatewayServer, bound_socket
from kpl_integrations.ingest.tenants import OpenTenants, Tenant

RECORDS_PER_REQUEST: Final = 100
_CONCURRENT_REQUESTS: Final = 256
_TIMEOUT: Final = aiohttp.ClientTimeout(total=120)
_OK: Final = 200
_RETRY_STATUSES: Final = (429, 503)
_encode: Final = msgspec.json.Encoder().encode


@asynccontextmanager
async def open_gateway_load(
    connection: Connection, totals: RequestTotals, records: DemoRecords, shards: int
) -> AsyncIterator[tuple[Producer, Load]]:
    """Serve a gateway with one tenant that needs no key, on a free loopback port.

    At the end of the block all accepted records are delivered.
    """
    # Do not read the environment: its settings are for other gateways.
    settings = IngestSettings(port=0, drain_delay_seconds=0.0).with_producer(
        region=connection.region, endpoint_url=connection.endpoint_url
    )
    transport = await connection.transport(settings.producer_config())
    directory = OpenTenants(Tenant(id="demo", default_ack="delivered"))
    gateway = IngestGateway(settings, directory, transport=transport, hooks=[totals])
    with bound_socket(settings.host, settings.port) as listening, _can_silence_logs() as silence:
        server = GatewayServer(gateway, listening)
        async with anyio.create_task_group() as tasks:
            started = anyio.Event()

            async def serve() -> None:
                # Shielded, so that Ctrl-C ends it in order too; cancelled requests would log tracebacks.
                with anyio.CancelScope(shield=True):
                    await server.run(started=started.set)

            tasks.start_soon(serve)
            try:
                await started.wait()
                yield gateway.producer, GatewayLoad(records, server.url, shards=shards)
            except BaseException:
                # Requests that are cancelled on purpose need no log.
                silence()
                # Two stop signals end the server at once; this is the first.
                server.stop()
                raise
            finally:
                server.stop()


@contextmanager
def _can_silence_logs() -> Iterator[Callable[[], None]]:
    """Yield a function that disables all logging until the end of the block."""
    before = logging.root.manager.disable
    try:
        yield lambda: logging.disable(logging.ERROR)
    finally:
        logging.disable(before)


class GatewayLoad(Load):
    """POSTs all records, 100 per request, from the first attempt to the answer after delivery."""

    def __init__(self, records: DemoRecords, url: str, *, shards: int) -> None:
        super().__init__(records, shards=shards)
        self._url = f"{url}/v1/streams/{STREAM}/records?ack=delivered"
        self._slots = anyio.CapacityLimiter(_CONCURRENT_REQUESTS)

    async def run(self, split: Callable[[], Any]) -> None:
        """Put all records and wait for their results."""
        count = self._records.count
        half = count // 2
        headers = {"Content-Type": "application/x-ndjson"}
        connector = aiohttp.TCPConnector(limit=_CONCURRENT_REQUESTS)
        async with aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT, headers=headers) as session:
            # Send the first record alone, so that the gateway lists the stream's shards.
            await self._post(session, self._request(0, 1)[0])
            self._pace.begin()
            async with anyio.create_task_group() as tasks:
                for first in range(1, count, RECORDS_PER_REQUEST):
                    after = min(first + RECORDS_PER_REQUEST, count)
                    if first <= half < after:
                        tasks.start_soon(split)
                    await self._slots.acquire_on_behalf_of(first)
                    body, sent = self._request(first, after)
                    tasks.start_soon(self._post_and_release, session, body, first)
                    await self._pace.keep(after - first, sent)

    def _request(self, first: int, after: int) -> tuple[bytes, int]:
        lines, sent = [], 0
        for number in range(first, after):
            key, data = self.record(number)
            sent += len(key) + len(data)
            lines.append(_encode({"partition_key": key, "data_base64": base64.b64encode(data).decode()}))
        return b"\n".join(lines), sent

    async def _post_and_release(self, session: aiohttp.ClientSession, body: bytes, first: int) -> None:
        try:
            await self._post(session, body)
        finally:
            self._slots.release_on_behalf_of(first)

    async def _post(self, session: aiohttp.ClientSession, body: bytes) -> None:
        began = time.monotonic()
        while True:
            async with session.post(self._url, data=body) as answer:
                if answer.status == _OK:
                    self.seconds_to_ack.append(time.monotonic() - began)
                    return
                text = await answer.text()
                if answer.status not in _RETRY_STATUSES:
                    message = (
                        f"the gateway answered {answer.status} to the demo's records: {text[:300]}; report this bug"
                    )
                    raise CommandFailure(message)
                wait = float(answer.headers.get("Retry-After", "1"))
            await anyio.sleep(wait)
