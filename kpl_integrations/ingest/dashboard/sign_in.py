"""Exchange the admin key for a cookie, and limit the attempts to guess the key. Pure."""

import hmac
import ipaddress
import math
from collections import OrderedDict
from hashlib import sha256
from typing import Final

from kpl_core.pipeline.token_bucket import TokenBucket

COOKIE: Final = "kpl_dashboard"
_COOKIE_NAME: Final = COOKIE.encode()
SECONDS: Final = 8 * 3_600
# Wrong keys of one address: a burst, then one every so many seconds. And of all addresses together.
AT_ONCE: Final = 5
SECONDS_EACH: Final = 12.0
ALL_AT_ONCE: Final = 100
ALL_PER_SECOND: Final = 10.0
_MOST_ADDRESSES: Final = 10_000
_IPV6_NETWORK_BITS: Final = 64


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


class LoginAttempts:
    """Limit wrong keys by address and in total. Each process counts on its own.

    An IPv6 client usually has a whole /64 network, so that counts as one address. The number of addresses is bounded
    and the oldest is evicted; the limit in total holds regardless of evictions.
    """

    def __init__(self, now: float) -> None:
        self._all = TokenBucket([(ALL_PER_SECOND, ALL_AT_ONCE)], now=now)
        self._by_address: OrderedDict[str, TokenBucket] = OrderedDict()

    def wait_seconds(self, address: str, now: float) -> float:
        """Return the seconds until a key from this address is checked; 0.0: at once."""
        own = self._by_address.get(_network_of(address))
        ready_at = self._all.ready_at((1.0,), now)
        if own is not None:
            ready_at = max(ready_at, own.ready_at((1.0,), now))
        return max(0.0, ready_at - now)

    def failed(self, address: str, now: float) -> None:
        """Count a wrong key."""
        network = _network_of(address)
        own = self._by_address.pop(network, None)
        if own is None:
            own = TokenBucket([(1 / SECONDS_EACH, AT_ONCE)], now=-math.inf)
        self._by_address[network] = own
        own.try_take((1.0,), now)
        self._all.try_take((1.0,), now)
        if len(self._by_address) > _MOST_ADDRESSES:
            self._by_address.popitem(last=False)


def _network_of(address: str) -> str:
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return address
    if known.version == 4:  # noqa: PLR2004 - the version of IP
        return address
    mapped = known.ipv4_mapped
    return str(mapped) if mapped is not None else str(ipaddress.ip_network((known.packed, _IPV6_NETWORK_BITS), False))  # noqa: FBT003
