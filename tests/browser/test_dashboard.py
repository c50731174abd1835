"""The dashboard in a real Chromium: live numbers under load, light and dark, phone and desktop, no foreign requests."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect
from prometheus_client.samples import Sample

from benchmarks.dashboard_pictures import PICTURES as PICTURES_TAKEN, take_pictures
from kpl_integrations.gateway_figures import StatsDocument
from kpl_integrations.ingest.dashboard.board import Board
from kpl_integrations.ingest.tenants.credentials import new_api_key, stored_key
from tests.browser.conftest import Gateway
from tests.support.certificates import certificate_pair, days_from_now, needs_openssl

pytestmark = pytest.mark.timeout(120)
Serve = Callable[..., Gateway]
# Where screenshots are saved, if set.
PICTURES = os.environ.get("KPL_PICTURES")
PUBLISHED = Path(__file__).parents[2] / "docs" / "pictures"
SECRET = "an-admin-key-of-32-characters-xyz"
NUMBER = "[data-number='{}']"


# The records a second of each tenant; one of them exceeds its rate.
TENANTS = {"acme": 400, "globex": 200, "initech": 100, "umbrella": 3_000}


class Load:
    """Tenants that post to a gateway, each from its own thread, until the test ends."""

    def __init__(self, folder: Path) -> None:
        self.keys = {tenant: new_api_key() for tenant in TENANTS}
        entries = (
            f'[[tenant]]\nid = "{tenant}"\nrecords_per_second = 2000\napi_keys = ["{stored_key(key)}"]\n'
            for tenant, key in self.keys.items()
        )
        (folder / "tenants.toml").write_text("\n".join(entries), encoding="utf-8")
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def begin(self, gateway: Gateway) -> None:
        for tenant, per_second in TENANTS.items():
            thread = threading.Thread(target=self._post_on, args=(gateway.url, self.keys[tenant], per_second))
            thread.start()
            self._threads.append(thread)

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _post_on(self, url: str, key: str, per_second: int) -> None:
        lines = "\n".join(json.dumps({"partition_key": str(n), "data": "x" * 200}) for n in range(per_second // 10))
        headers = {"content-type": "application/x-ndjson", "authorization": f"Bearer {key}"}
        with httpx.Client(base_url=url, headers=headers) as client:
            while not self._over.wait(0.1):
                assert client.post("/v1/streams/demo/records", content=lines).status_code in {202, 429}


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    load = Load(tmp_path)
    yield load
    load.end()


def _looked_at(browser: Browser, url: str, *, width: int = 1400, scheme: str = "light") -> tuple[Page, list[str]]:
    """Open the dashboard; the list receives every URL that the page requests."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{url}/dashboard")
    return page, asked


def _picture(page: Page, name: str, width: int) -> None:
    if PICTURES:
        page.wait_for_timeout(20_000)  # so that the page has data to show
    picture = page.screenshot(path=PICTURES and Path(PICTURES) / f"{name}.png", full_page=True)
    # A PNG begins with its signature, and contains its width.
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(picture[16:20]) == width


def _enter(page: Page) -> None:
    page.fill("#key", SECRET)
    page.get_by_role("button", name="Log in").click()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_the_dashboard_shows_live_numbers_under_load(
    browser: Browser, serve: Serve, load: Load, width: int, scheme: str
) -> None:
    gateway = serve("--local", "--tenants", "tenants.toml", KPL_INGEST_ADMIN_KEY=SECRET)
    page, asked = _looked_at(browser, gateway.url, width=width, scheme=scheme)
    _enter(page)
    load.begin(gateway)
    expect(page.locator("#state")).to_have_text("open")
    # The delivered count only grows, so two readings differ.
    books = page.locator("#books")
    expect(books).to_contain_text("delivered")
    expect(page.locator("#shards .bar").first).to_be_visible(timeout=15_000)
    first = books.inner_text()
    expect(books).not_to_have_text(first, timeout=10_000)
    page.wait_for_function("parseFloat(document.querySelector(\"[data-number='accepted']\").textContent) > 0")
    expect(page.locator("#tenants tr")).to_have_count(len(TENANTS))
    expect(page.locator("#answers")).to_contain_text("refused: quota", timeout=15_000)
    # Each chart has a unit and a time range.
    for chart, unit in (("#rates", "/s"), ("#delays", "ms")):
        expect(page.locator(chart)).to_contain_text(unit)
        expect(page.locator(chart)).to_contain_text("5 min ago")
        expect(page.locator(chart)).to_contain_text("now")
    expect(page.locator("#parts li")).to_have_text(["intake ok", "tenants file ok", "kinesis ok"])
    expect(page.locator("#lost")).to_have_text("No")
    expect(page.locator("#tenants polyline")).to_have_count(len(TENANTS))
    shown = page.content()
    assert [secret for secret in (SECRET, *load.keys.values()) if secret in shown or stored_key(secret) in shown] == []
    _picture(page, f"dashboard-{scheme}-{width}", width)
    # Nothing is cut off at any width; tables scroll on their own.
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(","))) > 380) == (scheme == "light")
    assert [url for url in asked if not url.startswith((gateway.url, "data:"))] == []


