"""Every setting of the gateway: from arguments, else from the environment as KPL_INGEST_..., else its default."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from kpl_core import BreakerPolicy, Config, ConfigError, DeadLetterOptions, FairnessPolicy, SpoolOptions, TierPolicy
from kpl_core.options.kinesis_limits import MIB
from kpl_integrations.ingest.decoding import DecodeLimits
from kpl_integrations.ingest.tenants import Ack

__all__ = ["IngestSettings", "load_settings", "unknown_variables"]

_PREFIX: Final = "KPL_INGEST_"

_Seconds = Annotated[float, Field(ge=0, le=86_400)]
_Port = Annotated[int, Field(ge=0, le=65_535)]
_LEAST_ADMIN_KEY: Final = 16


class IngestSettings(BaseSettings):
    """The gateway's settings. Sizes are in bytes, durations in seconds unless a name says milliseconds."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, frozen=True, extra="forbid")

    # Where it listens, and for how long it listens to one client.
    host: str = "127.0.0.1"
    port: _Port = 8080
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    # Proxies whose X-Forwarded-For and -Proto are believed: addresses or networks, with commas; "*": anybody's.
    forwarded_allow_ips: str | None = None
    header_seconds: Annotated[float, Field(gt=0, le=3_600)] = 10.0
    max_header_bytes: Annotated[int, Field(ge=1_024, le=MIB)] = 32_768
    body_seconds: Annotated[float, Field(gt=0, le=3_600)] = 30.0
    keep_alive_seconds: Annotated[int, Field(ge=1, le=3_600)] = 75
    max_connections: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000

    # Processes of `kpl serve`; a gateway inside an application is always one.
    workers: Annotated[int, Field(ge=1, le=64)] = 1

    # What a request may hold.
    # 10 MiB of data, all that a PutRecords request may hold, are 13.4 MiB of base64.
    max_body_bytes: Annotated[int, Field(ge=1_024, le=1 << 30)] = 16 * MIB
    # Of all clients together, while they are received.
    max_reading_bytes: Annotated[int, Field(ge=1_024, le=1 << 40)] = 256 * MIB
    max_inflated_bytes: Annotated[int, Field(ge=1_024, le=1 << 30)] = 16 * MIB
    max_records: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    max_depth: Annotated[int, Field(ge=1, le=500)] = 64
    max_record_bytes: Annotated[int, Field(ge=8_192, le=10 * MIB)] = MIB

    # Who may use it.
    tenants: Path | None = None
    reload_seconds: Annotated[float, Field(gt=0, le=3_600)] = 2.0
    admin_key: SecretStr | None = None
    default_ack: Ack = "queued"
    idempotency_keys: Annotated[int, Field(ge=1, le=1_000_000)] = 1_000
    idempotency_seconds: _Seconds = 600.0

    # Kinesis, and what is kept until it has answered.
    region: str | None = None
    endpoint_url: str | None = None
    # The deployment's own limit on what the gateway holds; the spool and dead letters stand on disk.
    max_outstanding_records: Annotated[int, Field(ge=1)] = 100_000
    max_outstanding_bytes: Annotated[int, Field(ge=1)] = 128 * MIB
    record_ttl_ms: Annotated[float, Field(ge=100, le=1e12)] = 30_000
    record_max_buffered_time_ms: Annotated[float, Field(ge=0, le=1e12)] = 100
    aggregation_enabled: bool = True
    spool: Path | None = None
    dead_letters: Path | None = None

    # How it ends: readiness is false for `drain_delay_seconds`, then the intake closes and what is there drains.
    drain_delay_seconds: _Seconds = 5.0
    close_seconds: _Seconds = 20.0

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            message = "tls_certificate and tls_key belong together; give both or none"
            raise ValueError(message)
        if self.admin_key is not None and len(self.admin_key) < _LEAST_ADMIN_KEY:
            # An empty one, of a variable that somebody forgot to fill, would be everybody's.
            message = (
                f"admin_key has {len(self.admin_key)} characters; give at least {_LEAST_ADMIN_KEY}, or unset it: "
                f"then nobody is admin"
            )
            raise ValueError(message)
        if self.max_reading_bytes < self.max_body_bytes:
            message = (
                f"max_reading_bytes is {self.max_reading_bytes:,}, below max_body_bytes, {self.max_body_bytes:,}; "
                f"raise the one or lower the other"
            )
            raise ValueError(message)
        if self.default_ack == "spooled" and self.spool is None:
            message = "default_ack is 'spooled', but there is no spool; give its path"
            raise ValueError(message)
        return self

    def decode_limits(self) -> DecodeLimits:
        """Return what one request may ask of the decoders."""
        return DecodeLimits(
            max_records=self.max_records, max_record_bytes=self.max_record_bytes, max_depth=self.max_depth
        )

    def producer_config(self, fairness: FairnessPolicy | None = None) -> Config:
        """Return the producer's options.

        Raises:
            ConfigError: one is out of its bounds.
        """
        letters = self.dead_letters is not None or self.spool is not None
        return Config(
            region=self.region,
            endpoint_url=self.endpoint_url,
            aggregation_enabled=self.aggregation_enabled,
            record_max_buffered_time_ms=self.record_max_buffered_time_ms,
            record_ttl_ms=self.record_ttl_ms,
            max_outstanding_records=self.max_outstanding_records,
            max_outstanding_bytes=self.max_outstanding_bytes,
            fairness=FairnessPolicy() if fairness is None else fairness,
            tiers=TierPolicy(),
            breaker=BreakerPolicy(),
            spool=None if self.spool is None else SpoolOptions(path=self.spool, mode="write_ahead"),
            dead_letters=DeadLetterOptions(path=None if self.spool is not None else self.dead_letters)
            if letters
            else None,
        )


def load_settings(**given: object) -> IngestSettings:
    """Return the settings, `given` before the environment; what is None counts as not given.

    Raises:
        ConfigError: a setting is unknown or out of its bounds; its value is not repeated.
    """
    try:
        return IngestSettings(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    except ValidationError as error:
        reasons = "; ".join(_reason(each, given) for each in error.errors(include_input=False))
        message = f"the gateway's settings do not hold: {reasons}"
        raise ConfigError(message) from None


def unknown_variables(environment: Iterable[str] = os.environ) -> list[str]:
    """Return the variables that look like settings and are none, such as misspelt ones."""
    known = {f"{_PREFIX}{name}".upper() for name in IngestSettings.model_fields}
    return sorted(name for name in environment if name.upper().startswith(_PREFIX) and name.upper() not in known)


def _reason(error: Mapping[str, Any], given: Mapping[str, object]) -> str:
    """Say what is wrong with a setting, by the name that it was given under."""
    if not error["loc"]:
        return str(error.get("ctx", {}).get("error", error["msg"]))
    name = str(error["loc"][0])
    return f"{name if given.get(name) is not None else _PREFIX + name.upper()}: {error['msg']}"
