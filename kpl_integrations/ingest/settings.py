"""The settings of the gateway: from arguments, else from the environment as KPL_INGEST_..., else the default."""

import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import SecretStr, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from kpl_core import BreakerPolicy, Config, ConfigError, DeadLetterOptions, FairnessPolicy, SpoolOptions, TierPolicy
from kpl_core.options.config import WirePath
from kpl_core.options.kinesis_limits import MIB
from kpl_core.options.validation import Bound, require_endpoint_url, require_number, require_region
from kpl_integrations.ingest.decoding import DecodeLimits
from kpl_integrations.ingest.tenants import Ack
from kpl_integrations.ingest.tenants.tenants_file import SecretReference

_PREFIX: Final = "KPL_INGEST_"

_LEAST_ADMIN_KEY: Final = 16
# What a browser sends as Origin (RFC 6454, section 7), and a slash that people add. A page in a file has "null".
_ORIGIN: Final = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/?#@*\s]+/?")
_HOUR: Final = 3_600
_DAY: Final = 86_400


class IngestSettings(BaseSettings):
    """The gateway's settings. Sizes are in bytes, durations in seconds unless a name says milliseconds."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, frozen=True, extra="forbid")

    # The address, and the time limits of one client.
    host: str = "127.0.0.1"
    port: Annotated[int, Bound(0, 65_535, "", whole=True)] = 8080
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    # The proxies whose X-Forwarded-For and -Proto are trusted: addresses or networks with commas; "*" trusts all.
    forwarded_allow_ips: str | None = None
    # The Host names that requests may have, with commas; loopback names are always allowed. None allows every name.
    allowed_hosts: str | None = None
    header_seconds: Annotated[float, Bound(0, _HOUR, "seconds", above=True)] = 10.0
    max_header_bytes: Annotated[int, Bound(1_024, MIB, "bytes", whole=True)] = 32_768
    body_seconds: Annotated[float, Bound(0, _HOUR, "seconds", above=True)] = 30.0
    keep_alive_seconds: Annotated[int, Bound(1, _HOUR, "seconds", whole=True)] = 75
    max_connections: Annotated[int, Bound(1, 1_000_000, "", whole=True)] = 10_000
    # The origins of web pages that may call the gateway from a browser, with commas; "*" allows every page.
    cors_origins: str | None = None
    # The share of the requests that the access log names, and the form of all log lines of `kpl serve`.
    access_log: Annotated[float, Bound(0, 1, "of the requests")] = 0.0
    log_format: Literal["text", "json"] = "text"
    # Answer complete requests inside uvicorn's protocol, if the installed uvicorn is supported.
    fast_path: bool = True

    # Processes of `kpl serve`. A gateway inside an application always has one.
    workers: Annotated[int, Bound(1, 64, "processes", whole=True)] = 1
    # The URL of the store in which several gateways share tenants' rates and shards' limits, or a file that contains
    # it; and how many processes of all these gateways may ever run at the same time.
    coordination: SecretStr | None = None
    coordination_file: Path | None = None
    coordination_workers: Annotated[int, Bound(1, 1_000_000, "processes", whole=True)] = 64

    # Bounds of a request. A PutRecords request may have 10 MiB of data, which is 13.4 MiB of base64.
    max_body_bytes: Annotated[int, Bound(1_024, 1 << 30, "bytes", whole=True)] = 16 * MIB
    # Unfinished bodies of all clients together.
    max_reading_bytes: Annotated[int, Bound(1_024, 1 << 40, "bytes", whole=True)] = 256 * MIB
    max_inflated_bytes: Annotated[int, Bound(1_024, 1 << 30, "bytes", whole=True)] = 16 * MIB
    max_records: Annotated[int, Bound(1, 1_000_000, "records in a request", whole=True)] = 10_000
    max_depth: Annotated[int, Bound(1, 500, "levels of JSON", whole=True)] = 64
    max_record_bytes: Annotated[int, Bound(8_192, 10 * MIB, "bytes", whole=True)] = MIB
    # The text of one record in a large body, and of a body that cannot be cut into records; at least twice
    # max_record_bytes. Decoding it blocks the gateway for about 5 ms.
    max_uncut_bytes: Annotated[int, Bound(65_536, 1 << 30, "bytes", whole=True)] = 2 * MIB

    # Tenants and keys.
    tenants: Path | None = None
    reload_seconds: Annotated[float, Bound(0, _HOUR, "seconds", above=True)] = 2.0
    admin_key: SecretStr | None = None
    default_ack: Ack = "queued"
    idempotency_keys: Annotated[int, Bound(1, 1_000_000, "keys of a tenant", whole=True)] = 1_000
    idempotency_seconds: Annotated[float, Bound(0, _DAY, "seconds")] = 600.0

    # Kinesis, and the buffer in memory; the spool and dead letters are on disk.
    region: str | None = None
    endpoint_url: str | None = None
    max_outstanding_records: Annotated[int, Bound(1, math.inf, "records", whole=True)] = 100_000
    max_outstanding_bytes: Annotated[int, Bound(1, math.inf, "bytes", whole=True)] = 128 * MIB
    record_ttl_ms: Annotated[float, Bound(100, 1e12, "milliseconds")] = 30_000
    record_max_buffered_time_ms: Annotated[float, Bound(0, 1e12, "milliseconds")] = 100
    aggregation_enabled: bool = True
    # How PutRecords requests are encoded: "fast" and "stock" are JSON, "cbor" needs no Base64.
    wire_path: WirePath = "fast"
    spool: Path | None = None
    # While the spool cannot store: send queued and delivered records straight to Kinesis, or refuse all.
    spool_failure: Literal["bypass", "refuse"] = "bypass"
    dead_letters: Path | None = None

    # Shutdown: not ready for `drain_delay_seconds`, then no new records, and `close_seconds` to deliver the others.
    drain_delay_seconds: Annotated[float, Bound(0, _DAY, "seconds")] = 5.0
    close_seconds: Annotated[float, Bound(0, _DAY, "seconds")] = 20.0

    @field_validator("*")
    @classmethod
    def _within_bounds(cls, value: Any, info: ValidationInfo) -> Any:  # noqa: ANN401 - of the setting's own type
        name = str(info.field_name)
        for bound in cls.model_fields[name].metadata:
            if isinstance(bound, Bound):
                require_number(name, value, bound, error=ValueError)
        return value

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, value: str | None) -> str | None:
        for origin in map(str.strip, (value or "").split(",")):
            if origin and _ORIGIN.fullmatch(origin) is None:
                message = (
                    f"{origin!r} is not an origin; write scheme, host and any port of each, such as "
                    f"https://shop.example,http://localhost:3000, or * for every page"
                )
                raise ValueError(message)
        return value

    @field_validator("endpoint_url", "region")
    @classmethod
    def _is_usable(cls, value: str | None, info: ValidationInfo) -> str | None:
        # Here too, because the repr of the settings shows them.
        if value is not None:
            (require_region if info.field_name == "region" else require_endpoint_url)(str(info.field_name), value)
        return value

    @field_validator("spool", "dead_letters")
    @classmethod
    def _is_no_folder(cls, value: Path | None) -> Path | None:
        # Workers would make their numbered files beside it.
        if value is not None and os.path.isdir(value):  # noqa: PTH112 - False for a folder that may not be searched
            message = f"{str(value)!r} is a folder; name a file in it, such as {str(value / 'spool.db')!r}"
            raise ValueError(message)
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            message = "tls_certificate and tls_key belong together; give both or none"
            raise ValueError(message)
        if self.admin_key is not None and len(self.admin_key) < _LEAST_ADMIN_KEY:
            # An empty key, from a variable without a value, would admit every client.
            message = (
                f"admin_key has {len(self.admin_key)} characters; give at least {_LEAST_ADMIN_KEY}, or unset it to "
                f"have no administrator"
            )
            raise ValueError(message)
        if self.max_reading_bytes < self.max_body_bytes:
            message = (
                f"max_reading_bytes is {self.max_reading_bytes:,}, below max_body_bytes, {self.max_body_bytes:,}; "
                f"raise max_reading_bytes or lower max_body_bytes"
            )
            raise ValueError(message)
        if self.coordination is not None and self.coordination_file is not None:
            message = "coordination and coordination_file are both set; give one of them"
            raise ValueError(message)
        if self.default_ack == "spooled" and self.spool is None:
            message = "default_ack is 'spooled', but there is no spool; give its path"
            raise ValueError(message)
        return self

    def coordination_url(self) -> str | None:
        """Return the URL of the store that several gateways share, which may contain a password.

        Raises:
            ConfigError: the file is empty, cannot be read, or lets other users read it.
        """
        if self.coordination_file is not None:
            return SecretReference("the URL of the coordination store", None, self.coordination_file).read({})
        return None if self.coordination is None else self.coordination.get_secret_value()

    def decode_limits(self) -> DecodeLimits:
        """Return the decoders' bounds of one request."""
        return DecodeLimits(
            max_records=self.max_records,
            max_record_bytes=self.max_record_bytes,
            max_depth=self.max_depth,
            max_uncut_bytes=max(self.max_uncut_bytes, 2 * self.max_record_bytes),
        )

    def producer_config(self, fairness: FairnessPolicy | None = None) -> Config:
        """Return the producer's options.

        Raises:
            ConfigError: an option is out of its bounds.
        """
        letters = self.dead_letters is not None or self.spool is not None
        return Config(
            region=self.region,
            endpoint_url=self.endpoint_url,
            aggregation_enabled=self.aggregation_enabled,
            wire_path=self.wire_path,
            record_max_buffered_time_ms=self.record_max_buffered_time_ms,
            record_ttl_ms=self.record_ttl_ms,
            max_outstanding_records=self.max_outstanding_records,
            max_outstanding_bytes=self.max_outstanding_bytes,
            fairness=FairnessPolicy() if fairness is None else fairness,
            tiers=TierPolicy(),
            breaker=BreakerPolicy(),
            spool=None
            if self.spool is None
            else SpoolOptions(path=self.spool, mode="write_ahead", failure=self.spool_failure),
            dead_letters=DeadLetterOptions(path=None if self.spool is not None else self.dead_letters)
            if letters
            else None,
        )


