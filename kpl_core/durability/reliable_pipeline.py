"""The journey with a safety net: what cannot be delivered is kept, and a shard in trouble is left alone.

The same pipeline with stages more, and only where a spool, dead letters or a breaker are configured, so
that nobody else pays for them:

    put -> (write ahead) -> aggregate -> limit -> (breaker) -> collect -> ... -> finish (or keep)

The disk is the driver's, like the network: it takes what is to be written (`take_writes`) and what is
leaving (`take_leaving`), and comes back with what became of each.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from kpl_core.durability.circuit_breaker import BreakerState, CircuitBreaker, Decision
from kpl_core.durability.keeping_ledger import KeepingLedger, Leaving
from kpl_core.durability.keeping_rules import KeepingRules, keeping_rules
from kpl_core.durability.shard_breakers import WHOLE_STREAM, ShardBreakers
from kpl_core.errors import BufferFull, InvalidUserRecord
from kpl_core.hooks import BreakerChanged
from kpl_core.options.config import Config
from kpl_core.options.reliability import TierPolicy
from kpl_core.pipeline.backing_off import BackingOff
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.lane import Lane
from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.pipeline.pipeline_statistics import PipelineStatistics
from kpl_core.records.aggregated_record import MAGIC
from kpl_core.records.kinesis_record import KinesisRecord, MovingUserRecord
from kpl_core.records.outcome import Delivery, Note, Origin, Outcome
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsRequest
from kpl_core.records.record_result import BREAKER_OPEN, NOT_SPOOLED, RATE_LIMITED, SHUTDOWN, Attempt, Place
from kpl_core.records.user_record import UserRecord, as_bytes, check_user_record, encode_partition_key

__all__ = ["ReliableStreamPipeline"]

# User records that may wait for the disk without holding room, where fewer than these may be outstanding.
MOST_LEAVING: Final = 10_000


class ReliableStreamPipeline(StreamPipeline):
    """A pipeline that keeps what it cannot deliver, behind circuit breakers; each part may be missing."""

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
        self._rules: KeepingRules = keeping_rules(config)
        self._delivery = delivery
        super().__init__(stream, config, buffer_limit, now=now, chance=chance, delivery=delivery, listening=listening)
        # Accepted without entering a lane first.
        self._accepted_aside = 0
        # To be written, and those of them that the driver has taken.
        self._writes: list[MovingUserRecord] = []
        self._writing = 0
        self._came_back: Counter[Origin] = Counter()
        # Where those are, if they wait for company.
        self._returned_to: set[Lane] = set()
        self._paused = BackingOff()
        self._breakers: ShardBreakers | None = None
        if config.breaker is not None:
            reserve = (TierPolicy() if config.tiers is None else config.tiers).critical_reserve
            self._breakers = ShardBreakers(
                config.breaker,
                reserved_per_second=max(1.0, reserve * config.rate_limit_records_per_sec_per_shard),
                is_retryable=config.is_retryable,
            )

    def _open_books(self, config: Config) -> KeepingLedger:  # noqa: ARG002 - `_rules` has what is in it
        self._books = KeepingLedger(
            self.stream, self._buffer_limit, self._generations, rules=self._rules, listening=self._listening
        )
        return self._books

    # Per user record

    def put(self, partition_key: Any, data: Any, now: float) -> Delivery:  # noqa: ANN401 - as the base class
        """Accept a user record; raises like the base class."""
        if self._rules.write_ahead:
            return self._accept(UserRecord(partition_key, as_bytes(data)), now)
        return super().put(partition_key, data, now)

    def put_pairs(self, records: Iterator[Any], now: float, deliveries: list[Delivery]) -> Any:  # noqa: ANN401 - a record
        """Accept checked pairs; like the base class."""
        if self._rules.write_ahead:
            return self._put_each(records, now, deliveries)
        return super().put_pairs(records, now, deliveries)

    def _put_each(self, records: Iterator[Any], now: float, deliveries: list[Delivery]) -> Any:  # noqa: ANN401
        for record in records:
            if record.__class__ is not tuple:
                return record
            try:
                deliveries.append(self.put(record[0], record[1], now))
            except BufferFull:
                return record
        return None

    def put_again(self, record: UserRecord, origin: Origin, now: float) -> Delivery:
        """Accept a user record from where it is kept; raises like `put`. If it fails it is there still."""
        if self._travels_alone(record):
            return self._put_alone(record, origin, now)
        delivery = self._accept(record, now, origin)
        self._came_back[origin] += 1
        digest = self._digest(record.partition_key.encode(), record.explicit_hash_key)
        self._returned_to.add(self._aggregator.lane(self.shard_map.predict(digest), record.tier))
        return delivery

    def _travels_alone(self, record: UserRecord) -> bool:
        """Say whether a producer before us has aggregated it: inside another aggregate no consumer would find it."""
        return record.data.startswith(MAGIC)

    def _put_alone(self, record: UserRecord, origin: Origin, now: float) -> Delivery:
        """Accept what must not be aggregated."""
        size = check_user_record(record, max_record_bytes=self.max_record_bytes)
        self._reserve(record, size)
        self._came_back[origin] += 1
        moving = self._aside(record, now)
        moving.outcome.notes = {0: Note(record.flow, origin)}
        delivery = self._delivery(moving.outcome, 0)
        self._admit(moving, now)
        self._attend(now)
        return delivery

    def _misses_again(self, mover: MovingUserRecord) -> bool:
        return self._travels_alone(mover.user_record) or super()._misses_again(mover)

    def hurry_what_came_back(self, now: float) -> None:
        """Let user records that were put again wait for no more company, because there is none for them now."""
        returned_to, self._returned_to = self._returned_to, set()
        for lane in returned_to:
            lane.hurry(now)
        self.attention = True

    def arrival_beside(self, record: UserRecord, earlier: Delivery) -> float | None:
        """Return when `earlier` arrived, if `record`, put now, would share its fate: both are delivered, or neither.

        None: they would travel apart. To let `record` share all of it, its time to live too, put it again as of then.
        """
        if self._travels_alone(record):
            return None
        try:
            key = encode_partition_key(record.partition_key)
            digest = self._digest(key, record.explicit_hash_key)
        except InvalidUserRecord:
            return None
        shard_id = self.shard_map.predict(digest)
        if not self._goes_straight_on(shard_id):
            return None
        lane = self._aggregator.lane(shard_id, record.tier)
        entry = lane.entry(key, digest)
        return lane.arrival_beside(earlier, record.partition_key, entry, record.data, record.explicit_hash_key)

    def _goes_straight_on(self, shard_id: str | None) -> bool:  # noqa: ARG002 - where there are gates it depends
        """Say whether a user record that is put enters aggregation at once."""
        return True

    def _accept(self, record: UserRecord, now: float, origin: Origin | None = None) -> Delivery:
        if origin is not None or not self._rules.write_ahead:
            return super()._accept(record, now, origin)
        size = check_user_record(record, max_record_bytes=self.max_record_bytes)
        self._reserve(record, size)
        moving = self._aside(record, now)
        self._writes.append(moving)
        self.attention = True
        return self._delivery(moving.outcome, 0)

    def puts_aside(self, record: UserRecord) -> bool:
        """Say whether a user record for which there is no room goes to the disk instead of being refused."""
        # What waits for the disk is bounded too.
        if self._books.leaving_count >= max(MOST_LEAVING, self._buffer_limit.max_records):
            return False
        return self._rules.spool or (record.tier == "bulk" and self._rules.dead_letters)

    def put_aside(self, record: UserRecord, message: str, now: float) -> Delivery:
        """Accept a user record for which there is no room, and let it leave at once; raises like `put` else."""
        check_user_record(record, max_record_bytes=self.max_record_bytes)
        moving = self._aside(record, now)
        self._books.set_aside(moving, Attempt(False, RATE_LIMITED, message, now, now))  # noqa: FBT003
        self.attention = True
        return self._delivery(moving.outcome, 0)

    def _aside(self, record: UserRecord, now: float) -> MovingUserRecord:
        """Take a checked user record in without a lane to be in."""
        generation = self._generations.current
        self._generations.hold(generation)
        self._accepted_aside += 1
        outcome = Outcome()
        if record.metadata is not None:
            outcome.metadata = {0: record.metadata}
        if record.flow is not None:
            outcome.notes = {0: Note(record.flow)}
        if record.data.__class__ is not bytes:
            record = msgspec.structs.replace(record, data=as_bytes(record.data))
        return MovingUserRecord(
            user_record=record,
            arrived_at=now,
            generation=generation,
            tier=record.tier,
            outcome=outcome,
            index=0,
            history=None,
        )

    # The disk

    @property
    def has_work_for_the_disk(self) -> bool:
        """Say whether `take_writes` or `take_leaving` would return something."""
        return bool(self._writes) or self._books.has_leaving

    def take_writes(self) -> list[MovingUserRecord]:
        """Remove and return what must be in the spool before it goes on.

        Each comes back to one of `written`, `not_written` and `wait_in_spool`.
        """
        writes, self._writes = self._writes, []
        self._writing += len(writes)
        return writes

    def written(self, moving: MovingUserRecord, now: float) -> Delivery:
        """Let a user record begin its journey, because it is in the spool; return its delivery."""
        self._writing -= 1
        notes = moving.outcome.notes
        moving.outcome.notes = {0: Note(None if notes is None else notes[0].flow, "write_ahead")}
        self._admit(moving, now)
        moving.outcome.wake()
        self._attend(now)
        return self._delivery(moving.outcome, 0)

    def _admit(self, moving: MovingUserRecord, now: float) -> None:
        self._aggregate_again([moving], now)
        self._generations.release(moving.generation)

    def not_written(self, moving: MovingUserRecord, message: str, now: float) -> None:
        """Fail a user record that the spool did not take; it was not acknowledged."""
        attempt = Attempt(False, NOT_SPOOLED, message, moving.arrived_at, now)  # noqa: FBT003
        self._end_writing(moving, attempt, None)

    def wait_in_spool(self, moving: MovingUserRecord, now: float) -> None:
        """End the journey of a written user record before it began, because the producer is closed."""
        text = "the producer was closed before this record could be sent; the spool has it"
        self._end_writing(moving, Attempt(False, SHUTDOWN, text, now, now), "spooled")  # noqa: FBT003

    def _end_writing(self, moving: MovingUserRecord, attempt: Attempt, place: Place | None) -> None:
        self._writing -= 1
        self._books.decide(moving, attempt, place)
        self._generations.release(moving.generation)
        moving.outcome.wake()

    def take_leaving(self) -> list[Leaving]:
        """Remove and return what is leaving for where it will be kept; each comes back to `left`."""
        return self._books.take_leaving()

    def left(self, leaving: Sequence[Leaving], place: Place | None) -> None:
        """Make them final: `place` has the user records, None: nothing took them, they have failed."""
        self._books.left(leaving, place)

    # The breaker

    @property
    def breakers(self) -> dict[str, CircuitBreaker]:
        """Return the circuit breakers by shard, "" for the whole stream's; empty if there are none."""
        return {} if self._breakers is None else self._breakers.breakers

    def _pack_run(self, records: Sequence[KinesisRecord], now: float) -> None:
        if self._breakers is None:
            super()._pack_run(records, now)
        else:
            for record in records:
                self._pack_if_allowed(record, self._breakers, now)

    def _pack_if_allowed(self, record: KinesisRecord, breakers: ShardBreakers, now: float) -> None:
        decision = breakers.allows(record.predicted_shard, record.tier, now)
        if decision is Decision.WAIT and not (self._rules.spool and record.tier == "normal"):
            at = breakers.ready_at(record.predicted_shard, record.tier, now)
            self._paused.add(record, min(at, record.expires_at))
        elif decision in {Decision.WAIT, Decision.REFUSE}:
            self._limiter.finished(record, now)
            shard_id = breakers.stopping(record.predicted_shard, now)
            text = f"the circuit breaker of {f'shard {shard_id}' if shard_id else f'stream {self.stream}'} is open"
            self._books.fail(record, Attempt(False, BREAKER_OPEN, text, now, now))  # noqa: FBT003
            self.attention = True
        else:
            if decision is Decision.PROBE:
                # The breaker's probes are answered in its time, or it asks for more; they wait for no pause.
                self._pause.probe_from(now)
            super()._pack_run((record,), now)

    def advance(self, now: float) -> None:
        """Let time pass, for those too that wait for a breaker."""
        if self._breakers is not None:
            self._notice(self._breakers, now)
            self._try_again(self._paused.take_due(now), now)
        super().advance(now)

    def request_completed(self, request: PutRecordsRequest, answer: PutRecordsAnswer, now: float) -> None:
        """Let the breakers learn from the answer; then finish, retry or fail what the request carried."""
        if self._breakers is not None and request in self._in_flight:
            self._breakers.answered(request, answer, now)
            self._notice(self._breakers, now)
        super().request_completed(request, answer, now)

    def _notice(self, breakers: ShardBreakers, now: float) -> None:
        """Tell what changed, and let go who waited for a breaker that is closed now."""
        for name, state in breakers.changes(now).items():
            if self._listening:
                self._books.facts.append(BreakerChanged(self.stream, name, state.value))
            if state is BreakerState.CLOSED:
                others = set() if name == WHOLE_STREAM else set(self.shard_map.open_shards) - {name}
                self._try_again(self._paused.take_except(others), now)

    def _try_again(self, records: list[KinesisRecord], now: float) -> None:
        for record in records:
            self._limiter.finished(record, now)
            self._limit(record, now)

    def _earliest_wakeup(self, *, may_send: bool = True) -> float:
        breaks_over = math.inf if self._breakers is None else self._breakers.next_wakeup()
        return min(super()._earliest_wakeup(may_send=may_send), self._paused.next_wakeup(), breaks_over)

    # Rare

    def abandon(self, now: float) -> None:
        """Give every user record that is left its final result, or let it leave for where it is kept."""
        for record in self._paused.take_except(set()):
            self._backing_off.add(record, now)
        super().abandon(now)

    def _route_again(self, stable: set[str], now: float) -> None:
        for record in self._paused.take_except(stable):
            self._backing_off.add(record, now)
        if self._breakers is not None:
            self._breakers.keep_only(set(self.shard_map.open_shards))
        super()._route_again(stable, now)

    def statistics(self) -> PipelineStatistics:
        """Count the user records wherever they are."""
        counted = super().statistics()
        return msgspec.structs.replace(
            counted,
            accepted=counted.accepted + self._accepted_aside - self._came_back.total(),
            backing_off=counted.backing_off + self._paused.user_record_count,
            keeping=len(self._writes) + self._writing + self._books.leaving_count,
            replayed=self._came_back["replay"],
            redriven=self._came_back["redrive"],
            breakers={name: breaker.known_state.value for name, breaker in self.breakers.items()},
        )
