"""The gateway as an ASGI application: routes, answers, and the life of its producer.

    app = IngestGateway(load_settings(tenants=Path("tenants.toml")), directory)

Served on its own it opens its producer in the lifespan. Mounted in another application, whose server runs only
that one's lifespan, it is entered there: `async with gateway: yield`. No framework stands in between: a request
costs a dictionary of its headers, one decoding call and one put.
"""

import contextlib
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Final, Self

import anyio

from kpl_core import Config, KinesisTransport, Producer, ProducerReport
from kpl_core.driver.event_loop import running_clock
from kpl_integrations.asgi.protocol import Receive, Scope, Send
from kpl_integrations.ingest.account import TenantAccounts
from kpl_integrations.ingest.admission import Refusal, Refused
from kpl_integrations.ingest.body import ClientGone
from kpl_integrations.ingest.dashboard import Dashboard
from kpl_integrations.ingest.fairness import TenantFairness
from kpl_integrations.ingest.intake import Intake
from kpl_integrations.ingest.metrics import GatewayMetrics
from kpl_integrations.ingest.otlp import OTLP_PATHS, OtlpRoute
from kpl_integrations.ingest.problem import problem_of
from kpl_integrations.ingest.rate_limit_headers import rate_limit_headers
from kpl_integrations.ingest.records_route import PREFIX, SUFFIX, RecordsRoute
from kpl_integrations.ingest.resources import Resource, Resources
from kpl_integrations.ingest.settings import IngestSettings
from kpl_integrations.ingest.stream_directory import StreamDirectory
from kpl_integrations.ingest.tenants import TenantDirectory
from kpl_integrations.ingest.wire_protocol import WireProtocol

__all__ = ["IngestGateway"]

_log: Final = logging.getLogger(__name__)
_JSON: Final = (b"content-type", b"application/json")
# A client that reads its answer this slowly gets the rest of it from the server's buffers, or not at all.
_SEND_SECONDS: Final = 30.0
_LARGE_ANSWER_BYTES: Final = 32_768
_READING: Final = ("GET", "HEAD")

Headers = list[tuple[bytes, bytes]]


