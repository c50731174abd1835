"""A stream's pipeline under everything that can happen to it, in every order Hypothesis can think of.

A list of what was put, a `FakeKinesis` and a KCL-like reader say what must hold; see the invariants.
"""

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kpl_core.errors import BufferFull
from kpl_core.hooks import RecordsFinished
from kpl_core.options.config import Config
from kpl_core.options.policy import FairnessPolicy
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.intake.fair_intake import FairIntake
from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.pipeline.shard_map import Shard
from kpl_core.producer.stream_set import stream_parts
from kpl_core.records.kinesis_record import KinesisRecord
from kpl_core.records.outcome import ResultHandle
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsEntry, PutRecordsRequest, RequestFailure
from kpl_core.records.record_result import RecordResult
from kpl_core.records.user_record import UserRecord
from kpl_core.testing import FakeKinesis, MergeDuringRequest, SplitDuringRequest
from tests.support.consumers import read_as_kcl, read_everything

RECORDS_PER_SECOND = 20.0
BYTES_PER_SECOND = 4_000.0
LONGEST_EXTENSION = 0.05

configs = st.fixed_dictionaries(
    {
        "aggregation_enabled": st.sampled_from([True, True, False]),
        "aggregation_max_size": st.sampled_from([100, 400, 51_200]),
        "aggregation_max_count": st.sampled_from([None, None, 3]),
        "collection_max_count": st.sampled_from([1, 3, 500]),
        "record_max_buffered_time_ms": st.sampled_from([0, 100, 1_000, 60_000]),
        "record_ttl_ms": st.sampled_from([500, 3_000, 30_000]),
        "burst_seconds": st.sampled_from([0.1, 1.0]),
        "consumer": st.sampled_from(["kcl", "kcl", "kcl", "per_user_record", "range_blind"]),
        "ordering": st.sampled_from(["none", "none", "per_key"]),
        "fail_if_throttled": st.booleans(),
        "adaptive_rate": st.booleans(),
    }
)
REQUEST_FAILURES = {"denied": "AccessDeniedException", "invalid": "ValidationException", "reset": "Internal"}
REFUSALS = {
    "throttled": PutRecordsEntry(error_code="ProvisionedThroughputExceededException", error_message="slow down"),
    "internal": PutRecordsEntry(error_code="InternalFailure", error_message="oops"),
}
keys = st.integers(0, 12).map("k{}".format)
answers = st.sampled_from(
    ["stored", "stored", "stored", "partly", "throttled", "denied", "invalid", "reset", "lost answer", "wrong count"]
)


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.kinesis = FakeKinesis({"s": 2}, enforce_limits=False)
        self.buffer_limit = BufferLimit(max_records=60, max_bytes=20_000)
        self.accepted: list[tuple[ResultHandle, str, bytes]] = []
        self.known: dict[int, RecordResult] = {}
        self.in_flight: list[PutRecordsRequest] = []
        self.sent: list[tuple[float, str | None, int]] = []
        # Kept with the record, so that no other record gets its id.
        self.paid_at: dict[int, tuple[float, KinesisRecord]] = {}
        self.flushes: list[tuple[int, int]] = []
        self.may_send = True
        self.was_blocked = False
        self.is_forced = False
        self.is_abandoned = False

    @initialize(config=configs, shards=st.integers(1, 4), seed=st.integers(0, 2**32), knows_map=st.booleans())
    def start(self, config: dict[str, Any], shards: int, seed: int, knows_map: bool) -> None:
        self.kinesis = FakeKinesis({"s": shards}, enforce_limits=False)
        self.config = Config(
            rate_limit_records_per_sec_per_shard=RECORDS_PER_SECOND,
            rate_limit_bytes_per_sec_per_shard=BYTES_PER_SECOND,
            **config,
        )
        chance = random.Random(seed)
        self.chance = chance
        self.pipeline = self.make_pipeline(chance.random)
        if knows_map:
            self.refresh()

    def make_pipeline(self, chance: Callable[[], float]) -> StreamPipeline:
        return stream_parts("s", self.config, self.buffer_limit, now=0.0, chance=chance, listening=True).pipeline

    # What the application does

    @rule(key=keys, size=st.integers(0, 300), tier=st.sampled_from(["normal", "normal", "critical", "bulk"]))
    def put(self, key: str, size: int, tier: Any) -> None:
        self.put_one(key, size, tier=tier, explicit=None)

    @rule(key=keys, explicit=st.integers(0, 2**128 - 1))
    def put_with_an_explicit_hash_key(self, key: str, explicit: int) -> None:
        self.put_one(key, 20, tier="normal", explicit=str(explicit))

    @rule(key=keys, count=st.integers(1, 30))
    def put_many(self, key: str, count: int) -> None:
        for _ in range(count):
            self.put_one(key, 10, tier="normal", explicit=None)

    def put_one(self, key: str, size: int, *, tier: Any, explicit: str | None) -> None:
        # Every user record is another one, so that each can be found again where it was stored.
        data = f"{len(self.accepted)}:".encode().ljust(size, b".")
        before = self.buffer_limit.outstanding_records, self.buffer_limit.outstanding_bytes
        try:
            if tier == "normal" and explicit is None and self.flow_of(key) is None:
                delivery = self.pipeline.put(key, data, self.now)
            else:
                record = UserRecord(key, data, explicit_hash_key=explicit, flow=self.flow_of(key), tier=tier)
                delivery = self.pipeline.put_record(record, self.now)
        except BufferFull:
            assert before == (self.buffer_limit.outstanding_records, self.buffer_limit.outstanding_bytes)
            assert self.may_refuse(len(key) + len(data))
        else:
            self.accepted.append((delivery, key, data))

    def flow_of(self, key: str) -> str | None:
        return None

    def may_refuse(self, size: int) -> bool:
        return self.buffer_limit.outstanding_records >= 60 or self.buffer_limit.outstanding_bytes + size > 20_000

    @rule()
    def flush(self) -> None:
        self.flushes.append((self.pipeline.flush(self.now), len(self.accepted)))
        self.drive(self.now)

    @rule()
    def flush_batches_if_only_they_use_the_buffer(self) -> None:
        """As the driver does while a put waits for room; a second time would be a spin."""
        batching = self.pipeline.stages.batching_count
        assert batching <= self.buffer_limit.outstanding_records
        if batching == self.buffer_limit.outstanding_records:
            self.flushes.append((self.pipeline.flush(self.now), len(self.accepted)))
            assert self.pipeline.stages.batching_count == 0
            self.drive(self.now)

    # What time and the driver do

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.02, 0.1, 0.5, 1.0]))
    def wait(self, seconds: float) -> None:
        self.drive(self.now + seconds)

    @rule(seconds=st.sampled_from([3.0, 31.0]))
    def wait_long(self, seconds: float) -> None:
        self.drive(self.now + seconds)

    @rule()
    def block_or_unblock_sending(self) -> None:
        self.may_send = not self.may_send
        self.was_blocked |= not self.may_send

    def drive(self, until: float) -> None:
        """Wake as the driver does; a wake-up after which nothing is different would be a spin."""
        wakeups_at_this_instant = 0
        while True:
            wakeup = self.poll()
            assert wakeup >= self.now
            if wakeup > until:
                break
            wakeups_at_this_instant = wakeups_at_this_instant + 1 if wakeup == self.now else 0
            assert wakeups_at_this_instant < 4
            self.now = wakeup
        self.now = until

    def poll(self) -> float:
        """Poll with few places, with many, or with none while sending is blocked; return the wake-up."""
        free_requests = self.chance.choice([1, 2, 1_000]) if self.may_send else 0
        poll = self.pipeline.poll(self.now, free_requests)
        assert len(poll.requests) <= free_requests
        while poll.wants_more and self.may_send:
            assert len(poll.requests) == free_requests
            self.take(poll.requests)
            free_requests = 1_000
            poll = self.pipeline.poll(self.now, free_requests)
        self.take(poll.requests)
        return poll.wakeup

    def take(self, requests: list[PutRecordsRequest]) -> None:
        for request in requests:
            assert 1 <= len(request.records) <= self.config.collection_max_count
            assert request.started_at == self.now
        self.in_flight += requests

    # What the service does

    @precondition(lambda self: self.in_flight)
    @rule(answer=answers, position=st.integers(0, 50))
    def answer(self, answer: str, position: int) -> None:
        request = self.in_flight.pop(position % len(self.in_flight))
        if answer == "invalid":
            # It has cost the shards nothing. Its halves leave with the tokens that it paid, however much later.
            for record in request.records:
                self.paid_at.setdefault(id(record), (request.started_at, record))
        else:
            self.note(request)
        self.pipeline.request_completed(request, self.answer_for(request, answer), self.now)
        self.drive(self.now)

    def note(self, request: PutRecordsRequest) -> None:
        for record in request.records:
            paid_at, _ = self.paid_at.pop(id(record), (request.started_at, record))
            self.sent.append((paid_at, record.predicted_shard, record.size_bytes))

    def answer_for(self, request: PutRecordsRequest, answer: str) -> PutRecordsAnswer:
        if answer in REQUEST_FAILURES:
            return RequestFailure(REQUEST_FAILURES[answer], answer)
        if answer == "partly":
            results = [self.chance.choice(["stored", *REFUSALS]) for _ in request.records]
            stored = iter(self.store(request, [result == "stored" for result in results]))
            return [REFUSALS.get(result) or next(stored) for result in results]
        if answer == "throttled":
            return [REFUSALS[answer]] * len(request.records)
        entries = self.store(request)
        if answer == "lost answer":
            return RequestFailure("Internal", "reset after it was stored")
        return entries[:-1] if answer == "wrong count" else entries

    def store(self, request: PutRecordsRequest, keep: list[bool] | None = None) -> list[PutRecordsEntry]:
        records = [
            (record.partition_key, record.explicit_hash_key, record.data)
            for index, record in enumerate(request.records)
            if keep is None or keep[index]
        ]
        entries = self.kinesis.put_records("s", records, now=self.now) if records else []
        return [PutRecordsEntry(entry.sequence_number, entry.shard_id) for entry in entries]

    @rule(split=st.booleans())
    def reshard(self, split: bool) -> None:
        effect = SplitDuringRequest() if split else MergeDuringRequest()
        if split or len(self.kinesis.open_shards("s")) > 1:
            self.kinesis.reshard("s", effect, now=self.now)

    @rule()
    def refresh(self) -> None:
        shards = [
            Shard(shard.shard_id, shard.starting_hash_key, shard.ending_hash_key)
            for shard in self.kinesis.open_shards("s")
        ]
        self.pipeline.shards_changed(shards, self.now)
        self.drive(self.now)

    # What must hold

    @invariant()
    def every_user_record_is_somewhere_once(self) -> None:
        counts = self.pipeline.statistics()
        assert counts.accepted == len(self.accepted)
        assert counts.accepted == counts.delivered + sum(counts.failed.values()) + counts.buffered
        settled = [delivery.peek() for delivery, _, _ in self.accepted]
        assert sum(result is not None and result.successful for result in settled) == counts.delivered
        assert sum(result is not None and not result.successful for result in settled) == sum(counts.failed.values())

    @invariant()
    def backpressure_counts_exactly_what_has_no_result(self) -> None:
        unsettled = [(key, data) for delivery, key, data in self.accepted if not delivery.done]
        assert self.buffer_limit.outstanding_records == len(unsettled)
        assert self.buffer_limit.outstanding_bytes == sum(len(key) + len(data) for key, data in unsettled)

    @invariant()
    def a_result_never_changes(self) -> None:
        for index, (delivery, _, _) in enumerate(self.accepted):
            result = delivery.peek()
            if result is not None:
                assert self.known.setdefault(index, result) == result
                assert len(result.attempts) >= 1
                assert result.attempts[-1].success == result.successful
                assert not any(attempt.success for attempt in result.attempts[:-1])

    @invariant()
    def a_finished_flush_left_nothing_behind(self) -> None:
        for generation, count in self.flushes:
            if self.pipeline.is_flushed(generation):
                assert all(delivery.done for delivery, _, _ in self.accepted[:count])

    @invariant()
    def in_order_no_shard_has_two_records_on_their_way(self) -> None:
        if self.accepted and self.config.ordering == "per_key" and not self.is_forced:
            shards = [record.predicted_shard for request in self.in_flight for record in request.records]
            assert len(shards) == len(set(shards))

    def teardown(self) -> None:
        if not hasattr(self, "pipeline"):
            return
        if self.chance.random() < 0.2:
            self.abandon()
        else:
            self.finish()
        assert (self.buffer_limit.outstanding_records, self.buffer_limit.outstanding_bytes) == (0, 0)
        assert all(delivery.done for delivery, _, _ in self.accepted)
        assert all(self.pipeline.is_flushed(generation) for generation, _ in self.flushes)
        self.every_user_record_is_somewhere_once()
        self.a_result_never_changes()
        self.what_was_delivered_can_be_read()
        self.no_window_saw_more_than_the_limits()
        self.facts_agree_with_the_books()

    def finish(self) -> None:
        """Flush, and let a healthy service answer everything."""
        self.may_send = True
        generation = self.pipeline.flush(self.now)
        started = self.now
        for _ in range(5_000):
            self.drive(self.now)
            if self.pipeline.is_flushed(generation):
                break
            if self.in_flight:
                request = self.in_flight.pop(0)
                self.note(request)
                self.pipeline.request_completed(request, self.store(request), self.now)
                if self.pipeline.shard_map.refresh_wanted:
                    self.refresh()
            else:
                wakeup = self.poll()
                assert wakeup < math.inf
                self.drive(wakeup)
        assert self.pipeline.is_flushed(generation)
        # 60 user records at 20 a second, held outcomes of 2 s, backoffs of 5 s: nothing waits for a deadline of 60 s.
        assert self.now - started < 20.0
        # Stale promises to look cost a wake-up each, and then it sleeps until there is news.
        for _ in range(20):
            if (wakeup := self.poll()) < math.inf:
                self.drive(wakeup)
        assert self.poll() == math.inf

    def abandon(self) -> None:
        self.pipeline.abandon(self.now)
        for request in self.in_flight:
            self.pipeline.request_completed(request, self.store(request), self.now)

    def what_was_delivered_can_be_read(self) -> None:
        reader = read_everything(self.kinesis, "s")
        if self.config.consumer == "kcl":
            reader = read_as_kcl(self.kinesis, "s", now=self.now)
        read = set(reader)
        for delivery, key, data in self.accepted:
            result = delivery.peek()
            if result is not None and result.successful:
                assert (result.shard_id, result.sequence_number, key, data) in read
        assert {(key, data) for _, _, key, data in read} <= {(key, data) for _, key, data in self.accepted}

    def no_window_saw_more_than_the_limits(self) -> None:
        """Tokens are taken on admission; a request leaves at most the buffered time later."""
        if self.was_blocked:
            return
        burst = self.config.burst_seconds
        waiting = min(self.config.record_max_buffered_time_ms, self.config.record_ttl_ms) / 1000 + LONGEST_EXTENSION
        for shard in {shard for _, shard, _ in self.sent}:
            sent = sorted((at, size) for at, to, size in self.sent if to == shard)
            for first, (start, _) in enumerate(sent):
                total = largest = 0
                for count, (at, size) in enumerate(sent[first:], start=1):
                    total, largest = total + size, max(largest, size)
                    seconds = burst + at - start + waiting
                    assert count <= RECORDS_PER_SECOND * seconds + 1e-6
                    assert total <= BYTES_PER_SECOND * seconds + largest + 1e-6

    def facts_agree_with_the_books(self) -> None:
        facts = self.pipeline.ledger.take_facts()
        finished = [fact for fact in facts if isinstance(fact, RecordsFinished)]
        counts = self.pipeline.statistics()
        delivered = [fact for fact in finished if fact.outcome == "delivered"]
        assert sum(fact.user_records for fact in delivered) == counts.delivered
        for reason, count in counts.failed.items():
            assert sum(fact.user_records for fact in finished if fact.reason == reason) == count
        assert sum(fact.user_bytes for fact in finished) == sum(len(key) + len(data) for _, key, data in self.accepted)


