import copy
import dataclasses
import inspect
import math
import pickle
from pathlib import Path
from typing import Any

import pytest

from kpl_core.errors import ConfigError
from kpl_core.options.config import NON_RETRYABLE_ERROR_CODES, Config, StreamConfig
from kpl_core.options.option import described
from kpl_core.options.reliability import DeadLetterOptions, SpoolOptions

MIB = 1024 * 1024

# The table of the specification: option, default.
DEFAULTS: dict[str, Any] = {
    "region": None,
    "endpoint_url": None,
    "verify_ssl": True,
    "aggregation_enabled": True,
    "aggregation_max_count": None,
    "aggregation_max_size": 51_200,
    "aggregate_partition_key": "a",
    "collection_max_count": 500,
    "collection_max_size": MIB,
    "record_max_buffered_time_ms": 100,
    "record_ttl_ms": 30_000,
    "fail_if_throttled": False,
    "rate_limit_records_per_sec_per_shard": 1_000.0,
    "rate_limit_bytes_per_sec_per_shard": 1_048_576.0,
    "burst_seconds": 1.0,
    "adaptive_rate": True,
    "retry_backoff_base_ms": 50,
    "retry_backoff_cap_ms": 5_000,
    "wire_path": "fast",
    "streams": {},
    "max_outstanding_records": 100_000,
    "max_outstanding_bytes": 64 * MIB,
    "max_in_flight_requests": 24,
    "max_connections": 24,
    "request_timeout_ms": 6_000,
    "connect_timeout_ms": 6_000,
    "max_record_size": None,
    "consumer": "kcl",
    "ordering": "none",
}

# Option, smallest and largest allowed value, and the closest values outside; None if there is no bound.
BOUNDS = [
    ("aggregation_max_count", 1, 10**12, 0, None),
    ("aggregation_max_size", 64, 10 * MIB, 63, 10 * MIB + 1),
    ("collection_max_count", 1, 500, 0, 501),
    ("collection_max_size", 52_224, 10 * MIB, 52_223, 10 * MIB + 1),
    ("record_max_buffered_time_ms", 0, 10**9, -1, None),
    ("record_ttl_ms", 100, 10**12, 99, None),
    ("rate_limit_records_per_sec_per_shard", 1.0, 1e9, 0.0, math.inf),
    ("rate_limit_bytes_per_sec_per_shard", 1.0, 1e12, 0.0, math.inf),
    ("burst_seconds", 0.1, 60.0, 0.0, math.inf),
    ("retry_backoff_base_ms", 1, 5_000, 0, None),
    ("retry_backoff_cap_ms", 50, 10**6, 0, None),
    ("max_outstanding_records", 1, 10**12, 0, None),
    ("max_outstanding_bytes", 1, 10**15, 0, None),
    ("max_in_flight_requests", 1, 1_000, 0, 1_001),
    ("max_connections", 1, 1_000, 0, 1_001),
    ("request_timeout_ms", 100, 600_000, 0, 600_001),
    ("connect_timeout_ms", 100, 300_000, 0, 300_001),
    ("max_record_size", 8_192, 10 * MIB, 8_191, 10 * MIB + 1),
]
WHOLE_NUMBERS = {
    "aggregation_max_count",
    "aggregation_max_size",
    "collection_max_count",
    "collection_max_size",
    "max_outstanding_records",
    "max_outstanding_bytes",
    "max_in_flight_requests",
    "max_connections",
    "max_record_size",
}


def made(**options: Any) -> Config:
    """Return a Config of options whose types mypy does not check."""
    return Config(**options)


@pytest.mark.parametrize(("option", "default"), DEFAULTS.items())
def test_the_defaults_are_the_specifications(option, default):
    assert getattr(Config(), option) == default


def test_every_numeric_option_has_a_row_in_this_table():
    numeric = {option.name for option in described(Config).values() if option.is_number}
    assert numeric == {row[0] for row in BOUNDS}


@pytest.mark.parametrize(("option", "smallest", "largest", "_below", "_above"), BOUNDS)
def test_values_on_the_bounds_are_accepted(option, smallest, largest, _below, _above):
    assert getattr(made(**{option: smallest}), option) == smallest
    assert getattr(made(**{option: largest}), option) == largest


