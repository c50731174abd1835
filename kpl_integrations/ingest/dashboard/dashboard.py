"""`/dashboard`: one self-contained page, updated by server-sent events.

The page and its events need the admin key, which is exchanged for a cookie. Without credentials (`kpl serve --local`)
they are open. One event a second serves all watchers. Without watchers a document is computed every 5 seconds, for the
history that a watcher gets first; less often where that takes more than 1 % of the CPU time, or asks more workers.
"""

import base64
import hashlib
import html
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files
from typing import Any, Final
from urllib.parse import parse_qs

import anyio
import msgspec

from kpl_integrations.asgi.protocol import Receive, Scope, Send, retry_after_header
from kpl_integrations.ingest.admission.refusals import REFUSALS, Refusal, Refused
from kpl_integrations.ingest.dashboard.board import Board
from kpl_integrations.ingest.dashboard.history import STEP_SECONDS, ChartHistory
from kpl_integrations.ingest.dashboard.sign_in import DashboardSession
from kpl_integrations.ingest.http.answers import send_answer, send_refusal
from kpl_integrations.ingest.http.bodies import ClientGone, read_body
from kpl_integrations.ingest.http.request_head import server_of
from kpl_integrations.ingest.open_gateway import OpenGateway, client_of
from kpl_integrations.ingest.stats import GatewayStats

_log: Final = logging.getLogger(__name__)
EVENT_SECONDS: Final = 1.0
MOST_WATCHERS: Final = 50
CLOSING_EVENT_SECONDS: Final = 2.0
_WATCHERS_RETRY_SECONDS: Final = 30.0
# Of a process, for the history; and each worker asks all others, so that a fleet of them asks less often.
_MOST_CPU_SHARE: Final = 0.01
_SECONDS_PER_WORKER: Final = 1.0
_MOST_FORM_BYTES: Final = 4_096
_FORM_SECONDS: Final = 10.0
_HTML: Final = (b"content-type", b"text/html; charset=utf-8")
_NO_STORE: Final = (b"cache-control", b"no-store")

Route = Callable[[Scope, Receive, Send], Awaitable[None]]


