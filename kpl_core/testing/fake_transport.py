"""What a test gives to a `Producer`: a transport without a network, and a hook that records all facts."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio

from kpl_core.hooks import Fact
from kpl_core.pipeline.shard_map import Shard
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsEntry, PutRecordsRequest, RequestFailure
from kpl_core.records.record_result import INTERNAL
from kpl_core.testing.fake_kinesis import FakeKinesis
from kpl_core.testing.faults import RequestPlan
from kpl_core.testing.kinesis_api import KinesisError

T = TypeVar("T")


class FakeTransport:
    """A `Transport` that passes requests to `kinesis` and applies its faults. It runs on asyncio and trio.

    Each answer takes `latency_seconds` of the event loop's clock, which cost nothing in virtual time. A fault that
    breaks the connection returns an `Internal` failure, as the transport of a real network does.
    """

    def __init__(self, kinesis: FakeKinesis, *, latency_seconds: float = 0.0) -> None:
        self.kinesis = kinesis
        self.latency_seconds = latency_seconds
        self.requests: list[PutRecordsRequest] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Do nothing: there is no connection to open."""
        yield

    async def put_records(self, request: PutRecordsRequest) -> PutRecordsAnswer:
        """Store the records, after applying the armed faults."""
        self.requests.append(request)
        plan = self.kinesis.faults.plan("PutRecords", stream=request.stream, now=anyio.current_time())

        def commit(now: float) -> list[PutRecordsEntry]:
            for effect in plan.reshards:
                self.kinesis.reshard(request.stream, effect, now=now)
            return self.kinesis.put_records(
                request.stream,
                [(record.partition_key, record.explicit_hash_key, record.data) for record in request.records],
                now=now,
            )

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


F = TypeVar("F", bound=Fact)


class RecordingHook:
    """A hook that records every fact. Pass it as `Producer(..., hooks=[hook])`.

    `facts` has them in the order of the calls.
    """

    def __init__(self) -> None:
        self.facts: list[Fact] = []

    def __call__(self, fact: Fact) -> None:
        """Append one fact to `facts`."""
        self.facts.append(fact)

    def of(self, kind: type[F]) -> list[F]:
        """Return the facts of one class, such as `RequestCompleted`."""
        return [fact for fact in self.facts if isinstance(fact, kind)]
