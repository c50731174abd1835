"""The clients of the stores on AWS: opening one, its errors as one sentence with a label for metrics, its clock."""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any, Final

import aiohttp
from botocore.exceptions import BotoCoreError, ClientError

from kpl_core.coordination.store import CONNECT_SECONDS, PARALLEL_CALLS, StoreAddress, StoreFailed
from kpl_core.errors import ConfigError

# aiohttp's own errors: a truncated body.
AWS_ERRORS: Final = (BotoCoreError, ClientError, aiohttp.ClientError, OSError, TimeoutError)

_ATTEMPTS: Final = 2
# Error code or its prefix -> reason, what to do.
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


async def open_client(service: str, address: StoreAddress, *, form: str) -> tuple[Any, Callable[[], Awaitable[None]]]:
    """Return a client for the store's address, and the function that closes it; `form` shows a complete URL.

    Raises:
        ConfigError: the URL names no bucket or table.
    """
    from aiobotocore.config import AioConfig  # noqa: PLC0415 - slow to import
    from aiobotocore.session import get_session  # noqa: PLC0415

    if not address.parts.netloc:
        message = f"store names no {form.split('/')[2]}; write it as {form}"
        raise ConfigError(message)
    options = dict(address.client_options)
    for name, option in (("region", "region_name"), ("endpoint_url", "endpoint_url")):
        if name in address.query:
            options[option] = address.query[name]
    config = AioConfig(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=CONNECT_SECONDS,
        max_pool_connections=PARALLEL_CALLS,
        retries={"total_max_attempts": _ATTEMPTS, "mode": "standard"},
    )
    context = (address.session or get_session()).create_client(service, config=config, **options)
    client = await context.__aenter__()

    async def close() -> None:
        await context.__aexit__(None, None, None)

    return client, close


def code_of(error: BaseException) -> str:
    """Return the service's error code, or the exception's class name."""
    if isinstance(error, ClientError):
        return str(error.response.get("Error", {}).get("Code", "Unknown"))
    return type(error).__name__


def store_failed(place: str, error: BaseException) -> StoreFailed:
    """Return the error to raise: why `place` cannot be used."""
    code = code_of(error)
    for beginning, reason, remedy in _ROWS:
        if code.startswith(beginning):
            return StoreFailed(f"{place}: {code}; {remedy}", reason=reason)
    return StoreFailed(f"{place}: {code}; check its endpoint and the network", reason="down")


@contextmanager
def store_errors(place: str) -> Iterator[None]:
    """Turn the errors of aiobotocore into `StoreFailed`."""
    try:
        yield
    except AWS_ERRORS as error:
        raise store_failed(place, error) from error


def answered_at(place: str, answer: Mapping[str, Any]) -> float:
    """Return the service's clock, seconds since 1970, from the `Date` header of its answer.

    Raises:
        StoreFailed: the answer has no date. Every answer of AWS has one; a proxy may remove it.
    """
    try:
        return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()
    except (KeyError, TypeError, ValueError) as error:
        message = f"{place}: an answer has no Date header; check the proxies in between"
        raise StoreFailed(message, reason="clock") from error
