"""The refusals of the gateway: the reasons, 429 and 503 and the other statuses, and what Retry-After says.

The table `REFUSALS` has the answer to each reason; the code, the tests and OpenAPI read it. Problem types:
"quota-exceeded" and "temporary-reduced-capacity" are registered by the RateLimit draft
(draft-ietf-httpapi-ratelimit-headers). The others are "about:blank" with a `code` of this gateway (RFC 9457).

The waits of rejected clients, Retry-After and RateLimit, are computed here only.
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

import enum
import math
from bisect import bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from kpl_integrations.asgi.protocol import Header, retry_after_header, whole_seconds
from kpl_integrations.ingest.decoding import DecodeRefusal
from kpl_integrations.ingest.tenants import QuotaState, Tenant

QUEUE_SHARE: Final = "queue-share"
# The scheduler plans this far ahead. Clients beyond it get about this time and no slot.
LONGEST_SECONDS: Final = 60.0
# How long a slot waits for its client: clock differences, the network and the client's own jitter.
GRACE_SECONDS: Final = 2.0
MOST_SLOTS: Final = 1_024
# Over so many seconds the retries are spread of clients for which no better time is known.
MOST_SPREAD_SECONDS: Final = 3
# Waits are whole seconds, so several clients are due together. Each slot gets 10 % more than its cost, so that all
# of them are admitted.
SLACK: Final = 1.1
# Shorter samples are ignored. Samples decay with this time constant.
SHORTEST_SAMPLE_SECONDS: Final = 0.2
_MEMORY_SECONDS: Final = 3.0


class Refusal(enum.Enum):
    """The reasons for a rejection."""

    QUOTA = "quota"
    QUEUE_SHARE = "queue share"
    CPU_SHARE = "cpu share"
    NO_ROOM = "no room"
    BREAKER_OPEN = "breaker open"
    DRAINING = "draining"
    NOT_SPOOLED = "not spooled"
    STREAM_UNCERTAIN = "stream uncertain"
    NO_CREDENTIALS = "no credentials"
    BAD_CREDENTIALS = "bad credentials"
    FORBIDDEN = "forbidden"
    UNKNOWN_STREAM = "unknown stream"
    UNKNOWN_PATH = "unknown path"
    METHOD = "method"
    HOST = "host"
    WRONG_KEYS = "wrong keys"
    TOO_LARGE = "too large"
    SLOW_BODY = "slow body"
    UNSUPPORTED = "unsupported"
    MALFORMED = "malformed"
    BAD_RECORDS = "bad records"
    BAD_PARAMETER = "bad parameter"
    KEY_IN_USE = "idempotency key in use"
    KEY_REUSED = "idempotency key reused"
    EXPIRED = "expired"
    NOT_DELIVERED = "not delivered"
    BUSY = "busy"
    BAD_HTTP = "bad http"
    SLOW_HEAD = "slow head"
    LARGE_HEAD = "large head"
    TRANSFER_CODING = "transfer coding"
    HTTP_VERSION = "http version"


class RefusalAnswer(NamedTuple):
    """A row of the table: the status, the problem's code and title, and the header fields."""

    status: int
    code: str
    title: str
    # Retry-After if the code that rejects has no better value; None: a retry of the same request cannot succeed.
    retry_after_seconds: float | None = None
    # Sends RateLimit and RateLimit-Policy if the tenant has a quota.
    shows_quota: bool = False
    # Closes the connection, because the rest of the request is not worth reading.
    closes: bool = False


_QUOTA: Final = "quota-exceeded"
_CAPACITY: Final = "temporary-reduced-capacity"

