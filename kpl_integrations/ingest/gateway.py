"""The gateway as an ASGI application: its routes, and the lifecycle of its producer.

    app = IngestGateway(load_settings(tenants=Path("tenants.toml")), directory)

Served on its own, it opens its producer in the lifespan. Mounted in another application, enter it in that
application's lifespan: `async with gateway: yield`. It uses no web framework: a request costs a dictionary of its
headers, one decoding call and one put.
"""

import contextlib
import dataclasses
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

import anyio
import msgspec

from kpl_core import Config, Hook, Producer, ProducerReport
from kpl_core.event_loop import running_clock
from kpl_core.hooks import CoordinatorMet, RecordsFinished, RequestCompleted
from kpl_core.transport import KinesisTransport
from kpl_core.transport.default_transport import default_transport
from kpl_integrations.asgi.protocol import Receive, Scope, Send
from kpl_integrations.host_names import HostNames
from kpl_integrations.ingest.admission.admission import Admission
from kpl_integrations.ingest.admission.clients import AddressBudgets, LoginAttempts, SharedRoom
from kpl_integrations.ingest.admission.refusals import Refusal, Refused
from kpl_integrations.ingest.admission.tenant_account import TenantAccounts, TenantFairness
from kpl_integrations.ingest.dashboard import Dashboard
from kpl_integrations.ingest.http.access_log import AccessLog
from kpl_integrations.ingest.http.answers import Answer, Headers, ServerRefusals, Tally, send_answer, send_refusal
from kpl_integrations.ingest.http.certificate import ServerCertificate
from kpl_integrations.ingest.http.correlation import (
    LOG_FIELDS,
    REQUEST_ID_HEADER,
    identify,
    new_request_id,
    request_id_of_scope,
)
from kpl_integrations.ingest.http.cors import CrossOrigin
from kpl_integrations.ingest.http.large_bodies import LargeBodies
from kpl_integrations.ingest.http.read_turns import ReadTurns
from kpl_integrations.ingest.http.request_head import (
    FORWARDED_FOR,
    PREFIX,
    SUFFIX,
    RecordsHead,
    Server,
    correlation_of,
    header_fields,
    records_head,
    records_head_of,
    server_of,
)
from kpl_integrations.ingest.open_gateway import OpenGateway, client_of
from kpl_integrations.ingest.openapi import openapi_document
from kpl_integrations.ingest.outside_parts import (
    WatchedSink,
    dead_letter_sink,
    opentelemetry_metrics,
    opentelemetry_spans,
)
from kpl_integrations.ingest.readiness.readyz import PartsWatch
from kpl_integrations.ingest.request.kinesis_wire import KinesisRequest, signed_request
from kpl_integrations.ingest.request.needs import Need, Steps
from kpl_integrations.ingest.request.otlp import OTLP_PATHS, OtlpRequest
from kpl_integrations.ingest.request.records import RecordsRequest
from kpl_integrations.ingest.request.request import Request
from kpl_integrations.ingest.routes.request_driver import RequestDriver
from kpl_integrations.ingest.routes.resources import Resource, Resources
from kpl_integrations.ingest.settings import IngestSettings
from kpl_integrations.ingest.stats import GatewayStats, SingleProcessStats
from kpl_integrations.ingest.streams.stream_directory import NO_STREAM, StreamDirectory
from kpl_integrations.ingest.tenants import CallableTenants, OpenTenants, Tenant, TenantDirectory
from kpl_integrations.ingest.tenants.credentials import AdminKey
from kpl_integrations.ingest.tenants.tenant import ReloadFailureLog
from kpl_integrations.ingest.workers.link import SupervisorLink
from kpl_integrations.ingest.workers.peer_stats import PeerStats, take_part
from kpl_integrations.ingest.workers.shared_quotas import shared_quotas, sharing_of
from kpl_integrations.metrics.prometheus import PrometheusMetrics
from kpl_integrations.metrics.sources import producer_source

