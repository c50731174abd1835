"""One call for both AWS SDKs of Python, so that a test of a server runs with both.

Retries and the client's own parameter validation are off, because the tests check the server.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, Protocol

import boto3
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.config import Config

__all__ = ["SDKS", "Call", "client_of"]

SDKS = ("aiobotocore", "boto3")

_SETTINGS: dict[str, Any] = {
    "retries": {"total_max_attempts": 1},
    "parameter_validation": False,
    "connect_timeout": 5,
    "read_timeout": 5,
    "max_pool_connections": 50,
}


class Call(Protocol):
    """Calls an operation by its snake-case name and returns the parsed answer."""

    async def __call__(self, operation: str, **members: Any) -> dict[str, Any]: ...


@cache
def _aio_session() -> AioSession:
    return AioSession()


@cache
def _boto3_session() -> boto3.Session:
    return boto3.Session()


@asynccontextmanager
async def client_of(sdk: str, endpoint_url: str, **settings: Any) -> AsyncIterator[Call]:
    """Yield a function that calls `endpoint_url` through one of `SDKS`."""
    options = _SETTINGS | settings
    names = {"service_name": "kinesis", "region_name": "us-east-1", "endpoint_url": endpoint_url}
    if sdk == "aiobotocore":
        async with _aio_session().create_client(**names, config=AioConfig(**options)) as aio_client:

            async def call(operation: str, **members: Any) -> dict[str, Any]:
                answer: dict[str, Any] = await getattr(aio_client, operation)(**members)
                return answer

            yield call
        return
    client: Any = _boto3_session().client(**names, config=Config(**options))  # type: ignore[call-overload]

    async def call_in_thread(operation: str, **members: Any) -> dict[str, Any]:
        answer: dict[str, Any] = await asyncio.to_thread(getattr(client, operation), **members)
        return answer

    try:
        yield call_in_thread
    finally:
        client.close()
