"""API keys: 256 random bits that only the tenant keeps; the gateway keeps their SHA-256.

A fast hash is right for such keys: nobody tries 2**256 of them. (It would be wrong for passwords.)
"""

import secrets
from collections.abc import Iterable
from hashlib import sha256
from hmac import compare_digest
from typing import Final

from kpl_core import ConfigError
from kpl_integrations.ingest.tenants.tenant import Tenant

__all__ = ["ApiKeys", "new_api_key", "parse_stored_key", "stored_key"]

KEY_PREFIX: Final = "kpl_"
STORED_PREFIX: Final = "sha256:"
_KEY_BYTES: Final = 32
_DIGEST_HEX_DIGITS: Final = 64
_LONGEST_KEY: Final = 512
# By what a digest is found; the rest of it is compared in constant time.
_INDEX_BYTES: Final = 8


def new_api_key() -> str:
    """Return a key: "kpl_" and 256 random bits in URL-safe base64."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def stored_key(api_key: str) -> str:
    """Return what a tenants file keeps of a key: "sha256:" and 64 hexadecimal digits."""
    return STORED_PREFIX + sha256(api_key.encode()).hexdigest()


def parse_stored_key(stored: str) -> bytes:
    """Return the digest in a tenants file.

    Raises:
        ConfigError: it is none. The message does not repeat it: it may be a key somebody put there whole.
    """
    digits = stored.removeprefix(STORED_PREFIX)
    try:
        digest = bytes.fromhex(digits)
    except ValueError:
        digest = b""
    if not stored.startswith(STORED_PREFIX) or len(digits) != _DIGEST_HEX_DIGITS or len(digest) != _KEY_BYTES:
        message = (
            f"an API key is no {STORED_PREFIX!r} and {_DIGEST_HEX_DIGITS} hexadecimal digits; "
            f"never store the key itself, but what `kpl keys new` or `kpl keys hash` prints for it"
        )
        raise ConfigError(message)
    return digest


class ApiKeys:
    """Finds the tenant of a presented key: one hash and one lookup, however many there are.

    Raises:
        ConfigError: one key belongs to two tenants.
    """

    __slots__ = ("_tenants",)

    def __init__(self, keys: Iterable[tuple[bytes, Tenant]]) -> None:
        self._tenants: dict[bytes, tuple[bytes, Tenant]] = {}
        for digest, tenant in keys:
            known = self._tenants.setdefault(digest[:_INDEX_BYTES], (digest, tenant))
            if known[1].id != tenant.id:
                message = f"tenants {known[1].id} and {tenant.id} have the same API key; make one for each"
                raise ConfigError(message)

    def tenant_of(self, api_key: str) -> Tenant | None:
        """Return whose key it is."""
        if len(api_key) > _LONGEST_KEY:
            return None
        digest = sha256(api_key.encode("utf-8", "surrogatepass")).digest()
        found = self._tenants.get(digest[:_INDEX_BYTES])
        return found[1] if found is not None and compare_digest(found[0], digest) else None

    def __len__(self) -> int:
        return len(self._tenants)

    def __repr__(self) -> str:
        """Count them; not even digests are shown."""
        return f"<ApiKeys, {len(self._tenants)}>"
