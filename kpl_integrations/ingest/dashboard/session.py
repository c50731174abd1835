"""Who may look: the admin key, exchanged for a cookie that no script can read; pure.

The cookie is an expiry and its HMAC under the admin key. Nothing is stored, so every worker knows it, and a new
key ends all sessions.
"""

import hmac
from hashlib import sha256
from http.cookies import CookieError, SimpleCookie
from typing import Final

__all__ = ["COOKIE", "Session"]

COOKIE: Final = "kpl_dashboard"
SECONDS: Final = 8 * 3_600


class Session:
    """Makes and checks cookies. Times are seconds since 1970, since a cookie outlives the process."""

    __slots__ = ("_key",)

    def __init__(self, admin_key: str) -> None:
        self._key = admin_key.encode()

    def begin(self, given_key: str, now: float, *, is_secure: bool) -> str | None:
        """Return the `Set-Cookie` of a new session; None if the key is wrong. `is_secure`: the browser speaks TLS."""
        if not hmac.compare_digest(given_key.encode(), self._key):
            return None
        expires_at = str(int(now) + SECONDS)
        secure = "; Secure" if is_secure else ""
        value = f"{expires_at}.{self._mac(expires_at)}"
        # No Path: the browser takes the folder of what it asked, which is right under a prefix unknown here too.
        return f"{COOKIE}={value}; Max-Age={SECONDS}; HttpOnly; SameSite=Strict{secure}"

    def is_open(self, cookie_header: bytes, now: float) -> bool:
        """Say whether the request's `Cookie` is one of ours, and not over."""
        try:
            morsel = SimpleCookie(cookie_header.decode("latin-1")).get(COOKIE)
        except CookieError:
            return False
        expires_at, _, mac = "..".partition(".") if morsel is None else morsel.value.partition(".")
        if not expires_at.isdecimal() or not hmac.compare_digest(mac.encode(), self._mac(expires_at).encode()):
            return False
        return now < int(expires_at)

    def _mac(self, expires_at: str) -> str:
        return hmac.new(self._key, b"kpl dashboard " + expires_at.encode(), sha256).hexdigest()
