"""The options of the handler as `dictConfig` gives them, checked once."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypedDict

import msgspec

from kpl_core import Config, ConfigError, DeadLetterOptions, SpoolOptions
from kpl_core.background.sigterm import FlushOnSigterm
from kpl_core.options.kinesis_limits import BYTES_PER_SECOND_PER_SHARD, MIB
from kpl_core.options.option import EndpointUrl, Option, Region, check_options
from kpl_core.options.validation import did_you_mean, require_choice, require_kind
from kpl_integrations.logging_handler.entry import KeyChoice, Oversize
from kpl_integrations.logging_handler.formatter import JsonFormat

# What happens to an entry that the producer has no room for, once it cannot wait any longer: it waits all the same,
# or goes to the spool or to the dead letters.
WithoutRoom = Literal["wait", "spool", "dlq"]

_BLOCK: Final = re.compile(r"block\((\d+(?:\.\d+)?)\)")
_OVERFLOWS: Final = ("drop_oldest", "drop_newest", "drop_lowest_level", "spool", "dlq")
# How long a flush or a close waits without a delivery, unless `close_timeout` is set.
_PATIENCE_SECONDS: Final = 5.0
# A log record seldom has fewer bytes, so the bytes are the effective bound.
_LEAST_RECORD_BYTES: Final = 100
# The options that make the handler's own `Config`, and what stands for each in one that is given.
_IN_CONFIG: Final[Mapping[str, str]] = {
    "region": "region",
    "endpoint_url": "endpoint_url",
    "spool_path": "spool",
    "max_sending_bytes": "max_outstanding_bytes",
}


class LogOptions(TypedDict, total=False):
    """The options of `KinesisHandler` by name, beside `stream`, `level`, `config`, `producer` and `transport`."""

    region: str | None
    endpoint_url: str | None
    json_format: JsonFormat
    partition_key: KeyChoice
    overflow: str
    oversize: Oversize
    spool_path: str | None
    max_queue_records: int | None
    max_queue_bytes: int
    max_sending_bytes: int
    close_timeout: float | None
    notice_seconds: float
    flush_on_sigterm: FlushOnSigterm


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The same with their defaults. `KinesisHandler` describes each.

    Raises:
        ConfigError: an option is out of its bounds.
    """

    region: Region = None
    endpoint_url: EndpointUrl = None
    json_format: Annotated[JsonFormat, Option("The JSON of a log record, unless another formatter is set.")] = "plain"
    partition_key: Annotated[
        KeyChoice, Option('"random", "logger", "trace_id", "extra:<field>" or a function of the log record.')
    ] = "random"
    overflow: Annotated[
        str, Option('What happens to what is logged faster than it can be sent: a word, or "block(<seconds>)".')
    ] = "drop_oldest"
    oversize: Annotated[Oversize, Option("What happens to a record that is too large.")] = "truncate"
    spool_path: Annotated[
        str | None, Option("A file on a local disk for what cannot be delivered in time; delivered later.")
    ] = None
    max_queue_records: Annotated[
        int | None, Option("A second bound of the queue; None: none.", 0, unit="records", above=True)
    ] = None
    max_queue_bytes: Annotated[int, Option("The bound of the queue.", 0, unit="bytes", above=True)] = 64 * MIB
    max_sending_bytes: Annotated[int, Option("The bound of what is being sent.", 0, unit="bytes", above=True)] = 2 * MIB
    close_timeout: Annotated[
        float | None,
        Option("How long a close may take; None: longer while records are delivered.", 0, unit="seconds", above=True),
    ] = None
    notice_seconds: Annotated[
        float,
        Option("The time between notices of dropped records in the stream.", 0, unit="seconds", above=True),
    ] = 10.0
    flush_on_sigterm: Annotated[
        FlushOnSigterm,
        Option("Flush before SIGTERM ends the process: within 3 seconds, or so many.", 0, unit="seconds", above=True),
    ] = None

    def __post_init__(self) -> None:
        """Check every option that nothing else checks."""
        check_options(self)
        if not self.block_seconds:
            require_choice("overflow", self.overflow, _OVERFLOWS, also="'block(<seconds>)'")

    @property
    def patience_seconds(self) -> float:
        """Return how many seconds a flush or close may take; longer only while records are delivered."""
        return _PATIENCE_SECONDS if self.close_timeout is None else self.close_timeout

    @property
    def extra_seconds(self) -> float:
        """Return how much longer it may take while records are delivered: the time of a full queue for one shard."""
        return 0.0 if self.close_timeout is not None else self.max_queue_bytes / BYTES_PER_SECOND_PER_SHARD

    @property
    def overflow_rule(self) -> str:
        """Return the queue's rule, without its argument."""
        return self.overflow.partition("(")[0]

    @property
    def block_seconds(self) -> float:
        """Return how many seconds an `emit` may wait for room; 0 unless overflow is `block(seconds)`."""
        blocking = _BLOCK.fullmatch(self.overflow)
        return 0.0 if blocking is None else float(blocking[1])


