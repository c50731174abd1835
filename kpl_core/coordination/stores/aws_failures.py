"""What botocore raises, as one sentence and a word for metrics; and the clock of an answer."""

from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Final

import aiohttp
from botocore.exceptions import BotoCoreError, ClientError

from kpl_core.coordination.store import StoreFailed

__all__ = ["AWS_ERRORS", "answered_at", "code_of", "store_failed"]

# aiohttp's own: a body that breaks off.
AWS_ERRORS: Final = (BotoCoreError, ClientError, aiohttp.ClientError, OSError, TimeoutError)

# Code of the error, or how it begins: reason, what to do.
_ROWS: Final = (
    ("AccessDenied", "denied", "allow this role to read and write there"),
    ("InvalidAccessKeyId", "denied", "check the credentials"),
    ("SignatureDoesNotMatch", "denied", "check the credentials"),
    ("ExpiredToken", "denied", "renew the credentials"),
    ("UnrecognizedClient", "denied", "check the credentials"),
    ("RequestTimeTooSkewed", "clock", "synchronise this machine's clock"),
    ("NoSuchBucket", "missing", "create the bucket, or check its name and region"),
    ("ResourceNotFoundException", "missing", "create the table, or check its name and region"),
    ("ProvisionedThroughputExceeded", "limit", "give the table more capacity, or lengthen the interval"),
    ("ThrottlingException", "limit", "give the table more capacity, or lengthen the interval"),
    ("SlowDown", "limit", "lengthen the interval, or use another prefix"),
)


def code_of(error: BaseException) -> str:
    """Return the service's code, or the kind of the error."""
    if isinstance(error, ClientError):
        return str(error.response.get("Error", {}).get("Code", "Unknown"))
    return type(error).__name__


def store_failed(place: str, error: BaseException) -> StoreFailed:
    """Return why `place` cannot be used."""
    code = code_of(error)
    for beginning, reason, remedy in _ROWS:
        if code.startswith(beginning):
            return StoreFailed(f"{place}: {code}; {remedy}", reason=reason)
    return StoreFailed(f"{place}: {code}; see its endpoint and the network", reason="down")


def answered_at(place: str, answer: Mapping[str, Any]) -> float:
    """Return the service's clock, seconds since 1970, from the `Date` of its answer.

    Raises:
        StoreFailed: the answer has none; every answer of AWS has one, but something may stand between.
    """
    try:
        return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()
    except (KeyError, TypeError, ValueError) as error:
        message = f"{place}: an answer does not tell the time (HTTP's Date); see what stands in between"
        raise StoreFailed(message, reason="clock") from error
