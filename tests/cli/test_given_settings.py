"""What a command line says about settings means the same in the gateway, in each worker and in its replacement."""

from typing import Any

import msgspec
import pytest

from docs import generated
from kpl_core import ConfigError
from kpl_integrations.cli.serve.worker import Given


def given(**arguments: Any) -> Given:
    return Given(**{"options": {}, "assigned": {}, "file": None, "local": False, **arguments})


def as_a_worker_has(command_line: Given) -> Given:
    return msgspec.json.decode(msgspec.json.encode(command_line), type=Given)


@pytest.mark.parametrize("later", ["spool = '/elsewhere/spool.db'", "spool = ", None])
def test_a_replaced_worker_has_the_settings_of_its_gateway_although_the_file_changed(tmp_path, later):
    file = tmp_path / "gateway.toml"
    file.write_text(f"\nspool = '{tmp_path / 'spool.db'}'")
    started = given(file=str(file)).with_file_text()
    before = started.settings()
    if later is None:
        file.unlink()
    else:
        file.write_text(later)
    replacement = as_a_worker_has(started).settings()
    assert replacement == before
    assert replacement.made["spool"].origin == f"{file}:2"


def test_a_file_that_cannot_be_read_is_an_error_at_the_start(tmp_path):
    assert given().with_file_text() == given()
    with pytest.raises(ConfigError, match=r"gateway\.toml: No such file"):
        given(file=str(tmp_path / "gateway.toml")).with_file_text()


# What beside --local is given, and the allowed hosts and drain delay with their origins.
BESIDE_LOCAL = [
    ({}, "", ("localhost", "--local"), (0.0, "--local")),
    ({"assigned": {"allowed_hosts": "foo"}}, "", ("foo", "--set allowed_hosts"), (0.0, "--local")),
    ({"options": {"allowed_hosts": "foo"}}, "gw.example", ("foo", "--allow-host"), (0.0, "--local")),
    ({}, "gw.example", ("gw.example", "KPL_INGEST_ALLOWED_HOSTS"), (0.0, "--local")),
    ({"options": {"drain_delay_seconds": 3.0}}, "", ("localhost", "--local"), (3.0, "--drain-delay-seconds")),
]


@pytest.mark.parametrize(("arguments", "variable", "hosts", "delay"), BESIDE_LOCAL)
def test_every_source_precedes_what_local_presets(monkeypatch, arguments, variable, hosts, delay):
    monkeypatch.setenv("KPL_INGEST_ALLOWED_HOSTS", variable)
    settings, made = given(local=True, **arguments).settings()
    assert (settings.allowed_hosts, made["allowed_hosts"].origin) == hosts
    assert (settings.drain_delay_seconds, made["drain_delay_seconds"].origin) == delay


def test_without_local_nothing_is_preset():
    settings, made = given().settings()
    assert (settings.allowed_hosts, settings.drain_delay_seconds, made) == (None, 5.0, {})


def test_local_takes_the_endpoint_of_the_command_line_none_of_the_environment_and_refuses_that_of_a_file(
    tmp_path, monkeypatch
):
    url = "http://127.0.0.1:4567"
    for one in ({"options": {"endpoint_url": url}}, {"assigned": {"endpoint_url": url}}):
        assert given(local=True, **one).settings().settings.producer.endpoint_url == url
    monkeypatch.setenv("KPL_INGEST_ENDPOINT_URL", url)
    assert given().settings().settings.producer.endpoint_url == url
    assert given(local=True).settings().settings.producer.endpoint_url is None
    file = tmp_path / "gateway.toml"
    file.write_text(f"\nendpoint_url = '{url}'")
    with pytest.raises(ConfigError) as error:
        given(local=True, file=str(file)).settings()
    assert str(error.value) == (
        f"{file}:2: endpoint_url is set, and --local starts a Kinesis of its own; remove one of them, or name a local "
        f"Kinesis with --endpoint-url"
    )


@pytest.mark.parametrize(("name", "flag"), generated.serve_flags().items())
def test_an_error_names_a_flag_that_there_is(name, flag):
    with pytest.raises(ConfigError) as error:
        given(options={name: "1"}, assigned={name: "1"}).settings()
    assert str(error.value) == f"--set {name} and {flag} are both set; give one of them"


@pytest.mark.parametrize("assigned", [None, "text", "json"])
@pytest.mark.parametrize("variable", ["", "text", "json"])
@pytest.mark.parametrize("in_file", ["", "log_format = 'text'", "log_format = 'json'"])
def test_the_form_of_the_lines_is_that_of_the_settings(monkeypatch, assigned, variable, in_file):
    monkeypatch.setenv("KPL_INGEST_LOG_FORMAT", variable)
    one = given(assigned={} if assigned is None else {"log_format": assigned}, file="gateway.toml", file_text=in_file)
    assert one.log_format().is_json is (one.settings().settings.log_format == "json")
    assert as_a_worker_has(one).log_format() == one.log_format()


@pytest.mark.parametrize("text", ["log_format = ", "log_format = 5", "log_format = []"])
def test_a_file_with_a_wrong_form_prints_text(text):
    assert not given(file="gateway.toml", file_text=text).log_format().is_json
