"""What one client may make the gateway hold and do before its request is accepted. Pure: instants are arguments.

A client is a tenant, or an address whose credentials are not verified yet. Three machines bound it:

- `SharedRoom`: the memory of unfinished bodies. There is one for verified tenants and one for all others. It is shared
  by max-min fairness: a client may use all of it until others need it. Then the largest body of the client that uses
  most is evicted, so a client with less than an equal share is refused only for a body that is being decoded.
- `RefusedBytes`: the bytes, received and inflated, of requests that were refused.
- `LoginAttempts`: guesses of the admin key.
"""

import ipaddress
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from kpl_core.pipeline.token_bucket import TokenBucket
from kpl_integrations.ingest.admission.refusals import Refusal, Refused

# Decoding costs up to 0.2 us a byte, so the refused requests of a client use less than half of a CPU.
REFUSED_BYTES_PER_SECOND: Final = 2 * 1024 * 1024
REFUSED_BYTES_AT_ONCE: Final = 16 * REFUSED_BYTES_PER_SECOND
# Requests that are refused at the same time cost at most this wait.
MOST_WAIT_SECONDS: Final = 60.0
MOST_ADDRESSES: Final = 10_000
# Wrong admin keys of one address: a burst, then one every so many seconds. And of all addresses together.
AT_ONCE: Final = 5
SECONDS_EACH: Final = 12.0
ALL_AT_ONCE: Final = 100
ALL_PER_SECOND: Final = 10.0
_IPV6_NETWORK_BITS: Final = 64
# The client in the text of a refusal.
THIS_ADDRESS: Final = "this address"


class HeldBody:
    """An unfinished body and its bytes. `evict` is called once if its bytes are given to another client."""

    __slots__ = ("client", "evict", "is_evicted", "room", "size_bytes")

    def __init__(self, room: "SharedRoom", client: str, evict: Callable[[], object]) -> None:
        self.room = room
        self.client = client
        self.evict = evict
        self.is_evicted = False
        self.size_bytes = 0

    def try_take(self, size_bytes: int) -> bool:
        """Take bytes for another piece; return False if the client may use no more."""
        return not self.is_evicted and self.room.try_take(self, size_bytes)

    def keep(self) -> None:
        """Never evict this body from now on. It takes no more bytes."""
        self.room.keep(self)

    def release(self) -> None:
        """Give all bytes back."""
        self.room.release(self)


