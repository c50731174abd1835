"""By keyword, as declarative configuration does, else by the environment."""

import warnings

import pytest

from kpl_core import Config, ConfigError, DeadLetterOptions, SpoolOptions
from kpl_core.testing import FakeTransport
from kpl_integrations.otel import KinesisMetricExporter, kinesis_telemetry
from kpl_integrations.otel.options import own_files, resolve_options
from tests.otel.conftest import EXPORTERS

# What is given, what the environment says, and what comes of it.
RESOLVED = [
    ("traces", {"stream": "a"}, {"KPL_OTEL_STREAM": "b"}, "stream", "a"),
    ("traces", {}, {"KPL_OTEL_STREAM": "b"}, "stream", "b"),
    ("logs", {}, {"KPL_OTEL_STREAM": "b", "KPL_OTEL_LOGS_STREAM": "c"}, "stream", "c"),
    ("logs", {}, {"KPL_OTEL_STREAM": "b", "KPL_OTEL_TRACES_STREAM": "c"}, "stream", "b"),
    ("traces", {"stream": "a"}, {}, "encoding", "otlp_proto"),
    ("traces", {"stream": "a"}, {"KPL_OTEL_ENCODING": "otlp_json"}, "encoding", "otlp_json"),
    ("traces", {"stream": "a"}, {}, "partition_key", "trace_id"),
    ("logs", {"stream": "a"}, {}, "partition_key", "random"),
    ("logs", {"stream": "a"}, {"KPL_OTEL_PARTITION_KEY": "resource"}, "partition_key", "resource"),
    ("logs", {"stream": "a"}, {"KPL_OTEL_PARTITION_KEY": "trace_id"}, "partition_key", "random"),
    ("metrics", {"stream": "a", "timeout_millis": "2500"}, {}, "timeout", 2.5),
    ("metrics", {"stream": "a"}, {"KPL_OTEL_TIMEOUT": "500"}, "timeout", 0.5),
    ("metrics", {"stream": "a"}, {"KPL_OTEL_METRICS_SHUTDOWN_TIMEOUT": "1500"}, "shutdown_timeout", 1.5),
    ("traces", {"stream": "a"}, {}, "compression", "none"),
    ("traces", {"stream": "a"}, {"KPL_OTEL_COMPRESSION": "gzip"}, "compression", "gzip"),
    ("traces", {"stream": "a"}, {}, "synchronous", False),
    ("traces", {"stream": "a"}, {"KPL_OTEL_SYNCHRONOUS": "true"}, "synchronous", True),
    ("traces", {"stream": "a", "synchronous": True}, {"KPL_OTEL_SYNCHRONOUS": "false"}, "synchronous", True),
    ("metrics", {"stream": "a"}, {"KPL_OTEL_BUFFER_BYTES": "1000000"}, "max_buffer_bytes", 1_000_000),
]


@pytest.mark.parametrize(("signal", "given", "environment", "option", "value"), RESOLVED)
def test_an_option_comes_from_the_keyword_otherwise_from_the_environment(signal, given, environment, option, value):
    assert getattr(resolve_options(signal, given, environment), option) == value


def test_region_and_endpoint_reach_the_producer():
    environment = {"KPL_OTEL_STREAM": "a", "KPL_OTEL_REGION": "eu-west-1", "KPL_OTEL_ENDPOINT": "http://127.0.0.1:1"}
    config = resolve_options("logs", {}, environment).config
    assert (config.region, config.endpoint_url) == ("eu-west-1", "http://127.0.0.1:1")


@pytest.mark.parametrize(("given", "is_enabled"), [({}, True), ({"aggregation": "false"}, False)])
def test_aggregation_is_an_option_of_the_producer(given, is_enabled):
    assert resolve_options("logs", {"stream": "a", **given}, {}).config.aggregation_enabled is is_enabled


def test_every_option_of_the_producer_has_a_variable_for_all_signals_and_for_one():
    environment = {
        "KPL_OTEL_STREAM": "a",
        "KPL_OTEL_RECORD_TTL_MS": "60000",
        "KPL_OTEL_LOGS_RECORD_TTL_MS": "90000",
        "KPL_OTEL_SPOOL": "/var/spool.db",
        "KPL_OTEL_SPOOL_MAX_BYTES": "50000000",
    }
    config = resolve_options("logs", {}, environment).config
    assert config.record_ttl_ms == 90_000
    assert config.spool is not None
    assert config.spool.max_bytes == 50_000_000
    assert resolve_options("traces", {}, environment).config.record_ttl_ms == 60_000


FILES = [
    ({"KPL_OTEL_SPOOL": "/var/otel.db"}, "/var/otel-logs.db", None),
    ({"KPL_OTEL_LOGS_SPOOL": "/var/otel.db"}, "/var/otel.db", None),
    ({"KPL_OTEL_SPOOL": "a.db", "KPL_OTEL_LOGS_SPOOL": "b.db", "KPL_OTEL_DEAD_LETTERS": "true"}, "b.db", None),
    ({"KPL_OTEL_DEAD_LETTERS": "/var/lost"}, None, "/var/lost-logs"),
]


