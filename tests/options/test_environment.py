"""Options come from environment variables, and a wrong value is an error that names the variable."""

import dataclasses
import warnings
from typing import get_type_hints

import pytest

from kpl_core import Config, ConfigError
from kpl_core.options.environment import variable_of


def test_each_simple_option_has_a_variable():
    environment = {
        "KPL_REGION": "eu-central-1",
        "KPL_AGGREGATION_ENABLED": "False",
        "KPL_RECORD_TTL_MS": "1e4",
        "KPL_MAX_OUTSTANDING_RECORDS": " 5000 ",
        "KPL_AGGREGATION_MAX_COUNT": "7",
        "KPL_WIRE_PATH": "stock",
        "KPL_VERIFY_SSL": "/ca.pem",
        "KPL_NON_RETRYABLE_ERROR_CODES": "A*, B",
        "KPL_SPOOL": "/var/spool.db",
        "KPL_COORDINATION": "redis://h:6379/0?group=a",
        "KPL_RETRY_DEADLINE_MS": "",
        "KPL_INGEST_PORT": "x",
        "REGION": "us-east-1",
    }
    config = Config.from_env(environment, request_timeout_ms=1_000, wire_path="cbor")
    assert (config.region, config.aggregation_enabled, config.record_ttl_ms) == ("eu-central-1", False, 10_000)
    assert (config.max_outstanding_records, config.aggregation_max_count) == (5_000, 7)
    assert (config.wire_path, config.verify_ssl, config.request_timeout_ms) == ("cbor", "/ca.pem", 1_000)
    assert config.non_retryable_error_codes == {"A*", "B"}
    assert config.spool is not None
    assert str(config.spool.path) == "/var/spool.db"
    assert config.coordination is not None
    assert Config.from_env({"KPL_VERIFY_SSL": "false"}).verify_ssl is False


def test_without_variables_the_options_are_the_defaults(monkeypatch):
    assert Config.from_env({}) == Config()
    monkeypatch.setenv("KPL_MAX_CONNECTIONS", "3")
    assert Config.from_env().max_connections == 3


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("KPL_AGGREGATION_ENABLED", "yes", "KPL_AGGREGATION_ENABLED is 'yes'; set it to true or false"),
        ("KPL_RECORD_TTL_MS", "30s", "KPL_RECORD_TTL_MS is '30s'; set it to a number"),
        ("KPL_RECORD_TTL_MS", "nan", "set it to a number"),
        ("KPL_RECORD_TTL_MS", "1", "record_ttl_ms is 1"),
        ("KPL_MAX_CONNECTIONS", "1.5", "max_connections"),
        ("KPL_ORDERING", "any", "ordering is 'any'"),
    ],
)
def test_a_wrong_value_is_an_error(variable, value, words):
    with pytest.raises(ConfigError, match=words):
        Config.from_env({variable: value})


def test_misspelt_variables_get_one_warning_that_names_the_nearest():
    others = {"KPL_INGEST_PROT": "1", "KPL_OTEL_STREM": "s", "KPL_GATEWAY_KEY": "k", "OTHER": "x", "KPL_REGION": "eu"}
    words = "environment variables that are no option of the producer are ignored"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Config.from_env(others)
    with pytest.warns(UserWarning, match="are no option") as caught:
        Config.from_env({"KPL_AGREGATION_ENABLED": "false", "KPL_TABLE": "t", **others})
    assert [(str(each.message), each.filename) for each in caught] == [
        (f"{words}: KPL_AGREGATION_ENABLED (did you mean KPL_AGGREGATION_ENABLED?), KPL_TABLE", __file__)
    ]


def test_every_option_has_a_variable_or_is_an_object():
    hints = get_type_hints(Config)
    without = {field.name for field in dataclasses.fields(Config) if variable_of(field.name, hints[field.name]) is None}
    assert without == {"botocore", "streams", "fairness", "breaker", "tiers"}