# As many examples as the profile says, at most: measuring coverage makes each of them slower.
AnyOrder.TestCase.settings = settings(max_examples=min(100, settings().max_examples), stateful_step_count=40)
TestAnyOrder = AnyOrder.TestCase


class AnyOrderWithFlows(AnyOrder):
    """The same where user records wait in their flows; every invariant holds for it too."""

    def make_pipeline(self, chance: Callable[[], float]) -> StreamPipeline:
        config = dataclasses.replace(self.config, fairness=FairnessPolicy(weights={"flow 1": 3}))
        return stream_parts("s", config, self.buffer_limit, now=0.0, chance=chance, listening=True).pipeline

    def flow_of(self, key: str) -> str | None:
        return f"flow {len(key + key[-1]) % 2 + int(key[1:]) % 3}"

    @invariant()
    def every_gate_is_open_where_all_are_said_to_be(self) -> None:
        pipeline = getattr(self, "pipeline", None)
        if pipeline is not None and isinstance(pipeline.fair, FairIntake) and pipeline.fair.all_let_pass():
            assert all(pipeline.fair.lets_pass(shard_id) for shard_id in (None, *pipeline.shard_map.open_shards))

    def may_refuse(self, size: int) -> bool:
        # A flow may hold as much as is free, times its weight: a full house is not needed to refuse it.
        return self.pipeline.statistics().queueing > 0 or super().may_refuse(size)


TestAnyOrderWithFlows = AnyOrderWithFlows.TestCase
TestAnyOrderWithFlows.settings = settings(max_examples=min(60, settings().max_examples), stateful_step_count=40)
