"""The gateway's settings: from arguments, else the environment, checked, and never repeated in an error."""

from pathlib import Path

import pytest

from kpl_core import ConfigError
from kpl_integrations.ingest import load_settings
from kpl_integrations.ingest.settings import unknown_variables


def test_the_environment_is_read_and_arguments_come_before_it(monkeypatch):
    monkeypatch.setenv("KPL_INGEST_PORT", "9000")
    monkeypatch.setenv("KPL_INGEST_MAX_BODY_BYTES", "2048")
    assert (load_settings().port, load_settings().max_body_bytes) == (9000, 2048)
    assert load_settings(port=1234).port == 1234
    assert load_settings(port=None).port == 9000


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"port": 70_000}, "port"),
        ({"tls_key": Path("key.pem")}, "belong together"),
        ({"default_ack": "spooled"}, "there is no spool"),
        ({"unknown": 1}, "unknown"),
        ({"max_depth": "secret-thing"}, "max_depth"),
    ],
)
def test_a_setting_out_of_its_bounds_is_named_without_its_value(given, words):
    with pytest.raises(ConfigError, match=words) as error:
        load_settings(**given)
    assert "secret-thing" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"port": 70_000}, "port: 70,000 is out of bounds; give a number of 0 or more, at most 65,535"),
        ({}, "KPL_INGEST_MAX_DEPTH: Input should be a valid integer, unable to parse string as an integer"),
        ({"max_depth": 5, "tls_key": "k"}, "tls_certificate and tls_key belong together; give both or none"),
    ],
)
def test_a_setting_is_named_as_it_was_given(monkeypatch, given, reason):
    monkeypatch.setenv("KPL_INGEST_MAX_DEPTH", "deep" if "max_depth" not in given and "port" not in given else "5")
    with pytest.raises(ConfigError) as error:
        load_settings(**given)
    assert str(error.value) == f"invalid settings of the gateway: {reason}"


def test_variables_that_are_no_settings_are_found():
    environment = ["KPL_INGEST_SPOOOL", "KPL_INGEST_SPOOL", "kpl_ingest_port", "KPL_GATEWAY_KEY", "PATH"]
    assert unknown_variables(environment) == ["KPL_INGEST_SPOOOL"]


def test_the_admin_key_is_in_no_repr(monkeypatch):
    monkeypatch.setenv("KPL_INGEST_ADMIN_KEY", "open sesame, please")
    assert "sesame" not in repr(load_settings())


@pytest.mark.parametrize("key", ["", "sesame"])
def test_an_admin_key_that_is_empty_or_short_is_refused_since_it_would_be_everybody_s(monkeypatch, key):
    monkeypatch.setenv("KPL_INGEST_ADMIN_KEY", key)
    with pytest.raises(ConfigError, match=f"admin_key has {len(key)} characters; give at least 16") as error:
        load_settings()
    assert "sesame" not in str(error.value)


def test_a_spool_takes_dead_letters_too_and_writes_ahead(tmp_path: Path):
    config = load_settings(spool=tmp_path / "s.db", dead_letters=tmp_path / "d.db").producer_config()
    assert config.spool is not None
    assert config.spool.mode == "write_ahead"
    assert config.dead_letters is not None
    assert config.dead_letters.path is None
    assert load_settings().producer_config().dead_letters is None
