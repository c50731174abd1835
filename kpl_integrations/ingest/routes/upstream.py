"""The few questions a client of the Kinesis protocol asks about a stream, passed on to Kinesis itself.

SDKs, agents and libraries ask for shards and a summary before they put. Nothing of theirs is in the question but
its arguments: it is asked with the gateway's credentials, a few at a time and in turn among the tenants, so that
neither the account's calls are used up nor one tenant's questions keep the others waiting.
"""

import calendar
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final, Protocol

import anyio
from botocore.exceptions import ClientError

from kpl_integrations.ingest.streams.call_turns import CallTurns
from kpl_integrations.kinesis_protocol import RequestRefused, Timestamp

__all__ = ["FAILED", "PASSED_ON", "TOO_OFTEN", "UNAVAILABLE", "AiobotocoreUpstream", "Upstream"]

# Operation, and the method of an AWS client.
PASSED_ON: Final[Mapping[str, str]] = {
    "DescribeStream": "describe_stream",
    "DescribeStreamSummary": "describe_stream_summary",
    "ListShards": "list_shards",
}
# Of all tenants together. The account has 10 DescribeStream a second, 20 summaries, 1,000 ListShards per stream.
_CALLS_PER_SECOND: Final = 8.0
_CALLS_AT_ONCE: Final = 16.0
_MOST_OPEN_CALLS: Final = 4
# Of one tenant, in line; and for how long. SDKs wait at least as long for an answer, and ask again.
MOST_WAITING: Final = 4
LONGEST_WAIT_SECONDS: Final = 2.0

FAILED: Final = "InternalFailure"
UNAVAILABLE: Final = "ServiceUnavailable"
TOO_OFTEN: Final = "LimitExceededException"
_FORBIDDEN: Final = "AccessDeniedException"
_UNKNOWN: Final = "UnknownOperationException"
# About whoever signed, and that was the gateway (API Reference, "Common Error Types", and `sigv4`).
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


class Upstream(Protocol):
    """Kinesis, as far as questions are passed on."""

    async def call(self, operation: str, arguments: Mapping[str, object], *, tenant: str) -> Mapping[str, object]:
        """Return the members of the answer; `tenant` is who asks.

        Raises:
            RequestRefused: Kinesis refused, or could not be asked.
        """


class AiobotocoreUpstream:
    """Asks with the transport's own aiobotocore client; `client` returns it, or None where there is none."""

    def __init__(self, client: Callable[[], Any]) -> None:
        self._client = client
        self._open_calls = anyio.CapacityLimiter(_MOST_OPEN_CALLS)
        self._turns: CallTurns | None = None

    async def call(self, operation: str, arguments: Mapping[str, object], *, tenant: str) -> Mapping[str, object]:
        """Ask Kinesis; see `Upstream`."""
        client = self._client()
        if client is None:
            raise RequestRefused(
                _UNKNOWN, f"{operation} cannot be passed on: there is no AWS client behind this gateway."
            )
        await self._wait_for_turn(tenant)
        try:
            async with self._open_calls:
                answer = await getattr(client, PASSED_ON[operation])(**arguments)
        except ClientError as error:
            raise _refusal(operation, error) from None
        except Exception:  # noqa: BLE001 - out of reach, or what a session's credentials and event handlers raise
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
        # Kinesis' own words name the gateway's role, which is none of a tenant's business.
        return RequestRefused(_FORBIDDEN, f"The gateway itself may not call {operation}.", status=status)
    if code in _OF_CREDENTIALS:
        # A client would take it for a verdict on its own keys, and stop.
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