REFUSALS: Final[Mapping[Refusal, RefusalAnswer]] = MappingProxyType(
    {
        # The tenant is above its own limits.
        Refusal.QUOTA: RefusalAnswer(429, _QUOTA, "Over the tenant's rate", retry_after_seconds=1.0, shows_quota=True),
        Refusal.QUEUE_SHARE: RefusalAnswer(
            429, _QUOTA, "Over the tenant's share of the queue", retry_after_seconds=1.0
        ),
        Refusal.CPU_SHARE: RefusalAnswer(429, _QUOTA, "Over the tenant's share of CPU time", retry_after_seconds=1.0),
        # The gateway or Kinesis has no capacity left for any tenant.
        Refusal.NO_ROOM: RefusalAnswer(503, _CAPACITY, "Out of room", retry_after_seconds=1.0),
        Refusal.BREAKER_OPEN: RefusalAnswer(503, _CAPACITY, "The stream does not answer", retry_after_seconds=1.0),
        Refusal.DRAINING: RefusalAnswer(503, _CAPACITY, "Shutting down", retry_after_seconds=1.0, closes=True),
        Refusal.NOT_SPOOLED: RefusalAnswer(503, _CAPACITY, "The spool takes no more", retry_after_seconds=1.0),
        Refusal.STREAM_UNCERTAIN: RefusalAnswer(
            503, _CAPACITY, "The stream could not be looked up", retry_after_seconds=2.0
        ),
        # Credentials, permissions and paths.
        Refusal.NO_CREDENTIALS: RefusalAnswer(401, "no-credentials", "No credentials"),
        Refusal.BAD_CREDENTIALS: RefusalAnswer(401, "bad-credentials", "Unknown credentials"),
        Refusal.WRONG_KEYS: RefusalAnswer(429, "too-many-wrong-keys", "Too many wrong keys", retry_after_seconds=12.0),
        Refusal.FORBIDDEN: RefusalAnswer(403, "stream-forbidden", "Not this tenant's stream"),
        Refusal.UNKNOWN_STREAM: RefusalAnswer(404, "unknown-stream", "No such stream"),
        Refusal.UNKNOWN_PATH: RefusalAnswer(404, "unknown-path", "No such resource"),
        Refusal.METHOD: RefusalAnswer(405, "method-not-allowed", "Method not allowed"),
        Refusal.HOST: RefusalAnswer(421, "unknown-host", "Not a name of this gateway"),
        # The content of the request.
        Refusal.TOO_LARGE: RefusalAnswer(413, "too-large", "Too large", closes=True),
        Refusal.SLOW_BODY: RefusalAnswer(408, "slow-body", "The body did not come in time", closes=True),
        Refusal.UNSUPPORTED: RefusalAnswer(415, "unsupported-media-type", "Unsupported content"),
        Refusal.MALFORMED: RefusalAnswer(400, "malformed", "Malformed body"),
        Refusal.BAD_RECORDS: RefusalAnswer(400, "bad-records", "Some records cannot be taken"),
        Refusal.BAD_PARAMETER: RefusalAnswer(400, "bad-parameter", "A parameter cannot be understood"),
        Refusal.KEY_IN_USE: RefusalAnswer(
            409, "idempotency-key-in-use", "The first request is not answered", retry_after_seconds=1.0
        ),
        Refusal.KEY_REUSED: RefusalAnswer(422, "idempotency-key-reused", "The key belongs to another request"),
        # Accepted with ack=delivered, and not delivered.
        Refusal.EXPIRED: RefusalAnswer(504, "expired", "No record was delivered in time"),
        Refusal.NOT_DELIVERED: RefusalAnswer(502, "not-delivered", "Kinesis took no record"),
        # Of the gateway's own server.
        Refusal.BUSY: RefusalAnswer(503, _CAPACITY, "Too many requests at once", retry_after_seconds=1.0, closes=True),
        Refusal.BAD_HTTP: RefusalAnswer(400, "bad-http", "Not a valid HTTP request", closes=True),
        Refusal.SLOW_HEAD: RefusalAnswer(408, "slow-head", "The header fields did not come in time", closes=True),
        Refusal.LARGE_HEAD: RefusalAnswer(431, "large-head", "Too large header fields", closes=True),
        Refusal.TRANSFER_CODING: RefusalAnswer(
            501, "unsupported-transfer-coding", "Unsupported transfer coding", closes=True
        ),
        Refusal.HTTP_VERSION: RefusalAnswer(505, "unsupported-http-version", "Unsupported HTTP version", closes=True),
    }
)
# What the gateway's own server refuses before it knows the path, and the details.
SERVER_REFUSALS: Final[Mapping[Refusal, str]] = MappingProxyType(
    {
        Refusal.BUSY: "the gateway has too many connections or requests; send this one again later",
        Refusal.BAD_HTTP: "this is not valid HTTP: a request has one Host field, a path, and one length or chunks",
        Refusal.SLOW_HEAD: "the request line and the header fields did not arrive in time; send them at once",
        Refusal.LARGE_HEAD: "the request line and the header fields are too large; send fewer or shorter ones",
        Refusal.TRANSFER_CODING: "the only transfer coding here is chunked",
        Refusal.HTTP_VERSION: "a request line here names version 1.1 or 1.0 of HTTP",
    }
)


