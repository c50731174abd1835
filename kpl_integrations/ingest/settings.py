"""The gateway's settings. `settings_sources` takes them from flags, the environment and a file."""

import dataclasses
import os
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import msgspec

from kpl_core import Config, ConfigError, FairnessPolicy
from kpl_core.options.kinesis_limits import MIB
from kpl_core.options.option import Option, check_options
from kpl_integrations.ingest.decoding import DecodeLimits
from kpl_integrations.ingest.tenants import Ack
from kpl_integrations.ingest.tenants.credentials import Secret

# What a gateway's producer has unless a setting says otherwise, by flat name.
PRODUCER_DEFAULTS: Final[dict[str, Any]] = {"max_outstanding_bytes": 128 * MIB, "breaker": True, "tiers": True}
# The same with a spool.
SPOOL_DEFAULTS: Final[dict[str, Any]] = {"spool_mode": "write_ahead", "spool_failure": "bypass", "dead_letters": True}

_LEAST_ADMIN_KEY: Final = 16
# What a browser sends as Origin (RFC 6454, section 7), and a slash that people add. A page in a file has "null".
_ORIGIN: Final = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/?#@*\s]+/?")
_PAGE: Final = re.compile(r"https?://[^\s#]+")
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\s]*)?")
_HOUR: Final = 3_600
_DAY: Final = 86_400


def _require_origins(name: str, value: str) -> None:
    for origin in map(str.strip, value.split(",")):
        if origin and _ORIGIN.fullmatch(origin) is None:
            message = (
                f"{name} has {origin!r}, which is not an origin; write scheme, host and any port of each, such as "
                f"https://shop.example,http://localhost:3000, or * for every page"
            )
            raise ConfigError(message)


def _require_page(name: str, value: str) -> None:
    if _PAGE.fullmatch(value) is None:
        message = f"{name} is {value!r}; give the http or https address of the page, without a # and what follows it"
        raise ConfigError(message)


def _require_key(name: str, key: Secret) -> None:
    if len(key) < _LEAST_ADMIN_KEY:
        # An empty key, from a variable without a value, would admit every client.
        message = (
            f"{name} has {len(key)} characters; give at least {_LEAST_ADMIN_KEY}, or unset it to have no administrator"
        )
        raise ConfigError(message)


def _require_queue(name: str, url: str) -> None:
    if not url.startswith(("https://", "http://")):
        message = f"{name} is {url!r}; it must be the URL of an SQS queue, as `aws sqs get-queue-url` prints it"
        raise ConfigError(message)


def _require_bucket(name: str, place: str) -> None:
    if _BUCKET.fullmatch(place) is None:
        message = f"{name} is {place!r}; it must be a bucket and optionally a prefix, such as 'letters/orders/'"
        raise ConfigError(message)


def default_producer() -> Config:
    """Return the options of a gateway's producer without settings."""
    return Config.from_mapping(PRODUCER_DEFAULTS)


class IngestSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway's settings, and the options of its producer.

    Raises:
        ConfigError: a setting is of a wrong type, out of its bounds, or excludes another one.
    """

    host: Annotated[str, Option("The address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Option("The port; 0 selects a free one.", 0, 65_535, "a port")] = 8080
    tls_certificate: Annotated[Path | None, Option("The certificate chain in PEM.")] = None
    tls_key: Annotated[Path | None, Option("Its private key in PEM.")] = None
    http2: Annotated[bool, Option("Whether clients may speak HTTP/2; HTTP/1.1 is spoken always.")] = True
    forwarded_allow_ips: Annotated[
        str | None,
        Option("The proxies whose X-Forwarded-For and -Proto are trusted: addresses or networks with commas, or *."),
    ] = None
    allowed_hosts: Annotated[
        str | None,
        Option("The Host names that requests may have, with commas, besides loopback names; None: every name."),
    ] = None
    header_seconds: Annotated[
        float, Option("How long a client may take to send a request's head.", 0, _HOUR, "seconds", above=True)
    ] = 10.0
    max_header_bytes: Annotated[int, Option("The most bytes of a request's head.", 1_024, MIB, "bytes")] = 32_768
    body_seconds: Annotated[
        float, Option("How long a client may take to send a body.", 0, _HOUR, "seconds", above=True)
    ] = 30.0
    keep_alive_seconds: Annotated[int, Option("How long an idle connection stays open.", 1, _HOUR, "seconds")] = 75
    max_connections: Annotated[
        int, Option("The most connections of clients to one process.", 1, 1_000_000, "connections")
    ] = 10_000
    cors_origins: Annotated[
        str | None,
        Option("The origins of web pages that may call the gateway, with commas, or *.", check=_require_origins),
    ] = None
    access_log: Annotated[
        float, Option("The share of the requests that the access log names.", 0, 1, "of the requests")
    ] = 0.0
    log_format: Annotated[Literal["text", "json"], Option("The form of all log lines of `kpl serve`.")] = "text"
    workers: Annotated[int, Option("Processes of `kpl serve`; one per core.", 1, 64, "processes")] = 1

    # A PutRecords request may have 10 MiB of data, which is 13.4 MiB of base64.
    max_body_bytes: Annotated[int, Option("The most bytes of a body.", 1_024, 1 << 30, "bytes")] = 16 * MIB
    max_reading_bytes: Annotated[
        int, Option("The most bytes of unfinished bodies of all clients.", 1_024, 1 << 40, "bytes")
    ] = 256 * MIB
    max_inflated_bytes: Annotated[
        int, Option("The most bytes of a body after decompression.", 1_024, 1 << 30, "bytes")
    ] = 16 * MIB
    max_records: Annotated[int, Option("The most records of a request.", 1, 1_000_000, "records in a request")] = 10_000
    max_depth: Annotated[int, Option("The deepest JSON.", 1, 500, "levels of JSON")] = 64
    max_record_bytes: Annotated[int, Option("The most bytes of key and data.", 8_192, 10 * MIB, "bytes")] = MIB
    # At least twice max_record_bytes. Decoding it blocks the gateway for about 5 ms.
    max_uncut_bytes: Annotated[
        int,
        Option(
            "The most text of one record in a large body, and of a body that cannot be cut.", 65_536, 1 << 30, "bytes"
        ),
    ] = 2 * MIB

    tenants: Annotated[Path | None, Option("The TOML file of tenants and their keys; reloaded when it changes.")] = None
    reload_seconds: Annotated[
        float, Option("The time between two looks at the tenants file.", 0, _HOUR, "seconds", above=True)
    ] = 2.0
    admin_key: Annotated[
        Secret | None,
        Option("The key for the figures of all tenants; None: no administrator.", secret=True, check=_require_key),
    ] = None
    runbook_url: Annotated[
        str | None,
        Option("The page that the cards of the dashboard link to; None: no links.", check=_require_page),
    ] = None
    default_ack: Annotated[Ack, Option("The acknowledgement of tenants and requests that select none.")] = "queued"
    idempotency_keys: Annotated[
        int, Option("The most remembered idempotency keys.", 1, 1_000_000, "keys of a tenant")
    ] = 1_000
    idempotency_seconds: Annotated[float, Option("How long an idempotency key is remembered.", 0, _DAY, "seconds")] = (
        600.0
    )

    dead_letters_sqs: Annotated[
        str | None, Option("The URL of an SQS queue that gets the dead letters.", check=_require_queue)
    ] = None
    dead_letters_s3: Annotated[
        str | None,
        Option("The bucket, and any prefix after a slash, that gets the dead letters.", check=_require_bucket),
    ] = None
    opentelemetry_metrics: Annotated[
        bool, Option("Record the producer's metrics with OpenTelemetry's meter provider, too.")
    ] = False
    opentelemetry_traces: Annotated[
        bool, Option("Continue the traces of clients in a span for each request, with OpenTelemetry's tracer provider.")
    ] = False

    drain_delay_seconds: Annotated[
        float, Option("How long it serves while not ready, after SIGTERM.", 0, _DAY, "seconds")
    ] = 5.0
    close_seconds: Annotated[float, Option("How long it then delivers what it accepted.", 0, _DAY, "seconds")] = 20.0

    producer: Config = msgspec.field(default_factory=default_producer)

    def __post_init__(self) -> None:
        """Check every setting, and those that belong together."""
        check_options(self)
        for name, path in (("spool", self.spool), ("dead_letters", self.dead_letters)):
            # Workers would make their numbered files beside it.
            if path is not None and os.path.isdir(path):  # noqa: PTH112 - False for a folder that may not be searched
                message = f"{name} is {str(path)!r}, a folder; name a file in it, such as {str(path / 'spool.db')!r}"
                raise ConfigError(message)
        if (self.tls_certificate is None) != (self.tls_key is None):
            message = "tls_certificate and tls_key belong together; give both or none"
            raise ConfigError(message)
        if self.max_reading_bytes < self.max_body_bytes:
            message = (
                f"max_reading_bytes is {self.max_reading_bytes:,}, below max_body_bytes, {self.max_body_bytes:,}; "
                f"raise max_reading_bytes or lower max_body_bytes"
            )
            raise ConfigError(message)
        places = [name for name in ("dead_letters", "dead_letters_sqs", "dead_letters_s3") if getattr(self, name)]
        if len(places) > 1:
            message = f"{' and '.join(places)} are set; dead letters have one place, so remove all but one"
            raise ConfigError(message)
        if self.default_ack == "spooled" and self.spool is None:
            message = "default_ack is 'spooled', but there is no spool; give its path"
            raise ConfigError(message)

    @property
    def spool(self) -> Path | None:
        """Return the spool's file."""
        return None if self.producer.spool is None else self.producer.spool.file

    @property
    def dead_letters(self) -> Path | None:
        """Return the dead letters' own file."""
        letters = self.producer.dead_letters
        return None if letters is None or letters.path is None else Path(letters.path)

    def decode_limits(self) -> DecodeLimits:
        """Return the decoders' bounds of one request."""
        return DecodeLimits(
            max_records=self.max_records,
            max_record_bytes=self.max_record_bytes,
            max_depth=self.max_depth,
            max_uncut_bytes=max(self.max_uncut_bytes, 2 * self.max_record_bytes),
        )

    def with_producer(self, **options: Any) -> Self:  # noqa: ANN401 - checked by Config
        """Return the settings with other options of the producer."""
        return msgspec.structs.replace(self, producer=dataclasses.replace(self.producer, **options))

    def producer_config(self, fairness: FairnessPolicy | None = None) -> Config:
        """Return the producer's options with a fair queue. `shared_quotas.sharing_of` has the coordination."""
        fair = FairnessPolicy() if fairness is None else fairness
        return dataclasses.replace(self.producer, fairness=fair, coordination=None)
