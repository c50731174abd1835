"""The gateway's settings come from arguments, else the environment. They are checked, and errors repeat no secret."""

import math
from pathlib import Path

import pytest

from kpl_core import ConfigError
from kpl_core.options.validation import Bound
from kpl_integrations.ingest import load_settings
from kpl_integrations.ingest.settings import IngestSettings, unknown_variables


def test_arguments_have_precedence_over_the_environment(monkeypatch):
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
def test_an_invalid_setting_is_named_without_a_value_that_may_be_secret(given, words):
    with pytest.raises(ConfigError, match=words) as error:
        load_settings(**given)
    assert "secret-thing" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"port": 70_000}, "port is 70000; it must be between 0 and 65,535"),
        ({}, "KPL_INGEST_MAX_DEPTH: Input should be a valid integer, unable to parse string as an integer"),
        ({"max_depth": 5, "tls_key": "k"}, "tls_certificate and tls_key belong together; give both or none"),
    ],
)
def test_a_setting_is_named_as_the_caller_gave_it(monkeypatch, given, reason):
    monkeypatch.setenv("KPL_INGEST_MAX_DEPTH", "deep" if "max_depth" not in given and "port" not in given else "5")
    with pytest.raises(ConfigError) as error:
        load_settings(**given)
    assert str(error.value) == f"invalid settings of the gateway: {reason}"


BOUNDS = {
    name: bound
    for name, field in IngestSettings.model_fields.items()
    for bound in field.metadata
    if isinstance(bound, Bound)
}


@pytest.mark.parametrize(("name", "bound"), BOUNDS.items())
def test_each_bound_of_the_table_holds(name, bound):
    """The smallest and the largest allowed value pass, and the next one outside does not."""
    step = 1 if bound.whole else 1e-3
    outside = [bound.smallest if bound.above else bound.smallest - step, math.nan]
    inside = [bound.smallest + step if bound.above else bound.smallest]
    if bound.largest < math.inf:
        inside.append(bound.largest)
        outside.append(bound.largest * 2)
    for value in inside:
        given = {"max_body_bytes": min(value, 1_024), name: value} if name == "max_reading_bytes" else {name: value}
        given = {"max_reading_bytes": 1 << 40, **given} if name == "max_body_bytes" else given
        assert getattr(load_settings(**given), name) == value
    for value in outside:
        with pytest.raises(ConfigError, match=name):
            load_settings(**{name: value})


def test_each_number_has_a_bound():
    defaults = {name: field.default for name, field in IngestSettings.model_fields.items()}
    numbers = {
        name for name, value in defaults.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }
    assert numbers == set(BOUNDS)


def test_an_out_of_bounds_variable_is_named_by_its_variable(monkeypatch):
    monkeypatch.setenv("KPL_INGEST_WORKERS", "65")
    with pytest.raises(ConfigError, match=r"KPL_INGEST_WORKERS is 65; it must be between 1 and 64 \(processes\)"):
        load_settings()


def test_variables_that_are_not_settings_are_found():
    environment = ["KPL_INGEST_SPOOOL", "KPL_INGEST_SPOOL", "kpl_ingest_port", "KPL_GATEWAY_KEY", "PATH"]
    assert unknown_variables(environment) == ["KPL_INGEST_SPOOOL"]


def test_no_repr_contains_the_admin_key(monkeypatch):
    monkeypatch.setenv("KPL_INGEST_ADMIN_KEY", "open sesame, please")
    assert "sesame" not in repr(load_settings())


@pytest.mark.parametrize("key", ["", "sesame"])
def test_an_empty_or_short_admin_key_is_rejected(monkeypatch, key):
    monkeypatch.setenv("KPL_INGEST_ADMIN_KEY", key)
    with pytest.raises(ConfigError, match=f"admin_key has {len(key)} characters; give at least 16") as error:
        load_settings()
    assert "sesame" not in str(error.value)


def test_a_spool_stores_dead_letters_too_and_writes_ahead(tmp_path: Path):
    config = load_settings(spool=tmp_path / "s.db", dead_letters=tmp_path / "d.db").producer_config()
    assert config.spool is not None
    assert config.spool.mode == "write_ahead"
    assert config.dead_letters is not None
    assert config.dead_letters.path is None
    assert load_settings().producer_config().dead_letters is None
