"""KinesisASGI around real frameworks under real servers, also around those that do not speak lifespan (Django)."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from tests.support.consumers import user_records
from tests.support.installation import Installed, site_packages
from tests.support.processes import free_port
from tests.support.running_program import Running, environment, running
from tests.support.waiting import wait_until

APP = "framework_apps:app"
SERVERS = {
    "uvicorn": ("uvicorn", "--port", "{port}", APP),
    "hypercorn": ("hypercorn", "--bind", "127.0.0.1:{port}", APP),
    "granian": ("granian", "--interface", "asgi", "--port", "{port}", APP),
    "gunicorn": (
        "gunicorn",
        "--no-control-socket",
        "--worker-class",
        "uvicorn_worker.UvicornWorker",
        "--bind",
        "127.0.0.1:{port}",
        APP,
    ),
    "daphne": ("daphne", "--port", "{port}", APP),
}
# Every framework, and the one without a lifespan under every server.
CELLS = [(framework, "uvicorn") for framework in ("quart", "litestar", "starlette")]
CELLS += [("django", server) for server in SERVERS if server != "daphne"]


@pytest.fixture(scope="module")
def kinesis() -> Iterator[ThreadedLocalKinesis]:
    with ThreadedLocalKinesis(LocalKinesis({"orders": 2})) as local:
        yield local


def answered(url: str) -> httpx.Response | None:
    try:
        return httpx.get(url, timeout=10)
    except httpx.TransportError:
        return None


@contextmanager
def serving(
    framework: str, server: str, kinesis: ThreadedLocalKinesis, installed: Installed, output: Path
) -> Iterator[tuple[Running, httpx.Response]]:
    """Run a server; yield it and its first answer."""
    port = free_port()
    more = {"FRAMEWORK": framework, "KPL_ENDPOINT_URL": kinesis.endpoint_url}
    account = {"AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local"}
    paths = environment()["PYTHONPATH"] + os.pathsep + str(site_packages(installed.frameworks_python))
    command = [option.format(port=port) for option in SERVERS[server]]
    with running(command, output, {**more, **account, "PYTHONPATH": paths}) as program:
        url = f"http://127.0.0.1:{port}/orders"
        wait_until(lambda: answered(url) is not None, lambda: f"an answer: {program.said()}")
        response = answered(url)
        assert response is not None
        yield program, response


@pytest.mark.parametrize(("framework", "server"), CELLS)
def test_a_producer_around_a_framework_is_open_until_the_server_ends(
    framework: str, server: str, kinesis: ThreadedLocalKinesis, installed: Installed, tmp_path: Path
) -> None:
    before = stored(kinesis)
    with serving(framework, server, kinesis, installed, tmp_path / "output") as (program, response):
        assert (response.status_code, response.json()) == (200, {"successful": True}), program.said()
        program.end(signal.SIGTERM)
    assert "Traceback" not in program.said()
    assert stored(kinesis) - before >= 2


def test_under_daphne_the_first_put_says_that_the_server_runs_no_lifespan(
    kinesis: ThreadedLocalKinesis, installed: Installed, tmp_path: Path
) -> None:
    with serving("django", "daphne", kinesis, installed, tmp_path / "output") as (program, response):
        assert response.status_code == 500, program.said()
        assert response.json()["error"].startswith(
            "this connection has no state['kinesis'], so no KinesisLifespan ran: give it to the outermost app "
            "(`lifespan=KinesisLifespan(config)`), and use a server that runs lifespans (uvicorn: not "
            "`--lifespan off`; daphne runs none)."
        )
        program.end(signal.SIGTERM)
    assert "Traceback" not in program.said()


def stored(kinesis: ThreadedLocalKinesis) -> int:
    return kinesis.call(lambda fake, now: len(list(user_records(fake, "orders"))))
