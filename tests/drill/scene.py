"""A real gateway in front of a local Kinesis, scraped by a real Prometheus, and everything that they say."""

import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import httpx

import kpl_integrations
from kpl_core import decode
from kpl_core.testing import Effect, When
from kpl_integrations.ingest.tenants.credentials import new_api_key, stored_key
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from tests.drill.board import Board, OpenBoard, opened_board
from tests.drill.traces import Collector, Sent, carries, collector, new_trace
from tests.support.processes import own_process
from tests.support.prometheus_server import asked, prometheus

STREAM = "orders"
EVERYTHING = When()
_START_SECONDS = 60.0
_LOOK_SECONDS = 0.2
_LINE = re.compile(r"^(\S+Z) (\w+): (.*)$")
_TENANTS = """\
[[tenant]]
id = "quiet"
trace_records = true
api_keys = ["{quiet}"]

[[tenant]]
id = "noisy"
records_per_second = 10
burst_seconds = 1
api_keys = ["{noisy}"]
"""


class LogLine(NamedTuple):
    """A line of the gateway's log, and its instant in seconds since 1970."""

    at: float
    level: str
    text: str


class Look(NamedTuple):
    """What was seen at one instant: seconds since the start of the watch, and what each view says."""

    seconds: float
    ready: int
    parts: dict[str, Any]
    # The state of each alert that is not inactive: "pending" or "firing".
    alerts: dict[str, str]
    # The status of a put of the quiet tenant.
    client: int
    # None without a Chromium.
    board: Board | None


class Scene:
    """One running gateway. `folder` has its files."""

    def __init__(self, folder: Path, kinesis: ThreadedLocalKinesis, traces: Collector, *, is_tls: bool = False) -> None:
        self.folder = folder
        self.kinesis = kinesis
        self.traces = traces
        self.scheme = "https" if is_tls else "http"
        self.tenants = folder / "tenants.toml"
        self.keys = {name: new_api_key() for name in ("quiet", "noisy")}
        self.write_tenants()
        self.client = httpx.Client(verify=False, timeout=10.0)  # noqa: S501 - an expired certificate is one of the cases
        self.ack = "queued"
        self.url = self.prometheus_url = ""
        self.log = folder / "gateway.log"
        self.environment: dict[str, str] = {}
        self.admin_key = secrets.token_urlsafe(32)
        self.board: OpenBoard | None = None
        self.sent: list[Sent] = []
        self._fault: Any = None

    def write_tenants(self) -> None:
        """Write a valid tenants file."""
        self.tenants.write_text(_TENANTS.format(**{name: stored_key(key) for name, key in self.keys.items()}))
        self.tenants.chmod(0o600)

    def put(self, tenant: str = "quiet", count: int = 1) -> int:
        """Put records in a trace of their own, and return the status of the answer; 0 without one."""
        records = [{"partition_key": f"k{number}", "data": {"text": "x" * 100}} for number in range(count)]
        trace_id, traceparent = new_trace()
        at, request_id, status = time.time(), f"drill-{len(self.sent)}", 0
        fields = {
            "authorization": f"Bearer {self.keys[tenant]}",
            "traceparent": traceparent,
            "x-request-id": request_id,
        }
        with suppress(httpx.TransportError):
            url = f"{self.url}/v1/streams/{STREAM}/records?ack={self.ack}"
            status = self.client.post(url, json={"records": records}, headers=fields).status_code
        self.sent.append(Sent(at, request_id, trace_id, count, status))
        return status

    def arrived(self, sent: Sent) -> int:
        """Return how many user records in Kinesis carry the trace of a request."""
        stored = self.kinesis.call(lambda fake, _: list(fake.records(STREAM)))
        found = [decode(each.data) or [each] for each in stored]
        return sum(carries(record.data, sent.trace_id) for records in found for record in records)

    def readiness(self) -> tuple[int, dict[str, Any]]:
        """Return status and document of `/readyz?verbose`; 0 without an answer."""
        with suppress(httpx.TransportError):
            answer = self.client.get(f"{self.url}/readyz?verbose")
            return answer.status_code, answer.json()
        return 0, {"parts": {}}

    def break_kinesis(self, effect: Effect, when: When = EVERYTHING) -> None:
        """Let requests to Kinesis, or records in them, fail in this way."""
        self._fault = self.kinesis.call(lambda fake, _: fake.faults.add(effect, when))

    def repair_kinesis(self) -> None:
        """End that."""
        self.kinesis.call(lambda fake, _: fake.faults.remove(self._fault))

    def lines(self, since: float) -> list[LogLine]:
        """Return the log lines from an instant on, in seconds since 1970."""
        found = []
        for line in self.log.read_text("utf-8", "replace").splitlines():
            if (parsed := _LINE.match(line)) is not None:
                instant = datetime.fromisoformat(parsed[1]).replace(tzinfo=UTC).timestamp()
                if instant >= since:
                    found.append(LogLine(instant, parsed[2], parsed[3]))
        return found

    def look(self, started_at: float) -> Look:
        """Ask everything once."""
        client = self.put()
        ready, document = self.readiness()
        alerts: dict[str, str] = {}
        for each in asked(self.prometheus_url, "alerts")["alerts"]:
            alerts.setdefault(each["labels"]["alertname"], each["state"])
        board = None if self.board is None else self.board.look()
        return Look(time.time() - started_at, ready, document["parts"], alerts, client, board)

    def watch(self, started_at: float, is_over: Callable[[list[Look]], object], seconds: float) -> list[Look]:
        """Look again and again until `is_over`, for so long at most."""
        looks = [self.look(started_at)]
        while not is_over(looks) and time.time() - started_at < seconds:
            time.sleep(_LOOK_SECONDS)
            looks.append(self.look(started_at))
        return looks

    def doctor(self) -> tuple[int, list[str]]:
        """Run `kpl doctor` with the gateway's environment; return its status, and the checks that are not ok."""
        command = [sys.executable, "-m", "kpl_integrations.cli", "doctor", STREAM, "--json"]
        done = subprocess.run(
            command, env=os.environ | self.environment, capture_output=True, text=True, check=False, timeout=120
        )
        checks = re.findall(r'"name":"([^"]+)","status":"(failed|warning)","found":"([^"]*)"', done.stdout)
        return done.returncode, [": ".join(each) for each in checks]


