"""The tutorial works: the test writes its files, starts its server, sends its requests and runs its tests."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

import kpl_core
from kpl_core import decode
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from tests.support.processes import free_port
from tests.support.waiting import wait_until

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text(encoding="utf-8")
PACKAGES = str(Path(next(iter(kpl_core.__path__))).parent)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the tutorial's files; blocks with the same title are appended to one file."""
    for title, code in re.findall(r"^```python title=\"(.+?)\"\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        with (tmp_path / title).open("a", encoding="utf-8") as file:
            file.write(f"{code}\n\n")
    return tmp_path


@pytest.fixture
def kinesis() -> Iterator[ThreadedLocalKinesis]:
    with ThreadedLocalKinesis(LocalKinesis({"orders": 4})) as running:
        yield running


@pytest.fixture
def environment(kinesis: ThreadedLocalKinesis) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": PACKAGES,
        "AWS_ENDPOINT_URL_KINESIS": kinesis.endpoint_url,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "local",
        "AWS_SECRET_ACCESS_KEY": "local",
    }


def _post(port: int, path: str, body: str) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def _wait_until_listening(port: int, server: subprocess.Popen[str]) -> None:
    def listens() -> bool:
        assert server.poll() is None, server.communicate()[0]
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until(listens, "uvicorn listens")


def _serve(app: str, folder: Path, environment: dict[str, str], port: int) -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", app, "--port", str(port)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    _wait_until_listening(port, server)
    return server


@pytest.mark.long
def test_the_service_accepts_orders_and_reports_them(
    folder: Path, environment: dict[str, str], kinesis: ThreadedLocalKinesis
) -> None:
    port = free_port()
    server = _serve("app:app", folder, environment, port)
    try:
        assert _post(port, "/orders", '{"customer": "ada", "total": 12}')[0] == 202
        assert _post(port, "/orders/unlucky", '{"customer": "bob", "total": 13}')[0] == 500
    finally:
        server.terminate()
        said = server.communicate(timeout=30)[0]
    stored = kinesis.call(lambda fake, _: fake.records("orders"))
    keys = [user_record.partition_key for each in stored for user_record in decode(each.data) or [each]]
    assert keys == ["ada"]
    assert "1 delivered, 0 failed, 0 buffered" in said


@pytest.mark.long
def test_the_other_service_answers_when_the_order_is_stored(folder: Path, environment: dict[str, str]) -> None:
    port = free_port()
    server = _serve("stored:app", folder, environment, port)
    try:
        status, body = _post(port, "/orders/ada", "")
    finally:
        server.terminate()
        server.communicate(timeout=30)
    assert status == 201
    assert '"shard":"shardId-' in body


@pytest.mark.long
def test_its_tests_pass(folder: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), "test_app.py"]
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=50, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
