"""A transport without a network that answers success at once, or delays its answers."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

import anyio

from benchmarks.ledger import ShardRanges
from kpl_core.pipeline.shard_map import Shard
from kpl_core.records.put_records import PutRecordsEntry, PutRecordsRequest

__all__ = ["InstantTransport"]

_MEBIBYTE = 1_048_576


class InstantTransport:
    """Accepts every request; `hold` and `release` control when it answers."""

    def __init__(self, shard_count: int) -> None:
        self._shards = [
            Shard(f"shardId-{number:012d}", start, end)
            for number, (start, end) in enumerate(ShardRanges(shard_count).ranges)
        ]
        self._may_answer: anyio.Event | None = None

    def hold(self) -> None:
        """Delay all answers from now on."""
        self._may_answer = anyio.Event()

    def release(self) -> None:
        """Send the delayed answers, and answer later requests at once."""
        if self._may_answer is not None:
            self._may_answer.set()

    def open(self) -> AbstractAsyncContextManager[object]:
        """Return a context without resources."""
        return nullcontext()

    async def put_records(self, request: PutRecordsRequest) -> list[PutRecordsEntry]:
        """Return success for each record, in its predicted shard."""
        if self._may_answer is not None:
            await self._may_answer.wait()
        first = self._shards[0].shard_id
        return [PutRecordsEntry("1", record.predicted_shard or first) for record in request.records]

    async def list_shards(self, stream: str) -> Sequence[Shard]:  # noqa: ARG002 - all streams are alike
        """Return the shards."""
        return self._shards

    async def max_record_bytes(self, stream: str) -> int:  # noqa: ARG002
        """Return the service's default."""
        return _MEBIBYTE
