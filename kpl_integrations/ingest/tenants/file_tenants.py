"""Tenants from a file that may change while the gateway runs."""

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from kpl_core import ConfigError
from kpl_integrations.ingest.tenants.authorization import bearer_key
from kpl_integrations.ingest.tenants.directory import AccessKey
from kpl_integrations.ingest.tenants.tenant import Ack, Tenant
from kpl_integrations.ingest.tenants.tenants_file import TenantTable, parse_tenants

__all__ = ["FileTenants"]

_logger: Final = logging.getLogger("kpl_integrations.ingest.tenants")

# Path, modification time, size and inode of each file; zeros for one that is not there.
_Signature = tuple[tuple[str, int, int, int], ...]


class FileTenants:
    """A directory of the tenants in a TOML file; call `reload_if_changed` every few seconds.

    A file that cannot be used changes nothing: the tenants stay, `problem` says why, and one warning is logged.

    Raises:
        ConfigError: at the start there are no tenants to stay with, so a file that cannot be used raises.
    """

    verifies = True

    def __init__(self, path: Path, *, environment: Mapping[str, str] = os.environ, default_ack: Ack = "queued") -> None:
        self._path = path
        self._environment = environment
        self._default_ack = default_ack
        self._seen = _signature([path])
        self._table = self._read()
        self._seen = _signature(self._files())
        self.problem: str | None = None

    @property
    def unknown(self) -> Tenant | None:
        """The flow of everybody without credentials, if the file has [unknown]."""
        return self._table.unknown

    def authenticate(self, authorization: str | None) -> Tenant | None:
        """Return the tenant of `Bearer <API key>`; see `TenantDirectory`."""
        if authorization is None:
            return self._table.unknown
        key = bearer_key(authorization)
        return None if key is None else self._table.api_keys.tenant_of(key)

    def access_key(self, access_key_id: str) -> AccessKey | None:
        """Return a tenant's SigV4 key pair."""
        return self._table.access_keys.get(access_key_id)

    def by_id(self, tenant_id: str) -> Tenant | None:
        """Return a tenant by its id."""
        return self._table.tenants.get(tenant_id)

    def tenants(self) -> Iterable[Tenant]:
        """Return all tenants of the file."""
        return self._table.tenants.values()

    def reload_if_changed(self) -> bool:
        """Look whether the file, or one with a secret, changed; read it if so.

        Blocks for as long as that takes, half a second for 10,000 tenants; it may run in another thread, because
        requests see the old tenants or the new ones, never a part of them.
        """
        seen = _signature(self._files())
        if seen == self._seen:
            return False
        # What changes from here on is seen by the next look.
        self._seen = seen
        try:
            table = self._read()
        except ConfigError as error:
            self.problem = str(error)
            _logger.warning("%s; the tenants stay as they are", error)
            return False
        self._table = table
        self._seen = seen if set(self._files()) == {Path(path) for path, *_ in seen} else _signature(self._files())
        self.problem = None
        _logger.info("%d tenants read from %s", len(table.tenants), self._path)
        return True

    def _files(self) -> list[Path]:
        return [self._path, *self._table.secret_files]

    def _read(self) -> TenantTable:
        try:
            text = self._path.read_text(encoding="utf-8")
            return parse_tenants(
                text, environment=self._environment, folder=self._path.parent, default_ack=self._default_ack
            )
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
            message = f"tenants file {self._path} cannot be read: {reason}"
            raise ConfigError(message) from None
        except ConfigError as error:
            message = f"tenants file {self._path} cannot be used: {error}"
            raise ConfigError(message) from None

    def __repr__(self) -> str:
        return f"<FileTenants {self._path}: {self._table!r}>"


def _signature(paths: Iterable[Path]) -> _Signature:
    return tuple((str(path), *_identity(path)) for path in paths)


def _identity(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0, 0)
    return (status.st_mtime_ns, status.st_size, status.st_ino)
