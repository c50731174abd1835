"""A transport without a network: the producer on one side, a `FakeKinesis` on the other."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio

from kpl_core.pipeline.shard_map import Shard
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsEntry, PutRecordsRequest, RequestFailure
from kpl_core.records.record_result import INTERNAL
from kpl_core.testing.fake_kinesis import FakeKinesis
from kpl_core.testing.fault_effects import RequestPlan
from kpl_core.testing.kinesis_error import KinesisError

__all__ = ["FakeTransport"]

T = TypeVar("T")


class FakeTransport:
    """Carries requests to `kinesis` and carries out its faults; runs on asyncio and trio.

    `latency_seconds` passes on the loop's clock before each answer, so under virtual time it costs
    nothing. What the transport of a real network would report as broken is an `Internal` failure.
    """

    def __init__(self, kinesis: FakeKinesis, *, latency_seconds: float = 0.0) -> None:
        self.kinesis = kinesis
        self.latency_seconds = latency_seconds
        self.requests: list[PutRecordsRequest] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Open nothing."""
        yield

    async def put_records(self, request: PutRecordsRequest) -> PutRecordsAnswer:
        """Store the records, or fail as the armed faults say."""
        self.requests.append(request)
        plan = self.kinesis.faults.plan("PutRecords", stream=request.stream, now=anyio.current_time())

        def commit(now: float) -> list[PutRecordsEntry]:
            for effect in plan.reshards:
                self.kinesis.reshard(request.stream, effect, now=now)
            entries = self.kinesis.put_records(
                request.stream,
                [(record.partition_key, record.explicit_hash_key, record.data) for record in request.records],
                now=now,
            )
            return [
                PutRecordsEntry(entry.sequence_number, entry.shard_id, entry.error_code, entry.error_message)
                for entry in entries
            ]

        answer = await self._carry_out(plan, commit)
        if isinstance(answer, RequestFailure) or not plan.count_change:
            return answer
        return answer[: plan.count_change] if plan.count_change < 0 else [*answer, *answer[: plan.count_change]]

    async def list_shards(self, stream: str) -> Sequence[Shard] | RequestFailure:
        """Return the open shards."""
        plan = self.kinesis.faults.plan("ListShards", stream=stream, now=anyio.current_time())
        return await self._carry_out(
            plan,
            lambda now: self._open_shards(stream, now),
        )

    def _open_shards(self, stream: str, now: float) -> Sequence[Shard]:
        self.kinesis.describe_stream_summary(stream, now=now)
        return [
            Shard(shard.shard_id, shard.starting_hash_key, shard.ending_hash_key)
            for shard in self.kinesis.open_shards(stream, now=now)
        ]

    async def max_record_bytes(self, stream: str) -> int | RequestFailure:
        """Return the stream's limit on key and data."""
        plan = self.kinesis.faults.plan("DescribeStreamSummary", stream=stream, now=anyio.current_time())
        return await self._carry_out(
            plan, lambda now: self.kinesis.describe_stream_summary(stream, now=now).max_record_size_kib * 1024
        )

    async def _carry_out(self, plan: RequestPlan, commit: Callable[[float], T]) -> T | RequestFailure:
        await anyio.sleep(self.latency_seconds + plan.latency_seconds)
        if plan.hang:
            await anyio.sleep_forever()
        if plan.reset_before:
            return RequestFailure(INTERNAL, "connection reset before the request was stored")
        if plan.error is not None:
            return RequestFailure(plan.error.code, plan.error.message)
        try:
            result = commit(anyio.current_time())
        except KinesisError as error:
            return RequestFailure(error.code, error.message)
        await anyio.sleep(plan.answer_latency_seconds)
        if plan.reset_after:
            return RequestFailure(INTERNAL, "connection reset after the request was stored")
        if plan.body is not None:
            return RequestFailure(INTERNAL, "the answer cannot be parsed")
        return result
