"""A tenant (its share of the capacity, its rates, its streams), and the directories that find the one of a request.

`TenantDirectory` is what the gateway asks. Two directories without a file are here.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import lru_cache
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, Protocol, get_args

from kpl_core import ConfigError
from kpl_core.options.policy import require_weight
from kpl_core.options.validation import Bound, require_number
from kpl_core.records.user_record import TIERS, Tier

_log: Final = logging.getLogger("kpl_integrations.ingest.tenants")
# At most one warning a minute for each kind of failure, even if every second reload fails.
QUIET_SECONDS: Final = 60.0

Ack = Literal["queued", "spooled", "delivered"]
ACKS: Final[tuple[Ack, ...]] = get_args(Ack)
Signal = Literal["logs", "traces", "metrics"]
SIGNALS: Final[tuple[Signal, ...]] = get_args(Signal)

# The id is used as a flow, a metric label and in log lines, so it has no characters that need escaping.
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")
_ALL: Final = ("*",)
# What `credentials.new_api_key` returns.
_API_KEY: Final = re.compile(r"kpl_[A-Za-z0-9_-]{40,}")
_LONGEST_SHOWN: Final = 24
# A quota, rate x burst, is a number of at most 15 digits in the RateLimit header fields (RFC 9651, section 3.3.1).
_BOUNDS: Final = {
    "records_per_second": Bound(1e-3, 1e9, "records a second", optional=True),
    "bytes_per_second": Bound(1.0, 1e11, "bytes a second", optional=True),
    "burst_seconds": Bound(1e-3, 3_600.0, "seconds of both rates"),
}


def shown(value: str, quoted: str | None = None) -> str:
    """Return a value in quotes for an error message; only its length if it may be a key pasted at the wrong place."""
    if len(value) > _LONGEST_SHOWN or value.startswith("kpl_"):
        return f"a value of {len(value)} characters, which may be a key"
    return repr(value) if quoted is None else quoted


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One tenant's settings. It contains no secret; the directory has the credentials.

    Args:
        id: the name of its flow.
        weight: its share relative to other tenants where they compete.
        tier: "critical" records are evicted last, "bulk" records first.
        records_per_second, bytes_per_second: its rates; None is unlimited. Bytes count data and partition key.
        burst_seconds: how many seconds of its rates it may use at once after a pause.
        streams: globs of the streams it may write to; a glob for ARNs begins with "arn:".
        default_ack: the acknowledgement of requests that do not choose one.
        aggregation: whether its user records may share a Kinesis record.
        trace_records: whether its records carry the trace of their request, if they are JSON objects or CloudEvents.
        otlp_streams: the streams of its logs, traces and metrics, instead of the gateway's.

    Raises:
        ConfigError: a value is out of its range.
    """

    id: str
    weight: float = 1.0
    tier: Tier = "normal"
    records_per_second: float | None = None
    bytes_per_second: float | None = None
    burst_seconds: float = 1.0
    streams: tuple[str, ...] = _ALL
    default_ack: Ack = "queued"
    aggregation: bool = True
    trace_records: bool = False
    otlp_streams: Mapping[Signal, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if _ID.fullmatch(self.id) is None or _API_KEY.fullmatch(self.id) is not None:
            message = (
                f"tenant id is {shown(self.id)}; it must be 1 to 128 ASCII letters, digits and _.:- after a letter or "
                f"digit, and no API key"
            )
            raise ConfigError(message)
        require_weight(f"weight of tenant {self.id}", self.weight)
        self._require_word("tier", self.tier, TIERS)
        self._require_word("ack", self.default_ack, ACKS)
        for name, bound in _BOUNDS.items():
            require_number(f"{name} of tenant {self.id}", getattr(self, name), bound)
        for signal in self.otlp_streams:
            self._require_word("otlp signal", signal, SIGNALS)
        object.__setattr__(self, "otlp_streams", MappingProxyType(dict(self.otlp_streams)))

    def _require_word(self, name: str, value: str, words: tuple[str, ...]) -> None:
        if value not in words:
            message = f"{name} of tenant {self.id} is {shown(value)}; it must be one of {', '.join(words)}"
            raise ConfigError(message)

    def allows(self, stream: str) -> bool:
        """Return True if it may write to `stream`, a name or an ARN; "*" allows every name, "arn:*" every ARN."""
        if self.streams == _ALL and not stream.startswith("arn:"):
            return True
        return _matches(self.streams, stream)


@lru_cache(maxsize=4096)
def _matches(globs: tuple[str, ...], stream: str) -> bool:
    is_arn = stream.startswith("arn:")
    return any(glob.startswith("arn:") == is_arn and _pattern(glob).fullmatch(stream) is not None for glob in globs)


@lru_cache(maxsize=4096)
def _pattern(glob: str) -> re.Pattern[str]:
    return re.compile(translate(glob))


# All clients without credentials together are this tenant.
UNKNOWN_TENANT: Final = Tenant(id="unknown")


class AccessKey(NamedTuple):
    """A tenant's key pair in the AWS form, for SigV4.

    If `session_token` is set, every request must send it. `expires_at` is in seconds since 1970. From then on
    the gateway answers requests with this key as requests with an expired token.
    """

    access_key_id: str
    secret: str
    tenant: Tenant
    session_token: str | None = None
    expires_at: float | None = None

    def __repr__(self) -> str:
        """Leave out the secret and the session token."""
        return f"AccessKey({self.access_key_id!r}, tenant={self.tenant.id!r})"


class TenantDirectory(Protocol):
    """The tenants of a gateway. All methods answer from memory and never wait, except `reload_if_changed`."""

    @property
    def unknown(self) -> Tenant | None:
        """The tenant of all requests without credentials; None rejects such requests."""

    @property
    def verifies(self) -> bool:
        """Whether credentials are checked; if False, every request belongs to `unknown`."""

    def authenticate(self, authorization: str | None) -> Tenant | None:
        """Return the tenant for the value of an Authorization header, or None to answer 401.

        Without the header, return `unknown`. For wrong credentials return None, never `unknown`.
        """

    def access_key(self, access_key_id: str) -> AccessKey | None:
        """Return the SigV4 key pair with this id, or None."""

    def by_id(self, tenant_id: str) -> Tenant | None:
        """Return the tenant with this id, or None."""

    def tenants(self) -> Iterable[Tenant]:
        """Return all known tenants without `unknown`."""

    def reload_if_changed(self) -> bool:
        """Read the source of the tenants again if it changed. Return True if the tenants are now different.

        The gateway calls this in a separate thread every `reload_seconds`. It logs exceptions and calls again.
        """


class OpenTenants:
    """A directory without credentials, for `--local`: all requests belong to one tenant."""

    verifies = False

    def __init__(self, tenant: Tenant) -> None:
        self.unknown: Tenant | None = tenant
        self._tenant = tenant

    def authenticate(self, authorization: str | None) -> Tenant:
        """Return the one tenant."""
        del authorization
        return self._tenant

    def access_key(self, access_key_id: str) -> None:
        """Return None: signatures are not checked."""
        del access_key_id

    def by_id(self, tenant_id: str) -> Tenant | None:
        """Return the one tenant if it has this id."""
        return self._tenant if tenant_id == self._tenant.id else None

    def tenants(self) -> Iterable[Tenant]:
        """Return no tenants: the only one is `unknown`."""
        return ()

    def reload_if_changed(self) -> bool:
        """Return False: nothing is read."""
        return False


class CallableTenants:
    """A directory in which a function of the application identifies the tenant.

    `identify` gets the value of the Authorization header (or None). It returns a `Tenant`, the id of one of
    `tenants`, or None for wrong credentials. An id outside `tenants` belongs to `unknown`, which is one flow;
    without `unknown` such a request is rejected. The function runs in the event loop for every request, so it
    must not wait: keep its data in memory.

    `access_keys` are for clients of the Kinesis protocol.
    """

    verifies = True

    def __init__(
        self,
        identify: Callable[[str | None], Tenant | str | None],
        *,
        tenants: Iterable[Tenant] = (),
        unknown: Tenant | None = None,
        access_keys: Mapping[str, AccessKey] | None = None,
    ) -> None:
        self._identify = identify
        self._tenants = {tenant.id: tenant for tenant in tenants}
        self._access_keys = dict(access_keys or {})
        self.unknown = unknown

    def authenticate(self, authorization: str | None) -> Tenant | None:
        """Call the function; see `TenantDirectory`."""
        found = self._identify(authorization)
        if isinstance(found, str):
            return self._tenants.get(found, self.unknown)
        return found

    def access_key(self, access_key_id: str) -> AccessKey | None:
        """Return the SigV4 key pair with this id, or None."""
        return self._access_keys.get(access_key_id)

    def by_id(self, tenant_id: str) -> Tenant | None:
        """Return the one of `tenants` with this id, or None."""
        return self._tenants.get(tenant_id)

    def tenants(self) -> Iterable[Tenant]:
        """Return `tenants`; the function may return others."""
        return self._tenants.values()

    def reload_if_changed(self) -> bool:
        """Return False: the application keeps its own data up to date."""
        return False


class ReloadFailureLog:
    """Log failed reloads of a directory: each exception type once until a reload succeeds, at most once a minute.

    Instants are in seconds on a monotonic clock.
    """

    __slots__ = ("_logged_at",)

    def __init__(self) -> None:
        self._logged_at: dict[type[Exception], float] = {}

    def failed(self, error: Exception, now: float) -> None:
        """Log an exception of `reload_if_changed`, unless its type was logged already."""
        kind = type(error)
        if kind in self._logged_at:
            return
        self._logged_at[kind] = now
        _log.warning(
            "reloading the tenants failed (%s); the gateway keeps the current tenants and retries",
            kind.__qualname__,
            exc_info=error,
        )

    def succeeded(self, now: float) -> None:
        """Log failures again from now on, once `QUIET_SECONDS` have passed since the last log line."""
        if self._logged_at:
            self._logged_at = {kind: at for kind, at in self._logged_at.items() if now - at < QUIET_SECONDS}
