"""What an endpoint's URL must be, and what of it may be shown: a password in it is nobody's business."""

import re
from typing import Final
from urllib.parse import SplitResult, urlsplit

from kpl_core.errors import ConfigError

__all__ = ["require_endpoint_url", "without_passwords"]

# "user:password@" of any URL in a text; an @ in a password that was not escaped belongs to it.
_USER: Final = re.compile(r"(?<=://)[^/?#\s\"']*@")


def without_passwords(text: str) -> str:
    """Return a text with "***" for the user and password of every URL in it."""
    return _USER.sub("***@", text)


def _parts(url: str) -> SplitResult | None:
    """Return the parts of a URL that requests can be sent to, None if it is none."""
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return None
    return parts if is_one else None


def require_endpoint_url(name: str, url: str) -> None:
    """Check that requests can be sent to `url`; `name` is the option's.

    Raises:
        ConfigError: its scheme is neither http nor https, it names no host, its port is none, or it
            names a user: that would be sent in the header in which the signature stands.
    """
    parts = _parts(url)
    if parts is None:
        message = (
            f"{name} is {without_passwords(url)!r}; it must be http:// or https://, a host, and perhaps a port, "
            f"as in 'http://127.0.0.1:4567'"
        )
        raise ConfigError(message)
    if parts.username is not None or parts.password is not None:
        message = (
            f"{name} is {without_passwords(url)!r}, with a user or a password; a signed request has no place for "
            f"them, so leave them out"
        )
        raise ConfigError(message)
