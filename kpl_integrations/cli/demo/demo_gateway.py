"""The demo's way through the gateway: one on loopback, and requests to it that are answered when all is delivered."""

import base64
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

import aiohttp
import anyio
import msgspec

from kpl_core import KinesisTransport, Producer, PutRecordsAnswer, PutRecordsRequest, RequestFailure
from kpl_core.hooks import RequestCompleted
from kpl_core.transport.aiobotocore_transport import AiobotocoreTransport
from kpl_integrations.cli.connection import Connection
from kpl_integrations.cli.demo.demo_pace import DemoPace
from kpl_integrations.cli.demo.demo_records import DemoRecords
from kpl_integrations.cli.demo.traffic import Traffic
from kpl_integrations.cli.failure import CommandFailure
from kpl_integrations.ingest import IngestGateway, IngestSettings
from kpl_integrations.ingest.serving import GatewayServer, bound_socket
from kpl_integrations.ingest.tenants import OpenTenants, Tenant

__all__ = ["DemoGateway"]

RECORDS_PER_REQUEST: Final = 100
_REQUESTS_AT_ONCE: Final = 256
_TIMEOUT: Final = aiohttp.ClientTimeout(total=120)
_OK: Final = 200
_COME_BACK: Final = (429, 503)
_THROTTLED: Final = "ProvisionedThroughputExceededException"
_encode: Final = msgspec.json.Encoder().encode


class DemoGateway:
    """A gateway with one tenant, who needs no key. Made by `opened`."""

    def __init__(self, gateway: IngestGateway, url: str) -> None:
        self._gateway = gateway
        self._url = url

    def traffic(self, records: DemoRecords, stream: str, *, shards: int) -> "GatewayTraffic":
        """Return what puts `records` through it."""
        return GatewayTraffic(records, self._url, stream, shards=shards)

    @property
    def producer(self) -> Producer:
        """Return the gateway's own producer."""
        return self._gateway.producer

    @classmethod
    @asynccontextmanager
    async def opened(cls, connection: Connection, traffic: Traffic) -> AsyncIterator["DemoGateway"]:
        """Serve on a free port of loopback until the end of the block; what was accepted is delivered then."""
        # Built without asking the environment: what is set for another gateway is not meant for this one.
        settings = IngestSettings.model_construct(
            port=0, drain_delay_seconds=0.0, region=connection.region, endpoint_url=connection.endpoint_url
        )
        transport = AiobotocoreTransport(settings.producer_config(), session=connection.session)
        directory = OpenTenants(Tenant(id="demo", default_ack="delivered"))
        gateway = IngestGateway(settings, directory, transport=_Counted(transport, traffic))
        with bound_socket(settings.host, settings.port) as listening, _silenceable() as silence:
            server = GatewayServer(gateway, listening)
            async with anyio.create_task_group() as tasks:
                started = anyio.Event()

                async def serve() -> None:
                    # Ctrl-C ends it, too, in its own order: requests that are cut off would be told with tracebacks.
                    with anyio.CancelScope(shield=True):
                        await server.run(started=started.set)

                tasks.start_soon(serve)
                try:
                    await started.wait()
                    yield cls(gateway, server.url)
                except BaseException:
                    # What is cut off on purpose need not be told of.
                    silence()
                    # The first signal of two that end it at once.
                    server.stop()
                    raise
                finally:
                    server.stop()


@contextmanager
def _silenceable() -> Iterator[Callable[[], None]]:
    """Yield what silences all logging until the end of the block."""
    before = logging.root.manager.disable
    try:
        yield lambda: logging.disable(logging.ERROR)
    finally:
        logging.disable(before)


class GatewayTraffic:
    """POSTs all records, a hundred to a request; `split` is called once, half-way."""

    def __init__(self, records: DemoRecords, url: str, stream: str, *, shards: int) -> None:
        self._records = records
        self._url = f"{url}/v1/streams/{stream}/records?ack=delivered"
        self._pace = DemoPace(shards)
        self._at_once = anyio.CapacityLimiter(_REQUESTS_AT_ONCE)
        self.put_count = 0
        self.put_bytes = 0
        # Of each request, from the first attempt to the answer that says what became of its records.
        self.seconds_to_ack: list[float] = []

    async def run(self, split: Callable[[], Any]) -> None:
        """Put all records; done when the gateway has said what became of each."""
        count = self._records.count
        half = count // 2
        headers = {"Content-Type": "application/x-ndjson"}
        connector = aiohttp.TCPConnector(limit=_REQUESTS_AT_ONCE)
        async with aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT, headers=headers) as session:
            # The first by itself: with it the gateway learns of the stream and its shards.
            await self._post(session, self._request(0, 1)[0])
            self._pace.begin()
            async with anyio.create_task_group() as tasks:
                for first in range(1, count, RECORDS_PER_REQUEST):
                    after = min(first + RECORDS_PER_REQUEST, count)
                    if first <= half < after:
                        tasks.start_soon(split)
                    await self._at_once.acquire_on_behalf_of(first)
                    body, sent = self._request(first, after)
                    tasks.start_soon(self._post_and_release, session, body, first)
                    await self._pace.keep(after - first, sent)

    def _request(self, first: int, after: int) -> tuple[bytes, int]:
        lines, sent = [], 0
        for number in range(first, after):
            key, data = self._records.record(number)
            self.put_count += 1
            self.put_bytes += len(data)
            sent += len(key) + len(data)
            lines.append(_encode({"partition_key": key, "data_base64": base64.b64encode(data).decode()}))
        return b"\n".join(lines), sent

    async def _post_and_release(self, session: aiohttp.ClientSession, body: bytes, first: int) -> None:
        try:
            await self._post(session, body)
        finally:
            self._at_once.release_on_behalf_of(first)

    async def _post(self, session: aiohttp.ClientSession, body: bytes) -> None:
        began = time.monotonic()
        while True:
            async with session.post(self._url, data=body) as answer:
                if answer.status == _OK:
                    self.seconds_to_ack.append(time.monotonic() - began)
                    return
                said = await answer.text()
                if answer.status not in _COME_BACK:
                    message = f"the gateway answered {answer.status} to the demo's records: {said[:300]}; report it"
                    raise CommandFailure(message)
                wait = float(answer.headers.get("Retry-After", "1"))
            await anyio.sleep(wait)


class _Counted:
    """A transport that tells `traffic` of each request, as a hook would."""

    def __init__(self, transport: KinesisTransport, traffic: Traffic) -> None:
        self._transport = transport
        self._traffic = traffic
        self.open = transport.open
        self.list_shards = transport.list_shards
        self.max_record_bytes = transport.max_record_bytes

    async def put_records(self, request: PutRecordsRequest) -> PutRecordsAnswer:
        """Send the request, and note what was in it."""
        began = time.monotonic()
        answer = await self._transport.put_records(request)
        error_code, throttled = None, 0
        if isinstance(answer, RequestFailure):
            error_code = answer.code
        else:
            throttled = sum(entry.error_code == _THROTTLED for entry in answer)
        self._traffic(
            RequestCompleted(
                stream=request.stream,
                started_at=began,
                ended_at=time.monotonic(),
                kinesis_records=len(request.records),
                user_records=sum(len(record.arrivals) for record in request.records),
                size_bytes=request.size_bytes,
                error_code=error_code,
                record_errors={},
                throttled_by_shard={"": throttled} if throttled else {},
            )
        )
        return answer