class Dashboard:
    """The routes of one gateway's dashboard. `wall_clock` is for cookies only."""

    def __init__(
        self, opened: OpenGateway, stats: GatewayStats, *, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._history = ChartHistory()
        self._workers = 1
        self._opened = opened
        self._stats = stats
        self._wall_clock = wall_clock
        key = opened.settings.admin_key
        self._session = None if key is None else DashboardSession(key.reveal())
        self._attempts = opened.login_attempts
        self._page = _Page("page.html", runbook_url=opened.settings.runbook_url or "")
        self._login = _Page("login.html")
        self._board = Board()
        self._latest = b""
        self._latest_at = -EVENT_SECONDS
        self._watchers = 0
        # One watcher computes an event, and the others wait for it.
        self._computing = anyio.Lock()

    def routes(self) -> dict[tuple[str, str], Route]:
        """Return the handlers by method and path."""
        shown = {("GET", "/dashboard"): self._show, ("GET", "/dashboard/events"): self._watch}
        return {("POST", "/dashboard"): self._enter, **{key: self._guarded(route) for key, route in shown.items()}}

    def _guarded(self, route: Route) -> Route:
        """Return a handler that refuses clients with too many wrong keys."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await route(scope, receive, send)
            except Refused as refused:
                await send_refusal(scope, send, refused, self._opened.tally)

        return guarded

    async def _show(self, scope: Scope, _receive: Receive, send: Send) -> None:
        if self._is_authorized(scope):
            await self._answer(send, 200, self._page)
        elif self._session is None:
            await self._answer(send, 403, self._login, note="Set KPL_INGEST_ADMIN_KEY, then enter that key here.")
        else:
            await self._answer(send, 401, self._login)

    async def _enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            room = self._opened.room_of(None, client_of(scope), server_of(scope))
            body = await read_body(receive, most_bytes=_MOST_FORM_BYTES, seconds=_FORM_SECONDS, room=room)
        except ClientGone:
            return
        except Refused as refused:
            await send_refusal(scope, send, refused, self._opened.tally)
            return
        # The size of the body bounds the number of fields; parse_qs's own bound would raise.
        given = parse_qs(body.decode("utf-8", "replace")).get("key", [""])[0]
        address, now = (scope.get("client") or ("",))[0], self._opened.admission.now()
        wait = self._attempts.wait_seconds(address, now)
        if wait > 0:
            retry_after = retry_after_header(wait)
            note = f"Too many wrong keys. Try again in {retry_after[1].decode()} s."
            await self._answer(send, REFUSALS[Refusal.WRONG_KEYS].status, self._login, note=note, headers=[retry_after])
            return
        # The server has a certificate, or a trusted proxy reports that the client uses TLS.
        is_secure = self._opened.settings.tls_certificate is not None or scope.get("scheme") == "https"
        session = self._session
        cookie = None if session is None else session.begin(given, self._wall_clock(), is_secure=is_secure)
        if cookie is None:
            self._attempts.failed(address, now)
            await self._answer(send, 401, self._login, note="This is not the admin key.")
            return
        headers = [(b"location", b"dashboard"), (b"set-cookie", cookie.encode()), _NO_STORE, (b"content-length", b"0")]
        await self._respond(send, 303, headers, b"")

    async def _watch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send one event a second until the client disconnects, its session expires, or admission closes."""
        if not self._is_authorized(scope):
            await self._respond(send, 401, [_NO_STORE, (b"content-length", b"0")], b"")
            return
        fields = dict(scope["headers"])
        if self._watchers >= MOST_WATCHERS:
            headers = [retry_after_header(_WATCHERS_RETRY_SECONDS), (b"content-length", b"0")]
            await self._respond(send, 503, headers, b"")
            return
        self._opened.tally.answers[200] += 1
        headers = [(b"content-type", b"text/event-stream"), _NO_STORE, (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._watchers += 1
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_until_gone, receive, tasks.cancel_scope)
                tasks.start_soon(self._until_closed, tasks.cancel_scope)
                past = msgspec.json.encode(self._history.shown(self._opened.admission.now()))
                first = b"event: history\ndata: %b\n\n" % past
                await send({"type": "http.response.body", "body": first, "more_body": True})
                # Attempts are not checked again: wrong keys of other clients must not end the stream.
                while self._has_session(fields) or self._opened.admin_key.is_shown(fields):
                    await send({"type": "http.response.body", "body": await self._event(), "more_body": True})
                    await anyio.sleep(EVENT_SECONDS)
                tasks.cancel_scope.cancel()
        finally:
            self._watchers -= 1
        # After the event `closed` the page waits for the next gateway. After the end of its session it gets 401.
        last_event = b"event: closed\ndata: {}\n\n" if self._opened.closing.is_set() else b""
        # A client that does not read must not delay the shutdown, and the server may have no time limit.
        with anyio.move_on_after(CLOSING_EVENT_SECONDS):
            await send({"type": "http.response.body", "body": last_event})

    async def remember(self) -> None:
        """Compute a document now and then, also without watchers, until cancelled."""
        while True:
            began = time.process_time()
            try:
                await self._event()
            except Exception:  # noqa: BLE001 - a chart with a gap must not end the gateway
                _log.warning("the dashboard's history has a gap, because the figures cannot be read", exc_info=True)
            spent = time.process_time() - began
            await anyio.sleep(max(STEP_SECONDS, spent / _MOST_CPU_SHARE, self._workers * _SECONDS_PER_WORKER))

    async def _until_closed(self, watching: anyio.CancelScope) -> None:
        await self._opened.closing.wait()
        watching.cancel()

    async def _event(self) -> bytes:
        """Return the latest event, which is the same for all watchers."""
        async with self._computing:
            now = self._opened.admission.now()
            # Half a period, because the timers of several watchers do not fire at the same time.
            if now - self._latest_at >= EVENT_SECONDS / 2:
                self._latest_at = now
                totals = await self._stats.totals()
                samples = (sample for family in totals.families for sample in family.samples)
                own_parts = self._opened.parts.readiness(verbose=True)[1]["parts"]
                stats = totals.stats.with_busiest_tenants()
                document = self._board.update(stats, samples, now, own_parts, is_current=totals.is_current)
                self._history.add(document, now)
                self._workers = max(1, document["workers"])
                self._latest = b"data: " + msgspec.json.encode(document) + b"\n\n"
            return self._latest

    def _is_authorized(self, scope: Scope) -> bool:
        fields = dict(scope["headers"])
        return self._has_session(fields) or self._opened.is_administrator(scope, fields)

    def _has_session(self, fields: dict[bytes, bytes]) -> bool:
        """Return True if the gateway has no credentials, or if the cookie is valid."""
        if not self._opened.directory.verifies:
            return True
        session = self._session
        return session is not None and session.is_open(fields.get(b"cookie", b""), self._wall_clock())

    async def _answer(
        self, send: Send, status: int, page: "_Page", *, note: str = "", headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        body = page.html.replace(b"<!-- note -->", note.encode())
        fields = [
            *headers,
            _HTML,
            _NO_STORE,
            (b"content-security-policy", page.policy),
            (b"referrer-policy", b"no-referrer"),
            (b"x-content-type-options", b"nosniff"),
            (b"content-length", str(len(body)).encode()),
        ]
        await self._respond(send, status, fields, body)

    async def _respond(self, send: Send, status: int, headers: list[Any], body: bytes) -> None:
        self._opened.tally.answers[status] += 1
        await send_answer(send, status, headers, body)


class _Page:
    """An HTML file of this package, and the policy that allows only its own script and style."""

    def __init__(self, name: str, *, runbook_url: str = "") -> None:
        runbook = f'data-runbook="{html.escape(runbook_url)}"'
        self.html = files(__package__).joinpath(name).read_bytes().replace(b'data-runbook=""', runbook.encode())
        script, style = (_source(self.html, tag) for tag in (b"script", b"style"))
        self.policy = b"; ".join(
            (
                b"default-src 'none'",
                b"script-src " + script,
                b"style-src " + style,
                # The empty icon, without which a browser asks for /favicon.ico.
                b"img-src data:",
                b"connect-src 'self'",
                b"form-action 'self'",
                b"base-uri 'none'",
                b"frame-ancestors 'none'",
            )
        )


def _source(page: bytes, tag: bytes) -> bytes:
    _, found, rest = page.partition(b"<" + tag + b">")
    if not found:
        return b"'none'"
    digest = hashlib.sha256(rest.partition(b"</" + tag + b">")[0]).digest()
    return b"'sha256-" + base64.b64encode(digest) + b"'"


async def _until_gone(receive: Receive, watching: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    watching.cancel()
