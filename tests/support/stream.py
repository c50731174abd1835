"""One stream's pipeline, driven by hand, and a service that stores everything."""

from typing import Any

from kpl_core.hooks import Fact
from kpl_core.options.config import Config
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.shard_map import Shard
from kpl_core.pipeline.stages import Poll
from kpl_core.producer.stream_set import stream_parts
from kpl_core.records.outcome import ResultHandle
from kpl_core.records.put_records import PutRecordsEntry, PutRecordsRequest
from kpl_core.records.user_record import UserRecord
from tests.support.material import even_shards, keys_in, shard_id, shard_of, split

THROTTLED = PutRecordsEntry(
    error_code="ProvisionedThroughputExceededException", error_message="Rate exceeded for shard"
)
PARENT = even_shards(1)
CHILDREN = split(PARENT, shard_id(0))
LOWER, UPPER = (keys_in(child, 8) for child in CHILDREN)


class Stream:
    """A pipeline with its buffer, and a service that stores everything in the shards it really has."""

    def __init__(self, shards: list[Shard] | None = None, *, chance: float = 0.5, **options: Any) -> None:
        self.buffer_limit = BufferLimit(max_records=10_000, max_bytes=10**8)
        self.pipeline = stream_parts(
            "s", Config(**options), self.buffer_limit, now=0.0, chance=lambda: chance, listening=True
        ).pipeline
        if shards is not None:
            self.pipeline.shards_changed(shards, 0.0)
            self.pipeline.ledger.take_facts()
        self.shards = shards or even_shards(1)
        self.sequence_number = 0
        self.now = 0.0

    def put(self, key: str, data: bytes = b"x", now: float = 0.0, **others: Any) -> ResultHandle:
        if others:
            return self.pipeline.put_record(UserRecord(key, data, **others), now)
        return self.pipeline.put(key, data, now)

    def poll(self, now: float, free_requests: int = 1_000) -> Poll:
        return self.pipeline.poll(now, free_requests)

    def wakeup(self, now: float) -> float:
        """When the pipeline wants the next poll, with no place for a request that is due."""
        return self.poll(now, 0).wakeup

    def due(self, now: float) -> list[PutRecordsRequest]:
        """All requests that leave until `now`, if the driver polls at each wake-up."""
        requests = []
        while True:
            poll = self.poll(self.now)
            requests += poll.requests
            if poll.wakeup > now:
                self.now = now
                return requests
            self.now = max(self.now, poll.wakeup)

    def only(self, now: float) -> PutRecordsRequest:
        (request,) = self.due(now)
        return request

    def stored(self, request: PutRecordsRequest) -> list[PutRecordsEntry]:
        entries = []
        for record in request.records:
            self.sequence_number += 1
            shard = shard_of(self.shards, int(record.explicit_hash_key))
            entries.append(PutRecordsEntry(str(self.sequence_number), shard))
        return entries

    def finish(self, now: float) -> float:
        """Answer everything with success until nothing is left; return when that was."""
        for _ in range(1_000):
            for request in self.due(now):
                self.pipeline.request_completed(request, self.stored(request), now)
            if self.pipeline.statistics().buffered == 0:
                return now
            now = max(now, self.wakeup(now))
        message = f"not finished at {now}: {self.pipeline.statistics()}"
        raise AssertionError(message)

    def facts(self, kind: type[Fact]) -> list[Any]:
        return [fact for fact in self.pipeline.ledger.take_facts() if isinstance(fact, kind)]


def held(request: PutRecordsRequest) -> list[tuple[str | None, list[str]]]:
    return [
        (record.predicted_shard, [each.partition_key for each in record.user_records()]) for record in request.records
    ]
