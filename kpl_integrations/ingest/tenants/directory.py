"""Who is asking: the one question the gateway has for its tenants, whoever answers it."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from kpl_integrations.ingest.tenants.tenant import Tenant

__all__ = ["AccessKey", "OpenTenants", "TenantDirectory"]


class AccessKey(NamedTuple):
    """An AWS-style key pair of a tenant, for SigV4.

    `session_token` must come with every request, if there is one. `expires_at` is in seconds since
    1970; from then on the key is answered as an expired token.
    """

    access_key_id: str
    secret: str
    tenant: Tenant
    session_token: str | None = None
    expires_at: float | None = None

    def __repr__(self) -> str:
        """Leave out what nobody may read."""
        return f"AccessKey({self.access_key_id!r}, tenant={self.tenant.id!r})"


class TenantDirectory(Protocol):
    """Answers from memory; nothing here waits."""

    @property
    def unknown(self) -> Tenant | None:
        """The one flow that everybody without credentials shares; None: nobody gets in without."""

    @property
    def verifies(self) -> bool:
        """Whether credentials are looked at; False: everybody is `unknown`, whatever they show."""

    def authenticate(self, authorization: str | None) -> Tenant | None:
        """Return the tenant of an `Authorization` header's value; None: answer 401.

        Without the header it is `unknown`. Wrong credentials are None, never `unknown`.
        """

    def access_key(self, access_key_id: str) -> AccessKey | None:
        """Return a tenant's SigV4 key pair."""

    def by_id(self, tenant_id: str) -> Tenant | None:
        """Return a tenant by its id."""

    def tenants(self) -> Iterable[Tenant]:
        """Return all known ones, `unknown` not among them."""

    def reload_if_changed(self) -> bool:
        """Read what the directory stands on anew if it changed; say whether other tenants hold now.

        It runs in a thread of its own, every `reload_seconds`. Whatever it raises is logged, and it is called again.
        """


class OpenTenants:
    """No credentials at all, for `--local`: everybody is one tenant."""

    verifies = False

    def __init__(self, tenant: Tenant) -> None:
        self.unknown: Tenant | None = tenant
        self._tenant = tenant

    def authenticate(self, authorization: str | None) -> Tenant:
        """Return the one tenant."""
        del authorization
        return self._tenant

    def access_key(self, access_key_id: str) -> None:
        """Return None: signatures are not looked at."""
        del access_key_id

    def by_id(self, tenant_id: str) -> Tenant | None:
        """Return the one tenant if it is that."""
        return self._tenant if tenant_id == self._tenant.id else None

    def tenants(self) -> Iterable[Tenant]:
        """Return none: nobody is known."""
        return ()

    def reload_if_changed(self) -> bool:
        """Return False: there is nothing to read."""
        return False
