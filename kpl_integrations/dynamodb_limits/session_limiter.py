"""Limits the DynamoDB calls of a boto3, botocore or aiobotocore session to a rate of capacity units.

    limiter = SessionLimiter(read_rate=500, write_rate=200)
    limiter.attach(session)                 # boto3.Session(), or aiobotocore's get_session()
    client = session.client("dynamodb")     # clients made from now on are limited

It uses three of botocore's events: `provide-client-params` requests ConsumedCapacity, `before-call` waits for
units, `after-call` reads the consumed units. (Jason Hunter, "Rate-limiting calls to Amazon DynamoDB using Python
Boto3, Part 1", AWS Database Blog.)
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from kpl_core.options.validation import ABOVE_ZERO, require_number

_READ: Final = 0
_WRITE: Final = 1
_READS: Final = ("GetItem", "Query", "Scan", "BatchGetItem", "TransactGetItems")
_WRITES: Final = ("PutItem", "UpdateItem", "DeleteItem", "BatchWriteItem", "TransactWriteItems")
# The answer of PartiQL shows whether it read or wrote; until then assume a write, which costs more.
_PARTIQL: Final = ("ExecuteStatement", "BatchExecuteStatement", "ExecuteTransaction")
_KIND_OF: Final = dict.fromkeys(_READS, _READ) | dict.fromkeys((*_WRITES, *_PARTIQL), _WRITE)
_THROTTLED: Final = frozenset({"ProvisionedThroughputExceededException", "ThrottlingException", "RequestLimitExceeded"})
# Weight of the newest cost in the estimate for the next call of the same operation.
_NEWEST_WEIGHT: Final = 0.3
_CONTEXT: Final = "kpl_reserved_units"
# A waiting call looks again after this long, because its rate may have changed.
_LONGEST_SLEEP_SECONDS: Final = 0.2
_ROUNDING_SECONDS: Final = 1e-9


def _ignore() -> None:
    pass


class SessionLimiter:
    """Limits a read and a write rate over all clients of the attached sessions. Thread-safe.

    Args:
        read_rate: read capacity units a second.
        write_rate: write capacity units a second.
        burst_seconds: the burst after an idle time, in seconds of each rate.
        clock: monotonic seconds.
        sleep: waits in a thread; on an event loop `asyncio.sleep` is used.
    """

    def __init__(
        self,
        *,
        read_rate: float,
        write_rate: float,
        burst_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        now = clock()
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._buckets = (
            PostpaidBucket(read_rate, burst_seconds=burst_seconds, now=now),
            PostpaidBucket(write_rate, burst_seconds=burst_seconds, now=now),
        )
        self._estimates: dict[str, float] = {}
        # Called when a call waits for units, in the thread of the call.
        self.on_waiting: Callable[[], None] = _ignore
        # Calls that were answered, and refused by the table.
        self.call_count = self.refused_count = 0

    @property
    def rates(self) -> tuple[float, float]:
        """The read and write units a second."""
        return self._buckets[_READ].rate, self._buckets[_WRITE].rate

    def set_rates(self, read_rate: float, write_rate: float) -> None:
        """Change both rates.

        Raises:
            ConfigError: a rate is not finite and above 0.
        """
        with self._lock:
            now = self._clock()
            self._buckets[_READ].set_rate(read_rate, now)
            self._buckets[_WRITE].set_rate(write_rate, now)

    def totals(self) -> tuple[float, float]:
        """Return the read and write units consumed so far."""
        return self._buckets[_READ].total, self._buckets[_WRITE].total

    def demand(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the read and write units that calls, refused ones too, have asked for, and those that wait now."""
        with self._lock:
            now = self._clock()
            (reads, reads_wait), (writes, writes_wait) = (bucket.demand(now) for bucket in self._buckets)
        return (reads, writes), (reads_wait, writes_wait)

    def attach(self, session: Any) -> None:  # noqa: ANN401 - three libraries' sessions and clients
        """Limit every DynamoDB client that `session` creates from now on. Also accepts a single client."""
        events, is_async = _events_of(session)
        events.register("provide-client-params.dynamodb", self._request_consumed_capacity)
        events.register("before-call.dynamodb", self._wait_on_loop if is_async else self._wait_in_thread)
        events.register("after-call.dynamodb", self._answered)
        events.register("after-call-error.dynamodb", self._failed)

    @staticmethod
    def _request_consumed_capacity(params: dict[str, Any], model: Any, **_: object) -> None:  # noqa: ANN401 - botocore's own
        is_supported = model.input_shape is not None and "ReturnConsumedCapacity" in model.input_shape.members
        if is_supported and params.get("ReturnConsumedCapacity", "NONE") == "NONE":
            params["ReturnConsumedCapacity"] = "TOTAL"

    def _wait_in_thread(self, model: Any, context: dict[str, Any], **_: object) -> None:  # noqa: ANN401
        for wait in self._waits(model.name, context):
            self._sleep(wait)

    async def _wait_on_loop(self, model: Any, context: dict[str, Any], **_: object) -> None:  # noqa: ANN401
        try:
            for wait in self._waits(model.name, context):
                await asyncio.sleep(wait)
        except asyncio.CancelledError:
            # The call was not made, so it cost nothing.
            self._settle(model.name, context, (0.0, 0.0))
            raise

    def _waits(self, operation: str, context: dict[str, Any]) -> Iterator[float]:
        """Reserve the estimated units; yield the seconds to sleep until they are there, at any rate set meanwhile."""
        kind = _KIND_OF.get(operation)
        if kind is None:
            return
        bucket = self._buckets[kind]
        with self._lock:
            estimate = self._estimates.get(operation, 1.0)
            context[_CONTEXT] = estimate
            wait = bucket.reserve(estimate, self._clock())
            ready_at = bucket.refilled + wait * bucket.rate
        while wait > 0.0:
            self.on_waiting()
            yield min(wait, _LONGEST_SLEEP_SECONDS)
            with self._lock:
                wait = bucket.wait_for(ready_at, self._clock())

    def _answered(self, parsed: Mapping[str, Any], model: Any, context: dict[str, Any], **_: object) -> None:  # noqa: ANN401
        kind = _KIND_OF.get(model.name)
        estimate = context.get(_CONTEXT)
        if kind is None or estimate is None:
            return
        units = _consumed(parsed.get("ConsumedCapacity"), kind)
        was_refused = units is None and parsed.get("Error", {}).get("Code") in _THROTTLED
        if units is None:
            spent = 0.0 if was_refused else estimate
            units = (spent, 0.0) if kind == _READ else (0.0, spent)
        with self._lock:
            self.call_count += 1
            if was_refused:
                self.refused_count += 1
                self._buckets[kind].refused += estimate
        self._settle(model.name, context, units)

    def _failed(self, context: dict[str, Any] | None = None, **_: object) -> None:
        # Without an answer the call may have been executed, so the estimate stays taken, as if it were refused.
        if context and _CONTEXT in context:
            del context[_CONTEXT]

    def _settle(self, operation: str, context: dict[str, Any], units: tuple[float, float]) -> None:
        estimate = context.pop(_CONTEXT)
        kind = _KIND_OF[operation]
        with self._lock:
            now = self._clock()
            self._buckets[kind].settle(estimate, units[kind], now)
            other = 1 - kind
            if units[other]:
                self._buckets[other].settle(0.0, units[other], now)
            if sum(units) > 0.0:
                self._estimates[operation] = (1 - _NEWEST_WEIGHT) * estimate + _NEWEST_WEIGHT * sum(units)


