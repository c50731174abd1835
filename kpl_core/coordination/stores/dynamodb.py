"""A store in a DynamoDB table: the objects of a group have one partition key, writes are conditional on a version.

The table has a partition key `group` and a sort key `name`, both strings. Reads are strongly consistent. An item may
have 400 KB, which is why large summaries have parts. `expires_at` can be configured as the table's TTL attribute; then
DynamoDB deletes the objects of workers that are long gone, free of charge.
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol
from uuid import uuid4

from kpl_core.coordination.store import ABSENT, DEFAULT_GROUP, Listing, Reading, StoreAddress, StoreFailed, Written
from kpl_core.coordination.stores.aws_client import (
    AWS_ERRORS,
    answered_at,
    code_of,
    open_client,
    store_errors,
    store_failed,
)
from kpl_core.paging import PageTokens

EXPIRES_AFTER_SECONDS: Final = 86_400
# `name` is a reserved word.
_NAMES: Final = {"#name": "name"}


async def open_store(address: StoreAddress) -> "DynamoDbStore":
    """Open `dynamodb://table/group?region=...&endpoint_url=...`."""
    client, close = await open_client("dynamodb", address, form="dynamodb://table/group")
    return DynamoDbStore(client, address.parts.netloc, address.parts.path.strip("/") or DEFAULT_GROUP, close=close)


class DynamoDbClient(Protocol):
    """The calls used of an aiobotocore DynamoDB client; its owner opens and closes it."""

    get_item: Callable[..., Awaitable[Mapping[str, Any]]]
    put_item: Callable[..., Awaitable[Mapping[str, Any]]]
    delete_item: Callable[..., Awaitable[Mapping[str, Any]]]
    query: Callable[..., Awaitable[Mapping[str, Any]]]


class DynamoDbStore:
    """Items of `table` in one group. asyncio only, like its client.

    Args:
        client: an aiobotocore client for DynamoDB.
        table: its name.
        group: the partition key of all objects; workers that share streams use the same group.
        close: called by `aclose`.
    """

    def __init__(
        self, client: DynamoDbClient, table: str, group: str, *, close: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        self._client = client
        self._table = table
        self._group = group
        self._close = close
        self._place = f"dynamodb://{table}/{group}"
        self._answered_at = partial(answered_at, self._place)
        self._at = 0.0

    def _key(self, name: str) -> dict[str, dict[str, str]]:
        return {"group": {"S": self._group}, "name": {"S": name}}

    async def read(self, name: str) -> Reading:
        """Return one object: one GetItem."""
        with store_errors(self._place):
            answer = await self._client.get_item(TableName=self._table, Key=self._key(name), ConsistentRead=True)
        at = self._at = self._answered_at(answer)
        item = answer.get("Item")
        if item is None:
            return Reading(None, ABSENT, at)
        body, version = _body_of(item), item.get("version", {}).get("S")
        if body is None or version is None:
            message = f"{self._place}: item {name} belongs to another program; use another group"
            raise StoreFailed(message, reason="garbage")
        return Reading(body, version, at)

    async def write(self, name: str, body: bytes, *, expected: str | None = None) -> Written:
        """Write an object if it has the expected version: one PutItem."""
        version = uuid4().hex
        condition: dict[str, Any] = {}
        if expected == ABSENT:
            condition = {"ConditionExpression": "attribute_not_exists(#name)", "ExpressionAttributeNames": _NAMES}
        elif expected is not None:
            condition = {
                "ConditionExpression": "version = :expected",
                "ExpressionAttributeValues": {":expected": {"S": expected}},
            }
        item = {**self._key(name), "body": {"B": body}, "version": {"S": version}}
        if self._at:
            item["expires_at"] = {"N": str(int(self._at) + EXPIRES_AFTER_SECONDS)}
        try:
            answer = await self._client.put_item(TableName=self._table, Item=item, **condition)
        except AWS_ERRORS as error:
            if code_of(error) in {"ConditionalCheckFailedException", "TransactionConflictException"}:
                return Written(None, self._answered_at(getattr(error, "response", {})))
            raise store_failed(self._place, error) from error
        self._at = self._answered_at(answer)
        return Written(version, self._at)

    async def read_all(self, prefix: str) -> Listing:
        """Return all objects whose names begin with `prefix`: one Query for each megabyte."""
        bodies: dict[str, bytes] = {}
        start: dict[str, Any] = {}
        tokens = PageTokens()
        while True:
            with store_errors(self._place):
                tokens.follow(start)
                page = await self._client.query(
                    TableName=self._table,
                    ConsistentRead=True,
                    KeyConditionExpression="#group = :group AND begins_with(#name, :prefix)",
                    ExpressionAttributeNames={"#group": "group", **_NAMES},
                    ExpressionAttributeValues={":group": {"S": self._group}, ":prefix": {"S": prefix}},
                    **start,
                )
            for item in page["Items"]:
                # Objects of another program fail later, where they are decoded and reported.
                bodies[item["name"]["S"]] = _body_of(item) or b""
            if "LastEvaluatedKey" not in page:
                return Listing(bodies, self._answered_at(page))
            start = {"ExclusiveStartKey": page["LastEvaluatedKey"]}

    async def delete(self, name: str) -> None:
        """Remove an object: one DeleteItem."""
        with store_errors(self._place):
            await self._client.delete_item(TableName=self._table, Key=self._key(name))

    async def aclose(self) -> None:
        """Close the client if it is this store's own."""
        if self._close is not None:
            await self._close()


def _body_of(item: Mapping[str, Any]) -> bytes | None:
    body: bytes | None = item.get("body", {}).get("B")
    return body
