"""Every option of the producer, validated once.

Names follow the KPL; times end in `_ms` where the KPL's do. One table holds the bounds, and every error
states the value, the bound and what to do.
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any, Final, Literal, Self, get_args, get_type_hints

from kpl_core.errors import ConfigError
from kpl_core.options.coordination_options import CoordinationOptions
from kpl_core.options.environment import options_from, warn_of_unknown
from kpl_core.options.kinesis_limits import (
    BYTES_PER_SECOND_PER_SHARD,
    DEFAULT_MAX_RECORD_BYTES,
    MAX_RECORD_BYTES,
    MIB,
    RECORDS_PER_REQUEST,
    RECORDS_PER_SECOND_PER_SHARD,
    REQUEST_BYTES,
)
from kpl_core.options.policy import FairnessPolicy
from kpl_core.options.reliability import BreakerPolicy, DeadLetterOptions, SpoolOptions, TierPolicy
from kpl_core.options.validation import (
    Bound,
    FrozenMapping,
    names_nearest,
    require_bounds,
    require_choice,
    require_endpoint_url,
    require_flag,
    require_kind,
    require_order,
    require_region,
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
_NUMBERS: Final = {
    "aggregation_max_count": Bound(1, math.inf, "user records in one aggregated record", whole=True, optional=True),
    "aggregation_max_size": Bound(
        64, MAX_RECORD_BYTES, "bytes of one aggregated record; a Kinesis record holds 10 MiB", whole=True
    ),
    "collection_max_count": Bound(1, RECORDS_PER_REQUEST, "PutRecords takes 500 records", whole=True),
    "collection_max_size": Bound(52_224, REQUEST_BYTES, "bytes of one request; PutRecords takes 10 MiB", whole=True),
    "record_max_buffered_time_ms": Bound(0, _LONGEST_MS, "milliseconds a user record may wait to be aggregated"),
    "record_ttl_ms": Bound(100, _LONGEST_MS, "milliseconds from arrival to failure"),
    "retry_deadline_ms": Bound(0, _LONGEST_MS, "milliseconds", optional=True),
    "rate_limit_records_per_sec_per_shard": Bound(1e-3, 1e12, "Kinesis records a second; a shard takes 1,000"),
    "rate_limit_bytes_per_sec_per_shard": Bound(1.0, 1e15, "bytes a second; a shard takes 1 MiB"),
    "burst_seconds": Bound(1e-3, 3600, "seconds of the rate that an idle shard accepts at once"),
    "retry_backoff_base_ms": Bound(1, _LONGEST_MS, "milliseconds"),
    "retry_backoff_cap_ms": Bound(1, _LONGEST_MS, "milliseconds"),
    "max_outstanding_records": Bound(1, math.inf, "user records between put and result", whole=True),
    "max_outstanding_bytes": Bound(1, math.inf, "bytes between put and result", whole=True),
    "max_in_flight_requests": Bound(1, 1_000, "PutRecords requests at a time", whole=True),
    "max_connections": Bound(1, 1_000, "connections to the endpoint", whole=True),
    "request_timeout_ms": Bound(1, 600_000, "milliseconds for one PutRecords request"),
    "connect_timeout_ms": Bound(1, 300_000, "milliseconds to connect"),
    "max_record_size": Bound(
        8_192, MAX_RECORD_BYTES, "bytes of key and data; the service takes 1 to 10 MiB", whole=True, optional=True
    ),
}


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

    region: str | None = None
    endpoint_url: str | None = None
    verify_ssl: bool | str = True
    aws_access_key_id: str | None = dataclasses.field(default=None, repr=False)
    aws_secret_access_key: str | None = dataclasses.field(default=None, repr=False)
    aws_session_token: str | None = dataclasses.field(default=None, repr=False)
    # Passed to botocore's own Config: proxies, client certificates, user agent. May hold secrets.
    botocore: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    aggregation_enabled: bool = True
    aggregation_max_count: int | None = None
    aggregation_max_size: int = 51_200
    aggregate_partition_key: AggregatePartitionKey = "a"
    collection_max_count: int = RECORDS_PER_REQUEST
    collection_max_size: int = MIB
    record_max_buffered_time_ms: float = 100
    record_ttl_ms: float = 30_000
    retry_deadline_ms: float | None = None
    fail_if_throttled: bool = False
    rate_limit_records_per_sec_per_shard: float = RECORDS_PER_SECOND_PER_SHARD
    rate_limit_bytes_per_sec_per_shard: float = BYTES_PER_SECOND_PER_SHARD
    burst_seconds: float = 1.0
    adaptive_rate: bool = True
    retry_backoff_base_ms: float = 50
    retry_backoff_cap_ms: float = 5_000
    wire_path: WirePath = "fast"
    streams: Mapping[str, StreamConfig] = dataclasses.field(default_factory=dict)
    max_outstanding_records: int = 100_000
    max_outstanding_bytes: int = 64 * MIB
    max_in_flight_requests: int = 24
    max_connections: int = 24
    request_timeout_ms: float = 6_000
    connect_timeout_ms: float = 6_000
    max_record_size: int | None = None
    non_retryable_error_codes: frozenset[str] = NON_RETRYABLE_ERROR_CODES
    consumer: Consumer = "kcl"
    ordering: Ordering = "none"
    fairness: FairnessPolicy | None = None
    spool: SpoolOptions | None = None
    dead_letters: DeadLetterOptions | None = None
    breaker: BreakerPolicy | None = None
    tiers: TierPolicy | None = None
    coordination: CoordinationOptions | None = None

    def __post_init__(self) -> None:
        """Check every option."""
        for name, (kinds, wanted) in _KINDS.items():
            require_kind(name, getattr(self, name), kinds, wanted)
        for name, allowed in _CHOICES.items():
            require_choice(name, getattr(self, name), allowed)
        for name in _FLAGS:
            require_flag(name, getattr(self, name))
        require_bounds(self, _NUMBERS)
        self._check_parts()
        require_order(self, "retry_backoff_base_ms", "retry_backoff_cap_ms")
        for stream, overrides in self.streams.items():
            require_kind(f"streams[{stream!r}]", overrides, StreamConfig, "a StreamConfig")
            self.for_stream(stream)
        # A copy: the caller may change its own mapping later.
        object.__setattr__(self, "streams", FrozenMapping(self.streams))
        object.__setattr__(self, "botocore", FrozenMapping(self.botocore))

    def _check_parts(self) -> None:
        if self.region is not None:
            require_region("region", self.region)
        if self.endpoint_url is not None:
            require_endpoint_url("endpoint_url", self.endpoint_url)
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
        variables, hints = os.environ if environment is None else environment, get_type_hints(cls)
        found = options_from(variables, hints)
        warn_of_unknown(variables, hints)
        return cls(**{**found, **options})

    @property
    def known_max_record_size(self) -> int:
        """Return the bound on key + data in bytes, or the service's default if none is configured."""
        return DEFAULT_MAX_RECORD_BYTES if self.max_record_size is None else self.max_record_size

    @property
    def retry_delay_seconds(self) -> float:
        """Return how long a retried user record may wait to be aggregated: half of `retry_deadline_ms`."""
        buffered = self.record_max_buffered_time_ms if self.retry_deadline_ms is None else self.retry_deadline_ms
        return buffered / 2 / 1000

    def is_retryable(self, error_code: str) -> bool:
        """Return True if another attempt can succeed after `error_code`."""
        return not any(
            error_code == code or (code.endswith("*") and error_code.startswith(code[:-1]))
            for code in self.non_retryable_error_codes
        )


_HINTS: Final = get_type_hints(Config)
_CHOICES: Final = {
    name: get_args(hint) for name, hint in _HINTS.items() if getattr(hint, "__origin__", None) is Literal
}
_FLAGS: Final = tuple(name for name, hint in _HINTS.items() if hint is bool)
_KINDS: Final[Mapping[str, tuple[Any, str]]] = {
    **dict.fromkeys(
        ("region", "endpoint_url", "aws_access_key_id", "aws_secret_access_key", "aws_session_token"),
        (str | None, "a str, or None to leave it to botocore"),
    ),
    "verify_ssl": (bool | str, "True, False or the path of a CA bundle"),
    "botocore": (Mapping, "a mapping of options of botocore's Config"),
    "streams": (Mapping, "a mapping of stream names or ARNs to StreamConfig"),
    # A str would be taken for a collection of single letters.
    "non_retryable_error_codes": (frozenset, "a frozenset of error codes"),
    **{
        name: (_HINTS[name], f"a {get_args(_HINTS[name])[0].__name__}, or None for none")
        for name in ("spool", "dead_letters", "breaker", "tiers", "fairness", "coordination")
    },
}