class SharedRoom:
    """`max_bytes` that clients share; see the module. A body that is alone in the room may have more."""

    __slots__ = ("_bodies", "_by_client", "max_bytes", "used_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._by_client: Counter[str] = Counter()
        self._bodies: dict[str, set[HeldBody]] = {}

    def bytes_of(self, client: str) -> int:
        """Return how many bytes a client uses."""
        return self._by_client[client]

    def try_take(self, body: HeldBody, size_bytes: int) -> bool:
        """Take bytes for a body, if necessary from a client that uses more. Return False if none uses more."""
        while self.used_bytes + size_bytes > self.max_bytes and self.used_bytes > body.size_bytes:
            largest = max(self._bodies, key=self.bytes_of, default=body.client)
            if self.bytes_of(largest) <= self.bytes_of(body.client) + size_bytes:
                return False
            evicted = max(self._bodies[largest], key=lambda each: each.size_bytes)
            self.release(evicted)
            evicted.is_evicted = True
            evicted.evict()
        self.used_bytes += size_bytes
        body.size_bytes += size_bytes
        self._by_client[body.client] += size_bytes
        self._bodies.setdefault(body.client, set()).add(body)
        return True

    def release(self, body: HeldBody) -> None:
        """Give all bytes of a body back; do nothing if it has none."""
        self.used_bytes -= body.size_bytes
        self._by_client[body.client] -= body.size_bytes
        body.size_bytes = 0
        self.keep(body)
        if not self._by_client[body.client]:
            del self._by_client[body.client]

    def keep(self, body: HeldBody) -> None:
        """Do not evict this body."""
        bodies = self._bodies.get(body.client, set())
        bodies.discard(body)
        if not bodies:
            self._bodies.pop(body.client, None)


class ClientRoom(NamedTuple):
    """One client's part of a room. `watch_body` keeps pauses of reading out of a body's time limit, if it is set."""

    room: SharedRoom
    client: str
    watch_body: Callable[[Any], Callable[[], object]] | None = None

    def hold(self, evict: Callable[[], object]) -> HeldBody:
        """Return a new body without bytes."""
        return HeldBody(self.room, self.client, evict)


class RefusedBytes:
    """The budget for one client's refused requests. While it is overdrawn, they are refused before decoding."""

    __slots__ = ("_paid_at",)

    def __init__(self) -> None:
        self._paid_at = -math.inf

    def charge(self, size_bytes: int, now: float) -> None:
        """Add the bytes of a refused request; the debt is at most what the rate pays in `MOST_WAIT_SECONDS`."""
        most = now + REFUSED_BYTES_AT_ONCE / REFUSED_BYTES_PER_SECOND + MOST_WAIT_SECONDS
        self._paid_at = min(max(self._paid_at, now) + size_bytes / REFUSED_BYTES_PER_SECOND, most)

    @property
    def ready_at(self) -> float:
        """Return when the next request may be read."""
        return self._paid_at - REFUSED_BYTES_AT_ONCE / REFUSED_BYTES_PER_SECOND

    def wait_seconds(self, now: float) -> float:
        """Return the seconds until the next request may be read; 0.0: at once."""
        return max(0.0, self.ready_at - now)


class AddressBudgets:
    """`RefusedBytes` of addresses whose requests were not verified. Above 10,000, the oldest is dropped."""

    def __init__(self) -> None:
        self.by_address: OrderedDict[str, RefusedBytes] = OrderedDict()
        self._all_ready_at = -math.inf

    def makes_wait(self, now: float) -> bool:
        """Return True if the budget of any address may be overdrawn, so that its requests wait."""
        return self._all_ready_at > now

    def wait_seconds(self, address: str, now: float) -> float:
        """Return the seconds until the next request of this address may be read; 0.0: at once."""
        budget = self.by_address.get(address)
        return 0.0 if budget is None else budget.wait_seconds(now)

    def require(self, address: str, now: float) -> None:
        """Raise `Refused` while the budget of this address is overdrawn."""
        wait = self.wait_seconds(address, now)
        if wait:
            raise over_decoding(THIS_ADDRESS, wait)

    def charge(self, address: str, size_bytes: int, now: float) -> None:
        """Charge a refused request."""
        if not size_bytes:
            return
        budget = self.by_address.pop(address, None) or RefusedBytes()
        budget.charge(size_bytes, now)
        self.by_address[address] = budget
        self._all_ready_at = max(self._all_ready_at, budget.ready_at)
        if len(self.by_address) > MOST_ADDRESSES:
            self.by_address.popitem(last=False)


class AddressBudget(NamedTuple):
    """The budget of one address, for a request whose tenant must not pay."""

    budgets: AddressBudgets
    address: str

    def wait_seconds(self, now: float) -> float:
        """Return the seconds until the next request may be read; 0.0: at once."""
        return self.budgets.wait_seconds(network_of(self.address), now)

    def charge(self, size_bytes: int, now: float) -> None:
        """Charge a refused request."""
        self.budgets.charge(network_of(self.address), size_bytes, now)


class LoginAttempts:
    """Limit wrong admin keys by address and in total, in the form and in Authorization. Each process counts alone.

    An attempt that its address may not make does not count in total, so one address cannot lock out the others. The
    number of addresses is bounded and the oldest is evicted; the limit in total holds regardless of evictions.
    """

    def __init__(self, now: float) -> None:
        self._all = TokenBucket([(ALL_PER_SECOND, ALL_AT_ONCE)], now=now)
        self._by_address: OrderedDict[str, TokenBucket] = OrderedDict()

    def wait_seconds(self, address: str, now: float) -> float:
        """Return the seconds until a key from this address is checked; 0.0: at once."""
        own = self._by_address.get(network_of(address))
        ready_at = self._all.ready_at((1.0,), now)
        if own is not None:
            ready_at = max(ready_at, own.ready_at((1.0,), now))
        return max(0.0, ready_at - now)

    def failed(self, address: str, now: float) -> None:
        """Count a wrong key."""
        network = network_of(address)
        own = self._by_address.pop(network, None)
        if own is None:
            own = TokenBucket([(1 / SECONDS_EACH, AT_ONCE)], now=-math.inf)
        self._by_address[network] = own
        if own.try_take((1.0,), now):
            self._all.try_take((1.0,), now)
        if len(self._by_address) > MOST_ADDRESSES:
            self._by_address.popitem(last=False)


def over_decoding(client: str, wait_seconds: float) -> Refused:
    """Return the refusal of a request that is not read because of its client's refused requests."""
    detail = (
        f"refused requests of {client} cost {wait_seconds * REFUSED_BYTES_PER_SECOND:,.0f} bytes, received and "
        f"decompressed, above the allowed {REFUSED_BYTES_PER_SECOND:,} a second; correct them, and send again after "
        f"{math.ceil(wait_seconds)} s"
    )
    return Refused(Refusal.QUOTA, detail, retry_after=wait_seconds)


def network_of(address: str) -> str:
    """Return the address that counts for a client: an IPv6 client usually has a whole /64 network."""
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return address
    if known.version == 4:  # noqa: PLR2004 - the version of IP
        return address
    mapped = known.ipv4_mapped
    return str(mapped) if mapped is not None else str(ipaddress.ip_network((known.packed, _IPV6_NETWORK_BITS), False))  # noqa: FBT003
