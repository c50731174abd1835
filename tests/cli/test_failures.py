"""A failure of any command is one sentence with the fix, on stderr, and a status from the table."""

import socket
import sys

import pytest

from kpl_core.testing import ErrorAnswer, When
from kpl_integrations.cli.connection import advice
from kpl_integrations.cli.exit_code import ExitCode
from tests.support.kpl_process import of_program, run

COMMANDS = ("put", "tail")


@pytest.fixture
def empty_file(tmp_path):
    """Return an empty input, so that only the connection can fail."""
    path = tmp_path / "empty"
    path.touch()
    return path


@pytest.fixture
def unused_port():
    """Yield a loopback port that refuses connections."""
    # It stays bound during the test, so that nothing else can listen on it.
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture
def failing(kpl, empty_file):
    """Return a function that runs a command, checks that it fails in one sentence, and returns status and sentence."""

    def failing(command, *arguments):
        outcome = kpl(command, *arguments, *[empty_file] * (command == "put"))
        assert outcome.out == ""
        assert outcome.err.startswith("kpl: ")
        assert outcome.err.count("\n") == 1
        assert "; " in outcome.err, "the fix"
        return outcome.status, outcome.err

    return failing


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_stream(failing, kinesis, command):
    status, error = failing(command, "nope", "--endpoint-url", kinesis.endpoint_url)
    assert status == ExitCode.UNUSABLE
    assert f"Kinesis at {kinesis.endpoint_url} has no stream 'nope'" in error
    place = f"--region us-east-1 --endpoint-url {kinesis.endpoint_url}"
    assert error.endswith(f"or create it: aws kinesis create-stream --stream-name nope --shard-count 1 {place}\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_an_endpoint_without_tls(failing, kinesis, command):
    url = kinesis.endpoint_url.replace("http", "https")
    status, error = failing(command, "demo", "--endpoint-url", url)
    assert status == ExitCode.UNUSABLE
    assert error.startswith(f"kpl: Kinesis at {url} does not speak TLS (")
    assert error.endswith("; write the endpoint with http://, or name the port for https\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unreachable_endpoint(failing, command, unused_port):
    status, error = failing(command, "demo", "--endpoint-url", f"http://127.0.0.1:{unused_port}")
    assert status == ExitCode.UNUSABLE
    assert "cannot be reached; check --endpoint-url" in error


@pytest.mark.parametrize("command", COMMANDS)
def test_no_credentials(failing, monkeypatch, command):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    status, error = failing(command, "demo", "--region", "eu-west-1")
    assert status == ExitCode.UNUSABLE
    assert "no AWS credentials found" in error
    assert "AWS_PROFILE" in error


def test_incomplete_credentials(failing, monkeypatch):
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    status, error = failing("tail", "demo", "--region", "eu-west-1")
    assert status == ExitCode.UNUSABLE
    assert "AWS_SECRET_ACCESS_KEY" in error


def test_a_kinesis_on_this_machine_needs_neither_credentials_nor_region(kpl, stream, monkeypatch, empty_file):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("no_proxy", "")
    assert kpl("put", *stream.address, empty_file).status == ExitCode.DONE
    assert kpl("tail", *stream.address, "--no-follow").status == ExitCode.DONE


@pytest.mark.parametrize("command", COMMANDS)
def test_no_region(failing, monkeypatch, command):
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    assert failing(command, "demo") == (
        ExitCode.UNUSABLE,
        "kpl: no region is set; name one with --region, or set AWS_DEFAULT_REGION (AWS_REGION is not read)\n",
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_an_empty_region(failing, monkeypatch, command):
    monkeypatch.setenv("AWS_DEFAULT_REGION", "")
    assert failing(command, "demo") == (
        ExitCode.UNUSABLE,
        "kpl: the region is empty; name one with --region, or set AWS_DEFAULT_REGION (AWS_REGION is not read)\n",
    )


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("stream", "words"), [("", "stream is empty"), ("my stream", "stream is 'my stream'")])
def test_a_stream_that_cannot_exist(failing, command, stream, words):
    status, error = failing(command, stream, "--endpoint-url", "http://127.0.0.1:9")
    assert status == ExitCode.UNUSABLE
    assert error.startswith(f"kpl: {words}; it must be")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--endpoint-url", "kinesis"), "not a URL; write it like http://"),
        (("--endpoint-url", "http://["), "not a URL; write it like http://"),
        (("--endpoint-url", "http://example.com:port"), "not a URL; write it like http://"),
        (("--region", "eu west"), "check --region, such as eu-west-1, and --endpoint-url"),
    ],
)
def test_an_invalid_endpoint_or_region(failing, options, words):
    status, error = failing("tail", "demo", *options)
    assert status == ExitCode.UNUSABLE
    assert words in error