@pytest.mark.parametrize(
    ("option", "value"),
    [(row[0], value) for row in BOUNDS for value in row[3:] if value is not None],
)
def test_values_outside_the_bounds_are_rejected_with_value_and_bound(option, value):
    with pytest.raises(ConfigError, match=rf"^{option} is {value!r}; it must be (between|at least) "):
        made(**{option: value})


@pytest.mark.parametrize("option", [row[0] for row in BOUNDS])
@pytest.mark.parametrize("value", ["100", b"1", True, [1], math.nan])
def test_a_number_is_not_a_str_a_bool_or_none(option, value):
    with pytest.raises(ConfigError, match=rf"^{option} is "):
        made(**{option: value})


@pytest.mark.parametrize("option", [row[0] for row in BOUNDS])
def test_none_is_accepted_only_by_optional_options(option):
    if DEFAULTS[option] is None:
        assert getattr(made(**{option: None}), option) is None
    else:
        with pytest.raises(ConfigError, match=rf"^{option} is None"):
            made(**{option: None})


@pytest.mark.parametrize("option", sorted(WHOLE_NUMBERS))
def test_a_count_must_be_a_whole_number(option):
    with pytest.raises(ConfigError, match=f"{option} is 100000.5; it must be a whole number"):
        made(**{option: 100_000.5})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("aggregate_partition_key", "b"),
        ("aggregate_partition_key", None),
        ("consumer", "lambda"),
        ("consumer", None),
        ("ordering", "strict"),
        ("wire_path", "slow"),
    ],
)
def test_a_choice_must_be_one_of_the_allowed_values(option, value):
    with pytest.raises(ConfigError, match=rf"{option} is {value!r}; it must be one of '"):
        made(**{option: value})


@pytest.mark.parametrize("option", ["aggregation_enabled", "fail_if_throttled", "adaptive_rate"])
@pytest.mark.parametrize("value", [None, 0, 1, "yes"])
def test_a_flag_must_be_true_or_false(option, value):
    with pytest.raises(ConfigError, match=f"{option} is {value!r}; it must be True or False"):
        made(**{option: value})


def test_the_cap_of_a_backoff_must_not_be_below_its_base():
    with pytest.raises(ConfigError, match="retry_backoff_cap_ms is 10, below retry_backoff_base_ms, 50"):
        Config(retry_backoff_cap_ms=10)


@pytest.mark.parametrize("make", [made, StreamConfig], ids=["Config", "StreamConfig"])
@pytest.mark.parametrize(
    ("option", "ending"),
    [
        ("record_ttl", "; did you mean record_ttl_ms\\?"),
        ("agregation_enabled", "; did you mean aggregation_enabled\\?"),
        ("x", ""),
    ],
)
def test_an_unknown_option_is_a_type_error_that_names_the_nearest(make, option, ending):
    with pytest.raises(TypeError, match=f"^(Stream)?Config has no option '{option}'{ending}$"):
        make(**{option: 5})


def test_the_constructor_still_shows_its_options():
    assert [*inspect.signature(Config).parameters] == [field.name for field in dataclasses.fields(Config)]


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(Config(), "region", "elsewhere")  # noqa: B010 - what mypy rejects must also fail at run time


SECRETS: dict[str, Any] = {
    "aws_access_key_id": "AKIASECRETID",
    "aws_secret_access_key": "secret-access-key",
    "aws_session_token": "secret-session-token",
    "botocore": {"proxies": {"https": "http://user:secret-proxy-password@proxy"}},
}


def test_the_repr_shows_no_secret():
    shown = repr(Config(region="us-east-1", **SECRETS)) + str(Config(**SECRETS))
    assert "us-east-1" in shown
    assert "SECRET" not in shown.upper()


def test_errors_contain_no_secret():
    with pytest.raises(ConfigError) as refused:
        Config(record_ttl_ms=1, **SECRETS)
    assert "SECRET" not in str(refused.value).upper()


