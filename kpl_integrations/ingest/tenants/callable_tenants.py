"""Tenants that the application knows: a function of its own decides who is asking."""

from collections.abc import Callable, Iterable, Mapping

from kpl_integrations.ingest.tenants.directory import AccessKey
from kpl_integrations.ingest.tenants.tenant import Tenant

__all__ = ["CallableTenants"]


class CallableTenants:
    """A directory over a function from the `Authorization` header's value (or None) to who it is.

    It answers a `Tenant`, the id of one of `tenants`, or None for wrong credentials. An id that is none of them
    belongs to `unknown`: all such share one flow; without `unknown` they are refused. The function runs in the
    event loop for every request, so it must not wait: keep what it needs in memory.

    `access_keys` are for clients that speak the Kinesis protocol.
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
        """Ask the function; see `TenantDirectory`."""
        found = self._identify(authorization)
        if isinstance(found, str):
            return self._tenants.get(found, self.unknown)
        return found

    def access_key(self, access_key_id: str) -> AccessKey | None:
        """Return a tenant's SigV4 key pair."""
        return self._access_keys.get(access_key_id)

    def by_id(self, tenant_id: str) -> Tenant | None:
        """Return one of `tenants`."""
        return self._tenants.get(tenant_id)

    def tenants(self) -> Iterable[Tenant]:
        """Return `tenants`; those the function makes are not known before they come."""
        return self._tenants.values()

    def reload_if_changed(self) -> bool:
        """Return False: what the function knows is its own business."""
        return False