def test_a_profile_that_does_not_exist(failing, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "missing")
    status, error = failing("tail", "demo")
    assert status == ExitCode.UNUSABLE
    assert "profile (missing) could not be found; check AWS_PROFILE" in error


@pytest.mark.parametrize(
    ("code", "operation", "words"),
    [
        ("AccessDeniedException", "ListShards", "IAM policy"),
        ("UnrecognizedClientException", "ListShards", "renew the credentials"),
        ("InvalidSignatureException", "ListShards", "clock of this machine"),
        ("ExpiredTokenException", "GetShardIterator", "renew the credentials"),
        ("KMSAccessDeniedException", "GetRecords", "the key that encrypts the stream"),
        ("ValidationException", "GetRecords", "check the stream and the endpoint"),
    ],
)
def test_an_error_of_the_service(failing, stream, code, operation, words):
    with stream.fault(ErrorAnswer(code), When(operation=operation)):
        status, error = failing("tail", *stream.address, "--no-follow")
    assert status == ExitCode.UNUSABLE
    assert f"rejects {operation} of '{stream.name}' ({code}: " in error
    assert advice(code) in error
    assert words in error


@pytest.mark.parametrize("name", ["missing", "."])
def test_an_unreadable_file(kpl, stream, tmp_path, name):
    outcome = kpl("put", *stream.address, tmp_path / name)
    assert outcome.status == ExitCode.BAD_INPUT
    assert outcome.err.startswith(f"kpl: {tmp_path / name} cannot be read (")
    assert outcome.err.endswith("; check its path and permissions\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("put",), "stream"),
        (("put", "s", "--key", "k", "--key-field", "f"), "not both"),
        (("put", "s", "--key-field", "f"), "--format ndjson"),
        (("put", "s", "--format", "xml"), "ndjson"),
        (("put", "s", "--skip", "-1"), "--skip"),
        (("tail", "s", "--limit", "0"), "--limit"),
        (("demo", "--records", "none"), "--records"),
        (("demo", "--shards", "0"), "--shards"),
        (("nonsense",), "nonsense"),
    ],
)
def test_wrong_usage_is_status_2(kpl, arguments, words):
    outcome = kpl(*arguments)
    assert (outcome.status, outcome.out) == (ExitCode.WRONG_USAGE, "")
    assert words in outcome.err.lower()


def test_a_process_fails_like_main():
    outcome = run("put", "demo", "--endpoint-url", "kinesis")
    assert (outcome.status, outcome.out) == (ExitCode.UNUSABLE, "")
    assert outcome.err == "kpl: --endpoint-url is 'kinesis', which is not a URL; write it like http://127.0.0.1:4567\n"


def test_a_missing_extra_is_reported():
    module = "typer"
    program = f"import sys; sys.modules[{module!r}] = None; from kpl_integrations.cli import main; sys.exit(main())"
    outcome = of_program(sys.executable, "-c", program, "tail", "s")
    assert (outcome.status, outcome.out) == (ExitCode.UNUSABLE, "")
    assert outcome.err == f"kpl: {module} is not installed; pip install 'kpl-integrations[cli,local]'\n"


@pytest.mark.parametrize("arguments", [("serve", "--local"), ("keys", "new")])
def test_a_missing_second_extra_is_reported(arguments):
    module = "prometheus_client"
    program = f"import sys; sys.modules[{module!r}] = None; from kpl_integrations.cli import main; sys.exit(main())"
    outcome = of_program(sys.executable, "-c", program, *arguments)
    assert (outcome.status, outcome.out) == (ExitCode.UNUSABLE, "")
    assert outcome.err == f"kpl: {module} is not installed; pip install 'kpl-integrations[cli,ingest]'\n"
