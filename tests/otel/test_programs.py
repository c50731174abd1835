"""Whole programs, configured by the environment alone: what arrives at the end and across a fork."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from kpl_core.testing import FakeKinesis
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from tests.support.processes import black_hole
from tests.support.running_program import Running, environment, run
from tests.support.telemetry import exported, user_records
from tests.support.waiting import wait_until

PROGRAMS = Path(__file__).parent / "programs"
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "opentelemetry.md"
REQUESTS = 40
# Each is there in two or three seconds on a machine that has nothing else to do.
SECONDS = 90
pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * SECONDS)]
LISTENING = re.compile(r"(?:Uvicorn running on|Listening at:) (http://[\d.:]+)")
UVICORN = ("uvicorn", "--port", "0", "--app-dir", str(PROGRAMS))
GUNICORN = (
    "gunicorn",
    "--worker-class",
    "uvicorn_worker.UvicornWorker",
    "--bind",
    "127.0.0.1:0",
    "--chdir",
    str(PROGRAMS),
)
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
INSTRUMENT = str(Path(sys.executable).parent / "opentelemetry-instrument")


@pytest.fixture
def kinesis() -> Iterator[ThreadedLocalKinesis]:
    streams = dict.fromkeys(("spans", "logs", "metrics"), 4)
    with ThreadedLocalKinesis(LocalKinesis(streams, enforce_limits=False)) as local:
        yield local


def variables(kinesis: ThreadedLocalKinesis) -> dict[str, str]:
    """Return the environment variables of the programs."""
    return {
        "OTEL_TRACES_EXPORTER": "kinesis",
        "OTEL_LOGS_EXPORTER": "kinesis",
        "OTEL_METRICS_EXPORTER": "kinesis",
        "OTEL_SERVICE_NAME": "orders",
        "KPL_OTEL_TRACES_STREAM": "spans",
        "KPL_OTEL_LOGS_STREAM": "logs",
        "KPL_OTEL_METRICS_STREAM": "metrics",
        "KPL_OTEL_REGION": "us-east-1",
        "KPL_OTEL_ENDPOINT": kinesis.endpoint_url,
    }


@contextmanager
def serving(
    app: str, output: Path, more: dict[str, str], *before: str, server: tuple[str, ...] = UVICORN
) -> Iterator[tuple[Running, str]]:
    command = [*before, sys.executable, "-m", *server, app]
    with output.open("wb") as file:
        process = subprocess.Popen(command, env=environment(more), stdout=file, stderr=subprocess.STDOUT)
        running = Running(process, output)
        try:
            (url,) = wait_until_listening(running)
            yield running, url
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def wait_until_listening(running: Running) -> list[str]:
    wait_until(
        lambda: LISTENING.search(running.said()) or running.process.poll() is not None, running.said, seconds=SECONDS
    )
    found = LISTENING.findall(running.said())
    assert found, running.said()
    return found


def ask_and_end(running: Running, url: str, ending: signal.Signals = signal.SIGINT) -> int:
    for number in range(REQUESTS):
        assert httpx.get(f"{url}/orders/{number}", timeout=SECONDS).status_code == 200
    status = running.end(ending, within=SECONDS)
    assert status in {0, -ending}, running.said()
    assert "did not all arrive" not in running.said()
    return status


def spans_by_kind(kinesis: ThreadedLocalKinesis) -> tuple[Counter[int], dict[bytes, set[str]]]:
    found = kinesis.call(lambda fake, now: list(exported(fake, "spans", "traces")))
    shards: dict[bytes, set[str]] = {}
    for shard, span in found:
        shards.setdefault(span.trace_id, set()).add(shard)
    return Counter(span.kind for _, span in found), shards


def counter_value(kinesis: ThreadedLocalKinesis, name: str) -> int:
    metrics = kinesis.call(lambda fake, now: [metric for _, metric in exported(fake, "metrics", "metrics")])
    return max(int(point.as_int) for metric in metrics if metric.name == name for point in metric.sum.data_points)


def test_environment_variables_alone_send_all_three_signals_of_a_fastapi_app(kinesis, tmp_path):
    with serving("telemetry_app:app", tmp_path / "said", variables(kinesis), INSTRUMENT) as (running, url):
        ask_and_end(running, url)
    everything_arrived(kinesis)


def test_the_configuration_file_of_the_documentation_sends_all_three_signals(kinesis, tmp_path):
    (shown,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    file = tmp_path / "otel.yaml"
    file.write_text(shown, encoding="utf-8")
    more = {"OTEL_CONFIG_FILE": str(file), "KPL_OTEL_ENDPOINT": kinesis.endpoint_url}
    with serving("telemetry_app:app", tmp_path / "said", more, INSTRUMENT) as (running, url):
        ask_and_end(running, url)
    everything_arrived(kinesis)
    keys = kinesis.call(lambda fake, now: {record.partition_key for _, record in user_records(fake, "logs")})
    assert len(keys) == 1


# The application, the server, and how SIGTERM ends its process.
ENDINGS = {
    "an application that knows of nothing": ("telemetry_app:app", UVICORN, -signal.SIGTERM),
    "a lifespan under gunicorn": ("lifespan_app:app", GUNICORN, 0),
}


@pytest.mark.parametrize("case", ENDINGS)
def test_sigterm_loses_nothing_although_the_providers_are_not_shut_down(kinesis, tmp_path, case):
    app, server, status = ENDINGS[case]
    more = {**variables(kinesis), "KPL_OTEL_SHUTDOWN_TIMEOUT": "25000"}
    more |= dict.fromkeys(
        ("OTEL_BSP_SCHEDULE_DELAY", "OTEL_BLRP_SCHEDULE_DELAY", "OTEL_METRIC_EXPORT_INTERVAL"), "3000"
    )
    with serving(app, tmp_path / "said", more, INSTRUMENT, server=server) as (running, url):
        # What was sent once is quick to send again, however busy the machine is.
        assert httpx.get(f"{url}/orders/{REQUESTS}", timeout=SECONDS).status_code == 200
        wait_until_each_stream_has_something(kinesis, running)
        assert ask_and_end(running, url, signal.SIGTERM) == status
    everything_arrived(kinesis, requests=REQUESTS + 1)


def wait_until_each_stream_has_something(kinesis: ThreadedLocalKinesis, running: Running) -> None:
    def has_all(fake: FakeKinesis, _: float) -> bool:
        return all(fake.records(stream) for stream in ("spans", "logs", "metrics"))

    wait_until(lambda: kinesis.call(has_all), running.said, seconds=SECONDS)


def test_an_endpoint_that_does_not_answer_delays_the_end_by_seconds_only(tmp_path):
    with black_hole() as endpoint:
        more = {"OTEL_TRACES_EXPORTER": "kinesis", "OTEL_LOGS_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"}
        more |= {"KPL_OTEL_STREAM": "spans", "KPL_OTEL_REGION": "us-east-1", "KPL_OTEL_ENDPOINT": endpoint}
        with serving("telemetry_app:app", tmp_path / "said", more, INSTRUMENT) as (running, url):
            began = time.monotonic()
            assert ask_and_end(running, url, signal.SIGTERM) == -signal.SIGTERM
            assert time.monotonic() - began < SECONDS / 2


def test_the_time_of_one_shutdown_is_the_deadline_of_all_three_signals_at_exit():
    """It was 0.7 of it for the flush, and then one for each provider that the SDK shuts down."""
    with black_hole() as endpoint:
        ended = run("otel/programs/three_signals.py", endpoint, "6000", more=CREDENTIALS)
        took = time.monotonic() - float(ended.stdout)
    assert ended.returncode == 0
    # All three were cut off, and each says so.
    for noun in ("spans", "log records", "data points"):
        assert f"kpl_integrations.otel: {noun} to stream 'telemetry'" in ended.stderr
    # Two deadlines, one after the other, would take 12 s.
    assert 4.0 < took < 12.0, took


def everything_arrived(kinesis: ThreadedLocalKinesis, requests: int = REQUESTS) -> None:
    kinds, shards = spans_by_kind(kinesis)
    internal, server = 1, 2
    # The request, what is sent of its answer (twice), and the application's own.
    assert kinds == {server: requests, internal: 3 * requests}
    assert len(shards) == requests
    assert all(len(where) == 1 for where in shards.values())
    lines = kinesis.call(lambda fake, now: [record.body.string_value for _, record in exported(fake, "logs", "logs")])
    assert sorted(line for line in lines if line.startswith("order ")) == sorted(f"order {n}" for n in range(requests))
    assert counter_value(kinesis, "orders") == requests


@pytest.mark.skipif(importlib.util.find_spec("fastapi.telemetry") is None, reason="FastAPI 0.142 brought telemetry")
def test_fastapis_own_telemetry_takes_our_providers(kinesis, tmp_path):
    more = {**variables(kinesis), "FASTAPI_OTEL_AUTO_CONFIGURE": "true"}
    with serving("native_app:app", tmp_path / "said", more) as (running, url):
        ask_and_end(running, url)
    kinds, shards = spans_by_kind(kinesis)
    server = 2
    assert kinds[server] == REQUESTS
    assert all(len(where) == 1 for where in shards.values())
    lines = kinesis.call(lambda fake, now: [record.body.string_value for _, record in exported(fake, "logs", "logs")])
    assert sum(line.startswith("order ") for line in lines) == REQUESTS
    assert counter_value(kinesis, "orders") == REQUESTS


def test_with_every_logger_at_debug_only_the_applications_lines_arrive(kinesis):
    # By name, which takes a resolver too.
    more = {**variables(kinesis), "KPL_OTEL_ENDPOINT": kinesis.endpoint_url.replace("127.0.0.1", "localhost")}
    ended = run("otel/programs/debug_logging.py", more=more)
    assert ended.returncode == 0, ended.stderr
    lines = kinesis.call(lambda fake, now: [record.body.string_value for _, record in exported(fake, "logs", "logs")])
    assert sorted(lines) == sorted(f"line {number}" for number in range(200))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_starts_empty_and_every_span_arrives_once(kinesis):
    ended = run("otel/programs/forking.py", "300", more=variables(kinesis))
    assert (ended.returncode, ended.stderr) == (0, "")
    names = kinesis.call(lambda fake, now: Counter(span.name for _, span in exported(fake, "spans", "traces")))
    makers = ("parent", "child-0", "child-1", "parent-again")
    assert names == Counter(f"{maker} {number}" for maker in makers for number in range(300))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_what_a_forked_child_flushed_is_in_kinesis_when_the_flush_returns(kinesis):
    """It returned True, and 300 of 300 spans were lost with the child."""
    ended = run("otel/programs/flushing_child.py", "100", more=variables(kinesis))
    assert (ended.stdout.split(), ended.stderr) == (["True"] * 3, "")
    names = kinesis.call(lambda fake, now: Counter(span.name for _, span in exported(fake, "spans", "traces")))
    assert names == Counter(f"child-{child} {number}" for child in range(3) for number in range(100))