class IngestGateway:
    """An ASGI application, and an async context manager that owns its producer.

    `transport` replaces the network; by default aiobotocore's. `config` replaces the producer's options that the
    settings would give; it must have a fair queue. `plain_receive` says that requests come straight from a server,
    whose `receive` opens no cancel scopes: then a request that is all here needs no timer.
    """

    def __init__(
        self,
        settings: IngestSettings,
        directory: TenantDirectory,
        *,
        transport: KinesisTransport | None = None,
        config: Config | None = None,
        chance: Callable[[], float] = random.random,
        plain_receive: bool = False,
    ) -> None:
        self.settings = settings
        self.directory = directory
        self._config = settings.producer_config(TenantFairness(directory)) if config is None else config
        self._transport = transport
        self._chance = chance
        self.plain_receive = plain_receive
        self.answers: Counter[int] = Counter()
        self.refusals: Counter[Refusal] = Counter()
        self.report: ProducerReport | None = None
        # Further routes by method and path: other protocols add themselves here before the gateway is entered.
        self.routes: dict[tuple[str, str], Callable[[Scope, Receive, Send], Awaitable[None]]] = {
            ("POST", "/"): WireProtocol(self),
            **{("POST", path): OtlpRoute(self, signal) for path, signal in OTLP_PATHS.items()},
        }
        self._entered = False
        Dashboard(self).install()

    # Its life

    async def __aenter__(self) -> Self:
        """Open the producer and the door."""
        transport = self._transport
        if transport is None:
            from kpl_core.driver.aiobotocore_transport import AiobotocoreTransport  # noqa: PLC0415 - 0.3 s

            transport = AiobotocoreTransport(self._config)
        self.transport = transport
        clock = running_clock()
        # Set when the intake closes: whoever answers for long, such as an event stream, ends now.
        self.closing = anyio.Event()
        self._closing_scope = anyio.CancelScope()
        self.metrics = GatewayMetrics(self)
        async with contextlib.AsyncExitStack() as stack:
            self.producer = Producer(self._config, transport=transport, hooks=(self._told, self.metrics.hook))
            await stack.enter_async_context(self.producer)
            self.accounts = TenantAccounts(
                clock=clock,
                chance=self._chance,
                idempotency_keys=self.settings.idempotency_keys,
                idempotency_seconds=self.settings.idempotency_seconds,
            )
            self.streams = StreamDirectory(transport, clock=clock)
            self.intake = Intake(self.producer, self.accounts, clock=clock, chance=self._chance)
            self.resources = Resources(self)
            self._records = RecordsRoute(
                self.settings, self.producer, self.directory, self.accounts, self.streams, self.intake
            )
            self._records.starts_receive = self.plain_receive
            self.metrics.watch(self.producer)
            reloading = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(reloading.cancel_scope.cancel)
            reloading.start_soon(self._reload)
            self._exits = stack.pop_all()
        self._entered = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Close the door, drain, and say what became of all records; at once if the block was cancelled."""
        if kind is not None and issubclass(kind, anyio.get_cancelled_exc_class()):
            return await self._exits.__aexit__(kind, error, traceback)
        try:
            await self.close()
        finally:
            # The block's own exception stays as it is: a task group that sees it wraps it.
            await self._exits.__aexit__(None, None, None)
        return None

    def drain(self) -> None:
        """Say `not ready`, and take what still comes."""
        self.resources.health.is_draining = True
        if self.intake.state == "open":
            self.intake.state = "draining"

    async def close(self) -> ProducerReport:
        """Take nothing more, deliver what is there within `close_seconds`, keep or fail the rest, and report."""
        self.drain()
        self.intake.state = "closed"
        self.closing.set()
        if self.report is None:
            with self._closing_scope:
                await self.producer.close(timeout=self.settings.close_seconds)
            self.report = self.producer.report()
            # What expired or was refused for good is complete, and lost all the same.
            is_well = self.report.complete and not self.report.failed_total
            level = logging.INFO if is_well else logging.WARNING
            _log.log(level, "the gateway is closed: %s", self.report)
        return self.report

    def give_up(self) -> None:
        """Let a `close` that is under way deliver no more: what is left is kept or fails at once."""
        self._closing_scope.cancel()

    async def _reload(self) -> None:
        while True:
            await anyio.sleep(self.settings.reload_seconds)
            # In a thread: ten thousand tenants take half a second to read.
            if await anyio.to_thread.run_sync(self.directory.reload_if_changed):
                _log.info("the tenants were read anew: %d", sum(1 for _ in self.directory.tenants()))

    def _told(self, fact: Any) -> None:  # noqa: ANN401 - any fact; only the intake looks
        if self._entered:
            self.intake(fact)

    # Requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; run the lifespan."""
        kind = scope["type"]
        if kind == "http":
            path: str = scope["path"]
            root: str = scope.get("root_path", "")
            if root and path.startswith(root):
                path = path[len(root) :]
            if path.startswith(PREFIX) and path.endswith(SUFFIX) and scope["method"] == "POST":
                try:
                    (status, body), account = await self._records.answer(
                        scope, receive, path[len(PREFIX) : -len(SUFFIX)]
                    )
                except Refused as refused:
                    await self.refuse(send, refused)
                    return
                except ClientGone:
                    return
                self.answers[status] += 1
                headers = [_JSON, (b"content-length", b"%d" % len(body))]
                if account.quota is not None:
                    headers += rate_limit_headers(account.quota.states(1, 0, self.intake.now()))
                if len(body) < _LARGE_ANSWER_BYTES:
                    await send({"type": "http.response.start", "status": status, "headers": headers})
                    await send({"type": "http.response.body", "body": body})
                else:
                    await _send(send, status, headers, body)
            else:
                await self._answer_other(scope, receive, send, path)
        elif kind == "lifespan":
            await self._lifespan(receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _answer_other(self, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        method: str = scope["method"]
        route = self.routes.get((method, path))
        if route is not None:
            await route(scope, receive, send)
            return
        try:
            status, headers, body = self._resource(method, path)(scope)
        except Refused as refused:
            await self.refuse(send, refused)
            return
        self.answers[status] += 1
        headers.append((b"content-length", str(len(body)).encode()))
        await _send(send, status, headers, b"" if method == "HEAD" else body)

    def _resource(self, method: str, path: str) -> Resource:
        if path.startswith(PREFIX) and path.endswith(SUFFIX):
            only = "POST"
            raise _method_not_allowed(only)
        resource = self.resources.by_path.get(path)
        if resource is not None:
            if method in _READING:
                return resource
            raise _method_not_allowed(", ".join(_READING))
        allowed = sorted(known for known, at in self.routes if at == path)
        if allowed:
            raise _method_not_allowed(", ".join(allowed))
        detail = "there is nothing here; records go to POST /v1/streams/{stream}/records, see /openapi.json"
        raise Refused(Refusal.UNKNOWN_PATH, detail)

    async def refuse(self, send: Send, refused: Refused) -> None:
        """Answer a refused request with its row of the table."""
        status, headers, body = problem_of(refused)
        self.refusals[refused.refusal] += 1
        self.answers[status] += 1
        await _send(send, status, headers, body)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        """Open with the server and close with it; a plain uvicorn has no delay before it stops listening."""
        await receive()
        try:
            await self.__aenter__()
        except Exception as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            raise
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.__aexit__(None, None, None)
        await send({"type": "lifespan.shutdown.complete"})


async def _send(send: Send, status: int, headers: Headers, body: bytes) -> None:
    start = {"type": "http.response.start", "status": status, "headers": headers}
    if len(body) < _LARGE_ANSWER_BYTES:
        await send(start)
        await send({"type": "http.response.body", "body": body})
        return
    with anyio.move_on_after(_SEND_SECONDS):
        await send(start)
        await send({"type": "http.response.body", "body": body})


def _method_not_allowed(allowed: str) -> Refused:
    return Refused(Refusal.METHOD, f"use {allowed} here", headers=((b"allow", allowed.encode()),))
