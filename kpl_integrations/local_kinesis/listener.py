"""The HTTP server of the local Kinesis: listens, answers each request, and applies the planned faults."""

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from aiohttp import web

from kpl_core.options.kinesis_limits import MIB
from kpl_core.testing import FakeKinesis, KinesisError, PutRecordsEntry, RequestPlan
from kpl_integrations.host_names import HostNames
from kpl_integrations.kinesis_protocol.requests import ListShards, PutRecords, RequestRefused, StreamRequest
from kpl_integrations.kinesis_protocol.wire import Wire, error_body, operation_of, request_of, wire_of
from kpl_integrations.local_kinesis.operations import answer

Clock = Callable[[], float]

# 10 MiB of data are 13.4 MiB of base64.
_MAX_BODY_BYTES: Final = 16 * MIB
_KEEP_ALIVE_SECONDS: Final = 75.0
# How long requests in progress may take after the server has stopped.
_GRACE_SECONDS: Final = 0.5
_LINGER_ZERO: Final = struct.pack("ii", 1, 0)  # close with RST instead of FIN
_TOO_LARGE: Final = 413
_WRONG_METHOD: Final = 405
_FORBIDDEN: Final = 403
_ACCESS_DENIED: Final = "AccessDeniedException"


class _Request(web.BaseRequest):
    """A request that accepts bodies up to the largest that Kinesis accepts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - aiohttp's own arguments
        super().__init__(*args, client_max_size=_MAX_BODY_BYTES, **kwargs)


class _Reset(Exception):  # noqa: N818 - never leaves this file
    """Reset the connection instead of answering."""


@dataclass(eq=False, repr=False)
class Listener:
    """One HTTP server. It can refuse connections and listen again, to simulate a service that is down.

    `clock` gives the current time; `closing` ends latencies and hangs early. Requests to other `hosts` get 403.
    """

    fake: FakeKinesis
    clock: Clock
    host: str
    port: int
    hosts: HostNames

    def __post_init__(self) -> None:
        self.closing = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._answered = 0
        self._server = web.Server(
            self._answer,
            request_factory=lambda *parts: _Request(*parts, loop),
            access_log=None,
            keepalive_timeout=_KEEP_ALIVE_SECONDS,
        )
        self._socket: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """The URL; it stays the same while connections are refused."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def listen(self) -> None:
        """Start to listen, on the previous port if there was one.

        Raises:
            OSError: the port is in use.
        """
        if self._socket is None:
            loop = asyncio.get_running_loop()
            self._socket = await loop.create_server(self._server, self.host, self.port, backlog=1024)
            self.port = self._socket.sockets[0].getsockname()[1]

    def refuse(self) -> None:
        """Stop listening, and drop all connections."""
        self._stop_listening()
        for connection in self._server.connections:
            if connection.transport is not None:
                connection.transport.abort()

    async def stop(self) -> None:
        """Stop listening, give requests in progress half a second, then drop them."""
        listening = self._stop_listening()
        self.closing.set()
        # Run the loop once, so that hanging requests see it.
        await asyncio.sleep(0)
        self._server.pre_shutdown()
        await self._server.shutdown(_GRACE_SECONDS)
        if listening is not None:
            await listening.wait_closed()

    def _stop_listening(self) -> asyncio.Server | None:
        listening, self._socket = self._socket, None
        if listening is not None:
            listening.close()
        return listening

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        headers = request.headers
        wire = wire_of(None)
        try:
            wire = wire_of(headers.get("Content-Type"))
            self._require_known_host(headers.getall("Host", ()))
            body = await self._body(request)
            operation = operation_of(headers.get("X-Amz-Target"))
            parsed = request_of(wire, operation, body)
            return self._response(wire, await self._carry_out(wire, operation, parsed))
        except (RequestRefused, KinesisError) as refusal:
            return self._response(wire, error_body(wire, refusal.code, refusal.message), refusal.status)
        except _Reset:
            _reset(request)
        except (ConnectionError, web.RequestPayloadError):
            pass  # the client disconnected before the body was complete
        return web.Response()  # aiohttp discards it, because the connection is closed

    def _require_known_host(self, hosts: Sequence[str]) -> None:
        if not self.hosts.allow(hosts):
            name = ", ".join(hosts)[:128]
            message = (
                f"The Host {name!r} is neither a loopback name nor an IP address. Web pages may not reach this Kinesis "
                "by a name of their own (DNS rebinding). If the name is this machine's, start it with "
                "--allow-host NAME, or LocalKinesis(allow_hosts=[NAME])."
            )
            raise RequestRefused(_ACCESS_DENIED, message, status=_FORBIDDEN)

    async def _body(self, request: web.BaseRequest) -> bytes:
        if request.method != "POST":
            code, message = "UnknownOperationException", f"{request.method} is not POST."
            raise RequestRefused(code, message, status=_WRONG_METHOD)
        size = request.content_length
        with suppress(web.HTTPRequestEntityTooLarge):
            if size is None or size <= _MAX_BODY_BYTES:
                return await request.read()
        code = "RequestEntityTooLargeException"
        message = f"The body has more than {_MAX_BODY_BYTES} bytes; a request holds at most 10 MiB of data and keys."
        raise RequestRefused(code, message, status=_TOO_LARGE)

    async def _carry_out(self, wire: Wire, operation: str, parsed: msgspec.Struct) -> bytes:
        kinesis = self.fake
        stream = parsed.stream() if isinstance(parsed, StreamRequest) else ""
        plan = self._plan(operation, stream, parsed)
        await self._wait(plan.latency_seconds)
        if plan.hang:
            await self.closing.wait()
        if plan.hang or plan.reset_before:
            raise _Reset
        if plan.error is not None:
            raise plan.error
        now = self.clock()
        for effect in plan.reshards:
            kinesis.reshard(stream, effect, now=now)
        body = self._commit(wire, parsed, stream, plan, now)
        await self._wait(plan.answer_latency_seconds)
        if plan.reset_after:
            raise _Reset
        return body if plan.body is None else plan.body

    def _plan(self, operation: str, stream: str, parsed: msgspec.Struct) -> RequestPlan:
        name: str | None = self.fake.stream_name(stream)
        page = 1
        if isinstance(parsed, ListShards) and parsed.next_token is not None:
            name, page = self.fake.listing(parsed.next_token)
        return self.fake.faults.plan(operation, stream=name, page=page, now=self.clock())

    def _commit(self, wire: Wire, parsed: msgspec.Struct, stream: str, plan: RequestPlan, now: float) -> bytes:
        if not isinstance(parsed, PutRecords):
            members = answer(parsed, self.fake, now)
            return wire.encode(members) if members else b""  # like the service: no members, no body
        records = [
            (record.partition_key or "", record.explicit_hash_key, record.data or b"")
            for record in parsed.records or ()
        ]
        entries = self.fake.put_records(stream, records, now=now)
        return wire.encode_put_results(_changed_count(entries, plan.count_change))

    async def _wait(self, seconds: float) -> None:
        if seconds > 0.0:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.closing.wait()

    def _response(self, wire: Wire, body: bytes, status: int = 200) -> web.Response:
        self._answered += 1
        headers = {
            "Content-Type": wire.content_type,
            "x-amzn-RequestId": f"00000000-0000-4000-8000-{self._answered:012x}",
        }
        return web.Response(body=body, status=status, headers=headers)


def _changed_count(entries: list[PutRecordsEntry], change: int) -> list[PutRecordsEntry]:
    return entries[:change] if change < 0 else entries + entries[-1:] * change


def _reset(request: web.BaseRequest) -> None:
    transport = request.transport
    if transport is not None:
        connection: socket.socket | None = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
        transport.abort()
