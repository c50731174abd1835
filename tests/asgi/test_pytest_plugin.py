"""The fixture as the tests of an application see it: installed, without configuration."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.running_program import environment

TESTS = """
import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.responses import Response
from starlette.testclient import TestClient

from kpl_integrations.asgi import KinesisLifespan, producer_of


async def order(request):
    producer_of(request.scope).put_nowait("placed", partition_key="42", data=b"an order")
    return Response()


@pytest.mark.kinesis_streams(placed=2)
def test_an_order_is_put(kinesis_double):
    with TestClient(Starlette(routes=[Route("/", order)], lifespan=KinesisLifespan())) as client:
        client.get("/")
        kinesis_double.wait_for("placed", count=1)


def test_each_test_begins_with_an_empty_stream(kinesis_double):
    assert kinesis_double.user_records("orders") == []


def test_without_the_fixture_the_real_transport_is_used():
    assert KinesisLifespan.transport_override is None
"""


@pytest.mark.long
def test_pytest_loads_the_fixture_and_its_mark(tmp_path: Path) -> None:
    (tmp_path / "test_app.py").write_text(TESTS, encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--strict-markers", "-W", "error", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert "3 passed" in ended.stdout, ended.stdout + ended.stderr
