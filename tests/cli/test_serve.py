"""`kpl serve` as a process: what it prints works as it stands, and a signal ends it in order."""

import json
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from kpl_integrations.cli.exit_code import ExitCode
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from tests.support.kpl_process import of_program, started
from tests.support.waiting import wait_until

ONE = {"partition_key": "k", "data": "x"}


def url_of(line: str) -> str:
    return line.rsplit(maxsplit=1)[-1]


@pytest.mark.long
def test_one_command_serves_and_the_lines_it_prints_work_as_they_stand():
    with started("serve", "--local", "--port", "0") as serve:
        shown = serve.stdout.readline()
        while "kpl tail" not in shown:
            shown += serve.stdout.readline()
        kpl = f'kpl() {{ "{sys.executable}" -m kpl_integrations.cli "$@"; }}'
        lines = shown.partition("In another terminal:\n")[2].replace("--from-start", "--from-start --no-follow --json")
        shell = of_program("bash", "-euc", f"{kpl}\n{lines}")
        assert shell.status == 0, shell.err
        assert '{"ack":"queued","accepted":1}' in shell.out
        assert '"accepted":1000,"delivered":1000,"failed":0' in shell.out
        assert '"status":"ready"' in shell.out
        assert shell.out.count('"partition_key":') == 1_001
        assert serve.end(signal.SIGINT) == 0
        assert "1,001 accepted: 1,001 delivered, 0 failed, 0 buffered" in serve.stderr.read()


@pytest.mark.long
def test_sigterm_drains_what_it_took():
    with started("serve", "--local", "--port", "0", "--stream", "orders:2", "--drain-delay-seconds", "3") as serve:
        url = url_of(serve.stdout.readline())
        with httpx.Client(timeout=20) as client:
            for _ in range(20):
                answer = client.post(f"{url}/v1/streams/orders/records", json={"records": [ONE] * 50})
                assert answer.status_code == 202
            serve.process.send_signal(signal.SIGTERM)
            wait_until(lambda: client.get(f"{url}/readyz").status_code == 503, "it is not ready")
            assert client.get(f"{url}/livez").status_code == 200
            assert client.post(f"{url}/v1/streams/orders/records", json=ONE).status_code == 202
        assert serve.end() == 0
        said = serve.stderr.read()
        assert "stopping: not ready" in said
        assert "1,001 accepted: 1,001 delivered" in said


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_delivers_and_forwards_without_the_memory_of_an_aws_client(kinesis):
    kinesis.call(lambda fake, now: fake.create_stream("light", shard_count=1, now=now))
    target = {"X-Amz-Target": "Kinesis_20131202.DescribeStreamSummary"}
    with started("serve", "--local", "--port", "0", "--endpoint-url", kinesis.endpoint_url) as serve:
        url = url_of(serve.stdout.readline())
        with httpx.Client(timeout=20) as client:
            assert client.post(f"{url}/v1/streams/light/records?ack=delivered", json=ONE).status_code == 200
            assert client.post(url, json={"StreamName": "light"}, headers=target).status_code == 200
        # aiohttp's parser is a shared library.
        assert "aiohttp" not in Path(f"/proc/{serve.process.pid}/maps").read_text()
        assert serve.end(signal.SIGINT) == 0


