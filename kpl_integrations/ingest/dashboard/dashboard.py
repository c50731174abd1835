"""`/dashboard`: one page without anything from elsewhere, kept alive by server-sent events.

The page and its events need the admin key, exchanged for a cookie; where no credentials are checked at all
(`kpl serve --local`) it is open. One look a second serves everybody who watches, and nobody watching costs nothing.
"""

import base64
import hashlib
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files
from typing import Any, Final
from urllib.parse import parse_qs

import anyio
import msgspec

from kpl_integrations.asgi.protocol import Receive, Scope, Send
from kpl_integrations.ingest.admission.admission import Refused
from kpl_integrations.ingest.dashboard.board import Board, MetricSample, Totals
from kpl_integrations.ingest.dashboard.login_attempts import LoginAttempts
from kpl_integrations.ingest.dashboard.session import Session
from kpl_integrations.ingest.http.body import ClientGone, read_body
from kpl_integrations.ingest.http.http_answer import send_refusal
from kpl_integrations.ingest.open_gateway import OpenGateway
from kpl_integrations.ingest.stats.totals import GatewayStats

__all__ = ["Dashboard"]

LOOK_SECONDS: Final = 1.0
MOST_WATCHERS: Final = 50
LAST_WORD_SECONDS: Final = 2.0
_MOST_FORM_BYTES: Final = 4_096
_FORM_SECONDS: Final = 10.0
_HTML: Final = (b"content-type", b"text/html; charset=utf-8")
_NO_STORE: Final = (b"cache-control", b"no-store")

Route = Callable[[Scope, Receive, Send], Awaitable[None]]


class Dashboard:
    """The routes of one gateway's dashboard. `wall_clock` is for cookies alone."""

    def __init__(
        self, opened: OpenGateway, gateway_stats: GatewayStats, *, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._opened = opened
        self._gateway_stats = gateway_stats
        self._wall_clock = wall_clock
        key = opened.settings.admin_key
        self._session = None if key is None else Session(key.get_secret_value())
        self._attempts = LoginAttempts(opened.intake.now())
        self._page = _Page("page.html")
        self._login = _Page("login.html")
        self._board = Board()
        self._seen = b""
        self._seen_at = -LOOK_SECONDS
        self._watchers = 0
        # One look at a time: the others who watch wait for what it sees.
        self._looking = anyio.Lock()

    def routes(self) -> dict[tuple[str, str], Route]:
        """Return its handlers by method and path."""
        return {
            ("GET", "/dashboard"): self._show,
            ("POST", "/dashboard"): self._enter,
            ("GET", "/dashboard/events"): self._watch,
        }

    async def _show(self, scope: Scope, _receive: Receive, send: Send) -> None:
        if self._may_look(scope):
            await self._answer(send, 200, self._page)
        elif self._session is None:
            await self._answer(send, 403, self._login, note="Set KPL_INGEST_ADMIN_KEY, and give that key here.")
        else:
            await self._answer(send, 401, self._login)

    async def _enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(receive, most_bytes=_MOST_FORM_BYTES, seconds=_FORM_SECONDS)
        except ClientGone:
            return
        except Refused as refused:
            await send_refusal(send, refused, self._opened.tally)
            return
        # The body's size bounds the number of fields; a bound of its own would raise.
        given = parse_qs(body.decode("utf-8", "replace")).get("key", [""])[0]
        address, now = (scope.get("client") or ("",))[0], self._opened.intake.now()
        wait = self._attempts.wait_seconds(address, now)
        if wait > 0:
            seconds = math.ceil(wait)
            note = f"Too many wrong keys; come back in {seconds} s."
            await self._answer(send, 429, self._login, note=note, headers=[(b"retry-after", b"%d" % seconds)])
            return
        # The server has its own certificate, or says that whoever ended TLS before it is to be believed.
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
        """Send one event a second until the client goes, its session is over, or the intake closes."""
        if not self._may_look(scope):
            await self._respond(send, 401, [_NO_STORE, (b"content-length", b"0")], b"")
            return
        if self._watchers >= MOST_WATCHERS:
            await self._respond(send, 503, [(b"retry-after", b"30"), (b"content-length", b"0")], b"")
            return
        self._opened.answers[200] += 1
        headers = [(b"content-type", b"text/event-stream"), _NO_STORE, (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._watchers += 1
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_until_gone, receive, tasks.cancel_scope)
                tasks.start_soon(self._until_closed, tasks.cancel_scope)
                while self._may_look(scope):
                    await send({"type": "http.response.body", "body": await self._event(), "more_body": True})
                    await anyio.sleep(LOOK_SECONDS)
                tasks.cancel_scope.cancel()
        finally:
            self._watchers -= 1
        # A page that was told `closed` waits for the next gateway; one whose session is over asks, and hears 401.
        last_word = b"event: closed\ndata: {}\n\n" if self._opened.closing.is_set() else b""
        # Who reads no more must not hold up the shutdown, and a host's server may know no bound of its own.
        with anyio.move_on_after(LAST_WORD_SECONDS):
            await send({"type": "http.response.body", "body": last_word})

    async def _until_closed(self, watching: anyio.CancelScope) -> None:
        await self._opened.closing.wait()
        watching.cancel()

    async def _event(self) -> bytes:
        """Return the newest event; all who watch see the same."""
        async with self._looking:
            now = self._opened.intake.now()
            # Half a period: timers of several watchers do not fire in step.
            if now - self._seen_at >= LOOK_SECONDS / 2:
                self._seen_at = now
                stats, families = await self._gateway_stats.totals()
                samples = [
                    MetricSample(sample.name, sample.labels, sample.value)
                    for family in families
                    for sample in family.samples
                ]
                document = self._board.look(Totals(stats.document(), samples), now)
                self._seen = b"data: " + msgspec.json.encode(document) + b"\n\n"
            return self._seen

    def _may_look(self, scope: Scope) -> bool:
        if not self._opened.directory.verifies:
            return True
        headers = dict(scope["headers"])
        if self._opened.admin_key.is_shown(headers):
            return True
        session = self._session
        return session is not None and session.is_open(headers.get(b"cookie", b""), self._wall_clock())

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
        self._opened.answers[status] += 1
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class _Page:
    """A file of this package, and the policy that lets its own script and style run and nothing else."""

    __slots__ = ("html", "policy")

    def __init__(self, name: str) -> None:
        self.html = files(__package__).joinpath(name).read_bytes()
        script, style = (_source(self.html, tag) for tag in (b"script", b"style"))
        self.policy = b"; ".join(
            (
                b"default-src 'none'",
                b"script-src " + script,
                b"style-src " + style,
                b"connect-src 'self'",
                b"form-action 'self'",
                b"base-uri 'none'",
                b"frame-ancestors 'none'",
            )
        )


def _source(html: bytes, tag: bytes) -> bytes:
    _, found, rest = html.partition(b"<" + tag + b">")
    if not found:
        return b"'none'"
    digest = hashlib.sha256(rest.partition(b"</" + tag + b">")[0]).digest()
    return b"'sha256-" + base64.b64encode(digest) + b"'"


async def _until_gone(receive: Receive, watching: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    watching.cancel()
