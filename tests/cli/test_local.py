import re
import signal
import sys
import textwrap

import boto3
import httpx
import pytest

from tests.support.kpl_process import of_program, started


def test_it_serves_any_sdk_until_sigterm():
    with started("local", "--port", "0", "--stream", "orders:3", "--stream", "clicks") as local:
        url = local.stdout.readline().split()[-1]
        client = boto3.client("kinesis", endpoint_url=url, region_name="us-east-1")
        assert sorted(client.list_streams()["StreamNames"]) == ["clicks", "orders"]
        assert len(client.list_shards(StreamName="orders")["Shards"]) == 3
        client.close()
        assert local.end(signal.SIGTERM) == 0
        assert local.stderr.read() == "stopped\n"
        assert "kpl put orders" in local.stdout.read()


def test_another_host_is_answered_only_if_it_is_allowed():
    with started("local", "--port", "0", "--allow-host", "kinesis", "--allow-host", "b") as local:
        url = local.stdout.readline().split()[-1]
        sent = {"X-Amz-Target": "Kinesis_20131202.ListStreams"}
        answers = {
            host: httpx.post(url, headers=sent | {"Host": host}, content=b"{}", timeout=20)
            for host in ("kinesis:4567", "b", "evil.example")
        }
        assert [answer.status_code for answer in answers.values()] == [200, 200, 403]
        assert "start it with --allow-host NAME" in answers["evil.example"].json()["message"]
        assert local.end(signal.SIGTERM) == 0


@pytest.mark.long
def test_the_printed_example_commands_work():
    with started("local", "--port", "0") as local:
        shown = local.stdout.readline()
        while "asyncio.run(main())" not in shown:
            shown += local.stdout.readline()
        terminal, _, program = shown.partition("In another terminal:\n")[2].partition("In Python:\n")
        lines = textwrap.dedent(terminal).partition("aws ")[0].replace("--from-start", "--from-start --no-follow")
        kpl = f'kpl() {{ "{sys.executable}" -m kpl_integrations.cli "$@"; }}'
        shell = of_program("bash", "-euc", f"{kpl}\n{lines}")
        assert shell.status == 0, shell.err
        assert len(re.findall(r"^\d\d:\d\d:.* shard \d", shell.out, re.MULTILINE)) == 1_000
        python = of_program(sys.executable, "-c", textwrap.dedent(program))
        assert "RecordResult(successful=True" in python.out, python.err
        assert local.end(signal.SIGINT) == 0


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--stream", "orders:none"), 2, "write NAME or NAME:SHARDS"),
        (("--stream", ":2"), 2, "write NAME or NAME:SHARDS"),
        (("--stream", "orders:0"), 2, "at least one shard"),
        (("--stream", "bad name!"), 2, "a name has 1 to 128 letters"),
        (("--port", "70000"), 2, "65535"),
    ],
)
def test_invalid_options_are_reported(kpl, arguments, status, words):
    outcome = kpl("local", "--port", "0", *arguments)
    assert outcome.status == status
    assert words in outcome.err


def test_a_port_in_use_is_reported(kpl, kinesis):
    port = kinesis.endpoint_url.rpartition(":")[2]
    outcome = kpl("local", "--port", port)
    assert outcome.status == 3
    assert outcome.err.startswith(f"kpl: port {port} of 127.0.0.1 cannot be used")
    assert "--port" in outcome.err
