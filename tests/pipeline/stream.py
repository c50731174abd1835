"""One stream's pipeline, driven by hand, and a service that stores everything."""

from typing import Any

from kpl_core.hooks import Fact
from kpl_core.options.config import Config
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.pipeline.shard_map import Shard
from kpl_core.records.outcome import Delivery
from kpl_core.records.put_records import PutRecordsEntry, PutRecordsRequest
from tests.pipeline.material import even_shards, keys_in, shard_id, shard_of, split

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
        self.pipeline = StreamPipeline(
            "s", Config(**options), self.buffer_limit, now=0.0, chance=lambda: chance, listening=True
        )
        if shards is not None:
            self.pipeline.shards_changed(shards, 0.0)
            self.pipeline.take_facts()
        self.shards = shards or even_shards(1)
        self.sequence_number = 0
        self.now = 0.0

    def put(self, key: str, data: bytes = b"x", now: float = 0.0, **others: Any) -> Delivery:
        return self.pipeline.put_any(key, data, now, **others) if others else self.pipeline.put(key, data, now)

    def due(self, now: float) -> list[PutRecordsRequest]:
        """All requests that leave until `now`, if the driver wakes when it is told to."""
        requests = []
        while True:
            self.now = min(now, max(self.now, self.pipeline.next_wakeup(self.now)))
            while (request := self.pipeline.next_request(self.now)) is not None:
                requests.append(request)
            if self.pipeline.next_wakeup(self.now) > now:
                self.now = now
                return requests

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
            now = max(now, self.pipeline.next_wakeup(now))
        message = f"not finished at {now}: {self.pipeline.statistics()}"
        raise AssertionError(message)

    def facts(self, kind: type[Fact]) -> list[Any]:
        return [fact for fact in self.pipeline.take_facts() if isinstance(fact, kind)]


def held(request: PutRecordsRequest) -> list[tuple[str | None, list[str]]]:
    return [
        (record.predicted_shard, [each.partition_key for each in record.user_records()]) for record in request.records
    ]
