"""The options of an exporter: by keyword, as in declarative configuration, otherwise from the environment.

    KPL_OTEL_STREAM            the stream's name or ARN
    KPL_OTEL_REGION            default: as for any AWS client
    KPL_OTEL_ENDPOINT          an endpoint other than that of AWS, such as a local Kinesis
    KPL_OTEL_ENCODING          otlp_proto or otlp_json
    KPL_OTEL_PARTITION_KEY     trace_id (spans only), random or resource
    KPL_OTEL_TIMEOUT           milliseconds an export may wait for room
    KPL_OTEL_SHUTDOWN_TIMEOUT  milliseconds a shutdown may take
    KPL_OTEL_BUFFER_BYTES      the bound of what is encoded and not delivered
    KPL_OTEL_AGGREGATION       false for consumers that cannot read the KPL's aggregated records
    KPL_OTEL_COMPRESSION       none, gzip or zstd
    KPL_OTEL_SYNCHRONOUS       true: an export returns after Kinesis has answered

Every other option of the producer has a variable too, named as those of `Config.from_env`: KPL_OTEL_RECORD_TTL_MS,
KPL_OTEL_SPOOL_MAX_BYTES ... A variable with the signal in its name wins: KPL_OTEL_LOGS_ENCODING. A file belongs to one
exporter: KPL_OTEL_SPOOL=otel.db is otel-traces.db, otel-logs.db and otel-metrics.db.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypedDict, get_args

import msgspec
from opentelemetry.metrics import MeterProvider

from kpl_core import Config, ConfigError
from kpl_core.background.sigterm import FlushOnSigterm
from kpl_core.options.environment import value_of, values_from, variables_of, warn_of_unknown
from kpl_core.options.flat_options import FlatOption, flat_options
from kpl_core.options.kinesis_limits import MIB, PARTITION_KEY_CHARACTERS
from kpl_core.options.option import DescribedOption, EndpointUrl, Option, Region, check_options, described
from kpl_core.options.reliability import marked_path
from kpl_core.transport import KinesisTransport

Signal = Literal["traces", "logs", "metrics"]
Encoding = Literal["otlp_proto", "otlp_json"]
Compression = Literal["none", "gzip", "zstd"]
# A function of the span, the log record, or the metric with its resource and scope.
KeyChoice = str | Callable[[Any], str]
MakeTransport = Callable[[Config], KinesisTransport]

# A key of four-byte characters.
_KEY_BYTES: Final = 4 * PARTITION_KEY_CHARACTERS
# An OTLP message seldom has fewer bytes, so the bytes are the effective bound.
_LEAST_RECORD_BYTES: Final = 64
_PREFIX: Final = "KPL_OTEL_"
# The options whose variables have shorter names.
VARIABLES: Final[Mapping[str, str]] = {
    "endpoint_url": "ENDPOINT",
    "timeout_millis": "TIMEOUT",
    "shutdown_timeout_millis": "SHUTDOWN_TIMEOUT",
    "max_buffer_bytes": "BUFFER_BYTES",
}
# The producer's options that an exporter has under another name, or decides itself.
OWN_NAMES: Final[Mapping[str, str]] = {
    "region": "region",
    "endpoint_url": "endpoint_url",
    "aggregation_enabled": "aggregation",
    "max_outstanding_bytes": "max_buffer_bytes",
    "max_outstanding_records": "max_buffer_bytes",
}
# The options that name a file, which belongs to one producer.
_FILES: Final = ("spool", "dead_letters")
_KEYS: Final[Mapping[Signal, tuple[str, ...]]] = {
    "traces": ("trace_id", "random", "resource"),
    "logs": ("random", "resource"),
    "metrics": ("random", "resource"),
}


class ExporterArguments(TypedDict, total=False):
    """The keywords of every exporter. `kinesis_telemetry` passes them to all three.

    A keyword that is not given, or None, comes from the environment, otherwise from a default. `config` is the
    producer's options in full, in place of region, endpoint_url, aggregation and the bounds of its buffer. If
    `synchronous`, an export returns after Kinesis has answered, within `timeout_millis`. With a `meter_provider` the
    exporter has metrics of its own (see `exporters`). `transport` makes the transport that replaces the network.
    `flush_on_sigterm` flushes before SIGTERM ends the process, and calls the handler that was set for it: True within 3
    seconds, a number within so many; None only in children of multiprocessing.
    """

    region: str | None
    endpoint_url: str | None
    encoding: str | None
    partition_key: KeyChoice | None
    timeout_millis: float | None
    shutdown_timeout_millis: float | None
    max_buffer_bytes: int | None
    aggregation: bool | str | None
    compression: str | None
    synchronous: bool | str | None
    config: Config | None
    meter_provider: MeterProvider | None
    transport: MakeTransport | None
    flush_on_sigterm: FlushOnSigterm


class ExporterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a user may set of an exporter, by keyword or variable, beside `stream` and `config`.

    Raises:
        ConfigError: an option is out of its bounds.
    """

    region: Region = None
    endpoint_url: EndpointUrl = None
    encoding: Annotated[Encoding, Option("How OTLP is encoded.")] = "otlp_proto"
    compression: Annotated[Compression, Option("How an encoded export is compressed.")] = "none"
    synchronous: Annotated[bool, Option("Whether an export returns after Kinesis has answered.")] = False
    aggregation: Annotated[bool, Option("Use the KPL's format, which some consumers cannot read.")] = True
    # The SDK gives 30 s to a shutdown.
    timeout_millis: Annotated[
        float, Option("How long an export may wait for room.", 0, unit="milliseconds", above=True)
    ] = 10_000.0
    shutdown_timeout_millis: Annotated[
        float, Option("How long a shutdown may take.", 0, unit="milliseconds", above=True)
    ] = 5_000.0
    max_buffer_bytes: Annotated[
        int, Option("The bound of what is encoded and not delivered.", 0, unit="bytes", above=True)
    ] = 16 * MIB

    def __post_init__(self) -> None:
        """Check every option."""
        check_options(self)