class Refused(Exception):  # noqa: N818 - reads as a sentence where it is raised
    """A request is rejected. The handler answers `REFUSALS[refusal]`.

    `detail` is a sentence for people, with the value and the bound and never a secret. `retry_after` in seconds
    replaces the row's value. `code` replaces the row's code where more is known. `extensions` are further members
    of the problem (`http.answers.Problem`), `headers` further header fields. `work_bytes` is how much was received or
    inflated before the request was rejected, as far as the handler does not know it. `is_unread` is True if the
    client may still send the rest of the body.
    """

    def __init__(
        self,
        refusal: Refusal,
        detail: str,
        *,
        retry_after: float | None = None,
        code: str | None = None,
        extensions: Mapping[str, Any] | None = None,
        headers: tuple[Header, ...] = (),
    ) -> None:
        super().__init__(f"{refusal.value}: {detail}")
        self.refusal = refusal
        self.detail = detail
        row = REFUSALS[refusal].retry_after_seconds
        self.retry_after = row if row is None or retry_after is None else retry_after
        self.code = code
        self.extensions = extensions
        self.headers = headers
        self.work_bytes = 0
        self.is_unread = False


_OF_DECODING: Final = {
    400: Refusal.MALFORMED,
    413: Refusal.TOO_LARGE,
    415: Refusal.UNSUPPORTED,
}


def refused_decoding(refusal: DecodeRefusal, inflated_bytes: int = 0) -> Refused:
    """Return a decoder's refusal as a rejected request."""
    place = {"index": refusal.index, "field": refusal.field}
    refused = Refused(
        _OF_DECODING[refusal.status],
        refusal.detail,
        code=refusal.code,
        extensions={name: value for name, value in place.items() if value is not None},
    )
    refused.work_bytes = inflated_bytes or refusal.inflated_bytes
    return refused


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


def spread_retry_after(chance: Callable[[], float]) -> float:
    """Return 1 to 3 seconds: clients that are refused together do not return together."""
    return 1.0 + int(MOST_SPREAD_SECONDS * chance())


def over_cpu_share(tenant: Tenant | None, *, retry_after: float | None = None) -> Refused:
    """Return the 429 for a request of a tenant that uses most of the CPU while the gateway is late."""
    client = "this address" if tenant is None else f"tenant {tenant.id}"
    return Refused(
        Refusal.CPU_SHARE,
        f"the gateway is out of CPU time and {client} has used more than its share; send fewer or larger requests",
        retry_after=retry_after,
    )


def rate_limit_headers(states: Sequence[QuotaState], *, retry_after: int | None = None) -> tuple[Header, ...]:
    """Return RateLimit-Policy and RateLimit; `t` is at least `retry_after`."""
    if not states:
        return ()
    policies = tuple([(state.name, state.limit, state.window_seconds) for state in states])
    limits = []
    for state in states:
        reset = max(state.ready_in, retry_after or 0)
        limits.append(f'"{state.name}";r={state.remaining}' + (f";t={whole_seconds(reset)}" if reset else ""))
    return ((b"ratelimit-policy", _policy(policies)), (b"ratelimit", ", ".join(limits).encode()))


@lru_cache(maxsize=1_024)
def _policy(policies: tuple[tuple[str, int, int], ...]) -> bytes:
    """Return the field that only changes with the tenant's settings."""
    units = {"bytes": ';qu="content-bytes"'}
    return ", ".join(f'"{name}";q={limit};w={window}{units.get(name, "")}' for name, limit, window in policies).encode()


