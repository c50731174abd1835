"""Forward read-only operations of the Kinesis protocol (ListShards, DescribeStream...) to Kinesis.

SDKs, agents and libraries ask for shards and a summary before they put. The gateway forwards only the arguments and
signs with its own credentials. Calls are limited in total and served round robin over the tenants, so they do not use
up the account's calls and one tenant does not delay the others.
"""

import calendar
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

from botocore.exceptions import ClientError

from kpl_integrations.ingest.streams.call_budget import CallBudget, describe_calls
from kpl_integrations.kinesis_protocol.requests import RequestRefused
from kpl_integrations.kinesis_protocol.wire import Timestamp

# The method of an AWS client, by operation.
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


class AiobotocoreUpstream:
    """Call Kinesis with the transport's aiobotocore client; `client` returns it, or None without one.

    `calls` is the budget that it shares with the gateway's own lookups.
    """

    def __init__(self, client: Callable[[], Any], calls: CallBudget | None = None) -> None:
        self._client = client
        self._calls = describe_calls() if calls is None else calls

    async def call(self, operation: str, arguments: Mapping[str, object], *, tenant: str) -> Mapping[str, object]:
        """Return the members of the answer; `tenant` is the id of the calling tenant.

        Raises:
            RequestRefused: Kinesis rejected the call or could not be asked.
        """
        client = self._client()
        if client is None:
            raise RequestRefused(_UNKNOWN, f"{operation} cannot be forwarded: this gateway has no AWS client.")
        async with self._calls.turn(tenant) as is_granted:
            if not is_granted:
                raise RequestRefused(TOO_OFTEN, "Rate exceeded for this operation; ask less often.")
            try:
                answer = await getattr(client, FORWARDED[operation])(**arguments)
            except ClientError as error:
                raise _refusal(operation, error) from None
            except Exception:  # noqa: BLE001 - not reachable, or raised by the session's credentials and event handlers
                raise _unavailable(operation) from None
        return {name: _wire_value(value) for name, value in answer.items() if name != "ResponseMetadata"}


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