def _trouble() -> dict[str, Any]:
    """Return the event of a gateway that lost records, with a queue of one tenant and a hot shard."""
    tenants = {
        "flood": {"accepted_records": 900, "waiting_records": 800, "waiting_bytes": 9 << 20, "cpu_seconds": 3.0},
        "quiet": {"accepted_records": 100, "waiting_records": 8, "waiting_bytes": 1 << 20, "cpu_seconds": 1.0},
    }
    document = {
        "state": "open",
        "records": {
            "accepted": 1_000,
            "delivered": 900,
            "failed": {"Expired": 12},
            "spooled": 5,
            "dead_lettered": 3,
            "buffered": 80,
        },
        "room": {"outstanding_records": 80, "max_records": 100, "outstanding_bytes": 1, "max_bytes": 32 << 20},
        "answers": {"202": 90, "429": 10},
        "refusals": {"quota": 7, "queue share": 3},
        "streams": {"orders": {"breakers": {"shardId-000000000003": "open"}}},
    }
    board = Board()
    board.update(msgspec.convert(document | {"tenants": {each: {} for each in tenants}}, StatsDocument), [], 0.0)
    place = {"stream": "orders", "shard": "shardId-000000000003"}
    samples = [
        Sample("kinesis_producer_shard_utilisation", place, 0.97),
        Sample("kinesis_ingest_tenant_wait_seconds", {"tenant": "flood"}, 17.0),
        Sample("kinesis_ingest_part", {"part": "intake", "state": "ok"}, 1.0),
        Sample("kinesis_ingest_part", {"part": "tenants_file", "state": "degraded"}, 1.0),
        Sample("kinesis_ingest_part", {"part": "kinesis", "state": "failed"}, 1.0),
    ]
    kinesis = {"state": "failed", "seconds": 42.0, "detail": "requests fail", "action": "run `kpl doctor`"}
    return board.update(
        msgspec.convert(document | {"tenants": tenants}, StatsDocument), samples, 1.0, {"kinesis": kinesis}
    )