_log: Final = logging.getLogger(__name__)
# A longer record costs more to copy than a batch of single records saves.
_MOST_SINGLE_BYTES: Final = 4_096
_POST: Final = "POST"
_AT_THE_ROOT: Final = ", for the Kinesis API; the dashboard is at /dashboard, and /openapi.json has all routes"
_READING: Final = ("GET", "HEAD")
_OTHER_HOST: Final = (
    "the Host field names another host than this gateway; use a loopback name, or start it with --allow-host NAME"
)

Route = Callable[[Scope, Receive, Send], Awaitable[None]]


class IngestGateway:
    """An ASGI application, and an async context manager that owns its producer.

    `transport` replaces the one to AWS. `config` replaces the producer's options from the settings; it must have a fair
    queue. `supervisor` connects a worker of `kpl serve --workers` to the others.
    `hooks` are further hooks of the producer.
    """

    def __init__(
        self,
        settings: IngestSettings,
        directory: TenantDirectory,
        *,
        transport: KinesisTransport | None = None,
        config: Config | None = None,
        chance: Callable[[], float] = random.random,
        supervisor: SupervisorLink | None = None,
        hooks: Sequence[Hook] = (),
    ) -> None:
        self.settings = settings
        self.directory = directory
        self._config = settings.producer_config(TenantFairness(directory)) if config is None else config
        self._sharing = sharing_of(settings, None if supervisor is None else supervisor.identity)
        if self._sharing is not None and self._config.coordination is None:
            self._config = dataclasses.replace(self._config, coordination=self._sharing.shards)
        self._supervisor = supervisor
        self._peer_stats: PeerStats | None = None
        self._transport = transport
        self._chance = chance
        self._hooks = hooks
        # The server's connections are read in turns while its event loop is late.
        self.read_turns = ReadTurns(self._tenant_shown)
        # Set by the server if it has TLS; read again with the tenants.
        self.certificate: ServerCertificate | None = None
        self._reload_wanted = anyio.Event()
        self.tally = Tally()
        self.server_refusals = ServerRefusals(self.tally, chance)
        self.report: ProducerReport | None = None
        # The dashboard, by method and path; filled when the gateway opens.
        self.routes: dict[tuple[str, str], Route] = {}
        self._hosts = None if settings.allowed_hosts is None else HostNames(settings.allowed_hosts.split(","))
        self._cors = None if settings.cors_origins is None else CrossOrigin(settings.cors_origins.split(","))
        self._access_log = AccessLog(settings.access_log) if settings.access_log else None
        self._limits = settings.decode_limits()
        # Each request has its own line in an access log, with its own time.
        most_bytes = min(_MOST_SINGLE_BYTES, settings.max_body_bytes, settings.max_record_bytes)
        self.most_single_bytes = most_bytes if self._access_log is None else 0
        self._entered = False

    # Lifecycle

    async def __aenter__(self) -> Self:
        """Open the producer and admission."""
        transport = self._transport
        if transport is None:
            transport = await default_transport(self._config)
        clock = running_clock()
        self._closing_scope = anyio.CancelScope()
        # The gateway sums its processes itself, so the client library's multiprocess mode is not needed.
        metrics = PrometheusMetrics(per_process=True)
        async with contextlib.AsyncExitStack() as stack:
            hooks: list[Hook] = [self._observe, metrics, *self._hooks]
            if self._supervisor is not None:
                # First: what is counted there should not wait for the other hooks.
                hooks.insert(0, self._supervisor.counts)
            measured = opentelemetry_metrics(self.settings)
            hooks += [] if measured is None else [measured]
            sink = await stack.enter_async_context(dead_letter_sink(self.settings, clock))
            producer = Producer(self._config, transport=transport, hooks=hooks, dead_letter_sink=sink)
            await stack.enter_async_context(producer)
            if measured is not None:
                measured.watch(producer_source(producer))
            self.opened = opened = self._open(producer, transport, sink, clock)
            own = SingleProcessStats(opened, metrics)
            if self._sharing is not None:
                shared = shared_quotas(
                    self._sharing.quotas,
                    opened.accounts,
                    region=self.settings.producer.region,
                    clock=opened.admission.now,
                    chance=self._chance,
                    tell=partial(opened.parts.coordinated, "quotas"),
                )
                await stack.enter_async_context(shared)
            if self._supervisor is not None:
                taking_part = take_part(self._supervisor, opened, own)
                self._peer_stats = await stack.enter_async_context(taking_part)
            dashboard = self._add_routes(opened, own if self._peer_stats is None else self._peer_stats)
            reloading = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(reloading.cancel_scope.cancel)
            reloading.start_soon(self._reload)
            reloading.start_soon(opened.parts.run)
            reloading.start_soon(dashboard.remember)
            self._exits = stack.pop_all()
        self._entered = True
        return self

    def _open(
        self, producer: Producer, transport: KinesisTransport, sink: WatchedSink | None, clock: Callable[[], float]
    ) -> OpenGateway:
        accounts = TenantAccounts(
            clock=clock,
            chance=self._chance,
            idempotency_keys=self.settings.idempotency_keys,
            idempotency_seconds=self.settings.idempotency_seconds,
        )
        # Only a directory that verifies has verified tenants.
        verified_bytes = self.settings.max_reading_bytes // 2 if self.directory.verifies else 0
        acknowledge = None if self._supervisor is None else self._supervisor.counts.acknowledge
        admission = Admission(producer, accounts, clock=clock, chance=self._chance, acknowledge=acknowledge)
        streams = StreamDirectory(transport, clock=clock, has_pipeline=lambda stream: stream in producer.statistics())
        parts = PartsWatch(
            producer,
            lambda: admission.state,
            has_tenants_file=not isinstance(self.directory, OpenTenants | CallableTenants),
            certificate=self.certificate,
            default_ack=self.settings.default_ack,
            sink=sink,
            streams=streams,
            clock=clock,
        )
        return OpenGateway(
            settings=self.settings,
            directory=self.directory,
            transport=transport,
            producer=producer,
            accounts=accounts,
            streams=streams,
            admission=admission,
            verified_room=SharedRoom(verified_bytes),
            anonymous_room=SharedRoom(self.settings.max_reading_bytes - verified_bytes),
            addresses=AddressBudgets(),
            large_bodies=LargeBodies(self.settings.body_seconds),
            tally=self.tally,
            admin_key=AdminKey(self.settings.admin_key),
            login_attempts=LoginAttempts(clock()),
            read_turns=self.read_turns,
            parts=parts,
            closing=anyio.Event(),
            spans=opentelemetry_spans(self.settings),
            wall_clock=time.time,
        )

    def _add_routes(self, opened: OpenGateway, stats: GatewayStats) -> Dashboard:
        self._resources = Resources(opened, stats, msgspec.json.encode(openapi_document(opened.settings)))
        self._driver = RequestDriver(opened)
        dashboard = Dashboard(opened, stats)
        self.routes |= dashboard.routes()
        return dashboard

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Close admission, drain, and log the report; without draining if the block was cancelled."""
        if kind is not None and issubclass(kind, anyio.get_cancelled_exc_class()):
            return await self._exits.__aexit__(kind, error, traceback)
        try:
            await self.close()
        finally:
            # Pass no exception: a task group would wrap the block's own.
            await self._exits.__aexit__(None, None, None)
        return None

    def drain(self) -> None:
        """Report not ready, and still accept requests."""
        self.read_turns.end()
        if self.admission.state == "open":
            self.admission.state = "draining"

    async def close(self) -> ProducerReport:
        """Reject new records, deliver buffered ones for `close_seconds`, keep or fail the rest, and return a report."""
        self.drain()
        self.admission.state = "closed"
        self.opened.closing.set()
        self.opened.large_bodies.finish()
        if self.report is None:
            with self._closing_scope:
                await self.producer.close(timeout=self.settings.close_seconds)
            self.report = self.producer.report()
            if self._peer_stats is not None:
                await self._peer_stats.report()
            if self.report.all_delivered:  # else the producer has logged its report, as a warning
                _log.info("gateway closed: %s", self.report)
        return self.report

    def give_up(self) -> None:
        """Stop the delivery of a running `close`: the remaining records are kept or fail at once."""
        self._closing_scope.cancel()

    def reload(self) -> None:
        """Read the tenants and the certificate again now, as for SIGHUP. Not thread-safe."""
        self._reload_wanted.set()

    async def _reload(self) -> None:
        failures = ReloadFailureLog()
        parts = self.opened.parts
        while True:
            with anyio.move_on_after(self.settings.reload_seconds):
                await self._reload_wanted.wait()
            is_wanted, self._reload_wanted = self._reload_wanted.is_set(), anyio.Event()
            if self.certificate is not None:
                await anyio.to_thread.run_sync(partial(self.certificate.reload_if_changed, always=is_wanted))
            try:
                # In a thread, because reading 10,000 tenants takes 0.5 s.
                if await anyio.to_thread.run_sync(self.directory.reload_if_changed):
                    _log.info("reloaded the tenants: %d", sum(1 for _ in self.directory.tenants()))
            except Exception as error:  # noqa: BLE001 - an application's directory may raise anything
                failures.failed(error, anyio.current_time())
                parts.tenants_problem = type(error).__name__
            else:
                failures.succeeded(anyio.current_time())
                parts.tenants_problem = getattr(self.directory, "problem", None)
            parts.look()

    def _observe(self, fact: Any) -> None:  # noqa: ANN401 - any fact; admission selects its own
        if not self._entered:
            return
        if isinstance(fact, CoordinatorMet):
            self.opened.parts.coordinated("shards", fact)
        elif isinstance(fact, RequestCompleted):
            self.opened.parts.answered(fact)
            if fact.error_code == NO_STREAM:
                self.opened.streams.doubt(fact.stream)
        elif not isinstance(fact, RecordsFinished):
            self.admission(fact)
        elif fact.outcome == "delivered":
            self.opened.streams.confirm(fact.stream)

    @property
    def producer(self) -> Producer:
        """The producer of an open gateway."""
        return self.opened.producer

    @property
    def admission(self) -> Admission:
        """The admission of an open gateway."""
        return self.opened.admission

    # Requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or run the lifespan."""
        kind = scope["type"]
        if kind == "lifespan":
            await self._lifespan(receive, send)
        elif kind != "http":
            await send({"type": "websocket.close", "code": 1000})
        else:
            send = identify(scope, send)
            if self._access_log is not None:
                send = self._access_log.watch(scope, send)
            if self._cors is not None:
                if await self._cors.answer_preflight(scope, send):
                    return
                send = self._cors.allowing(scope, send)
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_for_this_host(scope["headers"]):
            await send_refusal(scope, send, Refused(Refusal.HOST, _OTHER_HOST), self.tally)
            return
        path: str = scope["path"] or "/"
        root: str = scope.get("root_path", "")
        if root:
            # The path relative to the prefix; the root may lack its slash.
            under = path.removeprefix(root.rstrip("/"))
            if under[:1] in {"", "/"}:
                path = under or "/"
        if scope["method"] == _POST and _takes_records(path):
            await self._driver.answer(self._request_of(scope, path), receive, send)
        else:
            await self._answer_other(scope, receive, send, path)

    def _request_of(self, scope: Scope, path: str) -> Request:
        """Return the request of a path that takes records, in the path's form."""
        opened, raw, client = self.opened, scope["headers"], client_of(scope)
        repeated = None
        try:
            headers = header_fields(raw)
        except Refused as refused:
            headers, repeated = dict(raw), refused
        server = server_of(scope)
        body = None if server is None else server.whole_body()
        request: Request
        if path.startswith(PREFIX) and path.endswith(SUFFIX):
            head = records_head(path[len(PREFIX) : -len(SUFFIX)], scope["query_string"], headers)
            request = RecordsRequest(opened, self._limits, head, client, body, server)
        elif path in OTLP_PATHS:
            request = OtlpRequest(opened, OTLP_PATHS[path], headers, client, body, server)
        else:
            request = KinesisRequest(opened, headers, signed_request(scope), client, body, server)
        request.repeated = repeated
        request.request_id = request_id_of_scope(scope)
        request.correlation = correlation_of(headers)
        scope[LOG_FIELDS] = request.log_fields
        return request

    def head_of(self, target: bytes, headers: Headers) -> RecordsHead | None:
        """Return the parsed head of a POST; see `Requests`. Answers to web pages have further header fields."""
        if self._cors is not None and self._cors.allowed(headers) is not None:
            return None
        return records_head_of(target, headers) if self._is_for_this_host(headers) else None

    def _is_for_this_host(self, headers: Headers) -> bool:
        if self._hosts is None:
            return True
        return self._hosts.allow(value.decode("latin-1") for name, value in headers if name == b"host")

    def _tenant_shown(self, authorization: str | None) -> Tenant | None:
        """Return the tenant with these credentials; None: they are wrong, or nothing is verified."""
        found = self.directory.authenticate(authorization) if self.directory.verifies else None
        return None if found is self.directory.unknown else found

    def begin(self, head: RecordsHead, body: bytes, client: str, server: Server | None) -> RecordsRequest | None:
        """Return a complete request; see `Requests`."""
        if FORWARDED_FOR in head.headers and self._tenant_shown(head.authorization) is None:
            # Its client counts by address, which the server finds for the application only.
            return None
        request = RecordsRequest(self.opened, self._limits, head, client, body, server)
        if self._access_log is not None:
            request.log = self._access_log.begin(client, f"{PREFIX}{head.stream}{SUFFIX}", len(body))
        return request

    def put_together(self, head: RecordsHead, bodies: Sequence[bytes]) -> Answer | list[Steps[Answer]] | None:
        """Put the records of several requests with one each; see `Requests`."""
        request = self.begin(head, b"", "", None)
        return None if request is None else request.put_together(bodies)

    async def finish(self, steps: Steps[Answer], need: Need, send: Send) -> None:
        """Run a request that waits to its end, and send its answer; see `Requests`."""
        answer = await self._driver.run(steps, need)
        request_id = answer.request_id or new_request_id()
        await send_answer(send, answer.status, [*answer.headers(), (REQUEST_ID_HEADER, request_id)], answer.body)

    async def _answer_other(self, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        method: str = scope["method"]
        route = self.routes.get((method, path))
        if route is not None:
            await route(scope, receive, send)
            return
        try:
            status, headers, body = await self._resource(method, path)(scope)
        except Refused as refused:
            await send_refusal(scope, send, refused, self.tally)
            return
        self.tally.answers[status] += 1
        headers.append((b"content-length", str(len(body)).encode()))
        await send_answer(send, status, headers, b"" if method == "HEAD" else body)

    def _resource(self, method: str, path: str) -> Resource:
        if _takes_records(path):
            raise _method_not_allowed(_POST, _AT_THE_ROOT if path == "/" else "")
        resource = self._resources.by_path.get(path)
        if resource is not None:
            if method in _READING:
                return resource
            raise _method_not_allowed(", ".join(_READING))
        allowed = sorted(known for known, at in self.routes if at == path)
        if allowed:
            raise _method_not_allowed(", ".join(allowed))
        detail = "no such path; send records to POST /v1/streams/{stream}/records, see /openapi.json"
        raise Refused(Refusal.UNKNOWN_PATH, detail)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        """Open and close with the server. uvicorn stops listening without a delay."""
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


def _takes_records(path: str) -> bool:
    return (path.startswith(PREFIX) and path.endswith(SUFFIX)) or path in OTLP_PATHS or path == "/"


def _method_not_allowed(allowed: str, more: str = "") -> Refused:
    return Refused(Refusal.METHOD, f"use {allowed} here{more}", headers=((b"allow", allowed.encode()),))
