"""The gateway as an ASGI application: routes, answers, and the life of its producer.

    app = IngestGateway(load_settings(tenants=Path("tenants.toml")), directory)

Served on its own it opens its producer in the lifespan. Mounted in another application, whose server runs only
that one's lifespan, it is entered there: `async with gateway: yield`. No framework stands in between: a request
costs a dictionary of its headers, one decoding call and one put.
"""

import contextlib
import dataclasses
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Final, Self

import anyio

from kpl_core import Config, KinesisTransport, Producer, ProducerReport
from kpl_core.event_loop import running_clock
from kpl_integrations.asgi.protocol import Receive, Scope, Send
from kpl_integrations.ingest.admission.account import TenantAccounts
from kpl_integrations.ingest.admission.admission import Refusal, Refused
from kpl_integrations.ingest.admission.body_room import BodyRoom
from kpl_integrations.ingest.admission.fairness import TenantFairness
from kpl_integrations.ingest.admission.intake import Intake
from kpl_integrations.ingest.dashboard import Dashboard
from kpl_integrations.ingest.fast_path.at_once import AtOnceAnswer, answer_at_once, head_at_once
from kpl_integrations.ingest.http.body import ClientGone
from kpl_integrations.ingest.http.http_answer import (
    LARGE_ANSWER_BYTES,
    Headers,
    json_headers,
    quota_headers,
    send_answer,
    send_refusal,
)
from kpl_integrations.ingest.http.tally import Tally
from kpl_integrations.ingest.open_gateway import OpenGateway
from kpl_integrations.ingest.resources import Resource, Resources
from kpl_integrations.ingest.routes.otlp import OTLP_PATHS, OtlpRoute
from kpl_integrations.ingest.routes.records_head import RecordsHead
from kpl_integrations.ingest.routes.records_route import PREFIX, SUFFIX, RecordsRoute
from kpl_integrations.ingest.routes.wire_protocol import WireProtocol
from kpl_integrations.ingest.settings import IngestSettings
from kpl_integrations.ingest.stats.metrics import GatewayMetrics
from kpl_integrations.ingest.stats.totals import GatewayStats, SingleProcessStats
from kpl_integrations.ingest.streams.stream_directory import StreamDirectory
from kpl_integrations.ingest.tenants import TenantDirectory
from kpl_integrations.ingest.tenants.admin_key import AdminKey
from kpl_integrations.ingest.tenants.reload_trouble import ReloadTrouble
from kpl_integrations.ingest.workers.link import SupervisorLink
from kpl_integrations.ingest.workers.peer_stats import PeerStats, take_part

__all__ = ["IngestGateway"]

_log: Final = logging.getLogger(__name__)
_READING: Final = ("GET", "HEAD")

Route = Callable[[Scope, Receive, Send], Awaitable[None]]


