"""How often the admin key may be guessed: a few times at once from one address, then slowly; and in all; pure.

Only wrong keys count. An IPv6 client has a whole /64 to itself, so that is one address here. What is counted is
bounded, and forgotten longest ago first; the bound in all makes forgetting no way around. Each process counts for
itself.
"""

import ipaddress
import math
from collections import OrderedDict
from typing import Final

from kpl_core.pipeline.token_bucket import TokenBucket

__all__ = ["LoginAttempts"]

AT_ONCE: Final = 5
SECONDS_EACH: Final = 12.0
ALL_AT_ONCE: Final = 100
ALL_PER_SECOND: Final = 10.0
_MOST_ADDRESSES: Final = 10_000
_BITS_OF_A_NETWORK: Final = 64


class LoginAttempts:
    """Wrong keys, by address."""

    def __init__(self, now: float) -> None:
        self._all = TokenBucket([(ALL_PER_SECOND, ALL_AT_ONCE)], now=now)
        self._by_address: OrderedDict[str, TokenBucket] = OrderedDict()

    def wait_seconds(self, address: str, now: float) -> float:
        """Return how long somebody at this address must wait before a key of theirs is looked at; 0: not at all."""
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
    if known.version == 4:  # noqa: PLR2004 - of IP
        return address
    mapped = known.ipv4_mapped
    return str(mapped) if mapped is not None else str(ipaddress.ip_network((known.packed, _BITS_OF_A_NETWORK), False))  # noqa: FBT003
