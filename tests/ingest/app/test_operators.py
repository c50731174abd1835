"""What operators and browsers need: an access log, log lines in JSON, cross-origin requests, HTTP/2."""

import json
import logging
import socket

import pytest

from kpl_core import ConfigError
from kpl_integrations.cli.terminal import LogFormat, show_logs
from kpl_integrations.ingest import load_settings
from kpl_integrations.ingest.http.access_log import AccessLog
from kpl_integrations.ingest.tenants import CallableTenants, OpenTenants, Tenant
from tests.support.gateway_scene import STREAM, Client, open_gateway
from tests.support.http2_frames import START, goaway_code, request, statuses
from tests.support.running_gateway import running_gateway

PAGE = "https://shop.example"
PATH = f"/v1/streams/{STREAM}/records"
ASKS = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
OPEN = OpenTenants(Tenant(id="local"))


@pytest.mark.anyio
async def test_a_browser_may_ask_before_it_sends_records():
    async with open_gateway(cors_origins=f"https://other.example, {PAGE}/") as gateway:
        client = Client(gateway)
        answer = await client.call("OPTIONS", PATH, headers=ASKS)
        assert answer.status == 204
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert "authorization" in answer.headers["access-control-allow-headers"]
        stranger = await client.call("OPTIONS", PATH, headers={**ASKS, "origin": "https://evil.example"})
        assert (stranger.status, "access-control-allow-origin" in stranger.headers) == (403, False)
        # OPTIONS without the fields of a browser is a method like any other.
        assert (await client.call("OPTIONS", PATH)).status == 405


@pytest.mark.anyio
async def test_a_browser_at_the_root_is_told_where_the_dashboard_is():
    async with open_gateway() as gateway:
        answer = await Client(gateway).get("/")
        assert (answer.status, "the dashboard is at /dashboard" in answer.json()["detail"]) == (405, True)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("origins", "is_allowed"),
    [(PAGE, True), ("*", True), (f"{PAGE}:443", True), (f"{PAGE}:80", False), ("https://other.example", False)],
)
async def test_a_page_may_read_the_answers_if_its_origin_is_allowed(origins, is_allowed):
    async with open_gateway(cors_origins=origins) as gateway:
        client = Client(gateway)
        for answer in (await client.post({"data": "x"}, origin=PAGE), await client.get("/nothing", origin=PAGE)):
            assert answer.headers.get("access-control-allow-origin") == (PAGE if is_allowed else None)
        assert "access-control-allow-origin" not in (await client.post({"data": "x"})).headers


@pytest.mark.parametrize(
    "origin", ["shop.example", "localhost:3000", "https://shop.example/page", "https//a", "**", "https://*.example"]
)
def test_an_origin_that_no_page_can_have_is_refused(origin):
    with pytest.raises(
        ConfigError, match=r"is not an origin; write scheme, host and any port of each, such as https://shop\.example"
    ):
        load_settings(cors_origins=f"{PAGE}, {origin}")


@pytest.mark.parametrize("origins", ["", "*", "null", f"{PAGE}/, , http://[::1]:3000,", "chrome-extension://abc"])
def test_origins_of_every_kind_are_accepted(origins):
    assert load_settings(cors_origins=origins).cors_origins == origins


@pytest.mark.anyio
@pytest.mark.parametrize(("shown", "is_told"), [("kpl_x", True), ("Basic a2V5", True), ("Bearer x", False)])
async def test_a_key_without_its_scheme_is_refused_with_the_form_of_the_header(shown, is_told):
    async with open_gateway(directory=CallableTenants(lambda _: None)) as gateway:
        answer = await Client(gateway).post({"data": "x"}, authorization=shown)
    assert answer.status == 401
    assert ("send an API key as Authorization: Bearer KEY" in answer.json()["detail"]) is is_told


@pytest.mark.anyio
async def test_without_the_setting_no_page_may_read_an_answer():
    async with open_gateway() as gateway:
        assert (await Client(gateway).call("OPTIONS", PATH, headers=ASKS)).status == 405
        assert "access-control-allow-origin" not in (await Client(gateway).post({"data": "x"}, origin=PAGE)).headers


