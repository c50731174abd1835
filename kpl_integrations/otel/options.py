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

A variable with the signal in its name wins: KPL_OTEL_TRACES_STREAM, KPL_OTEL_LOGS_ENCODING, ...
"""

import os
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypedDict, get_args

import msgspec
from opentelemetry.metrics import MeterProvider

from kpl_core import Config, ConfigError, KinesisTransport
from kpl_core.background.sigterm import FlushOnSigterm
from kpl_core.options.kinesis_limits import MIB, PARTITION_KEY_CHARACTERS
from kpl_core.options.validation import require_choice

Signal = Literal["traces", "logs", "metrics"]
Encoding = Literal["otlp_proto", "otlp_json"]
Compression = Literal["none", "gzip", "zstd"]
# A function of the span, the log record, or the metric with its resource and scope.
KeyChoice = str | Callable[[Any], str]
MakeTransport = Callable[[Config], KinesisTransport]

_DEFAULT_BUFFER_BYTES: Final = 16 * MIB
# Below the timeout of an export, and a small part of the 30 s that the SDK gives to a shutdown.
_DEFAULT_SHUTDOWN_MS: Final = 5_000.0
_DEFAULT_TIMEOUT_MS: Final = 10_000.0
# A key of four-byte characters.
_KEY_BYTES: Final = 4 * PARTITION_KEY_CHARACTERS
# An OTLP message seldom has fewer bytes, so the bytes are the effective bound.
_LEAST_RECORD_BYTES: Final = 64
_FLAGS: Final[Mapping[str, bool]] = {"true": True, "false": False}
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


class ExporterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one exporter, checked. Durations are seconds, sizes are bytes."""

    stream: str
    encoding: Encoding
    compression: Compression
    synchronous: bool
    partition_key: KeyChoice
    timeout: float
    shutdown_timeout: float
    max_buffer_bytes: int
    config: Config

    @property
    def max_data_bytes(self) -> int:
        """Return the most bytes of one encoded export: a record's limit less the longest key."""
        return self.config.for_stream(self.stream).known_max_record_size - _KEY_BYTES


def resolve_options(
    signal: Signal, given: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> ExporterOptions:
    """Return the options of the exporter of `signal`: those `given`, otherwise those of the environment.

    Raises:
        ConfigError: an option is missing or out of its bounds; the message names it and its variable.
        TypeError: a given name is no option.
    """
    _require_known(given)

    def look(option: str, variable: str, default: object = None) -> Any:  # noqa: ANN401 - of the option's own type
        value = given.get(option)
        if value is None:
            specific = f"KPL_OTEL_{signal.upper()}_{variable}"
            value = environment.get(specific) or environment.get(f"KPL_OTEL_{variable}") or None
        return default if value is None else value

    def number(option: str, variable: str, default: float) -> float:
        value = look(option, variable, default)
        try:
            found = float(value)
        except (TypeError, ValueError):
            found = -1.0
        if not found > 0:
            message = f"{option} is {value!r}; it must be a number above 0 (or KPL_OTEL_{variable} in the environment)"
            raise ConfigError(message)
        return found

    stream = look("stream", "STREAM")
    if not stream:
        message = f"no stream for {signal} is given; set KPL_OTEL_STREAM or KPL_OTEL_{signal.upper()}_STREAM"
        raise ConfigError(message)
    encoding, compression = look("encoding", "ENCODING", "otlp_proto"), look("compression", "COMPRESSION", "none")
    require_choice("encoding", encoding, get_args(Encoding))
    require_choice("compression", compression, get_args(Compression))
    buffer_bytes = int(number("max_buffer_bytes", "BUFFER_BYTES", _DEFAULT_BUFFER_BYTES))
    return ExporterOptions(
        stream=stream,
        encoding=encoding,
        compression=compression,
        synchronous=_flag("synchronous", look("synchronous", "SYNCHRONOUS", default=False)),
        partition_key=_key_choice(
            signal, look("partition_key", "PARTITION_KEY"), is_given=given.get("partition_key") is not None
        ),
        timeout=number("timeout_millis", "TIMEOUT", _DEFAULT_TIMEOUT_MS) / 1_000,
        shutdown_timeout=number("shutdown_timeout_millis", "SHUTDOWN_TIMEOUT", _DEFAULT_SHUTDOWN_MS) / 1_000,
        max_buffer_bytes=buffer_bytes,
        config=given.get("config")
        or Config(
            region=look("region", "REGION"),
            endpoint_url=look("endpoint_url", "ENDPOINT"),
            aggregation_enabled=_flag("aggregation", look("aggregation", "AGGREGATION", default=True)),
            max_outstanding_bytes=buffer_bytes,
            max_outstanding_records=max(1, buffer_bytes // _LEAST_RECORD_BYTES),
        ),
    )


def _flag(option: str, value: object) -> bool:
    found = _FLAGS.get(str(value).strip().lower())
    if found is None:
        message = f"{option} is {value!r}; it must be true or false (or KPL_OTEL_{option.upper()} in the environment)"
        raise ConfigError(message)
    return found


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