def _consumed(answer: Any, kind: int) -> tuple[float, float] | None:  # noqa: ANN401 - a mapping, a list of them, or none
    """Return the read and write units in an answer; None if it has none."""
    if not answer:
        return None
    read = write = 0.0
    for table in answer if isinstance(answer, list) else [answer]:
        reads, writes = table.get("ReadCapacityUnits"), table.get("WriteCapacityUnits")
        if reads is None and writes is None:
            total = float(table.get("CapacityUnits", 0.0))
            reads, writes = (total, 0.0) if kind == _READ else (0.0, total)
        read += float(reads or 0.0)
        write += float(writes or 0.0)
    return read, write


def _events_of(session: Any) -> tuple[Any, bool]:  # noqa: ANN401
    """Return the session's or client's event emitter, and whether it awaits handlers."""
    if hasattr(session, "meta") and hasattr(session.meta, "events"):
        events = session.meta.events
    elif hasattr(session, "events"):
        events = session.events
    else:
        events = session.get_component("event_emitter")
    # boto3 and botocore wrap the emitter to alias event names.
    emitter = getattr(events, "_emitter", events)
    return events, type(emitter).__module__.startswith("aiobotocore")


class PostpaidBucket:
    """A token bucket for costs that are known only after the call: reserve an estimate, then settle the difference.

    DynamoDB returns the cost in the answer (ConsumedCapacity), and a query may cost a hundred times its estimate.
    So the bucket goes into debt, and later calls wait until the debt is paid. It starts full, refills `rate` tokens
    a second and holds at most `rate * burst_seconds`. Pure.
    """

    __slots__ = ("_burst_seconds", "_level", "_reserved", "_seen_at", "rate", "refilled", "refused", "total")

    def __init__(self, rate: float, *, burst_seconds: float, now: float) -> None:
        require_number("rate", rate, ABOVE_ZERO)
        require_number("burst_seconds", burst_seconds, ABOVE_ZERO)
        self.rate = rate
        self._burst_seconds = burst_seconds
        self._level = rate * burst_seconds
        self._seen_at = now
        # All consumed tokens, those of refused calls, and those reserved for calls without an answer.
        self.total = self.refused = self._reserved = 0.0
        # All tokens that time has brought; a call waits for its own count of these.
        self.refilled = 0.0

    def reserve(self, estimate: float, now: float) -> float:
        """Take the estimated tokens and return the seconds to wait before the call; later calls wait behind it."""
        self._refill(now)
        # An estimate above the capacity needs a full bucket.
        needed = min(estimate, self.rate * self._burst_seconds)
        wait = max(0.0, (needed - self._level) / self.rate)
        self._level -= estimate
        self._reserved += estimate
        return wait

    def wait_for(self, refilled: float, now: float) -> float:
        """Return the seconds until the bucket has refilled so many tokens in total."""
        self._refill(now)
        wait = (refilled - self.refilled) / self.rate
        return wait if wait > _ROUNDING_SECONDS else 0.0

    def demand(self, now: float) -> tuple[float, float]:
        """Return the tokens asked for so far, and those that calls wait for now."""
        self._refill(now)
        return self.total + self.refused + self._reserved, min(max(0.0, -self._level), self._reserved)

    def settle(self, estimate: float, actual: float, now: float) -> None:
        """Replace an estimate by the actual cost of the call."""
        self._refill(now)
        self._level += estimate - actual
        self._reserved = max(0.0, self._reserved - estimate)
        self.total += actual

    def set_rate(self, rate: float, now: float) -> None:
        """Change the refill rate; a debt stays.

        Raises:
            ConfigError: the rate is not finite and above 0.
        """
        require_number("rate", rate, ABOVE_ZERO)
        self._refill(now)
        self.rate = rate
        self._level = min(self._level, rate * self._burst_seconds)

    def _refill(self, now: float) -> None:
        if now > self._seen_at:
            refilled = (now - self._seen_at) * self.rate
            self.refilled += refilled
            self._level = min(self.rate * self._burst_seconds, self._level + refilled)
            self._seen_at = now
