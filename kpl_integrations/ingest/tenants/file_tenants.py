"""A directory of the tenants in a file, which may change while the gateway runs."""

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from kpl_core import ConfigError
from kpl_integrations.ingest.file_states import file_states
from kpl_integrations.ingest.tenants.credentials import bearer_key
from kpl_integrations.ingest.tenants.tenant import AccessKey, Ack, Tenant
from kpl_integrations.ingest.tenants.tenants_file import (
    TenantTable,
    parse_tenants,
    read_checked,
    require_not_writable_by_others,
)

_logger: Final = logging.getLogger("kpl_integrations.ingest.tenants")


class FileTenants:
    """A directory of the tenants in a TOML file. Call `reload_if_changed` every few seconds.

    If the changed file is invalid, the current tenants stay, `problem` has the reason, and a warning is logged once for
    each reason.

    Without `has_spool`, a tenant whose requests would ask for a spool by default makes the file invalid.

    Raises:
        ConfigError: the file is invalid at the start.
    """

    verifies = True

    def __init__(
        self,
        path: Path,
        *,
        environment: Mapping[str, str] = os.environ,
        default_ack: Ack = "queued",
        has_spool: bool = True,
    ) -> None:
        self._path = path
        self._environment = environment
        self._default_ack = default_ack
        self._has_spool = has_spool
        self._seen = file_states([path])
        self._table = self._read()
        self._seen = file_states(self._files())
        self.problem: str | None = None

    @property
    def unknown(self) -> Tenant | None:
        """The tenant of all requests without credentials, if the file has [unknown]."""
        return self._table.unknown

    def authenticate(self, authorization: str | None) -> Tenant | None:
        """Return the tenant of `Bearer <API key>`; see `TenantDirectory`."""
        if authorization is None:
            return self._table.unknown
        key = bearer_key(authorization)
        return None if key is None else self._table.api_keys.tenant_of(key)

    def access_key(self, access_key_id: str) -> AccessKey | None:
        """Return the SigV4 key pair with this id, or None."""
        return self._table.access_keys.get(access_key_id)

    def by_id(self, tenant_id: str) -> Tenant | None:
        """Return the tenant with this id, or None."""
        return self._table.tenants.get(tenant_id)

    def tenants(self) -> Iterable[Tenant]:
        """Return all tenants of the file."""
        return self._table.tenants.values()

    def reload_if_changed(self) -> bool:
        """Read the file again if it or a file with a secret changed, or if it could not be used the last time.

        Blocks while it reads, about 0.5 s for 10,000 tenants. It may run in another thread: requests see either
        all old or all new tenants.
        """
        seen = file_states(self._files())
        # What made the file invalid may be elsewhere: in its mode, or in a secret file that no tenant had before.
        if seen == self._seen and self.problem is None:
            return False
        # The next call sees changes from here on.
        self._seen = seen
        try:
            table = self._read()
        except ConfigError as error:
            if str(error) != self.problem:
                _logger.warning("%s; the gateway keeps the current tenants", error)
            self.problem = str(error)
            return False
        self._table = table
        self._seen = seen if set(self._files()) == {Path(path) for path, *_ in seen} else file_states(self._files())
        self.problem = None
        _logger.info("read %d tenants from %s", len(table.tenants), self._path)
        return True

    def _files(self) -> list[Path]:
        return [self._path, *self._table.secret_files]

    def _read(self) -> TenantTable:
        text = read_checked(self._path, "the list of tenants", require_not_writable_by_others)
        try:
            table = parse_tenants(
                text, environment=self._environment, folder=self._path.parent, default_ack=self._default_ack
            )
            if not self._has_spool:
                _reject_spooled(table)
        except ConfigError as error:
            message = f"tenants file {self._path} cannot be used: {error}"
            raise ConfigError(message) from None
        return table

    def __repr__(self) -> str:
        return f"<FileTenants {self._path}: {self._table!r}>"


def _reject_spooled(table: TenantTable) -> None:
    for tenant in (*table.tenants.values(), table.unknown):
        if tenant is not None and tenant.default_ack == "spooled":
            message = (
                f"tenant {tenant.id} has ack = 'spooled', and this gateway has no spool; start it with --spool FILE, "
                f"or choose queued or delivered"
            )
            raise ConfigError(message)