# The lowest contrast of a text with its background, as WCAG 2.2 defines it, and that text.
LOWEST_CONTRAST = """() => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = (text) => channels(text).slice(0, 3).map((each) => each / 255)
    .map((each) => each <= .04045 ? each / 12.92 : ((each + .055) / 1.055) ** 2.4)
    .reduce((sum, each, index) => sum + each * [.2126, .7152, .0722][index], 0);
  const behind = (element) => {
    const color = getComputedStyle(element).backgroundColor;
    return channels(color)[3] === 0 ? behind(element.parentElement) : color;
  };
  const texts = [...document.querySelectorAll("main *")].filter((each) => each.checkVisibility() &&
    [...each.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim()));
  return texts.map((each) => {
    const style = getComputedStyle(each), color = each.closest("svg") ? style.fill : style.color;
    const [one, other] = [luminance(color), luminance(behind(each))];
    return [(Math.max(one, other) + .05) / (Math.min(one, other) + .05), each.textContent];
  }).sort((one, other) => one[0] - other[0])[0];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 820, 1400])
def test_the_dashboard_answers_the_four_questions_of_an_operator(
    browser: Browser, serve: Serve, width: int, scheme: str
) -> None:
    gateway = serve("--local")
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    event = f"data: {json.dumps(_trouble())}\n\n"
    page.route("**/dashboard/events", lambda route: route.fulfill(body=event, content_type="text/event-stream"))
    page.goto(f"{gateway.url}/dashboard")
    expect(page.locator("#parts li")).to_have_text(
        [
            "kinesis failed for 42 s: requests fail. Do: run `kpl doctor`",
            "tenants file degraded: the log of that worker says why",
            "intake ok",
        ]
    )
    expect(page.locator("#lost")).to_have_text("Yes: 12 records")
    expect(page.locator("#books")).to_contain_text("+ failed12 12 Expired")
    red = [row.inner_text().split()[1] for row in page.locator("#books .bad").all()]
    assert red == ["spooled", "dead-lettered", "failed"]
    expect(page.locator("#late")).to_have_text("17 s")
    expect(page.locator("#cause")).to_have_text("flood")
    expect(page.locator("#cause-shares output")).to_have_text(["90%", "90%", "75%"])
    expect(page.locator("#hot")).to_have_text("orders 3")
    expect(page.locator("#breakers p")).to_have_text("orders, shardId-000000000003: open")
    colours = [
        page.locator(each).first.evaluate("(each) => getComputedStyle(each).color") for each in ("#breakers p", ".bad")
    ]
    assert colours[0] == colours[1]
    expect(page.locator("#answers tr")).to_have_count(4)
    expect(page.locator("#answers tr td:first-child")).to_have_text(
        ["202 Accepted", "429 Too Many Requests", "refused: quota", "refused: queue share"]
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(
        "[...document.querySelectorAll('.scroll')].every((each) => each.scrollWidth <= each.clientWidth)"
    )
    page.evaluate("document.getElementById('main').classList.remove('stale')")
    contrast, text = page.evaluate(LOWEST_CONTRAST)
    assert contrast >= 4.5, text
    # The cards of each row end together: no hole in the grid.
    edges = page.evaluate("[...document.querySelectorAll('.card')].map((card) => card.getBoundingClientRect())")
    rows = {edge["y"]: max(each["right"] for each in edges if each["y"] == edge["y"]) for edge in edges}
    assert len(set(map(round, rows.values()))) == 1
    page.close()


KNOWN = ("good", "Nothing to deliver"), ("good", "None")
UNKNOWN = ("warn", "Nothing is delivered"), ("warn", "Not known")


@pytest.mark.parametrize(
    ("kinesis", "buffered", "late", "suffers"),
    [("ok", 0, *KNOWN), ("ok", 5, UNKNOWN[0], KNOWN[1]), ("degraded", 0, *UNKNOWN), ("failed", 5, *UNKNOWN)],
)
def test_nothing_is_green_that_is_not_known(
    browser: Browser, serve: Serve, kinesis: str, buffered: int, late: tuple[str, str], suffers: tuple[str, str]
) -> None:
    """While Kinesis took no records, the page said "Nothing to deliver" and "None" in green."""
    records = {"accepted": buffered, "delivered": 0, "buffered": buffered}
    samples = [
        Sample("kinesis_ingest_part", {"part": "kinesis", "state": kinesis}, 1.0),
        Sample("kinesis_producer_shard_utilisation", {"stream": "orders", "shard": "shardId-000000000003"}, 0.0),
    ]
    document = Board().update(msgspec.convert({"state": "open", "records": records}, StatsDocument), samples, 0.0)
    page = browser.new_page()
    event = f"data: {json.dumps(document)}\n\n"
    page.route("**/dashboard/events", lambda route: route.fulfill(body=event, content_type="text/event-stream"))
    page.goto(f"{serve('--local').url}/dashboard")
    for card, (level, text) in {"#late": late, "#suffers": suffers}.items():
        expect(page.locator(card)).to_have_text(text)
        expect(page.locator(card)).to_have_attribute("data-level", level)
    expect(page.locator("#hot")).to_have_attribute("data-level", "good" if kinesis == "ok" else "")
    page.close()


def test_each_card_links_to_its_section_of_the_runbook(browser: Browser, serve: Serve) -> None:
    gateway = serve("--local", KPL_INGEST_RUNBOOK_URL="https://wiki.example/runbook")
    page, _ = _looked_at(browser, gateway.url)
    links = page.locator("h2 a.help")
    expect(links).to_have_count(page.locator("h2").count())
    expect(links.first).to_have_attribute(
        "href", "https://wiki.example/runbook#records-are-lost-user-records-of-stream-were-not-delivered"
    )
    expect(links.first).to_have_accessible_name("What to do: Is anything lost?")


def test_the_time_range_is_changed_with_the_keyboard(browser: Browser, serve: Serve) -> None:
    page, _ = _looked_at(browser, serve("--local").url)
    expect(page.locator("#rates")).to_contain_text("5 min ago")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "range"
    page.keyboard.press("ArrowUp")
    expect(page.locator("#rates")).to_contain_text("60 s ago")


@needs_openssl
def test_a_browser_speaks_http_2_over_tls(browser: Browser, serve: Serve, load: Load, tmp_path: Path) -> None:
    del load  # its tenants are in the file
    certificate, key = certificate_pair(tmp_path, "gateway", days_from_now(-1), days_from_now(90))
    files = ("--tls-certificate", str(certificate), "--tls-key", str(key))
    gateway = serve("--local", "--tenants", "tenants.toml", *files, KPL_INGEST_ADMIN_KEY=SECRET)
    page = browser.new_context(ignore_https_errors=True).new_page()
    page.goto(f"{gateway.url}/dashboard")
    _enter(page)
    # The page, the cookie and the stream of its events.
    expect(page.locator("#state")).to_have_text("open")
    expect(page.locator("#books")).to_contain_text("delivered")
    assert page.evaluate("performance.getEntriesByType('navigation')[0].nextHopProtocol") == "h2"
    page.context.close()


def _note(said: list[str], message: ConsoleMessage) -> None:
    said.append(message.text)


@pytest.mark.long
def test_a_page_that_is_opened_shows_what_happened_before(browser: Browser, serve: Serve) -> None:
    gateway = serve("--local")
    lines = '{"partition_key":"a","data":"x"}\n' * 100
    with httpx.Client(base_url=gateway.url, headers={"content-type": "application/x-ndjson"}) as client:
        for _ in range(12):
            assert client.post("/v1/streams/demo/records?ack=delivered", content=lines).status_code == 200
            time.sleep(1.0)
    for _ in range(2):
        page = browser.new_page()
        complaints: list[str] = []
        page.on("console", partial(_note, complaints))
        page.goto(f"{gateway.url}/dashboard")
        expect(page.locator("#state")).to_have_text("open")
        points = page.locator("#rates polyline").first.get_attribute("points")
        assert points is not None
        assert len(points.split()) >= 3
        # Their heights differ: records came after the first one.
        assert len({point.partition(",")[2] for point in points.split()}) > 1
        assert complaints == []
        page.close()


@pytest.mark.long
def test_the_pictures_of_the_documentation_are_taken_by_a_script(browser: Browser, tmp_path: Path) -> None:
    for path, picture in zip(take_pictures(browser, tmp_path, seconds=2.0), PICTURES_TAKEN, strict=True):
        taken, published = path.read_bytes(), (PUBLISHED / path.name).read_bytes()
        for each in (taken, published):
            assert each.startswith(b"\x89PNG\r\n\x1a\n")
            assert int.from_bytes(each[16:20]) == picture.width
            assert len(each) < 150 * 1024


def test_the_dashboard_asks_for_the_admin_key_and_does_not_leak_it(browser: Browser, serve: Serve, load: Load) -> None:
    del load  # its tenants are in the file
    gateway = serve("--local", "--tenants", "tenants.toml", KPL_INGEST_ADMIN_KEY=SECRET)
    page, _ = _looked_at(browser, gateway.url)
    expect(page.locator("#books")).to_have_count(0)
    page.fill("#key", "a wrong one")
    page.get_by_role("button").click()
    expect(page.get_by_role("alert")).to_contain_text("not the admin key")
    _enter(page)
    expect(page.locator("#state")).to_have_text("open")
    (cookie,) = page.context.cookies()
    assert cookie["httpOnly"]
    assert cookie["sameSite"] == "Strict"
    assert SECRET not in page.content()
    assert SECRET not in cookie["value"]
    assert page.evaluate("document.cookie") == ""


def test_the_dashboard_shows_when_the_gateway_closes(browser: Browser, serve: Serve) -> None:
    gateway = serve("--local", KPL_INGEST_DRAIN_DELAY_SECONDS="0")
    page, _ = _looked_at(browser, gateway.url)
    expect(page.locator("#state")).to_have_text("open")
    gateway.process.terminate()
    expect(page.locator("#state")).to_have_text("closed", timeout=15_000)
    # An open event stream does not keep the process alive.
    assert gateway.process.wait(timeout=15) in {0, 143}


def test_the_dashboard_reconnects_and_asks_for_the_key_if_one_is_set(
    browser: Browser, serve: Serve, load: Load
) -> None:
    del load  # its tenants are in the file
    gateway = serve("--local", KPL_INGEST_DRAIN_DELAY_SECONDS="0")
    port = gateway.url.rpartition(":")[2]
    page, _ = _looked_at(browser, gateway.url)
    for arguments, sees in (
        (("--local",), lambda: expect(page.locator("#state")).to_have_text("open", timeout=30_000)),
        (("--local", "--tenants", "tenants.toml"), lambda: expect(page.locator("#key")).to_be_visible(timeout=30_000)),
    ):
        expect(page.locator("#state")).to_have_text("open", timeout=30_000)
        gateway.process.terminate()
        gateway.process.wait(timeout=30)
        expect(page.locator("#state")).not_to_have_text("open", timeout=30_000)
        gateway = serve("--port", port, *arguments, KPL_INGEST_ADMIN_KEY=SECRET, KPL_INGEST_DRAIN_DELAY_SECONDS="0")
        sees()
