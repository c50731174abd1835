"""The dashboard's routes over ASGI: authorization, events, and the end of event streams."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import msgspec
import pytest

from kpl_core import Config, ConfigError, FairnessPolicy
from kpl_core.testing import FakeKinesis
from kpl_core.testing.fake_transport import FakeTransport
from kpl_integrations.ingest import IngestGateway, load_settings
from kpl_integrations.ingest.dashboard.dashboard import CLOSING_EVENT_SECONDS, MOST_WATCHERS, Dashboard
from kpl_integrations.ingest.stats import GatewayTotals, SingleProcessStats
from kpl_integrations.ingest.tenants import CallableTenants, OpenTenants, Tenant, TenantDirectory
from kpl_integrations.metrics.prometheus import PrometheusMetrics
from tests.support.virtual_time import Backend

pytestmark = pytest.mark.anyio
KEY = "an-admin-key-of-32-characters-xyz"
OPEN = OpenTenants(Tenant(id="local"))
CLOSED = CallableTenants(lambda _: None)


@pytest.fixture
def anyio_backend(virtual_time_backend: Backend) -> Backend:
    return virtual_time_backend


@asynccontextmanager
async def _gateway(directory: TenantDirectory, **settings: object) -> AsyncIterator[IngestGateway]:
    transport = FakeTransport(FakeKinesis({"demo": 2}))
    config = Config(region="us-east-1", fairness=FairnessPolicy())
    async with IngestGateway(load_settings(**settings), directory, transport=transport, config=config) as gateway:
        yield gateway


class Client:
    """One request. Setting `gone` disconnects the client."""

    def __init__(self, method: str, path: str, *, body: bytes = b"", **headers: str) -> None:
        fields = [(name.encode(), value.encode()) for name, value in headers.items()]
        self.scope: dict[str, Any] = {
            "type": "http", "method": method, "path": path, "query_string": b"", "headers": fields,
        }  # fmt: skip
        self._body: bytes | None = body
        self.gone = anyio.Event()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.content = b""

    async def receive(self) -> Any:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.content += message["body"]

    async def ask(self, gateway: IngestGateway) -> "Client":
        await gateway(self.scope, self.receive, self._send)
        return self

    def events(self) -> list[Any]:
        return [document for kind, document in self._all_events() if kind != b"event: history"]

    def history(self) -> list[dict[str, Any]]:
        (found,) = [document for kind, document in self._all_events() if kind == b"event: history"]
        return list(found)

    def _all_events(self) -> list[tuple[bytes, Any]]:
        parts = [each.rpartition(b"data: ") for each in self.content.split(b"\n\n") if each]
        return [(kind.strip(), msgspec.json.decode(data)) for kind, _, data in parts]


async def test_without_credentials_every_client_is_authorized() -> None:
    async with _gateway(OPEN) as gateway:
        page = await Client("GET", "/dashboard").ask(gateway)
        assert page.status == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "unsafe" not in page.headers["content-security-policy"]


async def test_without_a_session_there_is_only_a_form() -> None:
    async with _gateway(CLOSED, admin_key=KEY) as gateway:
        assert (await Client("GET", "/dashboard").ask(gateway)).status == 401
        events = await Client("GET", "/dashboard/events").ask(gateway)
        assert (events.status, events.content) == (401, b"")


async def test_without_an_admin_key_the_page_names_the_variable_to_set() -> None:
    async with _gateway(CLOSED) as gateway:
        page = await Client("GET", "/dashboard").ask(gateway)
        assert page.status == 403
        assert b"KPL_INGEST_ADMIN_KEY" in page.content
        assert (await Client("POST", "/dashboard", body=b"key=").ask(gateway)).status == 401


async def test_the_key_is_exchanged_for_a_cookie_that_opens_page_and_events() -> None:
    async with _gateway(CLOSED, admin_key=KEY) as gateway:
        assert (await Client("POST", "/dashboard", body=b"key=wrong").ask(gateway)).status == 401
        entered = await Client("POST", "/dashboard", body=f"key={KEY}".encode()).ask(gateway)
        assert (entered.status, entered.headers["location"]) == (303, "dashboard")
        cookie = entered.headers["set-cookie"].partition(";")[0]
        assert (await Client("GET", "/dashboard", cookie=cookie).ask(gateway)).status == 200


async def test_a_form_that_is_too_large_is_rejected_like_any_body() -> None:
    async with _gateway(CLOSED, admin_key=KEY) as gateway:
        assert (await Client("POST", "/dashboard", body=b"key=" + b"x" * 10_000).ask(gateway)).status == 413


async def test_a_login_under_a_path_prefix_returns_with_the_cookie() -> None:
    async with _gateway(CLOSED, admin_key=KEY) as gateway:

        async def behind_a_proxy(scope: Any, receive: Any, send: Any) -> None:
            await gateway({**scope, "path": scope["path"].removeprefix("/some/gateway")}, receive, send)

        transport = httpx.ASGITransport(app=behind_a_proxy)
        async with httpx.AsyncClient(transport=transport, base_url="http://host.example/some/gateway") as browser:
            assert (await browser.get("/dashboard")).status_code == 401
            entered = await browser.post("/dashboard", data={"key": KEY}, follow_redirects=True)
            assert (entered.status_code, entered.url.path) == (200, "/some/gateway/dashboard")


async def test_a_form_without_a_key_is_a_wrong_key_and_not_a_server_error() -> None:
    async with _gateway(CLOSED, admin_key=KEY) as gateway:
        for body in (b"a=1&b=2&c=3", b"&" * 4_000, b"\xff=%ff&;key", b"key=%ff"):
            assert (await Client("POST", "/dashboard", body=body).ask(gateway)).status == 401


async def test_there_is_one_event_a_second_until_the_client_disconnects() -> None:
    async with _gateway(OPEN) as gateway, anyio.create_task_group() as tasks:
        watcher = Client("GET", "/dashboard/events")
        tasks.start_soon(watcher.ask, gateway)
        await anyio.sleep(3.5)
        assert watcher.headers["content-type"] == "text/event-stream"
        assert [event["state"] for event in watcher.events()] == ["open"] * 4
        watcher.gone.set()


async def test_a_page_that_is_opened_gets_what_happened_without_watchers() -> None:
    async with _gateway(OPEN) as gateway:
        await anyio.sleep(61)
        watcher = Client("GET", "/dashboard/events")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watcher.ask, gateway)
            await anyio.sleep(0.5)
            watcher.gone.set()
        ages = [point["ago"] for point in watcher.history()]
        assert ages == sorted(ages, reverse=True)
        assert len(ages) >= 12
        assert ages[0] == pytest.approx(61, abs=1)
        assert {"accepted", "delivered", "p50", "p99", "queue"} <= watcher.history()[0].keys()


async def test_figures_that_cannot_be_read_do_not_end_the_gateway(caplog: pytest.LogCaptureFixture) -> None:
    async with _gateway(OPEN) as gateway:

        class Failing(SingleProcessStats):
            def __init__(self) -> None:
                """Read nothing."""

            async def totals(self) -> GatewayTotals:
                raise OSError

        dashboard = Dashboard(gateway.opened, Failing())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(dashboard.remember)
            await anyio.sleep(11)
            tasks.cancel_scope.cancel()
        assert caplog.text.count("the figures cannot be read") == 3
        assert gateway.admission.state == "open"


async def test_closing_admission_ends_every_event_stream() -> None:
    async with _gateway(OPEN) as gateway, anyio.create_task_group() as tasks:
        watchers = [Client("GET", "/dashboard/events") for _ in range(3)]
        for watcher in watchers:
            tasks.start_soon(watcher.ask, gateway)
        await anyio.sleep(1.5)
        await gateway.close()
    for watcher in watchers:
        assert b"event: closed" in watcher.content


async def test_an_expired_session_ends_its_event_stream() -> None:
    async with _gateway(CLOSED, admin_key=KEY) as gateway:
        began_at = anyio.current_time()
        gateway.routes |= Dashboard(
            gateway.opened,
            SingleProcessStats(gateway.opened, PrometheusMetrics()),
            wall_clock=lambda: 1_800_000_000.0 + (anyio.current_time() - began_at) * 3_600,
        ).routes()
        entered = await Client("POST", "/dashboard", body=f"key={KEY}".encode()).ask(gateway)
        watcher = Client("GET", "/dashboard/events", cookie=entered.headers["set-cookie"].partition(";")[0])
        with anyio.fail_after(20):
            await watcher.ask(gateway)
        assert watcher.status == 200
        # Advance the wall clock by eight hours.
        assert len(watcher.events()) in {8, 9}
        assert b"closed" not in watcher.content


async def test_a_watcher_that_does_not_read_does_not_delay_the_shutdown() -> None:
    async def unread(message: Any) -> None:
        if message["type"] == "http.response.body":
            await anyio.sleep_forever()

    async with _gateway(OPEN) as gateway:
        watcher = Client("GET", "/dashboard/events")
        with anyio.fail_after(1.5 + CLOSING_EVENT_SECONDS + 1.0):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(gateway, watcher.scope, watcher.receive, unread)
                await anyio.sleep(1.5)
                await gateway.close()


async def test_watchers_beyond_the_bound_get_503_with_retry_after() -> None:
    async with _gateway(OPEN) as gateway, anyio.create_task_group() as tasks:
        watchers = [Client("GET", "/dashboard/events") for _ in range(MOST_WATCHERS)]
        for watcher in watchers:
            tasks.start_soon(watcher.ask, gateway)
        await anyio.sleep(0.5)
        assert (await Client("GET", "/dashboard/events").ask(gateway)).status == 503
        watchers[0].gone.set()
        await anyio.sleep(0.1)
        late = Client("GET", "/dashboard/events")
        tasks.start_soon(late.ask, gateway)
        await anyio.sleep(0.1)
        assert late.status == 200
        for watcher in [*watchers, late]:
            watcher.gone.set()


async def test_after_repeated_wrong_keys_no_key_is_checked_for_a_while() -> None:
    async with _gateway(CLOSED, admin_key=KEY) as gateway:

        async def enter(key: str, address: str = "192.0.2.1") -> Client:
            asking = Client("POST", "/dashboard", body=f"key={key}".encode())
            asking.scope["client"] = (address, 40_000)
            return await asking.ask(gateway)

        assert [(await enter(f"guess-{number}")).status for number in range(6)] == [401] * 5 + [429]
        # The right key is rejected too. Otherwise a rejection would reveal that a key is wrong.
        refused = await enter(KEY)
        assert (refused.status, refused.headers["retry-after"]) == (429, "12")
        assert b"12 s" in refused.content
        assert (await enter(KEY, "192.0.2.2")).status == 303
        await anyio.sleep(12.1)
        assert (await enter(KEY)).status == 303


async def test_wrong_keys_of_others_do_not_end_an_event_stream_of_the_right_key() -> None:
    async with _gateway(CLOSED, admin_key=KEY) as gateway, anyio.create_task_group() as tasks:

        def asking(key: str) -> Client:
            client = Client("GET", "/dashboard/events", authorization=f"Bearer {key}")
            client.scope["client"] = ("192.0.2.1", 40_000)
            return client

        watcher = asking(KEY)
        tasks.start_soon(watcher.ask, gateway)
        await anyio.sleep(0.5)
        statuses = [(await asking(f"guess-{number}").ask(gateway)).status for number in range(6)]
        assert statuses == [401] * 5 + [429]
        await anyio.sleep(3)
        assert len(watcher.events()) == 4
        assert (await asking(KEY).ask(gateway)).status == 429
        watcher.gone.set()


@pytest.mark.parametrize(("scheme", "is_secure"), [("http", False), ("https", True)])
async def test_behind_a_tls_proxy_the_cookie_is_secure(scheme: str, is_secure: bool) -> None:
    """The server sets the scheme from X-Forwarded-Proto if it trusts the proxy."""
    async with _gateway(CLOSED, admin_key=KEY) as gateway:
        asking = Client("POST", "/dashboard", body=f"key={KEY}".encode())
        asking.scope["scheme"] = scheme
        entered = await asking.ask(gateway)
        assert ("; Secure" in entered.headers["set-cookie"]) == is_secure


async def test_the_cards_link_to_the_runbook_that_is_configured() -> None:
    for url, shown in (
        (None, ""),
        ('https://wiki.example/r?a=1&b="2"', "https://wiki.example/r?a=1&amp;b=&quot;2&quot;"),
    ):
        async with _gateway(OPEN, runbook_url=url) as gateway:
            page = await Client("GET", "/dashboard").ask(gateway)
            assert page.status == 200
            assert f'<body data-runbook="{shown}">' in page.content.decode()


@pytest.mark.parametrize(
    "url", ["wiki.example/runbook", "ftp://wiki.example", "https://wiki.example/#k", "javascript:x"]
)
def test_a_runbook_that_is_no_page_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"runbook_url is .*give the http or https address"):
        load_settings(runbook_url=url)
