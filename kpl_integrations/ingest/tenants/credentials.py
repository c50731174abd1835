"""Credentials in the Authorization header: bearer keys of tenants and of the administrator.

One rule for both (RFC 9110, section 11.1; RFC 6750, section 2.1): the scheme is `Bearer` in any letter case,
followed by one or more spaces and the key. A key without the scheme is rejected.

A tenant's API key has 256 random bits. Only the tenant keeps it; the gateway keeps its SHA-256. A fast hash is
right for random keys, because 2**256 of them cannot be tried. (It would be wrong for passwords.)
"""

import secrets
from collections.abc import Iterable, Mapping
from hashlib import sha256
from hmac import compare_digest
from typing import Final

from kpl_core import ConfigError
from kpl_integrations.ingest.tenants.tenant import Tenant

KEY_PREFIX: Final = "kpl_"
STORED_PREFIX: Final = "sha256:"
_SCHEME: Final = "bearer"
_KEY_BYTES: Final = 32
_DIGEST_HEX_DIGITS: Final = 64
_LONGEST_KEY: Final = 512
# Digests are indexed by these first bytes; the whole digest is then compared in constant time.
_INDEX_BYTES: Final = 8


def bearer_key(authorization: str | None) -> str | None:
    """Return the key in the value of an Authorization header; None if it has another scheme or no key."""
    if authorization is None:
        return None
    scheme, _, key = authorization.strip().partition(" ")
    return key.strip() or None if scheme.lower() == _SCHEME else None


def new_api_key() -> str:
    """Return a new key: "kpl_" and 256 random bits in URL-safe base64."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def stored_key(api_key: str) -> str:
    """Return the form of a key in a tenants file: "sha256:" and 64 hexadecimal digits."""
    return STORED_PREFIX + sha256(api_key.encode()).hexdigest()


def parse_stored_key(stored: str) -> bytes:
    """Return the digest of a key in a tenants file.

    Raises:
        ConfigError: it is not a digest. The message does not repeat it, because it may be the key itself.
    """
    digits = stored.removeprefix(STORED_PREFIX)
    try:
        digest = bytes.fromhex(digits)
    except ValueError:
        digest = b""
    if not stored.startswith(STORED_PREFIX) or len(digits) != _DIGEST_HEX_DIGITS or len(digest) != _KEY_BYTES:
        message = (
            f"an API key is not {STORED_PREFIX!r} and {_DIGEST_HEX_DIGITS} hexadecimal digits; "
            f"never store the key itself, but the output of `kpl keys new` or `kpl keys hash`"
        )
        raise ConfigError(message)
    return digest


class ApiKeys:
    """Find the tenant of a key with one hash and one lookup, for any number of tenants.

    Raises:
        ConfigError: two tenants have the same key.
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
        """Return the tenant with this key, or None."""
        if len(api_key) > _LONGEST_KEY:
            return None
        digest = sha256(api_key.encode("utf-8", "surrogatepass")).digest()
        found = self._tenants.get(digest[:_INDEX_BYTES])
        return found[1] if found is not None and compare_digest(found[0], digest) else None

    def __len__(self) -> int:
        return len(self._tenants)

    def __repr__(self) -> str:
        """Show the number of keys, but no digests."""
        return f"<ApiKeys, {len(self._tenants)}>"


class Secret:
    """A text that no repr, log line or error shows."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the text."""
        return self._text

    def __len__(self) -> int:
        return len(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and compare_digest(self._text.encode(), other._text.encode())

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return "Secret('***')"


class AdminKey:
    """The key that gives access to the figures of all tenants. Without one, there is no administrator.

    The comparison takes constant time. The key is not part of the repr.
    """

    __slots__ = ("_key",)

    def __init__(self, key: Secret | None) -> None:
        self._key = None if key is None else key.reveal().encode()

    def is_shown(self, headers: Mapping[bytes, bytes]) -> bool:
        """Return True if the Authorization header has this key as its bearer key."""
        if self._key is None:
            return False
        # UTF-8, so that a key outside ASCII matches; undecodable bytes match no key.
        shown = bearer_key(headers.get(b"authorization", b"").decode("utf-8", "replace"))
        return shown is not None and compare_digest(shown.encode(), self._key)

    def __repr__(self) -> str:
        return "<AdminKey>" if self._key is not None else "<AdminKey, none>"