def log_settings(stream: str, config: object, options: dict[str, Any], *, is_shared: bool = False) -> LogSettings:
    """Return the checked options. Errors of `dictConfig` show them as their cause.

    `dictConfig` takes a TypeError that names `stream` for one of a handler of old, and hides it. So a missing name is a
    ConfigError.

    Raises:
        ConfigError: there is no stream, `config` is no Config, an option is out of its bounds, or `config` or the
            producer that is shared has it already.
        TypeError: there is no such option.
    """
    for name in options:
        if name not in LogSettings.__struct_fields__:
            known = ("stream", "level", "config", "producer", "transport", *LogSettings.__struct_fields__)
            message = f"KinesisHandler has no option {name!r}{did_you_mean(name, known)}"
            raise TypeError(message)
    if not stream:
        message = "KinesisHandler has no stream; give the name or the ARN of one"
        raise ConfigError(message)
    require_kind("config", config, Config | Mapping | None, "a kpl_core.Config, a table of its options, or left out")
    for name, inside in _IN_CONFIG.items():
        if options.get(name) is not None and (is_shared or config is not None):
            message = (
                f"{name} and producer are both set; the producer has its own options, so leave {name} out"
                if is_shared
                else f"{name} and config are both set; write {inside} into config"
            )
            raise ConfigError(message)
    return LogSettings(**options)


def without_room(settings: LogSettings, config: Config, *, is_shared: bool) -> WithoutRoom:
    """Return what happens to a record without room in the producer (see `WithoutRoom`)."""
    if is_shared:
        return "wait"
    if config.spool is not None and settings.overflow != "dlq":
        return "spool"
    return "wait" if config.dead_letters is None else "dlq"


def producer_config(settings: LogSettings, config: Config | Mapping[str, Any] | None, *, is_shared: bool) -> Config:
    """Return the options of the handler's producer: `config`, also as a table, or one made from the plain options.

    Raises:
        ConfigError: records are to be kept, and no file is configured to keep them in.
    """
    if isinstance(config, Mapping):
        config = Config.from_mapping(config)
    elif config is None:
        path = None if settings.spool_path is None else Path(settings.spool_path)
        config = Config(
            region=settings.region,
            endpoint_url=settings.endpoint_url,
            max_outstanding_bytes=settings.max_sending_bytes,
            max_outstanding_records=max(1, settings.max_sending_bytes // _LEAST_RECORD_BYTES),
            spool=None if path is None else SpoolOptions(path=path),
            dead_letters=None if path is None else DeadLetterOptions(),
        )
    wants = {"overflow": settings.overflow, "oversize": settings.oversize}
    for name, value in wants.items():
        if is_shared and value in {"spool", "dlq"}:
            message = f"{name} is {value!r}, which needs a producer of the handler's own; leave producer out"
            raise ConfigError(message)
        place = {"spool": config.spool, "dlq": config.dead_letters}.get(value, config)
        if place is None:
            message = (
                f"{name} is {value!r}, and there is no file to keep records in; set spool_path, or in config "
                f"{'spool' if value == 'spool' else 'dead_letters'}"
            )
            raise ConfigError(message)
    return config
