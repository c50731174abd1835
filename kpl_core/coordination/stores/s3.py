"""A store in an S3 bucket, with S3's conditional writes (If-Match, If-None-Match; S3, 2024).

The answer of each request carries S3's clock (`Date`). The version is the ETag, which S3 compares. S3 is strongly
consistent, so a read returns the latest write. If S3 did a write and its answer was lost, the retry looks rejected:
then no worker wins, and the next one computes.
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol

from kpl_core.coordination.bounded_calls import in_parallel
from kpl_core.coordination.store import ABSENT, Listing, Reading, StoreAddress, Written
from kpl_core.coordination.stores.aws_client import (
    AWS_ERRORS,
    answered_at,
    code_of,
    open_client,
    store_errors,
    store_failed,
)
from kpl_core.paging import PageTokens

# The reports, and the parts of the latest plan that was read.
_LISTINGS_KEPT: Final = 2
_GONE: Final = frozenset({"NoSuchKey", "404", "NotFound"})
_REFUSED: Final = frozenset({"PreconditionFailed", "412", "ConditionalRequestConflict", "409", "NoSuchKey", "404"})


async def open_store(address: StoreAddress) -> "S3Store":
    """Open `s3://bucket/prefix/?region=...&endpoint_url=...`."""
    client, close = await open_client("s3", address, form="s3://bucket/prefix/")
    return S3Store(client, address.parts.netloc, address.parts.path.removeprefix("/"), close=close)


class S3StoreClient(Protocol):
    """The calls used of an aiobotocore S3 client; its owner opens and closes it."""

    get_object: Callable[..., Awaitable[Mapping[str, Any]]]
    put_object: Callable[..., Awaitable[Mapping[str, Any]]]
    delete_object: Callable[..., Awaitable[Mapping[str, Any]]]
    list_objects_v2: Callable[..., Awaitable[Mapping[str, Any]]]


class S3Store:
    """Objects of `bucket` below `prefix`. asyncio only, like its client.

    Args:
        client: an aiobotocore client for S3.
        bucket: without versioning, because each old version would be stored and charged.
        prefix: a / is added if it does not end in one.
        close: called by `aclose`.
    """

    def __init__(
        self, client: S3StoreClient, bucket: str, prefix: str, *, close: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        self._client = client
        self._bucket = bucket
        self._prefix = prefix if not prefix or prefix.endswith("/") else f"{prefix}/"
        self._close = close
        # The objects of the last listings, by prefix and key, with their ETags.
        self._listed: dict[str, dict[str, Reading]] = {}
        self._place = f"s3://{bucket}/{self._prefix}"
        self._answered_at = partial(answered_at, self._place)

    async def read(self, name: str) -> Reading:
        """Return one object: one GetObject."""
        try:
            answer = await self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)
            body = await answer["Body"].read()
        except AWS_ERRORS as error:
            if code_of(error) in _GONE:
                return Reading(None, ABSENT, self._answered_at(getattr(error, "response", {})))
            raise store_failed(self._place, error) from error
        return Reading(body, answer["ETag"], self._answered_at(answer))

    async def write(self, name: str, body: bytes, *, expected: str | None = None) -> Written:
        """Write an object if it has the expected version: one PutObject."""
        condition: dict[str, str] = {}
        if expected is not None:
            condition = {"IfNoneMatch": "*"} if expected == ABSENT else {"IfMatch": expected}
        try:
            answer = await self._client.put_object(
                Bucket=self._bucket,
                Key=self._prefix + name,
                Body=body,
                ContentType="application/json",
                **condition,
            )
        except AWS_ERRORS as error:
            if condition and code_of(error) in _REFUSED:
                return Written(None, self._answered_at(getattr(error, "response", {})))
            raise store_failed(self._place, error) from error
        return Written(answer["ETag"], self._answered_at(answer))

    async def read_all(self, prefix: str) -> Listing:
        """Return all objects whose names begin with `prefix`.

        It takes one ListObjectsV2 per 1,000, and one GetObject for each that has changed since it was last read. A
        listing that is cancelled keeps what it has read, so the next one continues.
        """
        etags: dict[str, str] = {}
        token: dict[str, str] = {}
        tokens = PageTokens()
        while True:
            with store_errors(self._place):
                page = await self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix + prefix, **token)
            etags |= {found["Key"]: found["ETag"] for found in page.get("Contents", ())}
            if not page.get("IsTruncated"):
                break
            token = {"ContinuationToken": page["NextContinuationToken"]}
            with store_errors(self._place):
                tokens.follow(token)
        last = self._listed.pop(prefix, {})
        listed = self._listed[prefix] = {key: known for key, known in last.items() if etags.get(key) == known.version}
        # Each plan's parts have a prefix of their own.
        while len(self._listed) > _LISTINGS_KEPT:
            del self._listed[next(iter(self._listed))]

        async def read_one(key: str) -> None:
            reading = await self.read(key.removeprefix(self._prefix))
            if reading.body is not None:
                listed[key] = reading

        await in_parallel([partial(read_one, key) for key in etags if key not in listed])
        bodies = {key.removeprefix(self._prefix): reading.body or b"" for key, reading in listed.items()}
        return Listing(bodies, self._answered_at(page))

    async def delete(self, name: str) -> None:
        """Delete an object: one DeleteObject, which is free of charge."""
        with store_errors(self._place):
            await self._client.delete_object(Bucket=self._bucket, Key=self._prefix + name)

    async def aclose(self) -> None:
        """Close the client if it is this store's own."""
        if self._close is not None:
            await self._close()
