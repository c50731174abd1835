"""Why a user record failed, in the closed set of reasons that dead letters, replay and metrics share."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, get_args

from kpl_core.records.record_result import BREAKER_OPEN, EXPIRED, RATE_LIMITED, SHUTDOWN, UNKNOWN, RecordResult

__all__ = ["INCURABLE", "REASONS", "REASON_BY_ERROR_CODE", "Reason", "reason_of", "reason_of_code"]

Reason = Literal[
    "rate_limited",
    "ttl",
    "retries_exhausted",
    "throttled",
    "invalid",
    "oversize",
    "breaker_open",
    "shutdown",
    "unserialisable",
]
REASONS: Final[tuple[Reason, ...]] = get_args(Reason)

# The code of the last attempt, and the reason it stands for; "Expired" is told apart in `reason_of_code`.
REASON_BY_ERROR_CODE: Final[Mapping[str, Reason]] = MappingProxyType(
    {
        "ProvisionedThroughputExceededException": "throttled",
        "LimitExceededException": "throttled",
        "KMSThrottlingException": "throttled",
        "ValidationException": "invalid",
        "InvalidArgumentException": "invalid",
        BREAKER_OPEN: "breaker_open",
        RATE_LIMITED: "rate_limited",
        SHUTDOWN: "shutdown",
        UNKNOWN: "shutdown",
    }
)

# These fail again whenever they are tried.
INCURABLE: Final[frozenset[Reason]] = frozenset({"invalid", "oversize", "unserialisable"})


def reason_of_code(code: str, *, attempts: int) -> Reason:
    """Return the reason for which a user record failed whose last of `attempts` has this error code.

    A record that expired without another attempt died of its TTL, one that had attempts exhausted them.
    """
    if code == EXPIRED:
        return "ttl" if attempts == 1 else "retries_exhausted"
    return REASON_BY_ERROR_CODE.get(code, "retries_exhausted")


def reason_of(result: RecordResult) -> Reason:
    """Return the reason for which a failed result is a dead letter."""
    return reason_of_code(result.error_code or "", attempts=len(result.attempts))
