"""Options come from environment variables, and a wrong value is an error that names the variable."""

import inspect
import math
import tomllib
import warnings

import pytest

from docs.generated import shown_kind
from kpl_core import Config, ConfigError, CoordinationOptions, FairnessPolicy, RateLimitPolicy, StreamConfig
from kpl_core.options.flat_options import flat_options
from kpl_core.options.option import described
from kpl_core.options.reliability import BreakerPolicy, DeadLetterOptions, SpoolOptions, TierPolicy


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
        "KPL_MAX_RECORD_SIZE": "",
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
        ("KPL_AGGREGATION_ENABLED", "yes", "KPL_AGGREGATION_ENABLED is 'yes'; it must be True or False"),
        ("KPL_RECORD_TTL_MS", "30s", "KPL_RECORD_TTL_MS is '30s'; it must be a number"),
        ("KPL_RECORD_TTL_MS", "nan", "it must be a number"),
        ("KPL_RECORD_TTL_MS", "1", "KPL_RECORD_TTL_MS is 1; it must be"),
        ("KPL_MAX_CONNECTIONS", "1.5", "KPL_MAX_CONNECTIONS is 1.5"),
        ("KPL_ORDERING", "any", "KPL_ORDERING is 'any'"),
    ],
)
def test_a_wrong_value_is_an_error(variable, value, words):
    with pytest.raises(ConfigError, match=words):
        Config.from_env({variable: value})


def test_misspelt_variables_get_one_warning_that_names_the_nearest():
    others = {"KPL_INGEST_PROT": "1", "KPL_OTEL_STREM": "s", "KPL_GATEWAY_KEY": "k", "OTHER": "x", "KPL_REGION": "eu"}
    # Kubernetes sets these for a service named kpl.
    others |= {"KPL_SERVICE_HOST": "10.0.0.1", "KPL_PORT": "tcp://10.0.0.1:80", "KPL_PORT_80_TCP_PORT": "80"}
    words = "environment variables that are not options of the producer are ignored"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Config.from_env(others)
    with pytest.warns(UserWarning, match="are not options") as caught:
        Config.from_env({"KPL_AGREGATION_ENABLED": "false", "KPL_TABLE": "t", **others})
    assert [(str(each.message), each.filename) for each in caught] == [
        (f"{words}: KPL_AGREGATION_ENABLED (did you mean KPL_AGGREGATION_ENABLED?), KPL_TABLE", __file__)
    ]


def test_every_option_has_a_variable_or_is_a_mapping():
    without = {name for name, flat in flat_options(Config).items() if not flat.has_variable}
    assert without == {"botocore", "streams", "fairness_weights"}


def test_a_group_of_options_has_a_variable_for_each():
    config = Config.from_env(
        {
            "KPL_SPOOL": "/var/spool.db",
            "KPL_SPOOL_MAX_BYTES": "50000000000",
            "KPL_DEAD_LETTERS": "true",
            "KPL_DEAD_LETTERS_ALARM_DEPTH": "7",
            "KPL_BREAKER_OPEN_SECONDS": "2",
            "KPL_TIERS": "true",
        }
    )
    assert config == Config(
        spool=SpoolOptions(path="/var/spool.db", max_bytes=50_000_000_000),
        dead_letters=DeadLetterOptions(alarm_depth=7),
        breaker=BreakerPolicy(open_seconds=2),
        tiers=TierPolicy(),
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"spol_max_bytes": 5}, "there is no option 'spol_max_bytes'; did you mean spool_max_bytes?"),
        ({"spool_max_bytes": 5}, "spool_max_bytes is 5; it must be between 1,048,576 and 17,592,186,044,416 (bytes)"),
        ({"spool_max_bytes": 1 << 30}, "spool_max_bytes is set, and spool is not; set spool too, or remove"),
        (
            {"breaker": False, "breaker_open_seconds": 1},
            "breaker is false, and breaker_open_seconds is set; remove one",
        ),
        (
            {"breaker_open_seconds": 50},
            "breaker_max_open_seconds is 5, below breaker_open_seconds, 50; raise breaker_max_open_seconds or lower",
        ),
        (
            {"spool": "a", "spool_failure": "bypass"},
            "spool_failure is 'bypass' and spool_mode is 'overflow', in which no put waits for the spool; set spool",
        ),
        ({"breaker": "on"}, "breaker is 'on'; it must be True or False"),
        ({"spool": 5}, "spool is 5; it must be a path"),
        ({"spool": "a", "dead_letters": "b"}, "dead_letters.path is 'b', and a spool is set"),
        ({"streams": {"s": {"record_ttl": 5}}}, "streams['s']: StreamConfig has no option 'record_ttl'; did you mean"),
        ({"streams": {"s": 5}}, "streams['s'] is of type int; it must be a table of options"),
        ({"non_retryable_error_codes": "A"}, "non_retryable_error_codes is of type str; it must be a frozenset of str"),
        ({"coordination": "http://:hunter2@h"}, "coordination is not a URL of a known kind; begin it with one of"),
        ({"record_ttl_ms": "5"}, "record_ttl_ms is '5'; it must be a number (milliseconds from arrival to failure)"),
    ],
)
def test_a_mapping_with_a_wrong_value_is_an_error_of_its_flat_name(options, words):
    with pytest.raises(ConfigError) as raised:
        Config.from_mapping(options)
    assert str(raised.value).startswith(words)
    assert "hunter2" not in str(raised.value)


def test_a_table_of_a_file_is_the_same_configuration():
    text = """
        region = "eu-central-1"
        spool = "spool.db"
        spool_mode = "write_ahead"
        dead_letters = true
        non_retryable_error_codes = ["A*"]
        fairness_weights = {a = 3}
        [streams.audit]
        aggregation_enabled = false
    """
    assert Config.from_mapping(tomllib.loads(text)) == Config(
        region="eu-central-1",
        spool=SpoolOptions(path="spool.db", mode="write_ahead"),
        dead_letters=DeadLetterOptions(),
        non_retryable_error_codes=frozenset({"A*"}),
        fairness=FairnessPolicy(weights={"a": 3}),
        streams={"audit": StreamConfig(aggregation_enabled=False)},
    )


OPTION_CLASSES = [
    *(Config, SpoolOptions, DeadLetterOptions, BreakerPolicy, TierPolicy, FairnessPolicy, RateLimitPolicy),
    CoordinationOptions,
]


@pytest.mark.parametrize("options", OPTION_CLASSES)
def test_every_field_of_a_class_of_options_is_described(options):
    assert [*described(options)] == [*inspect.signature(options).parameters]
    for option in described(options).values():
        assert option.option.meaning.endswith((".", "!"))
        assert option.bound is None or (option.bound.smallest > -math.inf and option.bound.unit)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("wire_path", '"fast", "stock", "cbor"'),
        ("record_ttl_ms", "a number"),
        ("aggregation_enabled", "true or false"),
        ("spool", "a path"),
        ("non_retryable_error_codes", "words with commas"),
        ("region", "a word"),
    ],
)
def test_the_table_of_variables_says_what_the_text_of_each_is(name, kind):
    assert shown_kind(flat_options(Config)[name].option) == kind
