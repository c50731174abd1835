"""All shards of a stream, read by GetRecords over HTTP, children after their parents."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import anyio
from anyio.abc import TaskGroup
from botocore.exceptions import ClientError

from kpl_integrations.cli.first_error import raises_first
from kpl_integrations.cli.tail.consumer_view import ReadRecord, user_records
from kpl_integrations.cli.tail.reading_order import ReadableShard, ReadingOrder

__all__ = ["StreamReader"]

# At the end of a shard. It gives five reads a second, shared by all its consumers: a guest takes two.
PAUSE_SECONDS: Final = 0.5
_RECORDS_PER_READ: Final = 1_000

Start = Literal["LATEST", "TRIM_HORIZON"]


class StreamReader:
    """Reads until told to stop or, with `follow` False, to the end of what is stored.

    `take` is given the user records of each answer. It says whether it wants more.
    """

    def __init__(
        self,
        client: Any,  # noqa: ANN401 - aiobotocore has no types
        stream_argument: Mapping[str, str],
        take: Callable[[Sequence[ReadRecord]], bool],
        *,
        start: Start,
        follow: bool,
    ) -> None:
        self._client = client
        self._stream = stream_argument
        self._take = take
        self._start = start
        self._follow = follow
        self._order = ReadingOrder()
        self.kinesis_records = 0
        # Aggregated records found on a shard that is not theirs.
        self.dropped_records = 0

    async def run(self, started: Callable[[], object] = lambda: None) -> None:
        """Read; `started` is called when nothing that arrives from then on can be missed."""
        shards = await self._list_shards()
        iterators: dict[str, str] = {}
        if self._start == "LATEST":
            for shard in shards:
                iterators[shard.shard_id] = await self._iterator(shard, type="LATEST")
        started()
        with raises_first():
            await self._read_all(shards, iterators)

    async def _read_all(self, shards: Sequence[ReadableShard], iterators: Mapping[str, str]) -> None:
        async with anyio.create_task_group() as tasks:
            for shard in self._order.discover(shards):
                tasks.start_soon(self._read_shard, shard, iterators.get(shard.shard_id), tasks)

    async def _list_shards(self) -> list[ReadableShard]:
        """Return the open shards, and before them the closed ones if they are wanted too."""
        shards: list[ReadableShard] = []
        wanted = "AT_LATEST" if self._start == "LATEST" else "FROM_TRIM_HORIZON"
        arguments: dict[str, Any] = {**self._stream, "ShardFilter": {"Type": wanted}}
        while True:
            page = await self._client.list_shards(**arguments)
            shards += map(ReadableShard.of_listed, page["Shards"])
            token = page.get("NextToken")
            if not token:
                return shards
            arguments = {"NextToken": token}

    async def _iterator(self, shard: ReadableShard, *, type: str, after: str | None = None) -> str:  # noqa: A002
        position = {} if after is None else {"StartingSequenceNumber": after}
        answer = await self._client.get_shard_iterator(
            **self._stream, ShardId=shard.shard_id, ShardIteratorType=type, **position
        )
        iterator: str = answer["ShardIterator"]
        return iterator

    async def _read_shard(self, shard: ReadableShard, iterator: str | None, tasks: TaskGroup) -> None:
        children: list[ReadableShard] = []
        last: str | None = None
        if iterator is None:
            iterator = await self._iterator(shard, type="TRIM_HORIZON")
        while iterator is not None:
            try:
                answer = await self._client.get_records(ShardIterator=iterator, Limit=_RECORDS_PER_READ)
            except ClientError as error:
                iterator = await self._iterator_after(error, shard, last)
                continue
            iterator = answer.get("NextShardIterator")
            children = [ReadableShard.of_child(child) for child in answer.get("ChildShards") or ()]
            records = answer["Records"]
            if records:
                last = records[-1]["SequenceNumber"]
            if not self._hand_on(records, shard):
                tasks.cancel_scope.cancel()
            if iterator is not None and not answer.get("MillisBehindLatest"):
                if not self._follow:
                    return
                await anyio.sleep(PAUSE_SECONDS)
        for next_shard in self._order.finish(shard.shard_id, children):
            tasks.start_soon(self._read_shard, next_shard, None, tasks)

    async def _iterator_after(self, error: ClientError, shard: ReadableShard, last: str | None) -> str:
        """Return where to go on when an iterator is five minutes old: this process was stopped, or it slept."""
        if error.response.get("Error", {}).get("Code") != "ExpiredIteratorException":
            raise error
        if last is None:
            return await self._iterator(shard, type=self._start)
        return await self._iterator(shard, type="AFTER_SEQUENCE_NUMBER", after=last)

    def _hand_on(self, records: Sequence[Mapping[str, Any]], shard: ReadableShard) -> bool:
        self.kinesis_records += len(records)
        found: list[ReadRecord] = []
        for record in records:
            seen = user_records(record, shard)
            if seen is None:
                self.dropped_records += 1
            else:
                found += seen
        return self._take(found) if found else True