class ExporterOptions(ExporterSettings, frozen=True, kw_only=True):
    """Options of one exporter, checked."""

    stream: str
    partition_key: KeyChoice
    config: Config

    @property
    def timeout(self) -> float:
        """Return how many seconds an export may wait for room."""
        return self.timeout_millis / 1_000

    @property
    def shutdown_timeout(self) -> float:
        """Return how many seconds a shutdown may take."""
        return self.shutdown_timeout_millis / 1_000

    @property
    def max_data_bytes(self) -> int:
        """Return the most bytes of one encoded export: the limit of a record minus the longest partition key."""
        return self.config.for_stream(self.stream).known_max_record_size - _KEY_BYTES


def resolve_options(
    signal: Signal, given: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> ExporterOptions:
    """Return the options of the exporter of `signal`: those `given`, otherwise those of the environment.

    Raises:
        ConfigError: an option is missing or out of its bounds; the message names it and its variable.
        TypeError: a given name is not an option.

    Unknown variables that begin with `KPL_OTEL_` get a `UserWarning`.
    """
    _require_known(given)
    warn_of_unknown(environment, _known_variables(), _PREFIX, "an exporter")

    def variable_of(name: str) -> tuple[str, str | None]:
        """Return the name and the text of the variable that applies."""
        specific = f"{_PREFIX}{signal.upper()}_{name}"
        found = specific if environment.get(specific) else f"{_PREFIX}{name}"
        return found, environment.get(found) or None

    stream, key = given.get("stream") or variable_of("STREAM")[1], given.get("partition_key")
    if not stream:
        message = f"no stream for {signal} is given; set KPL_OTEL_STREAM or KPL_OTEL_{signal.upper()}_STREAM"
        raise ConfigError(message)
    values: dict[str, Any] = {}
    for name, option in described(ExporterSettings).items():
        shown, value = (name, given[name]) if given.get(name) is not None else variable_of(variable_suffix(name))
        if value is not None:
            # Declarative configuration may have text.
            values[name] = (value_of if isinstance(value, str) else _checked)(option, value, shown)
    return ExporterOptions(
        **values,
        stream=stream,
        partition_key=_key_choice(signal, key or variable_of("PARTITION_KEY")[1], is_given=key is not None),
        config=given.get("config") or _producer_config(signal, ExporterSettings(**values), environment),
    )


def variable_suffix(name: str) -> str:
    """Return the end of the name of an option's variable."""
    return VARIABLES.get(name, name.upper())


def _checked(option: DescribedOption, value: Any, shown: str) -> Any:  # noqa: ANN401 - of the option's own type
    return option.checked(value, shown)


def _producer_config(signal: Signal, settings: ExporterSettings, environment: Mapping[str, str]) -> Config:
    own = {
        "region": settings.region,
        "endpoint_url": settings.endpoint_url,
        "aggregation_enabled": settings.aggregation,
        "max_outstanding_bytes": settings.max_buffer_bytes,
        "max_outstanding_records": max(1, settings.max_buffer_bytes // _LEAST_RECORD_BYTES),
    }
    others = _options_of_the_producer()
    general = values_from(environment, others, _PREFIX)
    for name in _FILES:
        if isinstance(general.get(name), str | Path):
            general[name] = marked_path(general[name], signal)
    specific = values_from(environment, others, f"{_PREFIX}{signal.upper()}_")
    return Config.from_mapping({**general, **specific, **own})


def own_files(config: Config, signal: Signal) -> Config:
    """Return the options with files of this signal's own, for exporters that are given the same `config`."""
    groups = {name: getattr(config, name) for name in _FILES}
    return replace(
        config,
        **{
            name: msgspec.structs.replace(group, path=marked_path(group.path, signal))
            for name, group in groups.items()
            if group is not None and group.path is not None
        },
    )


def _options_of_the_producer() -> dict[str, FlatOption]:
    return {name: flat for name, flat in flat_options(Config).items() if name not in OWN_NAMES}


def _known_variables() -> set[str]:
    own = {"STREAM", "PARTITION_KEY", *map(variable_suffix, described(ExporterSettings))}
    known = own | variables_of(_options_of_the_producer())
    return known | {f"{signal.upper()}_{name}" for signal in get_args(Signal) for name in known}


def _key_choice(signal: Signal, key: KeyChoice | None, *, is_given: bool) -> KeyChoice:
    # One variable may be set for all signals, but only spans can have the key "trace_id".
    if key is None or (key == "trace_id" and signal != "traces" and not is_given):
        return _KEYS[signal][0]
    if not callable(key) and key not in _KEYS[signal]:
        message = f"partition_key is {key!r}; for {signal} it must be one of {', '.join(_KEYS[signal])}, or a function"
        raise ConfigError(message)
    return key


def _require_known(given: Mapping[str, Any]) -> None:
    known = {"stream", *ExporterArguments.__annotations__}
    if unknown := given.keys() - known:
        message = f"there is no option {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}"
        raise TypeError(message)
