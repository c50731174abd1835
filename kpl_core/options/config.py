"""Every option of the producer, validated once.

Names follow the KPL; times end in `_ms` where the KPL's do. One table holds the bounds, and every error
states the value, the bound and what to do.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from kpl_core.errors import ConfigError
from kpl_core.options.coordination_options import CoordinationOptions
from kpl_core.options.environment import values_from, variables_of, warn_of_unknown
from kpl_core.options.flat_options import flat_options, nested
from kpl_core.options.kinesis_limits import (
    BYTES_PER_SECOND_PER_SHARD,
    DEFAULT_MAX_RECORD_BYTES,
    MAX_RECORD_BYTES,
    MIB,
    RECORDS_PER_REQUEST,
    RECORDS_PER_SECOND_PER_SHARD,
    REQUEST_BYTES,
)
from kpl_core.options.option import EndpointUrl, Option, Region, check_options
from kpl_core.options.policy import FairnessPolicy
from kpl_core.options.reliability import BreakerPolicy, DeadLetterOptions, SpoolOptions, TierPolicy
from kpl_core.options.validation import (
    names_nearest,
    require_kind,
    require_order,
)

AggregatePartitionKey = Literal["a", "first"]
Consumer = Literal["kcl", "per_user_record", "range_blind"]
Ordering = Literal["none", "per_key"]
WirePath = Literal["fast", "stock", "cbor"]

# Codes that a retry cannot cure. A trailing * matches any ending.
NON_RETRYABLE_ERROR_CODES: Final = frozenset(
    {
        "AccessDenied*",
        "ResourceNotFoundException",
        "Validation*",
        "InvalidArgumentException",
        "UnrecognizedClientException",
        "InvalidSignatureException",
        "IncompleteSignature*",
        "MissingAuthenticationToken*",
        "KMSDisabledException",
        "KMSAccessDeniedException",
        "KMSNotFoundException",
        # Not a service code: botocore's chain found no credentials.
        "NoCredentials",
    }
)

# The longest time, 30 years, catches a value in the wrong unit.
_LONGEST_MS: Final = 1e12


@names_nearest
@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """Overrides for one stream. None means the producer's own value."""

    aggregation_enabled: bool | None = None
    aggregation_max_count: int | None = None
    aggregation_max_size: int | None = None
    aggregate_partition_key: AggregatePartitionKey | None = None
    record_max_buffered_time_ms: float | None = None
    record_ttl_ms: float | None = None
    fail_if_throttled: bool | None = None
    rate_limit_records_per_sec_per_shard: float | None = None
    rate_limit_bytes_per_sec_per_shard: float | None = None
    burst_seconds: float | None = None
    adaptive_rate: bool | None = None
    max_record_size: int | None = None
    consumer: Consumer | None = None
    ordering: Ordering | None = None

    def overrides(self) -> dict[str, Any]:
        """Return the options that are set."""
        return {name: value for name, value in vars(self).items() if value is not None}