@pytest.mark.long
def test_a_local_gateway_answers_only_to_loopback_names_and_those_of_allow_host():
    """A web page that names this machine as its own server (DNS rebinding) reaches the gateway under its own name."""
    with started("serve", "--local", "--port", "0", "--allow-host", "dev.internal", "--allow-host", "b") as serve:
        url = url_of(serve.stdout.readline())
        with httpx.Client(timeout=20) as client:

            def status(host: str) -> int:
                sent = client.post(f"{url}/v1/streams/demo/records", json=ONE, headers={"Host": host})
                assert client.get(f"{url}/v1/stats", headers={"Host": host}).is_success == sent.is_success
                return sent.status_code

            allowed = ("localhost", "127.0.0.1:8080", "dev.internal:1", "b")
            assert [status(host) for host in allowed] == [202] * 4
            assert [status(host) for host in ("evil.example", "evil.example:8080", "10.0.0.1")] == [421] * 3
        assert serve.end(signal.SIGINT) == 0


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--port", "0"), 2, "no tenants are configured"),
        (("--local", "--port", "0", "--stream", "a:none"), 2, "write NAME or NAME:SHARDS"),
        (("--local", "--port", "0", "--tls-key", "key.pem"), 2, "belong together"),
        (
            ("--local", "--port", "0", "--tls-certificate", "/nowhere/c.pem", "--tls-key", "k.pem"),
            2,
            "c.pem cannot be read",
        ),
        (("--local", "--port", "0", "--host", "0.0.0.0"), 2, "checks no credentials"),  # noqa: S104 - refused
        (("--port", "0", "--tenants", "/nowhere/tenants.toml"), 4, "tenants.toml"),
    ],
)
def test_what_cannot_be_served_is_said_in_a_sentence(kpl, arguments, status, words):
    outcome = kpl("serve", *arguments)
    assert (outcome.status, words in outcome.err) == (status, True), outcome.err


def test_a_tenant_that_needs_a_spool_stops_the_start_of_a_gateway_without_one(tmp_path: Path, kpl):
    tenants = tmp_path / "tenants.toml"
    tenants.write_text('[unknown]\nack = "spooled"\n')
    outcome = kpl("serve", "--local", "--port", "0", "--tenants", str(tenants))
    assert (outcome.status, "start it with --spool FILE" in outcome.err) == (4, True), outcome.err


def test_tenants_of_a_file_are_asked_for_their_keys(tmp_path: Path, kpl):
    made = json.loads(kpl("keys", "new", "--json").out)
    key, digest = made["api_key"], made["stored"]
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(f'[[tenant]]\nid = "acme"\napi_keys = ["{digest}"]\nstreams = ["demo"]\n')
    with started("serve", "--local", "--port", "0", "--tenants", str(tenants)) as serve:
        url = url_of(serve.stdout.readline()) + "/v1/streams/demo/records"
        assert httpx.post(url, json=ONE).status_code == 401
        assert httpx.post(url, json=ONE, headers={"authorization": "Bearer nonsense"}).status_code == 401
        assert httpx.post(url, json=ONE, headers={"authorization": f"Bearer {key}"}).status_code == 202
        assert serve.end(signal.SIGINT) == 0
        assert key not in serve.stderr.read()