def _paths_of(config):
    groups = (config.spool, config.dead_letters)
    return [None if group is None or group.path is None else str(group.path) for group in groups]


@pytest.mark.parametrize(("environment", "spool", "letters"), FILES)
def test_a_file_of_all_signals_has_the_signal_in_its_name(environment, spool, letters):
    config = resolve_options("logs", {"stream": "a"}, environment).config
    assert _paths_of(config) == [spool, letters]


def test_exporters_that_share_a_spool_variable_lose_nothing(kinesis, tmp_path, monkeypatch):
    monkeypatch.setenv("KPL_OTEL_SPOOL", str(tmp_path / "otel.db"))
    telemetry = kinesis_telemetry("telemetry", transport=lambda _config: FakeTransport(kinesis))
    telemetry.tracer_provider.get_tracer("tests").start_span("span").end()
    telemetry.logger_provider.get_logger("tests").emit(body="line")
    assert telemetry.force_flush(20_000)
    counts = telemetry.counts()
    names = {path.name for path in tmp_path.glob("*.db")}
    telemetry.shutdown()
    assert [(counts[signal].delivered, counts[signal].lost) for signal in ("traces", "logs")] == [(1, {}), (1, {})]
    assert names >= {"otel-traces.db", "otel-logs.db"}


def test_providers_that_share_a_configuration_have_a_spool_for_each_signal(kinesis, tmp_path):
    config = Config(spool=SpoolOptions(path=tmp_path / "otel.db"), dead_letters=DeadLetterOptions())
    for signal in ("traces", "logs", "metrics"):
        assert _paths_of(own_files(config, signal)) == [str(tmp_path / f"otel-{signal}.db"), None]
    telemetry = kinesis_telemetry("telemetry", config=config, transport=lambda _config: FakeTransport(kinesis))
    telemetry.tracer_provider.get_tracer("tests").start_span("span").end()
    telemetry.logger_provider.get_logger("tests").emit(body="line")
    assert telemetry.force_flush(20_000)
    telemetry.shutdown()
    assert {"otel-traces.db", "otel-logs.db"} <= {path.name for path in tmp_path.iterdir()}


def test_misspelt_variables_get_a_warning_that_names_the_nearest():
    known = {"KPL_OTEL_STREAM": "a", "KPL_OTEL_LOGS_SPOOL_MAX_BYTES": "5000000", "KPL_OTEL_LOGS_SPOOL": "b"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve_options("logs", {}, {**known, "KPL_SPOL": "not ours", "KPL_OTEL_TRACES_TIMEOUT": "5"})
    with pytest.warns(UserWarning, match="that are not options of an exporter are ignored") as caught:
        resolve_options("logs", {}, {**known, "KPL_OTEL_STREM": "b", "KPL_OTEL_LOGS_SPOL": "c"})
    [text] = [str(each.message) for each in caught]
    assert (
        "KPL_OTEL_LOGS_SPOL (did you mean KPL_OTEL_LOGS_SPOOL?), KPL_OTEL_STREM (did you mean KPL_OTEL_STREAM?)" in text
    )


def test_a_wrong_variable_is_named():
    with pytest.raises(ConfigError, match="KPL_OTEL_LOGS_TIMEOUT is 'soon'; it must be a number"):
        resolve_options("logs", {"stream": "a"}, {"KPL_OTEL_LOGS_TIMEOUT": "soon"})


def test_exports_are_divided_by_the_known_record_limit():
    given = {"stream": "a", "config": Config(max_record_size=10_485_760)}
    assert resolve_options("logs", given, {}).max_data_bytes == 10_485_760 - 1_024


REFUSED = [
    ({}, "no stream for logs is given; set KPL_OTEL_STREAM or KPL_OTEL_LOGS_STREAM"),
    ({"stream": "a", "encoding": "zipkin"}, "encoding is 'zipkin'; it must be one of 'otlp_proto', 'otlp_json'"),
    ({"stream": "a", "partition_key": "trace_id"}, "for logs it must be one of random, resource, or a function"),
    ({"stream": "a", "compression": "lz4"}, "compression is 'lz4'; it must be one of 'none', 'gzip', 'zstd'"),
    ({"stream": "a", "synchronous": "yes"}, "synchronous is 'yes'; it must be True or False"),
    ({"stream": "a", "timeout_millis": "soon"}, "timeout_millis is 'soon'; it must be a number (milliseconds)"),
    ({"stream": "a", "max_buffer_bytes": 0}, "max_buffer_bytes is 0; it must be above 0 (bytes)"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED)
def test_an_invalid_option_raises_an_error_that_names_it(given, words):
    with pytest.raises(ConfigError) as error:
        resolve_options("logs", given, {})
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("make", [*EXPORTERS.values(), kinesis_telemetry])
def test_an_unknown_option_raises_an_error_that_names_it(make):
    with pytest.raises(
        TypeError, match="there is no option strem; there are aggregation, compression, config, encoding"
    ):
        make("telemetry", region="us-east-1", strem="a")


def test_the_timeout_keyword_of_the_periodic_reader_is_accepted(make_exporter):
    exporter: KinesisMetricExporter = make_exporter("metrics")
    exporter.shutdown(timeout=100)
    assert exporter.counts().exported == 0