URLS_WITH_USERS = [
    ("https://someone:hunter2@example.org", "https://***@example.org"),
    ("https://someone:hunter@2@example.org:444/x", "https://***@example.org:444/x"),
    ("http://hunter@127.0.0.1:4567", "http://***@127.0.0.1:4567"),
    ("ftp://someone:hunter2@example.org", "ftp://***@example.org"),
    ("https://someone:hunter/2@example.org", "https://***@example.org"),
    ("https://someone:hunter2 ?#'@example.org", "https://***@example.org"),
]


@pytest.mark.parametrize(("url", "shown"), URLS_WITH_USERS)
def test_an_endpoint_with_a_password_is_rejected_without_showing_it(url, shown):
    with pytest.raises(ConfigError) as refused:
        Config(endpoint_url=url)
    assert str(refused.value).startswith(f"endpoint_url is {shown!r}")


@pytest.mark.parametrize("url", ["https://example.org", "http://127.0.0.1:4567/", "HTTP://[::1]:80/a@b"])
def test_an_endpoint_url_is_stored_unchanged(url):
    assert Config(endpoint_url=url).endpoint_url == url


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://x", "127.0.0.1:4567", "localhost:4567", "", "https://", "http://a:x", "http://[", "http://:pass@"),
        *("//x", "http://a b", " http://a", "http://a\n", "http://a/b c", "http://\u00fcber.example"),
    ],
)
def test_an_endpoint_that_cannot_receive_requests_is_rejected(url):
    with pytest.raises(ConfigError, match=r"^endpoint_url is '.*'; it must be http:// or https://, a host"):
        Config(endpoint_url=url)


@pytest.mark.parametrize("ending", ["?token=hunter2", "/?token=hunter2", "#hunter2", "?", "/x?a=1#hunter2"])
def test_an_endpoint_with_a_query_is_rejected_without_showing_it(ending):
    with pytest.raises(ConfigError, match=r"^endpoint_url is '.*\?\*\*\*'; it must not have a query") as refused:
        Config(endpoint_url=f"https://example.org{ending}")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("region", ["eu-west-1\n", "eu\nHost: x", "", " eu-west-1", "eu.west", "x" * 64])
def test_a_region_that_cannot_be_in_a_host_name_is_rejected(region):
    with pytest.raises(ConfigError, match=r"^region is '.*'; it must be letters, digits and hyphens"):
        Config(region=region)


def test_the_mappings_of_a_config_cannot_be_changed():
    streams = {"orders": StreamConfig(record_ttl_ms=5_000)}
    config = Config(streams=streams, botocore={"user_agent_extra": "x"})
    streams["audit"] = StreamConfig()
    assert set(config.streams) == {"orders"}
    for mapping in (config.streams, config.botocore):
        changeable: Any = mapping
        with pytest.raises(TypeError, match="cannot be changed"):
            changeable["orders"] = 5
        with pytest.raises(TypeError, match="cannot be changed"):
            changeable.update(orders=5)
    assert dataclasses.asdict(config)["streams"]["orders"]["record_ttl_ms"] == 5_000
    assert copy.deepcopy(config) == config


def test_a_config_can_be_pickled():
    config = Config(region="eu-west-1", streams={"orders": StreamConfig(record_ttl_ms=5_000)}, **SECRETS)
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301 - our own bytes


def test_streams_can_override_options():
    config = Config(
        record_ttl_ms=10_000,
        streams={
            "plain": StreamConfig(aggregation_enabled=False, consumer="range_blind"),
            "ordered": StreamConfig(ordering="per_key", record_ttl_ms=60_000, burst_seconds=0.1),
        },
    )
    assert config.for_stream("other") == config
    plain = config.for_stream("plain")
    assert (plain.aggregation_enabled, plain.consumer, plain.record_ttl_ms) == (False, "range_blind", 10_000)
    ordered = config.for_stream("ordered")
    assert (ordered.ordering, ordered.record_ttl_ms, ordered.burst_seconds) == ("per_key", 60_000, 0.1)
    assert ordered.aggregation_enabled


def test_false_and_zero_are_overrides_too():
    config = Config(streams={"s": StreamConfig(adaptive_rate=False, record_max_buffered_time_ms=0)})
    assert not config.for_stream("s").adaptive_rate
    assert config.for_stream("s").record_max_buffered_time_ms == 0


