"""`ordering="per_key"` as a law: in every scenario a reader sees each key's records in the order of their puts.

Records that expired, or were stored although the producer could not know it, leave gaps or come twice; what a
reader sees for the first time is never older than what it saw before.
"""

import random
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from kpl_core.options.config import Config
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.shard_map import Shard
from kpl_core.producer.stream_set import stream_parts
from kpl_core.records.outcome import ResultHandle
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsEntry, PutRecordsRequest, RequestFailure
from kpl_core.testing import FakeKinesis, SplitDuringRequest
from tests.support.consumers import Read, read_as_kcl, read_everything
from tests.support.material import hash_key

ANSWERS = ["stored", "throttled", "reset", "lost"]
# The oldest of an aggregate expires, the others do not, and there is more behind them.
ONE_EXPIRES = "put k0,wait 0.3,wait 0.3,put k0,wait 0.3,put k0,wait 0.3,put k0,wait 0.3,wait 0.1,wait 0.1"
# An aggregate lands in a child of its shard before the producer knows it, with more behind it.
LANDS_IN_A_CHILD = (
    "put k2,put k7,put k0,put k1,put k0,put k4,wait 0.3,wait 0.3,put k7,split,stored,put k2,put k0,refresh,put k6,"
    "wait 0.1,stored,put k5,stored,wait 0.3,wait 0.3,wait 0.3,put k3,put k6,wait 0.3,wait 0.3,wait 0.1,stored,wait 0.1,"
    "put k0,wait 0.3,stored,wait 0.3,wait 0.3,put k2,stored,put k5"
)
# A map comes, and at once another split makes it old: the answer names a shard that even this map does not have.
SPLIT_TWICE = "split,put k3,wait 0.3,put k1,wait 0.3,refresh,put k1,split"
STEPS = [*["put k0", "wait 0.3"] * 4, "put k1", "wait 0.1", *ANSWERS, "split", "refresh"]


class Ordered:
    """A pipeline in arrival order, driven by hand, in front of a service that fails as the step says."""

    def __init__(self, chance: random.Random, **options: Any) -> None:
        self.kinesis = FakeKinesis({"s": 2}, enforce_limits=False)
        self.consumer = options.get("consumer", "kcl")
        config = Config(ordering="per_key", retry_backoff_base_ms=20, retry_backoff_cap_ms=100, **options)
        buffer_limit = BufferLimit(max_records=10_000, max_bytes=10**8)
        self.pipeline = stream_parts("s", config, buffer_limit, now=0.0, chance=chance.random).pipeline
        self.now = 0.0
        self.put_count = 0
        self.in_flight: list[PutRecordsRequest] = []
        self.deliveries: list[ResultHandle] = []
        self.refresh()

    def step(self, step: str) -> None:
        what, _, argument = step.partition(" ")
        if what == "put":
            self.deliveries.append(self.pipeline.put(argument, b"%d" % self.put_count, self.now))
            self.put_count += 1
        elif what == "wait":
            self.drive(self.now + float(argument))
        elif what == "split":
            self.kinesis.reshard("s", SplitDuringRequest(), now=self.now)
        elif what == "refresh":
            self.refresh()
        elif self.in_flight:
            request = self.in_flight.pop(0)
            self.pipeline.request_completed(request, self.answer(what, request), self.now)
        self.drive(self.now)

    def drive(self, until: float) -> None:
        """Wake as the driver does until then."""
        while True:
            poll = self.pipeline.poll(self.now, 1_000)
            self.in_flight += poll.requests
            if poll.wakeup > until:
                break
            self.now = poll.wakeup
        self.now = until

    def refresh(self) -> None:
        shards = self.kinesis.open_shards("s")
        self.pipeline.shards_changed(
            [Shard(shard.shard_id, shard.starting_hash_key, shard.ending_hash_key) for shard in shards], self.now
        )

    def answer(self, what: str, request: PutRecordsRequest) -> PutRecordsAnswer:
        if what == "throttled":
            refusal = PutRecordsEntry(error_code="ProvisionedThroughputExceededException", error_message="slow down")
            return [refusal] * len(request.records)
        if what == "reset":
            return RequestFailure("Internal", "reset before it was stored")
        stored = self.kinesis.put_records(
            "s",
            [(record.partition_key, record.explicit_hash_key, record.data) for record in request.records],
            now=self.now,
        )
        if what == "lost":
            return RequestFailure("Internal", "reset after it was stored")
        return [PutRecordsEntry(entry.sequence_number, entry.shard_id) for entry in stored]

    def finish(self) -> None:
        """Let a healthy service answer everything."""
        for _ in range(1_000):
            if self.pipeline.shard_map.refresh_wanted:
                self.refresh()
            if all(delivery.done for delivery in self.deliveries):
                return
            if self.in_flight:
                self.step("stored")
            else:
                self.drive(self.pipeline.poll(self.now, 0).wakeup)
        message = f"not finished at {self.now}: {self.pipeline.statistics()}"
        raise AssertionError(message)

    def first_seen(self) -> dict[str, list[int]]:
        seen: dict[str, list[int]] = defaultdict(list)
        for read in self.read():
            if int(read.data) not in seen[read.partition_key]:
                seen[read.partition_key].append(int(read.data))
        return seen

    def read(self) -> list[Read]:
        if self.consumer == "kcl":
            return read_as_kcl(self.kinesis, "s", now=self.now)
        ranges = {
            shard.shard_id: range(shard.starting_hash_key, shard.ending_hash_key + 1)
            for shard in self.kinesis.list_shards("s", now=self.now).shards
        }
        return [
            read for read in read_everything(self.kinesis, "s") if hash_key(read.partition_key) in ranges[read.shard_id]
        ]


