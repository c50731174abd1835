"""Hooks into a boto3, botocore or aiobotocore session: each DynamoDB call waits for its units, and tells what it used.

    limiter = SessionLimiter(read_rate=500, write_rate=200)
    limiter.attach(session)                 # boto3.Session(), or aiobotocore's get_session()
    client = session.client("dynamodb")     # clients made from now on are limited

Three of botocore's events: `provide-client-params` asks for ConsumedCapacity, `before-call` waits,
`after-call` reads what was consumed. (Jason Hunter, "Rate-limiting calls to Amazon DynamoDB using
Python Boto3, Part 1", AWS Database Blog.)
"""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from kpl_integrations.dynamodb_limits.postpaid_bucket import PostpaidBucket

__all__ = ["SessionLimiter"]

_READ: Final = 0
_WRITE: Final = 1
_KIND_OF: Final[Mapping[str, int]] = {
    "GetItem": _READ,
    "Query": _READ,
    "Scan": _READ,
    "BatchGetItem": _READ,
    "TransactGetItems": _READ,
    "PutItem": _WRITE,
    "UpdateItem": _WRITE,
    "DeleteItem": _WRITE,
    "BatchWriteItem": _WRITE,
    "TransactWriteItems": _WRITE,
    # PartiQL says in its answer which of both it was; until then it is a write, the dearer of the two.
    "ExecuteStatement": _WRITE,
    "BatchExecuteStatement": _WRITE,
    "ExecuteTransaction": _WRITE,
}
_THROTTLED: Final = frozenset({"ProvisionedThroughputExceededException", "ThrottlingException", "RequestLimitExceeded"})
# Of the newest cost in the guess for the next call of its kind.
_NEWEST: Final = 0.3
_CONTEXT: Final = "kpl_reserved_units"


class SessionLimiter:
    """Keeps two rates over all clients of the sessions it is attached to. Thread-safe.

    Args:
        read_rate: read capacity units a second.
        write_rate: write capacity units a second.
        burst_seconds: how many seconds of its rates a rested limiter gives at once.
        clock: monotonic seconds.
        sleep: waits, in a thread; on an event loop `asyncio.sleep` is used.
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
        self._guesses: dict[str, float] = {}

    # What it is told and asked

    @property
    def rates(self) -> tuple[float, float]:
        """Return read and write units a second."""
        return self._buckets[_READ].rate, self._buckets[_WRITE].rate

    def set_rates(self, read_rate: float, write_rate: float) -> None:
        """Keep other rates from now on.

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

    # Hooks

    def attach(self, session: Any) -> None:  # noqa: ANN401 - three libraries' sessions and clients
        """Limit every DynamoDB client that `session` makes from now on; a client may be given instead."""
        events, is_async = _events_of(session)
        events.register("provide-client-params.dynamodb", self._ask_for_capacity)
        events.register("before-call.dynamodb", self._wait_on_loop if is_async else self._wait_in_thread)
        events.register("after-call.dynamodb", self._answered)
        events.register("after-call-error.dynamodb", self._failed)

    @staticmethod
    def _ask_for_capacity(params: dict[str, Any], model: Any, **_: object) -> None:  # noqa: ANN401 - botocore's own
        can_tell = model.input_shape is not None and "ReturnConsumedCapacity" in model.input_shape.members
        if can_tell and params.get("ReturnConsumedCapacity", "NONE") == "NONE":
            params["ReturnConsumedCapacity"] = "TOTAL"

    def _wait_in_thread(self, model: Any, context: dict[str, Any], **_: object) -> None:  # noqa: ANN401
        wait = self._reserve(model.name, context)
        if wait > 0.0:
            self._sleep(wait)

    async def _wait_on_loop(self, model: Any, context: dict[str, Any], **_: object) -> None:  # noqa: ANN401
        wait = self._reserve(model.name, context)
        if wait <= 0.0:
            return
        try:
            await asyncio.sleep(wait)
        except asyncio.CancelledError:
            # It was never made.
            self._settle(model.name, context, (0.0, 0.0))
            raise

    def _reserve(self, operation: str, context: dict[str, Any]) -> float:
        kind = _KIND_OF.get(operation)
        if kind is None:
            return 0.0
        with self._lock:
            guess = self._guesses.get(operation, 1.0)
            context[_CONTEXT] = guess
            return self._buckets[kind].reserve(guess, self._clock())

    def _answered(self, parsed: Mapping[str, Any], model: Any, context: dict[str, Any], **_: object) -> None:  # noqa: ANN401
        kind = _KIND_OF.get(model.name)
        guess = context.get(_CONTEXT)
        if kind is None or guess is None:
            return
        units = _consumed(parsed.get("ConsumedCapacity"), kind)
        if units is None:
            was_refused = parsed.get("Error", {}).get("Code") in _THROTTLED
            spent = 0.0 if was_refused else guess
            units = (spent, 0.0) if kind == _READ else (0.0, spent)
        self._settle(model.name, context, units)

    def _failed(self, context: dict[str, Any] | None = None, **_: object) -> None:
        # No answer: it may have been done, so what was guessed counts.
        if context and _CONTEXT in context:
            del context[_CONTEXT]

    def _settle(self, operation: str, context: dict[str, Any], units: tuple[float, float]) -> None:
        guess = context.pop(_CONTEXT)
        kind = _KIND_OF[operation]
        with self._lock:
            now = self._clock()
            self._buckets[kind].settle(guess, units[kind], now)
            other = 1 - kind
            if units[other]:
                self._buckets[other].settle(0.0, units[other], now)
            if sum(units) > 0.0:
                self._guesses[operation] = (1 - _NEWEST) * guess + _NEWEST * sum(units)


def _consumed(answer: Any, kind: int) -> tuple[float, float] | None:  # noqa: ANN401 - a mapping, a list of them, or none
    """Return the read and write units an answer tells of, None if it tells of none."""
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
    """Return where to register, and whether handlers are awaited there."""
    if hasattr(session, "meta") and hasattr(session.meta, "events"):
        events = session.meta.events
    elif hasattr(session, "events"):
        events = session.events
    else:
        events = session.get_component("event_emitter")
    # boto3 and botocore alias event names in front of the emitter itself.
    emitter = getattr(events, "_emitter", events)
    return events, type(emitter).__module__.startswith("aiobotocore")
