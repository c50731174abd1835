"""Exchange the admin key for a cookie. Pure."""

import hmac
from hashlib import sha256
from typing import Final

COOKIE: Final = "kpl_dashboard"
_COOKIE_NAME: Final = COOKIE.encode()
SECONDS: Final = 8 * 3_600


def _cookie_value(cookie_header: bytes) -> str:
    """Return the value of our cookie, or "". `http.cookies` takes quadratic time for some headers (CPython 3.11)."""
    for pair in cookie_header.split(b";"):
        name, _, value = pair.strip().partition(b"=")
        if name == _COOKIE_NAME:
            return value.strip(b'"').decode("latin-1")
    return ""


class DashboardSession:
    """Create and verify cookies. Times are seconds since 1970, because a cookie outlives the process.

    A cookie is an expiration time and its HMAC with the admin key. Scripts cannot read the cookie. Nothing is stored,
    so all workers accept it, and a new admin key ends all sessions.
    """

    def __init__(self, admin_key: str) -> None:
        self._key = admin_key.encode()

    def begin(self, given_key: str, now: float, *, is_secure: bool) -> str | None:
        """Return the `Set-Cookie` of a new session, or None for a wrong key. `is_secure`: the browser uses TLS."""
        if not hmac.compare_digest(given_key.encode(), self._key):
            return None
        expires_at = str(int(now) + SECONDS)
        secure = "; Secure" if is_secure else ""
        value = f"{expires_at}.{self._mac(expires_at)}"
        # Without Path the browser uses the folder of the requested URL, which is correct under an unknown prefix too.
        return f"{COOKIE}={value}; Max-Age={SECONDS}; HttpOnly; SameSite=Strict{secure}"

    def is_open(self, cookie_header: bytes, now: float) -> bool:
        """Return True if the request's `Cookie` header has a valid cookie that is not expired."""
        expires_at, _, mac = _cookie_value(cookie_header).partition(".")
        if not expires_at.isdecimal() or not hmac.compare_digest(mac.encode(), self._mac(expires_at).encode()):
            return False
        return now < int(expires_at)

    def _mac(self, expires_at: str) -> str:
        return hmac.new(self._key, b"kpl dashboard " + expires_at.encode(), sha256).hexdigest()