@pytest.mark.parametrize("consumer", ["kcl", "per_user_record"])
@pytest.mark.parametrize("aggregation", [True, False])
@given(
    steps=st.lists(st.sampled_from(STEPS), max_size=60),
    ttl_ms=st.sampled_from([1_000, 2_000, 30_000]),
    collection_max_count=st.sampled_from([1, 500]),
    seed=st.integers(0, 2**32),
)
@example(steps=[*ONE_EXPIRES.split(","), "stored", "wait 0.1"], ttl_ms=1_000, collection_max_count=500, seed=1)
@example(steps=[*ONE_EXPIRES.split(","), "throttled", "stored"], ttl_ms=1_000, collection_max_count=500, seed=1)
@example(steps=[*ONE_EXPIRES.split(",")[3:], "reset", "wait 0.1"], ttl_ms=1_000, collection_max_count=500, seed=1)
@example(
    steps=LANDS_IN_A_CHILD.split(","),
    ttl_ms=30_000,
    collection_max_count=500,
    seed=1,
)
@example(steps=SPLIT_TWICE.split(","), ttl_ms=30_000, collection_max_count=500, seed=1)
@settings(max_examples=min(100, settings().max_examples), derandomize=True)
def test_a_reader_sees_each_key_in_the_order_of_its_puts(
    aggregation, consumer, steps, ttl_ms, collection_max_count, seed
):
    ordered = Ordered(
        random.Random(seed),
        aggregation_enabled=aggregation,
        consumer=consumer,
        record_ttl_ms=ttl_ms,
        collection_max_count=collection_max_count,
        record_max_buffered_time_ms=400,
    )
    for step in steps:
        ordered.step(step)
    ordered.finish()
    for numbers in ordered.first_seen().values():
        assert numbers == sorted(numbers)


@pytest.mark.parametrize("consumer", ["kcl", "per_user_record"])
def test_what_is_decided_without_a_map_travels_again_before_what_waited_for_it(consumer):
    """It was aggregated again behind what had been put after it."""
    ordered = Ordered(random.Random(1), consumer=consumer, record_max_buffered_time_ms=400)
    for step in ["put k5", "put k4", "wait 0.6", "split", "split", "put k5", "stored", "wait 9.9"]:
        ordered.step(step)
    assert ordered.pipeline.statistics().held == 2
    ordered.step("wait 0.2")
    assert ordered.pipeline.statistics().held == 0
    ordered.finish()
    assert ordered.first_seen() == {"k5": [0, 2], "k4": [1]}


def test_what_is_left_of_an_aggregate_that_expires_between_two_shards_keeps_its_place():
    """The one behind it was closed at the same instant, and admitted before what was left came back."""
    ordered = Ordered(
        random.Random(1), aggregation_max_count=3, record_ttl_ms=1_000, record_max_buffered_time_ms=0, consumer="kcl"
    )
    for step in ["put k0", *["wait 0.1", "put k0"] * 5, "wait 0.55"]:
        ordered.step(step)
    request = ordered.in_flight.pop()
    ordered.kinesis.reshard("s", SplitDuringRequest(), now=ordered.now)
    ordered.pipeline.request_completed(request, ordered.answer("throttled", request), ordered.now)
    ordered.refresh()
    ordered.finish()
    assert ordered.first_seen() == {"k0": [1, 2, 3, 4, 5]}


@pytest.mark.parametrize("consumer", ["kcl", "per_user_record"])
def test_what_is_aggregated_again_goes_before_the_open_record_of_its_shard(consumer):
    """The shard where it was stored is not known, and its own is still open. A later put of its key waits there."""
    ordered = Ordered(random.Random(1), consumer=consumer, record_max_buffered_time_ms=400)
    for step in ["put k5", "put k4", "wait 0.6", "split", "split", "stored", "wait 9.9", "put k4", "wait 0.2"]:
        ordered.step(step)
    assert ordered.pipeline.statistics().held == 0
    ordered.finish()
    assert ordered.first_seen() == {"k5": [0], "k4": [1, 2]}
