"""Forward read-only operations of the Kinesis protocol (ListShards, DescribeStream...) to Kinesis.

SDKs, agents and libraries ask for shards and a summary before they put. The gateway forwards only the arguments and
signs with its own credentials. Calls are limited in total and served round robin over the tenants, so they do not use
up the account's calls and one tenant does not delay the others.
"""

import calendar
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from kpl_core.records.record_result import INTERNAL
from kpl_core.transport import RequestFailure
from kpl_integrations.ingest.streams.call_budget import CallBudget, describe_calls
from kpl_integrations.kinesis_protocol.requests import RequestRefused
from kpl_integrations.kinesis_protocol.wire import Timestamp

# The method of the transport's `call`, by operation.
FORWARDED: Final[Mapping[str, str]] = {
    "DescribeStream": "describe_stream",
    "DescribeStreamSummary": "describe_stream_summary",
    "ListShards": "list_shards",
}

FAILED: Final = "InternalFailure"
UNAVAILABLE: Final = "ServiceUnavailable"
TOO_OFTEN: Final = "LimitExceededException"
_FORBIDDEN: Final = "AccessDeniedException"
_UNKNOWN: Final = "UnknownOperationException"
# Errors without an answer of Kinesis, and errors about the signature, which is the gateway's (API Reference, "Common
# Error Types", and `sigv4`). A client would take the latter for errors of its own keys and stop.
_OF_GATEWAY: Final = frozenset(
    {
        INTERNAL,
        "NoCredentials",
        UNAVAILABLE,
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


# Of answers to the forwarded operations. A transport reads them as numbers or as instants.
_INSTANTS: Final = frozenset({"StreamCreationTimestamp"})


class Upstream:
    """Call Kinesis with the producer's transport. One without `call`, such as a test's, forwards nothing.

    `calls` is the budget that it shares with the gateway's own lookups.
    """

    def __init__(self, transport: object, calls: CallBudget | None = None) -> None:
        self._call: Any = getattr(transport, "call", None)
        self._calls = describe_calls() if calls is None else calls

    async def call(self, operation: str, arguments: Mapping[str, object], *, tenant: str) -> Mapping[str, object]:
        """Return the members of the answer; `tenant` is the id of the calling tenant.

        Raises:
            RequestRefused: Kinesis rejected the call or could not be asked.
        """
        if self._call is None:
            raise RequestRefused(_UNKNOWN, f"{operation} cannot be forwarded: this gateway has no AWS client.")
        async with self._calls.turn(tenant) as is_granted:
            if not is_granted:
                raise RequestRefused(TOO_OFTEN, "Rate exceeded for this operation; ask less often.")
            stream: Any = arguments.get("StreamARN") or arguments.get("StreamName")
            answer = await self._call(FORWARDED[operation], _members, stream, **arguments)
        if isinstance(answer, RequestFailure):
            raise _refusal(operation, answer)
        members: Mapping[str, object] = answer
        return members


def _refusal(operation: str, failure: RequestFailure) -> RequestRefused:
    code = failure.code
    if code.startswith("AccessDenied"):
        # The message of Kinesis names the gateway's role, which a tenant must not see.
        return RequestRefused(_FORBIDDEN, f"The gateway itself may not call {operation}.")
    # Without a code of Kinesis, the code of the answer is its HTTP status.
    if code in _OF_GATEWAY or code.isdecimal():
        return RequestRefused(UNAVAILABLE, f"Kinesis could not be asked for {operation}; try again.", status=503)
    return RequestRefused(code, failure.message or code, status=500 if code.startswith("Internal") else 400)


def _members(answer: Mapping[str, Any]) -> dict[str, object]:
    """Return the members of a parsed answer, without botocore's own, with instants for any wire format."""
    return {name: _wire_value(name, value) for name, value in answer.items() if name != "ResponseMetadata"}


def _wire_value(name: str, value: object) -> object:
    if isinstance(value, datetime):
        return Timestamp(calendar.timegm(value.utctimetuple()) * 1000 + value.microsecond // 1000)
    if name in _INSTANTS and isinstance(value, int | float):
        return Timestamp(round(value * 1000))
    if isinstance(value, Mapping):
        return {inner: _wire_value(inner, member) for inner, member in value.items()}
    if isinstance(value, list):
        return [_wire_value(name, member) for member in value]
    return value
