"""The waits of rejected clients: Retry-After and RateLimit are computed and written here only.

`DrainRate` measures how fast a queue empties. `RetryAfterScheduler` spreads the retries of rejected clients over
time: each gets the time at which the clients before it will have been served. Most clients that obey
`Retry-After` then succeed at the first retry. With one time for all, the first retry would take the capacity and
the others would be rejected again.

A client never gets two different times: `t` of the RateLimit field is at least Retry-After.

    RateLimit-Policy: "records";q=1000;w=1, "bytes";q=1048576;w=1;qu="content-bytes"
    RateLimit: "records";r=0;t=3, "bytes";r=524288

These are structured fields (RFC 9651) of draft-ietf-httpapi-ratelimit-headers (2025): q quota, w window in seconds,
qu unit, r remaining, t seconds until more is available. A share of the queue depends on the other tenants, so it
has no policy: "Situations where throttling constraints are highly dynamic are better served using the RateLimit
field" (section 3).

    RateLimit: "queue-share";r=0;t=3
"""

import math
from bisect import insort
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

from kpl_integrations.ingest.admission.refusals import Refusal, Refused
from kpl_integrations.ingest.tenants import QuotaState, Tenant

QUEUE_SHARE: Final = "queue-share"
# The scheduler plans this far ahead. Clients beyond it get about this time and no slot.
LONGEST_SECONDS: Final = 60.0
# How long a slot waits for its client: clock differences, the network and the client's own jitter.
GRACE_SECONDS: Final = 2.0
MOST_SLOTS: Final = 1_024
# Waits are whole seconds, so several clients are due together. Each slot gets 10 % more than its cost, so that all
# of them are admitted.
SLACK: Final = 1.1
# Shorter samples are ignored. Samples decay with this time constant.
_SHORTEST_SAMPLE_SECONDS: Final = 0.2
_MEMORY_SECONDS: Final = 3.0

Header = tuple[bytes, bytes]


def _whole_seconds(seconds: float) -> int:
    """Return `seconds` rounded up, at least 1: never ask a client to come back before there is capacity."""
    return max(1, math.ceil(seconds))


def retry_after_header(seconds: float) -> Header:
    """Return the Retry-After field (RFC 9110, section 10.2.3)."""
    return b"retry-after", b"%d" % _whole_seconds(seconds)


def refusal_headers(refused: Refused) -> list[Header]:
    """Return the header fields of a rejected request: its own, and Retry-After if a retry can succeed."""
    headers = list(refused.headers)
    if refused.retry_after is not None:
        headers.append(retry_after_header(refused.retry_after))
    return headers


def over_quota(
    tenant: Tenant, states: Sequence[QuotaState], *, records: int, size_bytes: int, retry_after: int
) -> Refused:
    """Return the 429 for a request above the tenant's rates, whose states are `states`."""
    wanted = {"records": records, "bytes": size_bytes}
    violated = [state.name for state in states if state.remaining < wanted[state.name]]
    rates = ", ".join(
        f"{rate:,.10g} {unit} a second"
        for rate, unit in ((tenant.records_per_second, "records"), (tenant.bytes_per_second, "bytes"))
        if rate is not None
    )
    number = "1 record is" if records == 1 else f"{records:,} records are"
    return Refused(
        Refusal.QUOTA,
        f"{number} more than tenant {tenant.id} may send now; its rate is {rates}",
        retry_after=retry_after,
        # Without violated policies the quota has room, but it is reserved for clients with a retry time.
        extensions={"violated_policies": violated} if violated else None,
        headers=rate_limit_headers(states, retry_after=retry_after),
    )


def over_queue_share(tenant: Tenant, *, retry_after: int) -> Refused:
    """Return the 429 for a request of a tenant whose share of the queue is full."""
    return Refused(
        Refusal.QUEUE_SHARE,
        f"tenant {tenant.id} has used up its share of the queue: its records arrive faster than they are sent",
        retry_after=retry_after,
        extensions={"violated_policies": [QUEUE_SHARE]},
        headers=((b"ratelimit", f'"{QUEUE_SHARE}";r=0;t={retry_after}'.encode()),),
    )


