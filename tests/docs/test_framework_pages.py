"""The applications on the pages of the frameworks run in the servers that the pages name, and their records arrive."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from kpl_core import BlockingProducer
from kpl_core.testing import FakeKinesis
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from tests.support.consumers import user_records
from tests.support.processes import free_port
from tests.support.running_program import PACKAGES, Running, environment, running
from tests.support.waiting import wait_until

PAGES = Path(__file__).parents[2] / "docs" / "howto"


@pytest.fixture
def kinesis(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadedLocalKinesis]:
    with ThreadedLocalKinesis(LocalKinesis({"orders": 2})) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL_KINESIS", running.endpoint_url)
        yield running


def programs(page: str, folder: Path) -> None:
    """Write the programs on a page into a folder, each into the file that its first line names."""
    text = (PAGES / page).read_text(encoding="utf-8")
    for name, code in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        (folder / name).write_text(code, encoding="utf-8")


def stored(kinesis: ThreadedLocalKinesis) -> dict[str, list[bytes]]:
    """Return the data of the stored records by partition key."""
    by_key: dict[str, list[bytes]] = {}

    def read(fake: FakeKinesis, now: float) -> None:
        for record in user_records(fake, "orders"):
            by_key.setdefault(record.partition_key, []).append(record.data)

    kinesis.call(read)
    return by_key


def post(port: int, path: str, data: bytes) -> int:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", data=data, method="POST")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=20) as response:
        return int(response.status)


def importable(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([PACKAGES, str(folder)])}


def served(command: Sequence[str], *options: str, folder: Path) -> AbstractContextManager[Running]:
    # A program may write files, such as a database.
    return running([*command, *options], folder / "output.txt", importable(folder), folder=folder)


GUNICORN = ("gunicorn", "orders:app", "--workers", "2", "--threads", "4")
# Page, command of the server, the words that say it is ready, and the paths that put.
SERVED: list[tuple[str, Sequence[str], str, Sequence[str]]] = [
    ("flask.md", GUNICORN, "Booting worker", ["orders"]),
    ("flask.md", (*GUNICORN, "--preload"), "Booting worker", ["orders"]),
    ("django.md", GUNICORN, "Booting worker", ["orders"]),
    ("django.md", ("uvicorn", "orders_asgi:app"), "Uvicorn running on", ["orders", "sync"]),
    ("fastapi.md", ("uvicorn", "orders:app"), "Uvicorn running on", ["orders"]),
    ("litestar.md", ("uvicorn", "orders:app"), "Uvicorn running on", ["orders", "sync"]),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("page", "command", "ready", "paths"), SERVED, ids=[f"{row[0]}:{row[1][-1]}" for row in SERVED]
)
def test_a_served_application_puts_and_delivers_at_its_end(
    page: str, command: Sequence[str], ready: str, paths: Sequence[str], kinesis: ThreadedLocalKinesis, tmp_path: Path
) -> None:
    programs(page, tmp_path)
    port = free_port()
    address = ["--bind", f"127.0.0.1:{port}"] if command[0] == "gunicorn" else ["--port", str(port)]
    with served(command, *address, folder=tmp_path) as server:
        server.wait_until_said(ready)
        for path in paths:
            assert {post(port, f"{path}/c-{number}", b"%d" % number) for number in range(5)} <= {202}
        assert server.end(signal.SIGTERM) in {0, -signal.SIGTERM}
    found = stored(kinesis)
    assert set(found) == {f"c-{number}" for number in range(5)}
    assert all(len(data) == len(paths) for data in found.values())


@pytest.mark.long
@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_a_celery_task_stores_its_record(pool: str, kinesis: ThreadedLocalKinesis, tmp_path: Path) -> None:
    programs("celery.md", tmp_path)
    # A broker in a folder, so that no other server is needed.
    (tmp_path / "celeryconfig.py").write_text(
        "broker_url = 'filesystem://'\n"
        f"queue, control = {str(tmp_path / 'queue')!r}, {str(tmp_path / 'control')!r}\n"
        "broker_transport_options = {'data_folder_in': queue, 'data_folder_out': queue, 'control_folder': control}\n"
    )
    (tmp_path / "queue").mkdir()
    (tmp_path / "with_broker.py").write_text("from orders import app, order\napp.config_from_object('celeryconfig')\n")
    worker = [
        "celery",
        "--app",
        "with_broker:app",
        "worker",
        "--pool",
        pool,
        "--concurrency",
        "2",
        "--loglevel",
        "INFO",
    ]
    with served(worker, folder=tmp_path) as started:
        started.wait_until_said("ready.")
        send = "from with_broker import order\nfor n in range(5): order.delay(f'c-{n}', n)"
        subprocess.run([sys.executable, "-c", send], env=environment(importable(tmp_path)), check=True, timeout=50)
        wait_until(lambda: len(stored(kinesis)) == 5, lambda: f"five records, not {stored(kinesis)}: {started.said()}")
        assert started.end(signal.SIGTERM) == 0
    assert stored(kinesis) == {f"c-{number}": [b'{"total": %d}' % number] for number in range(5)}


def test_the_batch_job_puts_a_file(kinesis: ThreadedLocalKinesis, tmp_path: Path) -> None:
    programs("batch.md", tmp_path)
    lines = [json.dumps({"customer": f"c-{number}", "total": number}) for number in range(1_000)]
    (tmp_path / "orders.ndjson").write_text("\n".join(lines) + "\n")
    ended = subprocess.run(
        [sys.executable, "-W", "error", "backfill.py", "orders.ndjson"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "1,000 accepted: 1,000 delivered, 0 failed, 0 buffered\n"
    assert stored(kinesis) == {f"c-{n}": [line.encode()] for n, line in enumerate(lines)}


# AWS Lambda


@pytest.fixture
def handlers(tmp_path: Path) -> Any:
    programs("lambda.md", tmp_path)
    return lambda name: runpy.run_path(str(tmp_path / f"{name}.py"))


def test_the_lambda_page_shows_the_example(tmp_path: Path) -> None:
    """tests/interop/test_lambda.py runs it."""
    programs("lambda.md", tmp_path)
    example = PAGES.parents[1] / "examples" / "consumers" / "lambda_orders.py"
    assert (tmp_path / "lambda_orders.py").read_text(encoding="utf-8") == example.read_text(encoding="utf-8")


def test_the_lambda_producer_has_stored_its_records_when_it_returns(
    handlers: Any, kinesis: ThreadedLocalKinesis
) -> None:
    program = handlers("producer")
    handler = program["handler"]
    try:
        for invocation in range(2):
            orders = [{"customer": f"c-{number}", "invocation": invocation} for number in range(3)]
            assert handler({"orders": orders}, None) == {"stored": 3}
            assert sum(map(len, stored(kinesis).values())) == 3 * (invocation + 1)
        kinesis.call(lambda fake, now: fake.delete_stream("orders", now=now))
        with pytest.raises(RuntimeError, match="1 of 1 orders were not stored"):
            handler({"orders": [{"customer": "c-1"}]}, None)
    finally:
        BlockingProducer.shared(program["config"]).close(timeout=1.0)
