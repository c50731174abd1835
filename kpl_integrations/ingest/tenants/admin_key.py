"""The key of those who may see all tenants; without one nobody may."""

from collections.abc import Mapping
from hmac import compare_digest

from pydantic import SecretStr

__all__ = ["AdminKey"]


class AdminKey:
    """Compares in constant time, and shows itself to nobody."""

    __slots__ = ("_key",)

    def __init__(self, key: SecretStr | None) -> None:
        self._key = None if key is None else key.get_secret_value().encode()

    def is_shown(self, headers: Mapping[bytes, bytes]) -> bool:
        """Say whether these header fields show the key as `Authorization: Bearer`."""
        if self._key is None:
            return False
        return compare_digest(headers.get(b"authorization", b"").removeprefix(b"Bearer "), self._key)

    def __repr__(self) -> str:
        return "<AdminKey>" if self._key is not None else "<AdminKey, none>"
