"""`kpl doctor`: every check with every result, as a table and as JSON."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from kpl_core.testing import ErrorAnswer, When
from kpl_integrations.cli.doctor import (
    check_clock,
    check_hot_path,
    check_open_files,
    check_region,
    check_shards,
    check_stream,
)
from tests.support.certificates import certificate_pair, days_from_now, needs_openssl
from tests.support.kpl_process import in_a_terminal, run, without_escape_codes

SSO_PROFILE = """
sso_session = s
sso_account_id = 123456789012
sso_role_name = r
[sso-session s]
sso_region = us-east-1
sso_start_url = https://start.invalid
"""
NOW = datetime(2026, 11, 20, 12, 0, 0, tzinfo=UTC)


def dated(seconds: float) -> str:
    return (NOW - timedelta(seconds=seconds)).strftime("%a, %d %b %Y %H:%M:%S GMT")


# (check, status, expected words)
VERDICTS = [
    (check_clock(dated(2), NOW), "ok", "within a few seconds"),
    (check_clock(dated(60), NOW), "warning", "60 s ahead of the service"),
    (check_clock(dated(-60), NOW), "warning", "60 s behind the service"),
    (check_clock(dated(600), NOW), "failed", "AWS rejects signatures that are five minutes off"),
    (check_clock(None, NOW), "skipped", "sends no time"),
    (check_clock("yesterday", NOW), "skipped", "sends no time"),
    (check_stream({"StreamStatus": "ACTIVE"}), "ok", "ACTIVE, provisioned, records of 1,024 KiB at most"),
    (check_stream({"StreamStatus": "UPDATING"}), "warning", "its shards are changing"),
    (check_stream({"StreamStatus": "DELETING"}), "failed", "wait until it is ACTIVE, or create it"),
    (
        check_stream({"StreamStatus": "ACTIVE", "StreamModeDetails": {"StreamMode": "ON_DEMAND"}}),
        "ok",
        "on-demand",
    ),
    (check_shards(4, None), "ok", "4 open, together 4,000 records and 4 MiB a second"),
    (check_shards(4, {"ShardLimit": 500, "OpenShardCount": 12}), "ok", "the account uses 12 of 500"),
    (check_shards(4, {"ShardLimit": 500, "OpenShardCount": 500}), "warning", "ask AWS to raise the shard quota"),
    (check_open_files(None), "ok", "no limit"),
    (check_open_files(1_024), "ok", "1,024 at most"),
    (check_open_files(64), "warning", "ulimit -n 1024"),
    (check_hot_path({}, is_compiled=True, direct_url=""), "ok", "kernels in C"),
    (check_hot_path({"KPL_KERNELS": " off"}, is_compiled=False, direct_url=""), "ok", "KPL_KERNELS=off turns"),
    (check_hot_path({}, is_compiled=False, direct_url=None), "ok", "kernels in Python: these are sources"),
    (check_hot_path({}, is_compiled=False, direct_url='{"dir_info": {"editable": true}}'), "ok", "an editable"),
    (check_hot_path({}, is_compiled=False, direct_url='{"dir_info": {}, "url": "file:///src"}'), "ok", "from sources"),
    (check_hot_path({}, is_compiled=False, direct_url=""), "ok", "the installed wheel is the pure one"),
    (check_region("here", {"AWS_DEFAULT_REGION": ""}, is_given=False), "failed", "AWS_DEFAULT_REGION is empty"),
    (check_region("here", {"AWS_DEFAULT_REGION": ""}, is_given=True), "ok", "here"),
    (check_region("here", {}, is_given=False), "ok", "here"),
]


@pytest.mark.parametrize(("check", "status", "words"), VERDICTS)
def test_a_check_describes_its_result_and_the_fix(check, status, words):
    assert check.status == status
    assert words in f"{check.found} {check.fix}"
    assert bool(check.fix) is (status in {"warning", "failed"})


def verdicts(out: str) -> dict[str, str]:
    return {check["name"]: check["status"] for check in json.loads(out)["checks"]}


def test_a_usable_stream_passes_every_check(kpl, stream):
    status, out, err = kpl("doctor", *stream.address, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["ok"] is True
    found = verdicts(out)
    assert found.pop("put") == "skipped"
    assert set(found.values()) == {"ok"}


@pytest.mark.long
def test_in_a_pipe_the_table_has_no_escape_codes(stream):
    status, out, err = run("doctor", *stream.address)
    assert (status, err) == (0, "")
    assert "\x1b" not in out
    assert [line.split()[0] for line in out.splitlines() if not line.startswith(" ")] == [
        "configuration",
        "settings",
        "credentials",
        "connection",
        "stream",
        "shards",
        "list",
        "put",
        "clock",
        "open",
        "hot",
        "transport",
        "spool",
        "dead",
        "coordination",
    ]


def test_on_a_terminal_ok_is_green(stream):
    status, shown, _ = in_a_terminal("doctor", *stream.address)
    assert status == 0
    assert "\x1b[32mok" in shown
    assert "clock" in without_escape_codes(shown)


def test_a_missing_stream_is_reported_with_the_command_that_creates_it(kpl, stream):
    status, out, _ = kpl("doctor", "missing", *stream.address[1:], "--json")
    found = verdicts(out)
    assert (status, found["connection"], found["clock"], found["stream"], found["shards"]) == (
        3,
        "ok",
        "ok",
        "failed",
        "skipped",
    )
    assert "aws kinesis create-stream --stream-name missing" in out


def test_without_a_region_only_local_checks_run(kpl, monkeypatch):
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    status, out, _ = kpl("doctor", "orders", "--json")
    found = verdicts(out)
    assert (status, found.pop("configuration")) == (3, "failed")
    local = ("settings", "open files", "hot path", "spool", "dead letters", "coordination")
    assert [found.pop(name) for name in local] == ["ok"] * len(local)
    assert set(found.values()) == {"skipped"}
    assert "--region" in out


@needs_openssl
@pytest.mark.parametrize(
    ("days", "verdict", "words"),
    [((-9, -1), "failed", "expired at"), ((-90, 1), "warning", "expires at"), ((-1, 90), "ok", "valid until")],
)
def test_a_certificate_that_has_expired_fails(kpl, stream, tmp_path, monkeypatch, days, verdict, words):
    certificate, key = certificate_pair(tmp_path, "c", *map(days_from_now, days))
    monkeypatch.setenv("KPL_INGEST_TLS_CERTIFICATE", str(certificate))
    monkeypatch.setenv("KPL_INGEST_TLS_KEY", str(key))
    status, out, _ = kpl("doctor", *stream.address, "--json")
    assert (status, verdicts(out)["certificate"]) == (3 if verdict == "failed" else 0, verdict)
    assert words in out
    key.write_text("hello")
    status, out, _ = kpl("doctor", *stream.address, "--json")
    assert (status, verdicts(out)["certificate"]) == (3, "failed")
    assert "give a certificate chain" in out


def test_an_unreachable_endpoint_is_a_failed_connection(kpl):
    status, out, _ = kpl("doctor", "orders", "--endpoint-url", "http://127.0.0.1:9", "--json")
    found = verdicts(out)
    assert (status, found["credentials"], found["connection"], found["stream"]) == (3, "ok", "failed", "skipped")


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ("credential_process = /nowhere/helper", "found (in AWS' configuration), and cannot be fetched: FileNotFound"),
        (SSO_PROFILE, "run `aws sso login`"),
    ],
)
def test_credentials_of_a_profile_that_cannot_be_found_say_what_to_do(kpl, tmp_path, monkeypatch, profile, words):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "config"
    file.write_text(f"[profile dev]\n{profile}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "dev")
    monkeypatch.setenv("HOME", str(tmp_path))  # it has no token of SSO
    status, out, _ = kpl("doctor", "orders", "--region", "us-east-1", "--json")
    assert (status, verdicts(out)["credentials"]) == (3, "failed")
    assert words in out


def test_credentials_that_cannot_be_fetched_are_told_from_an_unreachable_kinesis(kpl, stream, tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    token = tmp_path / "token"
    token.write_text("signed by the cluster")
    environment = {
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(token),
        "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/writer",
        # Nothing listens there.
        "AWS_ENDPOINT_URL_STS": "http://127.0.0.1:1",
        "AWS_MAX_ATTEMPTS": "1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    status, out, err = kpl("doctor", *stream.address, "--json")
    found = verdicts(out)
    assert (status, found["credentials"], found["connection"]) == (3, "failed", "skipped")
    assert "found (assume-role-with-web-identity), and cannot be fetched: EndpointConnectionError" in out
    assert err == ""


@pytest.mark.parametrize(
    ("code", "check"),
    [
        ("UnrecognizedClientException", "credentials"),
        ("InvalidSignatureException", "credentials"),
        ("AccessDeniedException", "stream"),
    ],
)
def test_an_error_from_kinesis_fails_the_matching_check(kpl, stream, code, check):
    with stream.fault(ErrorAnswer(code), When(operation="DescribeStreamSummary")):
        status, out, _ = kpl("doctor", *stream.address, "--json")
    found = verdicts(out)
    assert (status, found["connection"], found[check]) == (3, "ok", "failed")
    assert next(each for each in json.loads(out)["checks"] if each["name"] == check)["fix"]