class DrainRate:
    """Estimate how many user records leave a queue per second from `finished`, a count that only grows."""

    __slots__ = ("_finished", "_per_second", "sampled_at")

    def __init__(self, now: float) -> None:
        self.sampled_at = now
        self._finished = 0
        self._per_second = 0.0

    def observe(self, finished: int, now: float) -> None:
        """Add a sample."""
        elapsed = now - self.sampled_at
        if elapsed < SHORTEST_SAMPLE_SECONDS:
            return
        share = 1.0 - math.exp(-elapsed / _MEMORY_SECONDS)
        self._per_second += share * ((finished - self._finished) / elapsed - self._per_second)
        self.sampled_at, self._finished = now, finished

    def per_second(self, finished: int, now: float) -> float:
        """Return the rate, or the rate since the last sample if that is higher; 0.0 after 60 s without samples."""
        elapsed = now - self.sampled_at
        since = (finished - self._finished) / max(elapsed, SHORTEST_SAMPLE_SECONDS)
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

    __slots__ = ("_chance", "_end", "_later", "_passed", "_slowdown", "slots")

    def __init__(self, chance: Callable[[], float]) -> None:
        self._chance = chance
        # Instants, costs, and when their service ends by the plan. Sorted: rounding to seconds can give a later request
        # an earlier slot.
        self.slots: list[tuple[float, float, float]] = []
        # Up to here the capacity is assigned.
        self._end = -math.inf
        # The slots that do not count there, after a change of the rate: when the service of each begins at the latest,
        # and its cost. The next one is the last.
        self._later: list[tuple[float, float]] = []
        # By which the costs were multiplied, because this process has a part of the tenant's rate.
        self._slowdown = 1.0
        # How many requests `try_pass` let pass whose slots are neither taken nor expired.
        self._passed = 0

    def reprice(self, slowdown: float, now: float) -> None:
        """Cost the slots with the rate in force: a full rate is `slowdown` times as high as this process's rate now.

        The times that clients were given stay. At a higher rate there is room between them.
        """
        if slowdown == self._slowdown:
            return
        factor, self._slowdown = slowdown / self._slowdown, slowdown
        self.slots = [(at, cost * factor, end) for at, cost, end in self.slots]
        self._end = min(self._end, now)
        self._later = sorted(((end - SLACK * cost, cost) for _, cost, end in self.slots if end > now), reverse=True)

    def booked_seconds(self, now: float) -> float:
        """Return for how many seconds from now on there are slots one after the other."""
        return max(0.0, self._end - now)

    def is_reserved(self, now: float, *, spare_seconds: float = 0.0) -> bool:
        """Return True if a request that arrives now would take capacity that is reserved for assigned slots.

        `spare_seconds` is the capacity that is left after this request.
        """
        self._drop_expired(now)
        slots = self.slots
        if not slots or slots[0][0] <= now:
            return False
        if spare_seconds <= 0.0:
            return True
        reserved = 0.0
        for at, cost, _ in slots:
            reserved += cost
            if reserved - (at - now) > spare_seconds:
                return True
        return False

    def take_due(self, now: float) -> None:
        """Use up the earliest slot if it is due, because a request was admitted."""
        if self.slots and self.slots[0][0] <= now:
            self._drop_first()

    def try_pass(self, now: float) -> bool:
        """Let one request pass for each slot that is due: it may be from the client that got this retry time."""
        self._drop_expired(now)
        if bisect_right(self.slots, (now, math.inf, math.inf)) <= self._passed:
            return False
        self._passed += 1
        return True

    def assign(self, cost_seconds: float, *, ready_in: float, now: float) -> int:
        """Return the whole seconds, at least 1, after which a rejected request should be retried."""
        own = SLACK * cost_seconds
        begin = max(now + ready_in - own, self._end)
        while self._later and self._later[-1][0] < begin + own:
            latest, reserved = self._later.pop()
            if latest + SLACK * reserved > now:
                self._end = max(now, self._end) + SLACK * reserved
                begin += SLACK * reserved
        end = begin + own
        if end - now > LONGEST_SECONDS or len(self.slots) >= MOST_SLOTS:
            # A request that needs longer by itself must not return earlier.
            return whole_seconds(max(ready_in, LONGEST_SECONDS) * (1.0 + 0.25 * self._chance()))
        self._end = end
        wait = whole_seconds(end - now + 0.5 * self._chance())
        insort(self.slots, (now + wait, cost_seconds, end))
        return wait

    def _drop_expired(self, now: float) -> None:
        while self.slots and self.slots[0][0] < now - GRACE_SECONDS:
            self._drop_first()

    def _drop_first(self) -> None:
        del self.slots[0]
        self._passed = max(0, self._passed - 1)
