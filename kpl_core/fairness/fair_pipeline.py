"""The journey with fairness: put -> (fair queue) -> aggregate -> limit -> ...

The same pipeline with one stage more, and only where flows are configured, so
that nobody else pays for it. A shard's gate is open while nothing waits for its
tokens or its retries and little of it is unanswered; then a user record goes
straight on. Behind a closed gate it waits in its flow, and whatever opens the
gate lets user records in, in fair order, until it closes again.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from kpl_core.durability.keeping_ledger import note_of
from kpl_core.durability.reliable_pipeline import ReliableStreamPipeline
from kpl_core.fairness.fair_shards import FairShards
from kpl_core.fairness.shard_gates import ShardGates
from kpl_core.options.config import Config
from kpl_core.options.policy import FairnessPolicy
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.lane import Lane
from kpl_core.pipeline.lane_output import Placed
from kpl_core.pipeline.pipeline_statistics import PipelineStatistics
from kpl_core.pipeline.retrier import expired_attempt
from kpl_core.records.kinesis_record import MovingUserRecord
from kpl_core.records.outcome import Delivery, Note, Outcome
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsRequest
from kpl_core.records.record_result import SHUTDOWN, Attempt
from kpl_core.records.user_record import Tier, UserRecord, as_bytes, encode_partition_key, require_notes, require_size

__all__ = ["FairStreamPipeline"]

# Of one user record that enters with others: lane, key, the lane's entry for it, data, bytes of both, hash key.
_Place = tuple[Lane, str, bytes, bytes, int, str | None]


class FairStreamPipeline(ReliableStreamPipeline):
    """A pipeline whose user records wait per flow in front of an overloaded shard."""

    def __init__(
        self,
        stream: str,
        config: Config,
        buffer_limit: BufferLimit,
        *,
        now: float,
        chance: Callable[[], float],
        delivery: type[Delivery] = Delivery,
        listening: bool = False,
    ) -> None:
        super().__init__(stream, config, buffer_limit, now=now, chance=chance, delivery=delivery, listening=listening)
        policy = self._policy = FairnessPolicy() if config.fairness is None else config.fairness
        self._waiting = FairShards(policy, buffer_limit, ttl_seconds=self._ttl_seconds)
        self._queued = 0
        self.gates = ShardGates(
            self._limiter, self._backing_off, self._waiting, bytes_per_second=config.rate_limit_bytes_per_sec_per_shard
        )
        # The flows whose user records are not aggregated.
        self._travel_alone: set[str | None] = set()

    # Per user record

    def put(self, partition_key: Any, data: Any, now: float) -> Delivery:  # noqa: ANN401 - as the base class
        """Accept a user record of no particular flow; raises like `put_any`."""
        return self.put_any(partition_key, data, now)

    def put_pairs(self, records: Iterator[Any], now: float, deliveries: list[Delivery]) -> Any:  # noqa: ANN401 - a record
        """Accept checked pairs, of no particular flow; like the base class."""
        return self._put_each(records, now, deliveries)

    def put_together(
        self,
        records: Sequence[UserRecord],
        now: float,
        *,
        flow: str | None,
        tier: Tier,
        aggregate: bool = True,
        keep: bool = True,
    ) -> list[Delivery]:
        """Accept all user records of one flow and tier, or none of them; their own flow and tier do not count.

        Room is taken once for all. Behind an open gate each then costs what a put without fairness costs. Without
        `keep` no disk ever sees them: who put them has them still, and hears if they fail.

        Raises:
            TypeError, InvalidUserRecord: one can never be accepted.
            BufferFull: there is no room for all of them now, or the flow has used up its share. Nothing was reserved.
        """
        require_notes(flow, None)
        if tier == "normal" and aggregate:
            placed = self._places_by_key(records)
        else:
            placed = [self._place(record, tier, aggregate=aggregate) for record in records]
        size_bytes = 0
        for place in placed:
            size_bytes += place[4]
        self._waiting.require_share(flow, size_bytes, records=len(placed), tier=tier)
        self._buffer_limit.reserve(size_bytes=size_bytes, records=len(placed), tier=tier)
        if not aggregate:
            self._travel_alone.add(flow)
        elif self._travel_alone:
            self._travel_alone.discard(flow)
        if self._rules.write_ahead and keep:
            return self._write_together(records, now, flow, tier)
        deliveries = self._enter_together(records, placed, now, flow, tier)
        if self._rules.spool or self._rules.dead_letters or not aggregate:
            note = Note(flow, None if keep else "caller")
            for delivery in deliveries:
                delivery.remark(note)
        return deliveries

    def put_pairs_together(self, pairs: Sequence[Any], now: float, *, flow: str | None) -> None:
        """Accept pairs of partition key and data, all or none, as `put_together` does; nobody asks what became of each.

        Without deliveries and places of their own they cost half of it. Where what cannot be delivered is kept, each
        needs a note of its flow, so there they are put as any others.

        Raises:
            TypeError, InvalidUserRecord, BufferFull: as `put_together`.
        """
        rules = self._rules
        if rules.write_ahead or rules.spool or rules.dead_letters:
            self.put_together([UserRecord(key, as_bytes(data)) for key, data in pairs], now, flow=flow, tier="normal")
            return
        runs, size_bytes = self._runs_by_lane(pairs)
        self._waiting.require_share(flow, size_bytes, records=len(pairs))
        self._buffer_limit.reserve(size_bytes=size_bytes, records=len(pairs))
        if self._travel_alone:
            self._travel_alone.discard(flow)
        output = self._lanes_output
        # A gate can only close when a lane closes something, which is news.
        all_let_pass = self.gates.all_let_pass()
        for lane, run in runs.items():
            position, end = 0, len(run)
            while position < end:
                if not (all_let_pass or self.gates.lets_pass(lane.shard_id)):
                    for key, _, data, _ in run[position:]:
                        self._queue(lane.shard_id, UserRecord(key, data), now, flow, "normal")
                    break
                position = lane.add_run(run, position, now)
                if output.news:
                    self._attend(now)
                    all_let_pass = self.gates.all_let_pass()

    def _runs_by_lane(self, pairs: Sequence[Any]) -> tuple[dict[Lane, list[Placed]], int]:
        """Return what goes into which lane, in the order of `pairs`, and the bytes of it all."""
        runs: dict[Lane, list[Placed]] = {}
        routes, find, most = self._routes, self._router.find, self.max_record_bytes
        size_bytes = 0
        for key, data in pairs:
            lane, key_entry, key_bytes = routes.get(key) or find(key)
            if data.__class__ is not bytes:
                data = as_bytes(data)  # noqa: PLW2901 - the same data
            size = len(data) + key_bytes
            if size > most:
                require_size(key_bytes, len(data), max_record_bytes=most)
            size_bytes += size
            run = runs.get(lane)
            if run is None:
                runs[lane] = run = []
            run.append((key, key_entry, data, size))
        return runs, size_bytes

    def _places_by_key(self, records: Sequence[UserRecord]) -> list[_Place]:
        """Return where each user record is aggregated: by the routes that every put uses, where there is a choice."""
        most = self.max_record_bytes
        routes, find = self._routes, self._router.find
        placed: list[_Place] = []
        for record in records:
            if record.explicit_hash_key is not None:
                placed.append(self._place(record, "normal", aggregate=True))
                continue
            key, data = record.partition_key, record.data
            lane, key_entry, key_bytes = routes.get(key) or find(key)
            size = len(data) + key_bytes
            if size > most:
                require_size(key_bytes, len(data), max_record_bytes=most)
            placed.append((lane, key, key_entry, data, size, None))
        return placed

    def _place(self, record: UserRecord, tier: Tier, *, aggregate: bool) -> _Place:
        key = encode_partition_key(record.partition_key)
        digest = self._digest(key, record.explicit_hash_key)
        shard_id = self.shard_map.predict(digest)
        lane = (self._aggregator.lane if aggregate else self._aggregator.single_lane)(shard_id, tier)
        size = len(record.data) + len(key)
        require_size(len(key), len(record.data), max_record_bytes=self.max_record_bytes)
        return lane, record.partition_key, lane.entry(key, digest), record.data, size, record.explicit_hash_key

    def _enter_together(
        self, records: Sequence[UserRecord], placed: list[_Place], now: float, flow: str | None, tier: Tier
    ) -> list[Delivery]:
        """Let user records that have room begin their journey: into their lanes, or behind closed gates."""
        deliveries: list[Delivery] = []
        output = self._lanes_output
        # Lanes of shards whose gate is open. It can only have closed when a lane closed something.
        is_open: dict[Lane, bool] = {}
        for index, (lane, key, key_entry, data, size, explicit_hash_key) in enumerate(placed):
            gate = is_open.get(lane)
            if gate is None:
                shard_id = lane.shard_id
                gate = is_open[lane] = self.gates.lets_pass(shard_id)
            if not gate:
                deliveries.append(self._queue(lane.shard_id, records[index], now, flow, tier))
                continue
            if explicit_hash_key is None:
                delivery = lane.add(key, key_entry, data, size, now)
            else:
                delivery = lane.add_any(key, key_entry, data, size, now, explicit_hash_key=explicit_hash_key)
            deliveries.append(delivery)
            if output.news:
                self._attend(now)
                is_open.clear()
        return deliveries

    def _write_together(
        self, records: Sequence[UserRecord], now: float, flow: str | None, tier: Tier
    ) -> list[Delivery]:
        """Let user records that have room wait for the spool first."""
        written = [self._aside(msgspec.structs.replace(record, flow=flow, tier=tier), now) for record in records]
        self._writes += written
        self.attention = True
        return [self._delivery(moving.outcome, 0) for moving in written]

    def _queue(self, shard_id: str | None, record: UserRecord, now: float, flow: str | None, tier: Tier) -> Delivery:
        """Let a user record that has room wait for its turn."""
        self._queued += 1
        outcome = Outcome()
        self._wait(shard_id, msgspec.structs.replace(record, flow=flow, tier=tier), now, outcome)
        return self._delivery(outcome, 0)

    def _travels_alone(self, record: UserRecord) -> bool:
        """Say whether a user record travels alone; that of a flow without aggregation always does."""
        return not self._policy.aggregates(record.flow) or super()._travels_alone(record)

    def _misses_again(self, mover: MovingUserRecord) -> bool:
        note = note_of(mover)
        flow = mover.user_record.flow if note is None else note.flow
        return flow in self._travel_alone or not self._policy.aggregates(flow) or super()._misses_again(mover)

    def _reserve(self, record: UserRecord, size: int) -> None:
        self._waiting.require_share(record.flow, size, tier=record.tier)
        super()._reserve(record, size)

    def _enter(self, record: UserRecord, key: bytes, digest: bytes, now: float) -> Delivery:
        shard_id = self.shard_map.predict(digest)
        if self.gates.lets_pass(shard_id):
            return super()._enter(record, key, digest, now)
        self._queued += 1
        outcome = Outcome()
        self._wait(shard_id, record, now, outcome)
        return self._delivery(outcome, 0)

    def _admit(self, moving: MovingUserRecord, now: float) -> None:
        record = moving.user_record
        shard_id = self.shard_map.predict(self._digest(record.partition_key.encode(), record.explicit_hash_key))
        if self.gates.lets_pass(shard_id):
            super()._admit(moving, now)
        else:
            self._waiting.put(shard_id, moving, moving.size_bytes)

    def _wait(self, shard_id: str | None, record: UserRecord, now: float, outcome: Outcome) -> None:
        generation = self._generations.current
        self._generations.hold(generation)
        waiting = MovingUserRecord(
            user_record=record,
            arrived_at=now,
            generation=generation,
            tier=record.tier,
            outcome=outcome,
            index=0,
            history=None,
        )
        self._waiting.put(shard_id, waiting, waiting.size_bytes)

    def _goes_straight_on(self, shard_id: str | None) -> bool:
        return self.gates.lets_pass(shard_id)

    # Per request

    def next_request(self, now: float) -> PutRecordsRequest | None:
        """Return the next request, and count what each shard has not answered."""
        request = super().next_request(now)
        if request is not None:
            self.gates.sent(request.records)
        return request

    def request_completed(self, request: PutRecordsRequest, answer: PutRecordsAnswer, now: float) -> None:
        """Finish, retry or fail what the request carried; then let in who waited for it."""
        self.gates.answered(request.records)
        super().request_completed(request, answer, now)
        self._let_in(now)

    def advance(self, now: float) -> None:
        """Let time pass, and let in who waited for it."""
        for waiting in self._waiting.take_expired(now):
            self._settle(waiting, expired_attempt(waiting, now))
        super().advance(now)
        self._let_in(now)

    def _let_in(self, now: float) -> None:
        """Open the gates: in fair order, until something waits for tokens again."""
        if self._waiting.next_wakeup() <= now:
            # First those leave whose time is over; `advance` sees to it.
            return
        for shard_id in self._waiting.waiting_shards:
            while self._waiting.is_waiting(shard_id) and self.gates.is_open(shard_id):
                waiting = self._waiting.take(shard_id)
                self._aggregate_again([waiting], now)
                self._generations.release(waiting.generation)
                self._limit_closed(now)

    def _earliest_wakeup(self, *, may_send: bool = True) -> float:
        return min(super()._earliest_wakeup(may_send=may_send), self._waiting.next_wakeup())

    # Rare

    def drain_force(self, now: float) -> None:
        """Let everything leave that is not expired, tokens or not, gates or not."""
        self.gates.force()
        super().drain_force(now)
        self._let_in(now)
        super().drain_force(now)

    def abandon(self, now: float) -> None:
        """Give every user record that is left its final result, those that wait for their turn too."""
        text = "the producer was closed before this record could be sent"
        for waiting in self._waiting.drain(self._waiting.waiting_shards):
            self._settle(waiting, Attempt(False, SHUTDOWN, text, now, now))  # noqa: FBT003
        super().abandon(now)

    def _settle(self, waiting: MovingUserRecord, attempt: Attempt) -> None:
        self._ledger.settle_alone(waiting, attempt, predicted_shard=None)
        self._generations.release(waiting.generation)
        waiting.outcome.wake()

    def _route_again(self, stable: set[str], now: float) -> None:
        super()._route_again(stable, now)
        moved = [shard_id for shard_id in self._waiting.waiting_shards if shard_id not in stable]
        for waiting in self._waiting.drain(moved):
            record = waiting.user_record
            digest = self._digest(record.partition_key.encode(), record.explicit_hash_key)
            self._waiting.put(self.shard_map.predict(digest), waiting, waiting.size_bytes)

    @property
    def waiting_by_flow(self) -> dict[Any, tuple[int, int]]:
        """Return how many user records, of how many bytes, each flow has in the fair queue."""
        return self._waiting.held_by_flow

    def oldest_by_flow(self) -> dict[Any, float]:
        """Return when the oldest user record of each flow in the fair queue arrived."""
        return self._waiting.oldest_by_flow()

    def statistics(self) -> PipelineStatistics:
        """Count the user records wherever they are."""
        counted = super().statistics()
        return msgspec.structs.replace(
            counted, accepted=counted.accepted + self._queued, queueing=self._waiting.user_record_count
        )
