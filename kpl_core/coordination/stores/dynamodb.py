"""A store in a DynamoDB table: the objects of a group have one partition key, writes are conditional on a version.

The table has a partition key `group` and a sort key `name`, both strings. Reads are strongly consistent. An item may
have 400 KB, which is why large summaries have parts. `expires_at` can be configured as the table's TTL attribute; then
DynamoDB deletes the objects of workers that are long gone, free of charge.

One item is read by all workers twice an interval, the head of the plan, and DynamoDB reads an item at most 3,000 times
a second. With `copies` its readers are spread: each write of it is followed by writes of copies with partition keys of
their own, and each worker reads one copy. A conditional write goes to the original. If it is refused, the copy may be
old, because its writer died in between; then the next read is one of the original. A worker that reads an old plan for
a while keeps its old shares, which the plan still counts as held. It must not return to a plan before the one that it
used. So each version has a serial, and a copy with a lower one than was read or written before is not used.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol
from uuid import uuid4

import anyio

from kpl_core.coordination.store import (
    ABSENT,
    CONNECT_SECONDS,
    DEFAULT_GROUP,
    Listing,
    Reading,
    StoreAddress,
    StoreFailed,
    Written,
)
from kpl_core.coordination.stores.aws_client import (
    AWS_ERRORS,
    answered_at,
    code_of,
    open_client,
    store_errors,
    store_failed,
)
from kpl_core.errors import ConfigError
from kpl_core.paging import PageTokens

EXPIRES_AFTER_SECONDS: Final = 86_400
# The item that all workers read (`lease_sync.SUMMARY_NAME`).
COPIED_NAME: Final = "leases.json"
_MOST_COPIES: Final = 64
# `name` is a reserved word.
_NAMES: Final = {"#name": "name"}


async def open_store(address: StoreAddress) -> "DynamoDbStore":
    """Open `dynamodb://table/group?region=...&endpoint_url=...&copies=...`.

    Raises:
        ConfigError: the URL names no table, or `copies` is not a number from 0 to 64.
    """
    copies = address.query.get("copies", "0")
    if not copies.isdecimal() or int(copies) > _MOST_COPIES:
        message = f"copies of the store is {copies!r}; it must be a number from 0 to {_MOST_COPIES}"
        raise ConfigError(message)
    client, close = await open_client("dynamodb", address, form="dynamodb://table/group")
    group = address.parts.path.strip("/") or DEFAULT_GROUP
    return DynamoDbStore(client, address.parts.netloc, group, copies=int(copies), close=close)


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
        copies: how many copies of the plan's head its readers share, the same in all workers; 0 for the original only.
        close: called by `aclose`.
    """

    def __init__(
        self,
        client: DynamoDbClient,
        table: str,
        group: str,
        *,
        copies: int = 0,
        close: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self._client = client
        self._table = table
        self._group = group
        self._close = close
        self._place = f"dynamodb://{table}/{group}"
        self._answered_at = partial(answered_at, self._place)
        self._at = 0.0
        # The serial of the head that was last read or written; in milliseconds of the store's clock, or one more.
        self._serial = 0
        # The latest head that is not in the copies, and the task that writes it.
        self._uncopied: dict[str, Any] | None = None
        self._copying: asyncio.Task[None] | None = None
        self._copies = [f"{group}~{number}" for number in range(copies)]
        self._copy = self._copies[uuid4().int % copies] if copies else group
        # The copy may be older than the original.
        self._reads_original = False

    def _key(self, name: str, group: str = "") -> dict[str, dict[str, str]]:
        return {"group": {"S": group or self._group}, "name": {"S": name}}

    async def read(self, name: str) -> Reading:
        """Return one object: one GetItem, or two while there is no copy of it, or an old one."""
        if name != COPIED_NAME:
            return (await self._read(name, self._group))[0]
        if self._copies and not self._reads_original:
            reading, serial = await self._read(name, self._copy)
            if reading.body is not None and serial >= self._serial:
                self._serial = serial
                return reading
        reading, self._serial = await self._read(name, self._group)
        self._reads_original = False
        return reading

    async def _read(self, name: str, group: str) -> tuple[Reading, int]:
        with store_errors(self._place):
            answer = await self._client.get_item(TableName=self._table, Key=self._key(name, group), ConsistentRead=True)
        at = self._at = self._answered_at(answer)
        item = answer.get("Item")
        if item is None:
            return Reading(None, ABSENT, at), 0
        body, version = _body_of(item), item.get("version", {}).get("S")
        if body is None or version is None:
            message = f"{self._place}: item {name} belongs to another program; use another group"
            raise StoreFailed(message, reason="garbage")
        return Reading(body, version, at), int(item.get("serial", {}).get("N", 0))

    async def write(self, name: str, body: bytes, *, expected: str | None = None) -> Written:
        """Write an object if it has the expected version: one PutItem. Those of the copies follow by themselves."""
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
        # Above every copy's, also if the original was deleted or restored.
        serial = max(self._serial + 1, int(self._at * 1_000))
        if name == COPIED_NAME:
            item["serial"] = {"N": str(serial)}
        try:
            answer = await self._client.put_item(TableName=self._table, Item=item, **condition)
        except AWS_ERRORS as error:
            if code_of(error) in {"ConditionalCheckFailedException", "TransactionConflictException"}:
                self._reads_original = True
                return Written(None, self._answered_at(getattr(error, "response", {})))
            raise store_failed(self._place, error) from error
        self._at = self._answered_at(answer)
        if name == COPIED_NAME:
            self._serial = serial
            if self._copies:
                self._uncopied = item
                if self._copying is None or self._copying.done():
                    # Not awaited here: slow copies must not make a plan that is written look failed.
                    self._copying = asyncio.create_task(self._write_copies())
        return Written(version, self._at)

    async def _write_copies(self) -> None:
        while self._uncopied is not None:
            item, self._uncopied = self._uncopied, None
            async with anyio.create_task_group() as writers:
                for group in self._copies:
                    writers.start_soon(self._write_copy, {**item, **self._key(COPIED_NAME, group)})

    async def _write_copy(self, item: dict[str, Any]) -> None:
        try:
            await self._client.put_item(
                TableName=self._table,
                Item=item,
                # A late write must not replace a newer one.
                ConditionExpression="attribute_not_exists(#serial) OR #serial < :serial",
                ExpressionAttributeNames={"#serial": "serial"},
                ExpressionAttributeValues={":serial": item["serial"]},
            )
        except AWS_ERRORS:
            # The original is written. The next write comes within an interval; until then its readers have an old plan.
            return

    async def read_all(self, prefix: str) -> Listing:
        """Return all objects whose names begin with `prefix`: one Query for each megabyte."""
        bodies: dict[str, bytes] = {}
        start: dict[str, Any] = {}
        tokens = PageTokens()
        while True:
            with store_errors(self._place):
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
            with store_errors(self._place):
                tokens.follow(start)

    async def delete(self, name: str) -> None:
        """Remove an object: one DeleteItem, and one for each copy."""
        with store_errors(self._place):
            for group in (self._group, *(self._copies if name == COPIED_NAME else ())):
                await self._client.delete_item(TableName=self._table, Key=self._key(name, group))

    async def aclose(self) -> None:
        """Finish the copies, within two seconds, and close the client if it is this store's own."""
        if self._copying is not None:
            with anyio.move_on_after(CONNECT_SECONDS):
                await self._copying
        if self._close is not None:
            await self._close()


def _body_of(item: Mapping[str, Any]) -> bytes | None:
    body: bytes | None = item.get("body", {}).get("B")
    return body