@contextmanager
def running(folder: Path, settings: dict[str, str], *, workers: int = 1) -> Iterator[Scene]:
    """Run a gateway, its Kinesis and a Prometheus; `settings` are those of KPL_INGEST_..., and the folder is empty."""
    is_tls = "TLS_CERTIFICATE" in settings
    with ThreadedLocalKinesis(LocalKinesis({STREAM: 2})) as kinesis, collector() as traces:
        scene = Scene(folder, kinesis, traces, is_tls=is_tls)
        known = {
            "TENANTS": str(scene.tenants),
            "PORT": "0",
            "REGION": "us-east-1",
            "ENDPOINT_URL": kinesis.endpoint_url,
            "DRAIN_DELAY_SECONDS": "0",
            "CLOSE_SECONDS": "2",
            "ADMIN_KEY": scene.admin_key,
            "WORKERS": str(workers),
            **settings,
        }
        scene.environment = {f"KPL_INGEST_{name}": value for name, value in known.items()}
        scene.environment |= traces.environment | {
            "PYTHONPATH": str(Path(kpl_integrations.__file__).parents[1]),
            "AWS_ENDPOINT_URL_KINESIS": kinesis.endpoint_url,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "local",
            "AWS_SECRET_ACCESS_KEY": "local",
        }
        instrument = str(Path(sys.executable).parent / "opentelemetry-instrument")
        command = [instrument, sys.executable, "-m", "kpl_integrations.cli", "serve"]
        with own_process("gateway", command, logs=folder, environment=scene.environment) as gateway, scene.client:
            gateway.wait_until(lambda: "listens on" in scene.log.read_text(), what="address", seconds=_START_SECONDS)
            scene.url = re.findall(r"listens on (\S+)", scene.log.read_text())[0]
            target = scene.url.rpartition("/")[2]
            with prometheus(target, folder, job="kpl-gateway", scheme=scene.scheme) as scene.prometheus_url:
                # An increase needs a value before it.
                gateway.wait_until(
                    lambda: bool(asked(scene.prometheus_url, "query", query="kinesis_ingest_open == 1")["result"]),
                    what="scrape",
                )
                with opened_board(scene.url, scene.admin_key) as scene.board:
                    yield scene