@pytest.mark.long
@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL_KINESIS", "AWS_ENDPOINT_URL", "KPL_INGEST_ENDPOINT_URL"])
def test_a_local_gateway_uses_no_kinesis_of_the_environment(variable, monkeypatch):
    """The README exports the endpoint of `kpl local` before it starts `kpl serve --local`."""
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    with started("serve", "--local", "--port", "0") as serve:
        url = url_of(serve.stdout.readline())
        assert "127.0.0.1:9;" not in serve.stdout.readline()
        answer = httpx.post(f"{url}/v1/streams/demo/records?ack=delivered", json=ONE, timeout=20)
        assert (answer.status_code, answer.json()["delivered"]) == (200, 1)
        assert serve.end(signal.SIGINT) == 0


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.long)])
def test_every_line_is_json_if_the_settings_say_so(monkeypatch, workers):
    monkeypatch.setenv("KPL_INGEST_ACCESS_LOG", "1")
    with started("serve", "--local", "--port", "0", "--workers", workers, "--set", "log_format=json") as serve:
        first = json.loads(serve.stdout.readline())
        url = first["url"]
        assert (first["message"], first["processes"]) == (f"Gateway listens on {url}", int(workers))
        assert httpx.post(f"{url}/v1/streams/demo/records?ack=delivered", json=ONE, timeout=20).status_code == 200
        assert serve.end(signal.SIGINT) == 0
        assert serve.stdout.read() == ""
        lines = [json.loads(line) for line in serve.stderr.read().splitlines()]
    (request,) = [line for line in lines if line["logger"] == "kpl_integrations.ingest.access"]
    assert (request["status"], request["level"]) == (200, "info")
    assert all(line["time"].endswith("Z") for line in lines)
    assert any("gateway closed" in line["message"] for line in lines)
    assert lines[-1]["message"] == "stopped; 1 accepted: 1 delivered, 0 failed, 0 buffered"
    assert (lines[-1]["accepted"], lines[-1]["failed"]) == (1, 0)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--local", "--spool", "/"), 2, "spool is '/', a folder; name a file in it"),
        (("--port", "0"), 2, "no tenants are configured"),
        (("--tenants", "/nowhere.toml"), 4, "/nowhere.toml"),
        (("--set", "prot=1"), 2, "--set prot is not a setting"),
        (("--set", "prot=1", "--print-config"), 2, "--set prot is not a setting"),
    ],
)
@pytest.mark.parametrize("source", ["environment", "command line", "file"])
def test_a_failure_is_a_line_of_json_too(monkeypatch, tmp_path, capsys, kpl, source, arguments, status, words):
    file = tmp_path / "gateway.toml"
    file.write_text("log_format = 'json'")
    said = {"environment": (), "command line": ("--set", "log_format=json"), "file": ("--config", str(file))}
    monkeypatch.setenv("KPL_INGEST_LOG_FORMAT", "json" if source == "environment" else "")
    # The command sets it for its process.
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    outcome = kpl("serve", *said[source], *arguments)
    (line,) = map(json.loads, outcome.err.splitlines())
    assert (outcome.status, line["level"], words in line["message"]) == (status, "error", True)
    sys.excepthook(ValueError, ValueError("of nobody"), None)
    (line,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert (line["level"], line["message"]) == ("critical", "ValueError: of nobody")


@pytest.mark.long
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_loss_is_a_warning_and_in_the_last_line(monkeypatch, workers):
    monkeypatch.setenv("KPL_INGEST_CLOSE_SECONDS", "1")
    monkeypatch.setenv("KPL_INGEST_DRAIN_DELAY_SECONDS", "0")
    with ExitStack() as running, httpx.Client(timeout=20) as client:
        kinesis = running.enter_context(ThreadedLocalKinesis(LocalKinesis({"mine": 1})))
        options = ("--workers", workers, "--endpoint-url", kinesis.endpoint_url, "--set", "log_format=json")
        with started("serve", "--local", "--port", "0", *options) as serve:
            url = json.loads(serve.stdout.readline())["url"]
            # One connection reaches one worker, which then knows the stream.
            answer = client.post(f"{url}/v1/streams/mine/records?ack=delivered", json=ONE)
            assert answer.status_code == 200, answer.text
            running.close()
            assert client.post(f"{url}/v1/streams/mine/records", json=ONE).status_code == 202
            assert serve.end(signal.SIGTERM) == ExitCode.NOT_ALL_ARRIVED
            lines = [json.loads(line) for line in serve.stderr.read().splitlines()]
    counts = "2 accepted: 1 delivered, 1 failed (1 Shutdown), 0 buffered"
    closed = [line for line in lines if line["message"] == f"the Kinesis producer is closed: {counts}"]
    assert [line["level"] for line in closed] == ["warning"]
    assert (lines[-1]["level"], lines[-1]["message"]) == ("warning", f"stopped; {counts}")


LOUD_PROGRAM = """
import logging, warnings
from kpl_integrations.cli.terminal import LogFormat, print_exceptions_as, show_all_logs

json_lines = LogFormat(is_json=True)
print_exceptions_as(json_lines)
with show_all_logs({"kpl_core": logging.INFO, "uvicorn.error": logging.ERROR}, json_lines):
    logging.getLogger("kpl_core.x").info("of the producer")
    logging.getLogger("uvicorn.error").error("of the server")
    logging.getLogger("uvicorn.error").warning("of a client")
    logging.getLogger("asyncio").error("of a library")
    logging.getLogger("asyncio").info("of no interest")
    warnings.warn("of Python", stacklevel=1)
    raise ValueError("of nobody")
"""


def test_lines_of_every_library_warnings_and_tracebacks_are_json():
    outcome = of_program(sys.executable, "-W", "always", "-c", LOUD_PROGRAM)
    messages = [json.loads(line)["message"] for line in outcome.err.splitlines()]
    assert messages[:3] == ["of the producer", "of the server", "of a library"]
    assert "of Python" in messages[3]
    assert messages[4:] == ["ValueError: of nobody"]
    assert outcome.status == 1