def load_settings(**given: object) -> IngestSettings:
    """Return the settings. `given` has precedence over the environment; None counts as not given.

    Raises:
        ConfigError: a setting is unknown or invalid. The message repeats no value that may be a secret.
    """
    try:
        return IngestSettings(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    except ValidationError as error:
        reasons = "; ".join(_reason(each, given) for each in error.errors(include_input=False))
        message = f"invalid settings of the gateway: {reasons}"
        raise ConfigError(message) from None


def unknown_variables(environment: Iterable[str] = os.environ) -> list[str]:
    """Return the environment variables that look like settings but are not, such as misspelt ones."""
    known = {f"{_PREFIX}{name}".upper() for name in IngestSettings.model_fields}
    return sorted(name for name in environment if name.upper().startswith(_PREFIX) and name.upper() not in known)


def _reason(error: Mapping[str, Any], given: Mapping[str, object]) -> str:
    """Return what is wrong with a setting, under the name that the caller used."""
    reason = str(error.get("ctx", {}).get("error", error["msg"]))
    if not error["loc"]:
        return reason
    name = str(error["loc"][0])
    shown = name if given.get(name) is not None else _PREFIX + name.upper()
    # The checker's sentences start with the option's name, pydantic's do not.
    return shown + (reason.removeprefix(name) if reason.startswith(f"{name} ") else f": {reason}")