@names_nearest
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The producer's options. docs/configuration.md describes each at length.

    Raises:
        ConfigError: an option is of a wrong type or out of its bounds.
    """

    region: Region = None
    endpoint_url: EndpointUrl = None
    verify_ssl: Annotated[
        bool | str,
        Option(
            "Whether to verify the endpoint's certificate, or the path of a CA bundle to verify it with.",
            kpl="VerifyCertificate, CaCertPath, CaCertFile",
        ),
    ] = True
    aws_access_key_id: Annotated[
        str | None,
        Option("A fixed credential; None: botocore's chain.", kpl="CredentialsProvider", secret=True),
    ] = dataclasses.field(default=None, repr=False)
    aws_secret_access_key: Annotated[str | None, Option("Its secret.", kpl="CredentialsProvider", secret=True)] = (
        dataclasses.field(default=None, repr=False)
    )
    aws_session_token: Annotated[
        str | None, Option("The token of a temporary credential.", kpl="CredentialsProvider", secret=True)
    ] = dataclasses.field(default=None, repr=False)
    # It may hold secrets.
    botocore: Annotated[
        Mapping[str, Any],
        Option(
            "Options of botocore's own Config: proxies, client certificates, user agent.",
            kpl="ProxyHost, ProxyPort, ProxyUserName, ProxyPassword",
            secret=True,
        ),
    ] = dataclasses.field(default_factory=dict, repr=False)

    aggregation_enabled: Annotated[
        bool, Option("Pack several user records into one Kinesis record.", kpl="AggregationEnabled")
    ] = True
    aggregation_max_count: Annotated[
        int | None,
        Option(
            "The most user records in one aggregated record; None: as many as fit.",
            1,
            unit="user records in one aggregated record",
            kpl="AggregationMaxCount",
        ),
    ] = None
    aggregation_max_size: Annotated[
        int,
        Option(
            "The most bytes of one aggregated record.",
            64,
            MAX_RECORD_BYTES,
            "bytes of one aggregated record; a Kinesis record holds 10 MiB",
            kpl="AggregationMaxSize",
        ),
    ] = 51_200
    aggregate_partition_key: Annotated[
        AggregatePartitionKey,
        Option("The partition key of an aggregated record: the KPL's constant, or that of its first user record."),
    ] = "a"
    collection_max_count: Annotated[
        int,
        Option(
            "The most Kinesis records in one request.",
            1,
            RECORDS_PER_REQUEST,
            "PutRecords takes 500 records",
            kpl="CollectionMaxCount",
        ),
    ] = RECORDS_PER_REQUEST
    collection_max_size: Annotated[
        int,
        Option(
            "The most bytes of one request.",
            52_224,
            REQUEST_BYTES,
            "bytes of one request; PutRecords takes 10 MiB",
            kpl="CollectionMaxSize (5 MiB)",
        ),
    ] = MIB
    record_max_buffered_time_ms: Annotated[
        float,
        Option(
            "How long a user record may wait to be batched.",
            0,
            _LONGEST_MS,
            "milliseconds a user record may wait to be aggregated",
            kpl="RecordMaxBufferedTime",
        ),
    ] = 100
    record_ttl_ms: Annotated[
        float,
        Option(
            "How long after its put a record fails as expired.",
            100,
            _LONGEST_MS,
            "milliseconds from arrival to failure",
            kpl="RecordTtl",
        ),
    ] = 30_000
    fail_if_throttled: Annotated[
        bool, Option("Fail a throttled record at once instead of retrying it.", kpl="FailIfThrottled")
    ] = False
    rate_limit_records_per_sec_per_shard: Annotated[
        float,
        Option(
            "The Kinesis records a second that one shard gets.",
            1e-3,
            1e12,
            "Kinesis records a second; a shard takes 1,000",
            kpl="RateLimit (150 %)",
        ),
    ] = RECORDS_PER_SECOND_PER_SHARD
    rate_limit_bytes_per_sec_per_shard: Annotated[
        float,
        Option(
            "The bytes of key and data a second that one shard gets.",
            1.0,
            1e15,
            "bytes a second; a shard takes 1 MiB",
            kpl="RateLimit (150 %)",
        ),
    ] = BYTES_PER_SECOND_PER_SHARD
    burst_seconds: Annotated[
        float,
        Option(
            "How many seconds of both rates an idle shard accepts at once.",
            1e-3,
            3600,
            "seconds of the rate that an idle shard accepts at once",
        ),
    ] = 1.0
    adaptive_rate: Annotated[bool, Option("Send less to a shard while it throttles records.")] = True
    retry_backoff_base_ms: Annotated[
        float, Option("The longest wait before the first retry; doubles with each.", 1, _LONGEST_MS, "milliseconds")
    ] = 50
    retry_backoff_cap_ms: Annotated[
        float,
        Option(
            "The longest wait before any retry, and between two probes of an outage.", 1, _LONGEST_MS, "milliseconds"
        ),
    ] = 5_000
    wire_path: Annotated[
        WirePath,
        Option("How requests are encoded: our JSON encoder, botocore's client, or CBOR without Base64."),
    ] = "fast"
    streams: Annotated[
        Mapping[str, StreamConfig], Option("Options that differ for single streams, by name or ARN.")
    ] = dataclasses.field(default_factory=dict)
    max_outstanding_records: Annotated[
        int, Option("The most user records between put and result.", 1, unit="user records between put and result")
    ] = 100_000
    max_outstanding_bytes: Annotated[
        int, Option("The most bytes of key and data between put and result.", 1, unit="bytes between put and result")
    ] = 64 * MIB
    max_in_flight_requests: Annotated[
        int,
        Option(
            "The most PutRecords requests in flight.",
            1,
            1_000,
            "PutRecords requests at a time",
            kpl="ThreadPoolSize, ThreadingModel",
        ),
    ] = 24
    max_connections: Annotated[
        int,
        Option("The most connections to the endpoint.", 1, 1_000, "connections to the endpoint", kpl="MaxConnections"),
    ] = 24
    request_timeout_ms: Annotated[
        float,
        Option(
            "How long one attempt waits for its answer.",
            1,
            600_000,
            "milliseconds for one PutRecords request",
            kpl="RequestTimeout",
        ),
    ] = 6_000
    connect_timeout_ms: Annotated[
        float,
        Option(
            "How long one attempt waits for its connection.",
            1,
            300_000,
            "milliseconds to connect",
            kpl="ConnectTimeout",
        ),
    ] = 6_000
    max_record_size: Annotated[
        int | None,
        Option(
            "The most bytes of key and data that a record of the stream may have; None: DescribeStreamSummary says it.",
            8_192,
            MAX_RECORD_BYTES,
            "bytes of key and data; the service takes 1 to 10 MiB",
            kpl="MaxUserRecordSize (data only)",
        ),
    ] = None
    non_retryable_error_codes: Annotated[
        frozenset[str], Option("Codes that fail a record at once; a trailing * matches any ending.")
    ] = NON_RETRYABLE_ERROR_CODES
    consumer: Annotated[
        Consumer, Option("Which kind of consumer reads the stream, which decides about wrong shards.")
    ] = "kcl"
    ordering: Annotated[Ordering, Option("Whether the records of a partition key stay in the order of their puts.")] = (
        "none"
    )
    fairness: Annotated[FairnessPolicy | None, Option("How flows share an overloaded shard.")] = None
    spool: Annotated[SpoolOptions | None, Option("The file for records that cannot be delivered at once.")] = None
    dead_letters: Annotated[DeadLetterOptions | None, Option("Where records go that failed permanently.")] = None
    breaker: Annotated[BreakerPolicy | None, Option("When to stop sending to a failing shard for a while.")] = None
    tiers: Annotated[TierPolicy | None, Option("How critical, normal and bulk records share the buffer.")] = None
    coordination: Annotated[
        CoordinationOptions | None, Option("The store in which producers share the shards' limits.")
    ] = None

    def __post_init__(self) -> None:
        """Check every option."""
        check_options(self)
        self._check_parts()
        require_order(self, "retry_backoff_base_ms", "retry_backoff_cap_ms")
        for stream, overrides in self.streams.items():
            require_kind(f"streams[{stream!r}]", overrides, StreamConfig, "a StreamConfig")
            self.for_stream(stream)

    def _check_parts(self) -> None:
        if self.spool is not None and self.dead_letters is not None and self.dead_letters.path is not None:
            message = (
                f"dead_letters.path is {str(self.dead_letters.path)!r}, and a spool is set; leave the path out, "
                f"because a spool's own file holds the dead letters"
            )
            raise ConfigError(message)

    def for_stream(self, stream: str) -> Self:
        """Return the options of `stream`, its overrides applied."""
        overrides = self.streams.get(stream)
        if overrides is None:
            return self
        try:
            return dataclasses.replace(self, streams={}, **overrides.overrides())
        except ConfigError as error:
            message = f"streams[{stream!r}]: {error}"
            raise ConfigError(message) from error

    @classmethod
    def kpl_compatible(cls, **options: Any) -> Self:  # noqa: ANN401 - any option, checked by the constructor
        """Return the preset that decides as the KPL does.

        Every error code is retried until the record's time to live, a wrong shard is decided for each user
        record, the rate is not adaptive, and a request holds up to 5 MiB. `options` are the constructor's.
        """
        preset: dict[str, Any] = {
            "non_retryable_error_codes": frozenset(),
            "consumer": "per_user_record",
            "adaptive_rate": False,
            "collection_max_size": 5 * MIB,
        }
        return cls(**{**preset, **options})

    @classmethod
    def from_env(cls, environment: Mapping[str, str] | None = None, **options: Any) -> Self:  # noqa: ANN401 - as above
        """Return the options that environment variables set, such as `KPL_REGION`; `options` have precedence.

        docs/configuration.md has the table. A variable that is empty counts as not set. Unknown variables
        that begin with `KPL_` get one `UserWarning`.

        Raises:
            ConfigError: a value is invalid; the message names the variable or the option.
        """
        variables, known = os.environ if environment is None else environment, flat_options(cls)
        found = values_from(variables, known)
        warn_of_unknown(variables, variables_of(known))
        return cls(**{**nested(cls, found), **options})

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> Self:
        """Return the options of a table of plain values, such as one of TOML, YAML or `dictConfig`.

        The names are those of the variables without `KPL_`, in lower case: `spool_max_bytes`. `streams` is a table of
        tables.

        Raises:
            ConfigError: an option is unknown, of a wrong type or out of its bounds, or excludes another one.
        """
        return cls(**nested(cls, {name: cls._plain(name, value) for name, value in options.items()}))

    @classmethod
    def _plain(cls, name: str, value: Any) -> Any:  # noqa: ANN401 - of the option's own type
        flat = flat_options(cls).get(name)
        if name == "streams" and isinstance(value, Mapping):
            return {stream: _stream_config(stream, table) for stream, table in value.items()}
        if flat is None:
            return value  # `nested` names the nearest
        # TOML and JSON have lists only.
        value = frozenset(value) if frozenset[str] in flat.option.kinds and isinstance(value, list) else value
        return flat.option.checked(value)

    @property
    def known_max_record_size(self) -> int:
        """Return the bound on key + data in bytes, or the service's default if none is configured."""
        return DEFAULT_MAX_RECORD_BYTES if self.max_record_size is None else self.max_record_size

    @property
    def retry_delay_seconds(self) -> float:
        """Return how long a retried user record may wait to be aggregated: half of what a new one may."""
        return self.record_max_buffered_time_ms / 2 / 1000

    def is_retryable(self, error_code: str) -> bool:
        """Return True if another attempt can succeed after `error_code`."""
        return not any(
            error_code == code or (code.endswith("*") and error_code.startswith(code[:-1]))
            for code in self.non_retryable_error_codes
        )


def config_or_default(config: Config | None) -> Config:
    """Return the config that a caller gave, or the default.

    Raises:
        ConfigError: it is not a Config, such as a table of its options.
    """
    if config is None:
        return Config()
    require_kind("config", config, Config, "a Config; make one of a table by Config.from_mapping")
    return config


def _stream_config(stream: str, table: Any) -> StreamConfig:  # noqa: ANN401 - anything that a file has
    if isinstance(table, StreamConfig):
        return table
    require_kind(f"streams[{stream!r}]", table, Mapping, "a table of options")
    try:
        return StreamConfig(**table)
    except TypeError as error:
        message = f"streams[{stream!r}]: {error}"
        raise ConfigError(message) from None