@pytest.mark.parametrize("options", [SpoolOptions, DeadLetterOptions])
def test_a_path_is_a_str_or_a_path(options):
    assert options(path="x.db") == options(path=Path("x.db"))
    for wrong in ("", b"x.db", 5):
        with pytest.raises(ConfigError, match=r"path is .*; it must be a path, as a str or a pathlib\.Path"):
            options(path=wrong)


def test_every_option_of_a_stream_is_an_option_of_the_producer():
    options = {option.name for option in dataclasses.fields(Config)}
    assert {option.name for option in dataclasses.fields(StreamConfig)} <= options


def test_an_override_outside_the_bounds_is_rejected_with_its_stream():
    with pytest.raises(ConfigError, match=r"streams\['orders'\]: record_ttl_ms is 5"):
        Config(streams={"orders": StreamConfig(record_ttl_ms=5)})


def test_an_override_of_a_wrong_type_is_rejected():
    with pytest.raises(ConfigError, match=r"streams\['orders'\] is of type dict; it must be a StreamConfig"):
        made(streams={"orders": {"record_ttl_ms": 5_000}})


def test_one_preset_has_the_decisions_of_the_kpl():
    preset = Config.kpl_compatible(region="us-east-1")
    assert preset.region == "us-east-1"
    assert preset.non_retryable_error_codes == frozenset()
    assert (preset.consumer, preset.adaptive_rate, preset.collection_max_size) == ("per_user_record", False, 5 * MIB)
    assert preset.record_ttl_ms == 30_000
    assert Config.kpl_compatible(adaptive_rate=True).adaptive_rate
    assert all(preset.is_retryable(code) for code in ("AccessDeniedException", "ResourceNotFoundException"))


@pytest.mark.parametrize(
    ("code", "is_retryable"),
    [
        ("AccessDeniedException", False),
        ("AccessDenied", False),
        ("ResourceNotFoundException", False),
        ("ValidationException", False),
        ("ValidationError", False),
        ("InvalidArgumentException", False),
        ("UnrecognizedClientException", False),
        ("InvalidSignatureException", False),
        ("KMSDisabledException", False),
        ("KMSAccessDeniedException", False),
        ("KMSNotFoundException", False),
        ("KMSThrottlingException", True),
        ("LimitExceededException", True),
        ("InternalFailure", True),
        ("ServiceUnavailable", True),
        ("ProvisionedThroughputExceededException", True),
        ("Internal", True),
        ("RecordCountMismatch", True),
        ("ResourceNotFoundExceptional", True),
    ],
)
def test_the_default_codes_are_not_retryable(code, is_retryable):
    assert Config().is_retryable(code) == is_retryable


def test_the_non_retryable_codes_can_be_configured():
    config = Config(non_retryable_error_codes=NON_RETRYABLE_ERROR_CODES - {"ResourceNotFoundException"} | {"Internal*"})
    assert config.is_retryable("ResourceNotFoundException")
    assert not config.is_retryable("InternalFailure")


def test_a_retried_record_waits_half_as_long_as_a_new_one():
    assert Config().retry_delay_seconds == 0.05
    assert Config(record_max_buffered_time_ms=1_000).retry_delay_seconds == 0.5


def test_the_record_limit_defaults_to_that_of_the_service():
    assert Config().known_max_record_size == MIB
    assert Config(max_record_size=10 * MIB).known_max_record_size == 10 * MIB


def test_the_longest_ttl_does_not_overflow():
    config = Config(record_ttl_ms=1e12)
    assert 1.0 + config.record_ttl_ms / 1000 > 1.0
    with pytest.raises(ConfigError, match=r"record_ttl_ms is 10000000000000\.0; it must be between"):
        Config(record_ttl_ms=1e13)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("region", 5),
        ("endpoint_url", b"http://127.0.0.1"),
        ("aws_secret_access_key", b"hidden"),
        ("verify_ssl", None),
        ("botocore", None),
        ("streams", ["orders"]),
        ("non_retryable_error_codes", "AccessDeniedException"),
        ("fairness", "weights"),
    ],
)
def test_an_error_names_an_option_of_a_wrong_type_but_not_its_value(name, value):
    with pytest.raises(ConfigError, match=rf"^{name} is of type {type(value).__name__}; it must be ") as caught:
        Config(**{name: value})
    assert "hidden" not in str(caught.value)
