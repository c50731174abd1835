"""Find the tenant of a request: the interface of the gateway, and two directories without a file."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple, Protocol

from kpl_integrations.ingest.tenants.tenant import Tenant

# At most one warning a minute for each kind of failure, even if every second reload fails.
QUIET_SECONDS: Final = 60.0

_log: Final = logging.getLogger("kpl_integrations.ingest.tenants")


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