def exchange(url: str, sent: bytes) -> bytes:
    """Send bytes, and return all that the server sends until it closes or is idle for a second."""
    port = int(url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(sent)
        received = b""
        connection.settimeout(1.0)
        try:
            while piece := connection.recv(65_536):
                received += piece
        except TimeoutError:
            pass
    return received


def post(*fields: str, body: bytes = b'{"data":"x"}', target: str = PATH) -> bytes:
    head = [f"POST {target} HTTP/1.1", "Host: x", "Content-Type: application/json", *fields]
    return "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body


@pytest.mark.long
def test_each_path_logs_its_requests_and_answers_pages_and_http_2(caplog):
    caplog.set_level(logging.INFO, "kpl_integrations.ingest.access")
    with running_gateway(OPEN, {STREAM: 1}, access_log=1.0, cors_origins=PAGE) as running:
        # The first request looks up the stream; the third takes the fast path.
        for _ in range(3):
            assert exchange(running.url, post()).startswith(b"HTTP/1.1 202")
        assert exchange(running.url, post(target=f"{PATH}?ack=delivered")).startswith(b"HTTP/1.1 200")
        assert b"access-control-allow-origin: https://shop.example" in exchange(running.url, post(f"Origin: {PAGE}"))
        assert exchange(running.url, b"GET /none%20a?key=secret HTTP/1.1\r\nHost: x\r\n\r\n").startswith(
            b"HTTP/1.1 404"
        )
        frames = exchange(running.url, START + request(1, "GET", "/livez?key=secret"))
    fields = [record.fields for record in caplog.records if record.name.endswith("access")]
    assert [(each["method"], each["target"], each["status"]) for each in fields] == [
        *[("POST", PATH, 202)] * 3,
        ("POST", PATH, 200),
        ("POST", PATH, 202),
        ("GET", "/none%20a", 404),
        ("GET", "/livez", 200),
    ]
    assert all(each["client"] == "127.0.0.1" and each["milliseconds"] >= 0 for each in fields)
    assert statuses(frames) == {1: 200}


@pytest.mark.long
def test_a_gateway_without_http_2_says_so_to_the_client_and_in_its_log(caplog):
    with running_gateway(OPEN, {STREAM: 1}, http2=False) as running:
        frames = exchange(running.url, START)
    assert goaway_code(frames) == 0xD
    assert b"speaks HTTP/1.1" in frames
    assert any("speaks HTTP/2" in record.getMessage() for record in caplog.records)


@pytest.mark.anyio
async def test_a_client_cannot_forge_fields_of_the_access_log(caplog):
    caplog.set_level(logging.INFO, "kpl_integrations.ingest.access")
    async with open_gateway(access_log=1.0) as gateway:
        await Client(gateway).get('/a" status="200')
    assert r'target="/a\" status=\"200" status=404' in caplog.text


def test_a_share_of_the_requests_is_logged(caplog):
    caplog.set_level(logging.INFO, "kpl_integrations.ingest.access")
    chances = iter([0.05, 0.1, 0.9])
    log = AccessLog(0.1, clock=lambda: 0.0, chance=lambda: next(chances))
    logs = [log.begin("c", "/", 1) for _ in range(3)]
    assert [each is not None for each in logs] == [True, False, False]
    assert not caplog.records
    assert logs[0] is not None
    logs[0](202, {"request_id": "a.1"})
    assert 'status=202 milliseconds=0.0 received_bytes=1 request_id="a.1"' in caplog.text
    send = object()
    log = AccessLog(0.1, clock=lambda: 0.0, chance=lambda: 0.5)
    assert log.watch({"query_string": b"", "path": "/", "method": "GET"}, send) is send  # type: ignore[arg-type]


def record_of(**more: object) -> logging.LogRecord:
    record = logging.LogRecord("kpl_integrations.x", logging.WARNING, "f", 1, "said %s", ("a\nb",), None)
    record.created = 1_700_000_000.25
    record.__dict__.update(more)
    return record


def test_a_log_line_has_its_instant_and_worker():
    assert LogFormat().line(record_of()) == "warning: said a\nb"
    line = LogFormat(has_time=True, worker=3).line(record_of())
    assert line == "2023-11-14T22:13:20.250Z warning: worker 3: said a\nb"
    assert LogFormat(worker=-1, drains="s.db").line(record_of()) == "warning: the drainer of s.db: said a\nb"


def test_a_log_line_in_json_has_the_fields_of_its_record(capsys):
    line = LogFormat(is_json=True, worker=0).line(record_of(fields={"status": 202}))
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "warning",
        "logger": "kpl_integrations.x",
        "worker": 0,
        "message": "said a\nb",
        "status": 202,
    }
    line = json.loads(LogFormat(is_json=True, worker=-1, drains="s.db").line(record_of()))
    assert (line["drains"], "worker" in line) == ("s.db", False)
    with show_logs("kpl_integrations.x", logging.INFO, LogFormat(is_json=True)):
        logging.getLogger("kpl_integrations.x").info("one line\nof JSON")
    assert json.loads(capsys.readouterr().err)["message"] == "one line\nof JSON"


@pytest.mark.parametrize("given", [{"access_log": 1.5}, {"log_format": "xml"}])
def test_an_impossible_setting_is_refused(given):
    with pytest.raises(ConfigError):
        load_settings(**given)