def rate_limit_headers(states: Sequence[QuotaState], *, retry_after: int | None = None) -> tuple[Header, ...]:
    """Return RateLimit-Policy and RateLimit; `t` is at least `retry_after`."""
    if not states:
        return ()
    policies = tuple([(state.name, state.limit, state.window_seconds) for state in states])
    limits = []
    for state in states:
        reset = state.reset_seconds if retry_after is None else max(state.reset_seconds, retry_after)
        limits.append(f'"{state.name}";r={state.remaining}' + (f";t={reset}" if reset else ""))
    return ((b"ratelimit-policy", _policy(policies)), (b"ratelimit", ", ".join(limits).encode()))


@lru_cache(maxsize=1_024)
def _policy(policies: tuple[tuple[str, int, int], ...]) -> bytes:
    """Return the field that only changes with the tenant's settings."""
    units = {"bytes": ';qu="content-bytes"'}
    return ", ".join(f'"{name}";q={limit};w={window}{units.get(name, "")}' for name, limit, window in policies).encode()


class DrainRate:
    """Estimate how many user records leave a queue per second from `finished`, a count that only grows."""

    __slots__ = ("_at", "_finished", "_per_second")

    def __init__(self, now: float) -> None:
        self._at = now
        self._finished = 0
        self._per_second = 0.0

    def sample_due(self, now: float) -> bool:
        """Return True if the last sample is old enough for the next one."""
        return now - self._at >= _SHORTEST_SAMPLE_SECONDS

    def observe(self, finished: int, now: float) -> None:
        """Add a sample."""
        elapsed = now - self._at
        if elapsed < _SHORTEST_SAMPLE_SECONDS:
            return
        share = 1.0 - math.exp(-elapsed / _MEMORY_SECONDS)
        self._per_second += share * ((finished - self._finished) / elapsed - self._per_second)
        self._at, self._finished = now, finished

    def per_second(self, finished: int, now: float) -> float:
        """Return the rate, or the rate since the last sample if that is higher; 0.0 after 60 s without samples."""
        elapsed = now - self._at
        since = (finished - self._finished) / max(elapsed, _SHORTEST_SAMPLE_SECONDS)
        return max(self._per_second * math.exp(-elapsed / _MEMORY_SECONDS), since) if elapsed < LONGEST_SECONDS else 0.0

    def seconds_for(self, records: int) -> float:
        """Return the seconds until this many records have left; at most `LONGEST_SECONDS`."""
        if self._per_second * LONGEST_SECONDS <= records:
            return LONGEST_SECONDS
        return records / self._per_second


class RetryAfterScheduler:
    """Assign retry times to rejected requests. The cost of a request is in seconds of service.

    Future capacity is reserved for clients that got a retry time. A request that arrives now takes the earliest
    slot that is due, whichever client it was assigned to. If no slot is due, it is admitted only if enough capacity
    remains for the assigned slots.
    """

    __slots__ = ("_chance", "_due", "_end")

    def __init__(self, chance: Callable[[], float]) -> None:
        self._chance = chance
        # Instants and costs, sorted. Rounding to seconds can give a later request an earlier slot.
        self._due: list[tuple[float, float]] = []
        self._end = -math.inf

    def is_reserved(self, now: float, *, spare_seconds: float = 0.0) -> bool:
        """Return True if a request that arrives now would take capacity that is reserved for assigned slots.

        `spare_seconds` is the capacity that is left after this request.
        """
        due = self._due
        while due and due[0][0] < now - GRACE_SECONDS:
            del due[0]
        if not due:
            return False
        if due[0][0] <= now:
            del due[0]
            return False
        reserved = 0.0
        for at, cost in due:
            reserved += cost
            if reserved - (at - now) > spare_seconds:
                return True
        return spare_seconds <= 0.0

    def is_due(self, now: float) -> bool:
        """Return True if a slot is due, so that a client with its retry time may have come."""
        return bool(self._due) and self._due[0][0] <= now

    def assign(self, cost_seconds: float, *, ready_in: float, now: float) -> int:
        """Return the whole seconds, at least 1, after which a rejected request should be retried."""
        end = max(now + ready_in, self._end + SLACK * cost_seconds)
        if end - now > LONGEST_SECONDS or len(self._due) >= MOST_SLOTS:
            # A request that needs longer by itself must not return earlier.
            return _whole_seconds(max(ready_in, LONGEST_SECONDS) * (1.0 + 0.25 * self._chance()))
        self._end = end
        wait = _whole_seconds(end - now + 0.5 * self._chance())
        insort(self._due, (now + wait, cost_seconds))
        return wait

    def __len__(self) -> int:
        return len(self._due)
