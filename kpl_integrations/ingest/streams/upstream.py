"""Forward read-only operations of the Kinesis protocol (ListShards, DescribeStream...) to Kinesis.

SDKs, agents and libraries ask for shards and a summary before they put. The gateway forwards only the arguments and
signs with its own credentials. Calls are limited in total and served round robin over the tenants, so they do not use
up the account's calls and one tenant does not delay the others.
"""

import calendar
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

import anyio
from botocore.exceptions import ClientError

from kpl_core.pipeline.token_bucket import TokenBucket
from kpl_integrations.kinesis_protocol.requests import RequestRefused
from kpl_integrations.kinesis_protocol.wire import Timestamp

# The method of an AWS client, by operation.
FORWARDED: Final[Mapping[str, str]] = {
    "DescribeStream": "describe_stream",
    "DescribeStreamSummary": "describe_stream_summary",
    "ListShards": "list_shards",
}
# For all tenants together. AWS allows an account 10 DescribeStream a second, 20 DescribeStreamSummary, and 1,000
# ListShards per stream.
_CALLS_PER_SECOND: Final = 8.0
_CALLS_AT_ONCE: Final = 16.0
_MOST_OPEN_CALLS: Final = 4
# The most waiting calls of one tenant, and the longest wait. SDKs wait at least as long for an answer, then retry.
MOST_WAITING: Final = 4
LONGEST_WAIT_SECONDS: Final = 2.0

FAILED: Final = "InternalFailure"
UNAVAILABLE: Final = "ServiceUnavailable"
TOO_OFTEN: Final = "LimitExceededException"
_FORBIDDEN: Final = "AccessDeniedException"
_UNKNOWN: Final = "UnknownOperationException"
# Errors about the signature, which is the gateway's (API Reference, "Common Error Types", and `sigv4`).
_OF_CREDENTIALS: Final = frozenset(
    {
        "ExpiredTokenException",
        "IncompleteSignature",
        "IncompleteSignatureException",
        "InvalidClientTokenId",
        "InvalidSignatureException",
        "MissingAuthenticationTokenException",
        "OptInRequired",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
    }
)


class Turn:
    """A waiting call. When it is granted, `granted` is True and `on_grant` has been called once."""

    def __init__(self, tenant: str, on_grant: Callable[[], object]) -> None:
        self.tenant = tenant
        self.on_grant = on_grant
        self.granted = False


class CallTurns:
    """Grant `per_second` calls, with bursts of `at_once`, round robin over the waiting tenants. Pure.

    With N waiting tenants, each gets at least 1/N of the calls; unused calls go to the others. A tenant may have
    `most_waiting` waiting calls.
    """

    def __init__(self, *, per_second: float, at_once: float, most_waiting: int, now: float) -> None:
        self._tokens = TokenBucket([(per_second, at_once)], now=now)
        self._most_waiting = most_waiting
        self._lines: OrderedDict[str, deque[Turn]] = OrderedDict()

    def ask(self, tenant: str, on_grant: Callable[[], object], now: float) -> Turn | None:
        """Enqueue a call; it is granted at once if possible. Returns None if the tenant's queue is full."""
        line = self._lines.setdefault(tenant, deque())
        if len(line) >= self._most_waiting:
            return None
        turn = Turn(tenant, on_grant)
        line.append(turn)
        self.grant(now)
        return turn

    def grant(self, now: float) -> None:
        """Grant the calls that are allowed at `now`."""
        while self._lines and self._tokens.try_take((1.0,), now):
            tenant, line = self._lines.popitem(last=False)
            turn = line.popleft()
            if line:
                # Move the tenant behind all others.
                self._lines[tenant] = line
            turn.granted = True
            turn.on_grant()

    def give_up(self, turn: Turn) -> None:
        """Remove a waiting call; do nothing if it was granted."""
        line = self._lines.get(turn.tenant)
        if turn.granted or line is None:
            return
        line.remove(turn)
        if not line:
            del self._lines[turn.tenant]

    def ready_at(self, now: float) -> float:
        """Return the instant at which `grant` can grant the next call."""
        return self._tokens.ready_at((1.0,), now)


class AiobotocoreUpstream:
    """Call Kinesis with the transport's aiobotocore client; `client` returns it, or None without one."""

    def __init__(self, client: Callable[[], Any]) -> None:
        self._client = client
        self._open_calls = anyio.CapacityLimiter(_MOST_OPEN_CALLS)
        self._turns: CallTurns | None = None

    async def call(self, operation: str, arguments: Mapping[str, object], *, tenant: str) -> Mapping[str, object]:
        """Return the members of the answer; `tenant` is the id of the calling tenant.

        Raises:
            RequestRefused: Kinesis rejected the call or could not be asked.
        """
        client = self._client()
        if client is None:
            raise RequestRefused(_UNKNOWN, f"{operation} cannot be forwarded: this gateway has no AWS client.")
        await self._wait_for_turn(tenant)
        try:
            async with self._open_calls:
                answer = await getattr(client, FORWARDED[operation])(**arguments)
        except ClientError as error:
            raise _refusal(operation, error) from None
        except Exception:  # noqa: BLE001 - not reachable, or raised by the session's credentials and event handlers
            raise _unavailable(operation) from None
        return {name: _wire_value(value) for name, value in answer.items() if name != "ResponseMetadata"}

    async def _wait_for_turn(self, tenant: str) -> None:
        if self._turns is None:
            self._turns = CallTurns(
                per_second=_CALLS_PER_SECOND,
                at_once=_CALLS_AT_ONCE,
                most_waiting=MOST_WAITING,
                now=anyio.current_time(),
            )
        turns, granted = self._turns, anyio.Event()
        turn = turns.ask(tenant, granted.set, anyio.current_time())
        if turn is None:
            raise _too_often()
        try:
            with anyio.move_on_after(LONGEST_WAIT_SECONDS):
                while not turn.granted:
                    now = anyio.current_time()
                    with anyio.move_on_after(turns.ready_at(now) - now):
                        await granted.wait()
                    turns.grant(anyio.current_time())
        finally:
            turns.give_up(turn)
        if not turn.granted:
            raise _too_often()


def _too_often() -> RequestRefused:
    return RequestRefused(TOO_OFTEN, "Rate exceeded for this operation; ask less often.")


def _refusal(operation: str, error: ClientError) -> RequestRefused:
    details = error.response.get("Error", {})
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 500)
    code = str(details.get("Code") or FAILED)
    if code.startswith("AccessDenied"):
        # The message of Kinesis names the gateway's role, which a tenant must not see.
        return RequestRefused(_FORBIDDEN, f"The gateway itself may not call {operation}.", status=status)
    if code in _OF_CREDENTIALS:
        # A client would take the error for one of its own keys and stop.
        return _unavailable(operation)
    return RequestRefused(code, str(details.get("Message") or code), status=status)


def _unavailable(operation: str) -> RequestRefused:
    return RequestRefused(UNAVAILABLE, f"Kinesis could not be asked for {operation}; try again.", status=503)


def _wire_value(value: object) -> object:
    if isinstance(value, datetime):
        return Timestamp(calendar.timegm(value.utctimetuple()) * 1000 + value.microsecond // 1000)
    if isinstance(value, Mapping):
        return {name: _wire_value(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_wire_value(member) for member in value]
    return value
