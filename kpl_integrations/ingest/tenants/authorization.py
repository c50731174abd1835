"""The `Authorization` header of the native routes: `Bearer` and an API key."""

from typing import Final

__all__ = ["bearer_key"]

_SCHEME: Final = "bearer"


def bearer_key(authorization: str) -> str | None:
    """Return the key in a header's value; None if it is of another scheme (RFC 6750, section 2.1)."""
    scheme, _, key = authorization.strip().partition(" ")
    return key.strip() or None if scheme.lower() == _SCHEME else None
