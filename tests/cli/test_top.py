"""`kpl top`: live on a terminal, once in a pipe, as JSON, and with one sentence for each error."""

import http.server
import json
import re
import runpy
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kpl_integrations.gateway_figures import RateTracker, RecordStats, StatsDocument
from kpl_integrations.ingest.tenants import OpenTenants, Tenant
from tests.support.kpl_process import in_a_terminal, started, without_escape_codes
from tests.support.running_gateway import running_gateway

DRAWING = Path(__file__).parents[2] / "docs" / "observability" / "draw_kpl_top.py"


class Gateway:
    """Answers `/v1/stats` with counts that grow at each request."""

    def __init__(self) -> None:
        self.key: str | None = None
        self.body: bytes | None = None
        # In the middle of the bulk import of the drawing.
        self.requests = 40
        self.url = ""

    def answer(self, authorization: str | None) -> tuple[int, bytes]:
        if self.key is not None and authorization != f"Bearer {self.key}":
            return 401, b'{"type":"about:blank","status":401}'
        if self.body is not None:
            return 200, self.body
        self.requests += 1
        return 200, json.dumps(drawing()["gateway_at"](self.requests)).encode()


def drawing() -> dict[str, Any]:
    return runpy.run_path(str(DRAWING))


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    state = Gateway()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = state.answer(self.headers["Authorization"])
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Write no log lines."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield state
        server.shutdown()
        thread.join()


def test_in_a_pipe_there_is_one_update_without_escape_codes(kpl, gateway):
    status, out, err = kpl("top", gateway.url, "--interval", "0.05")
    assert (status, err) == (0, "")
    assert "\x1b" not in out
    assert " in all" in out
    # In the unit of the option, not in millions of bytes.
    assert re.search(r"[\d.]+ MiB of 32\.0 MiB, [\d,]+ records", out)
    assert [line.split()[0] for line in out.splitlines() if line.startswith(("bulk-import", "shop", "mobile"))] == [
        "bulk-import",
        "shop",
        "mobile",
    ]


def test_each_update_is_one_json_object_with_rates(kpl, gateway):
    status, out, err = kpl("top", gateway.url, "--json", "--count", "3", "--interval", "0.05")
    assert (status, err) == (0, "")
    views = [json.loads(line) for line in out.splitlines()]
    assert len(views) == 3
    assert all(view["delivered_per_second"] > 0 and view["state"] == "open" for view in views)
    assert [len(view["delivered_history"]) for view in views] == [1, 2, 3]
    assert views[0]["records"]["dead_lettered"] == 3


def test_on_a_terminal_the_view_is_live_until_ctrl_c_with_status_0(gateway):
    status, shown, _ = in_a_terminal("top", gateway.url, "--interval", "0.05", after="bulk-import", typed="\x03")
    assert status == 0
    assert "\x1b[?1049h" in shown  # the alternate screen, so that nothing stays on the terminal
    assert "\x1b[?1049l" in shown
    assert "delivered/s" in without_escape_codes(shown)
    assert gateway.requests >= 42


def test_a_signal_ends_the_command_in_a_pipe_with_status_0(gateway):
    with started("top", gateway.url, "--json", "--count", "1000000", "--interval", "0.05") as running:
        assert json.loads(running.stdout.readline())["url"] == gateway.url
        assert running.end(signal.SIGTERM) == 0


def test_a_key_from_the_environment_is_sent(kpl, gateway, monkeypatch):
    gateway.key = "secret-key"
    monkeypatch.setenv("KPL_GATEWAY_KEY", "secret-key")
    assert kpl("top", gateway.url, "--json", "--interval", "0.05").status == 0


# The URL, the key and the answer of a failing server, then the exit status and a part of the error message.
FAILURES = [
    ("not-a-url", None, None, 2, "'not-a-url' is not the address of a gateway; write it like http://127.0.0.1:8080"),
    ("http://127.0.0.1:9", None, None, 3, "no gateway answers at http://127.0.0.1:9; check the address, or start one"),
    (None, "other-key", None, 3, "requires a key; set KPL_GATEWAY_KEY to its admin key or to a tenant's key"),
    (None, None, b"<html>", 3, "(status 200) is not a gateway; give the address that `kpl serve` printed"),
    (None, None, b'{"state": 5}', 3, "(status 200) is not a gateway; give the address that `kpl serve` printed"),
]


@pytest.mark.parametrize(("url", "key", "body", "status", "words"), FAILURES)
def test_an_error_is_one_sentence_with_its_fix(kpl, gateway, url, key, body, status, words):
    gateway.key, gateway.body = key, body
    ended = kpl("top", url or gateway.url)
    assert (ended.status, ended.out) == (status, "")
    assert words in ended.err
    assert ended.err.count("\n") == 1


def test_the_document_of_a_real_gateway_is_shown(kpl):
    with running_gateway(OpenTenants(Tenant(id="local")), {"orders": 2}) as gateway:
        answer = httpx.post(
            f"{gateway.url}/v1/streams/orders/records?ack=delivered", json={"partition_key": "k", "data": "d"}
        )
        assert answer.is_success, answer.text
        status, out, _ = kpl("top", gateway.url, "--json", "--interval", "0.05")
    view = json.loads(out)
    assert (status, view["state"], view["records"]["delivered"]) == (0, "open", 1)
    assert [stream["stream"] for stream in view["streams"]] == ["orders"]
    assert view["room"]["max_bytes"] > 0
    assert view["answers_per_second"]["200"] >= 0


def test_rates_of_a_restarted_gateway_count_from_zero():
    tracker = RateTracker("http://gateway")
    counts = [100, 300, 50]
    views = [
        tracker.update(StatsDocument(state="open", records=RecordStats(delivered=count)), now=2.0 * number)
        for number, count in enumerate(counts)
    ]
    assert [view.delivered_per_second for view in views] == [0, 100, 25]


def test_records_lost_with_a_dead_worker_are_shown(kpl, gateway):
    gateway.body = b'{"state": "open", "records": {"accepted": 9, "lost": 7}, "room": {"max_records": 10}}'
    _, out, _ = kpl("top", gateway.url, "--interval", "0.05")
    assert re.search(r"lost\s+7\s+with a worker that died", out)
    gateway.body = b'{"state": "open", "records": {"accepted": 9}, "room": {"max_records": 10}}'
    _, out, _ = kpl("top", gateway.url, "--interval", "0.05")
    assert "lost" not in out


def test_a_tenants_key_shows_only_that_tenant(kpl, gateway):
    gateway.body = b'{"state": "open", "tenants": {"shop": {"requests": 5}}}'
    status, out, _ = kpl("top", gateway.url, "--interval", "0.05")
    assert status == 0
    assert "shop" in out
    assert "delivered" not in out


def test_the_picture_in_the_documentation_is_what_the_command_draws():
    drawn = drawing()
    assert drawn["PICTURE"].read_text(encoding="utf-8") == drawn["picture"]()