class IngestGateway:
    """An ASGI application, and an async context manager that owns its producer.

    `transport` replaces the network; by default aiobotocore's. `config` replaces the producer's options that the
    settings would give; it must have a fair queue. `plain_receive` says that requests come straight from a server,
    whose `receive` opens no cancel scopes: then a request that is all here needs no timer. `supervisor` connects a
    worker of `kpl serve --workers` to the others.
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
        supervisor: SupervisorLink | None = None,
    ) -> None:
        self.settings = settings
        self.directory = directory
        self._config = settings.producer_config(TenantFairness(directory)) if config is None else config
        if supervisor is not None and self._config.coordination is None:
            self._config = dataclasses.replace(self._config, coordination=supervisor.identity.shard_sharing())
        self._supervisor = supervisor
        self._peer_stats: PeerStats | None = None
        self._transport = transport
        self._chance = chance
        self.plain_receive = plain_receive
        self.tally = Tally()
        self.report: ProducerReport | None = None
        # The other protocols and the dashboard, by method and path; there from the opening on.
        self.routes: dict[tuple[str, str], Route] = {}
        self._entered = False

    # Its life

    async def __aenter__(self) -> Self:
        """Open the producer and the door."""
        transport = self._transport
        if transport is None:
            from kpl_core.transport.aiobotocore_transport import AiobotocoreTransport  # noqa: PLC0415 - 0.3 s

            transport = AiobotocoreTransport(self._config)
        clock = running_clock()
        self._closing_scope = anyio.CancelScope()
        metrics = GatewayMetrics()
        async with contextlib.AsyncExitStack() as stack:
            producer = Producer(self._config, transport=transport, hooks=(self._told, metrics.hook))
            await stack.enter_async_context(producer)
            self.opened = opened = self._open(producer, transport, clock)
            metrics.watch(opened)
            own = SingleProcessStats(opened, metrics)
            if self._supervisor is not None:
                taking_part = take_part(self._supervisor, opened, own, chance=self._chance)
                self._peer_stats = await stack.enter_async_context(taking_part)
            self._route(opened, own if self._peer_stats is None else self._peer_stats)
            reloading = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(reloading.cancel_scope.cancel)
            reloading.start_soon(self._reload)
            self._exits = stack.pop_all()
        self._entered = True
        return self

    def _open(self, producer: Producer, transport: KinesisTransport, clock: Callable[[], float]) -> OpenGateway:
        accounts = TenantAccounts(
            clock=clock,
            chance=self._chance,
            idempotency_keys=self.settings.idempotency_keys,
            idempotency_seconds=self.settings.idempotency_seconds,
        )
        return OpenGateway(
            settings=self.settings,
            directory=self.directory,
            transport=transport,
            producer=producer,
            accounts=accounts,
            streams=StreamDirectory(transport, clock=clock),
            intake=Intake(
                producer, accounts, clock=clock, chance=self._chance, bodies=BodyRoom(self.settings.max_reading_bytes)
            ),
            tally=self.tally,
            admin_key=AdminKey(self.settings.admin_key),
            closing=anyio.Event(),
        )

    def _route(self, opened: OpenGateway, gateway_stats: GatewayStats) -> None:
        self._resources = Resources(opened, gateway_stats)
        self._records = RecordsRoute(
            opened.settings, opened.producer, opened.directory, opened.accounts, opened.streams, opened.intake
        )
        self._records.starts_receive = self.plain_receive
        self.routes |= {
            ("POST", "/"): WireProtocol(opened),
            **{("POST", path): OtlpRoute(opened, signal) for path, signal in OTLP_PATHS.items()},
            **Dashboard(opened, gateway_stats).routes(),
        }

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
        self._resources.health.is_draining = True
        if self.intake.state == "open":
            self.intake.state = "draining"

    async def close(self) -> ProducerReport:
        """Take nothing more, deliver what is there within `close_seconds`, keep or fail the rest, and report."""
        self.drain()
        self.intake.state = "closed"
        self.opened.closing.set()
        if self.report is None:
            with self._closing_scope:
                await self.producer.close(timeout=self.settings.close_seconds)
            self.report = self.producer.report()
            if self._peer_stats is not None:
                await self._peer_stats.report()
            # What expired or was refused for good is complete, and lost all the same.
            is_well = self.report.complete and not self.report.failed_total
            level = logging.INFO if is_well else logging.WARNING
            _log.log(level, "the gateway is closed: %s", self.report)
        return self.report

    def give_up(self) -> None:
        """Let a `close` that is under way deliver no more: what is left is kept or fails at once."""
        self._closing_scope.cancel()

    async def _reload(self) -> None:
        trouble = ReloadTrouble()
        while True:
            await anyio.sleep(self.settings.reload_seconds)
            try:
                # In a thread: ten thousand tenants take half a second to read.
                if await anyio.to_thread.run_sync(self.directory.reload_if_changed):
                    _log.info("the tenants were read anew: %d", sum(1 for _ in self.directory.tenants()))
            except Exception as error:  # noqa: BLE001 - an application's directory may raise anything
                trouble.failed(error, anyio.current_time())
            else:
                trouble.worked(anyio.current_time())

    def _told(self, fact: Any) -> None:  # noqa: ANN401 - any fact; only the intake looks
        if self._entered:
            self.intake(fact)

    @property
    def producer(self) -> Producer:
        """The producer of an open gateway."""
        return self.opened.producer

    @property
    def intake(self) -> Intake:
        """The door of an open gateway."""
        return self.opened.intake

    @property
    def streams(self) -> StreamDirectory:
        """The streams that an open gateway knows."""
        return self.opened.streams

    @property
    def answers(self) -> Counter[int]:
        """Requests answered, by status."""
        return self.tally.answers

    @property
    def refusals(self) -> Counter[Refusal]:
        """Requests refused, by row of the admission table."""
        return self.tally.refusals

    # Requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; run the lifespan."""
        kind = scope["type"]
        if kind == "http":
            path: str = scope["path"] or "/"
            root: str = scope.get("root_path", "")
            if root:
                # Under a prefix, the root is asked for with a slash or without.
                under = path.removeprefix(root.rstrip("/"))
                if under[:1] in {"", "/"}:
                    path = under or "/"
            if path.startswith(PREFIX) and path.endswith(SUFFIX) and scope["method"] == "POST":
                try:
                    (status, body), account = await self._records.answer(
                        scope, receive, path[len(PREFIX) : -len(SUFFIX)]
                    )
                except Refused as refused:
                    await send_refusal(send, refused, self.tally)
                    return
                except ClientGone:
                    return
                self.tally.answers[status] += 1
                headers = [*json_headers(body), *quota_headers(account, self.intake.now())]
                if len(body) < LARGE_ANSWER_BYTES:
                    await send({"type": "http.response.start", "status": status, "headers": headers})
                    await send({"type": "http.response.body", "body": body})
                else:
                    await send_answer(send, status, headers, body)
            else:
                await self._answer_other(scope, receive, send, path)
        elif kind == "lifespan":
            await self._lifespan(receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    def head_at_once(self, target: bytes, headers: Headers) -> RecordsHead | None:
        """Return what the head of a POST asks for; None: call the application."""
        return head_at_once(target, headers)

    def answer_at_once(self, head: RecordsHead, body: bytes) -> AtOnceAnswer | None:
        """Return the answer to a request that is here whole and needs no waiting; None: call the application."""
        return answer_at_once(self._records, self.tally, head, body)

    async def _answer_other(self, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        method: str = scope["method"]
        route = self.routes.get((method, path))
        if route is not None:
            await route(scope, receive, send)
            return
        try:
            status, headers, body = await self._resource(method, path)(scope)
        except Refused as refused:
            await send_refusal(send, refused, self.tally)
            return
        self.tally.answers[status] += 1
        headers.append((b"content-length", str(len(body)).encode()))
        await send_answer(send, status, headers, b"" if method == "HEAD" else body)

    def _resource(self, method: str, path: str) -> Resource:
        if path.startswith(PREFIX) and path.endswith(SUFFIX):
            only = "POST"
            raise _method_not_allowed(only)
        resource = self._resources.by_path.get(path)
        if resource is not None:
            if method in _READING:
                return resource
            raise _method_not_allowed(", ".join(_READING))
        allowed = sorted(known for known, at in self.routes if at == path)
        if allowed:
            raise _method_not_allowed(", ".join(allowed))
        detail = "there is nothing here; records go to POST /v1/streams/{stream}/records, see /openapi.json"
        raise Refused(Refusal.UNKNOWN_PATH, detail)

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


def _method_not_allowed(allowed: str) -> Refused:
    return Refused(Refusal.METHOD, f"use {allowed} here", headers=((b"allow", allowed.encode()),))
