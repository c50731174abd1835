"""From the lanes to the collector: limit, ask the gate, pack; and the way back of records that must travel again.

    lanes -> limiter -> (gate) -> collector          expired, refused, misrouted -> fail, or aggregate again

`StreamPipeline` calls the `Forwarder` whenever a lane has closed a record, tokens are due, or an answer has come.

The `Reaggregator` decides which Kinesis record a user record joins after it has left another one, or a queue. Such a
user record has an arrival, attempts and a flush that waits for it, and it keeps them. It must leave while it can still
be sent, and where the shard map may still be wrong it travels alone.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from kpl_core.errors import InvalidUserRecord
from kpl_core.pipeline.intake.fair_intake import FairIntake
from kpl_core.pipeline.lane import Lane
from kpl_core.pipeline.retrier import Retries
from kpl_core.pipeline.shard_limiter import Drained
from kpl_core.pipeline.shard_map import Shard
from kpl_core.pipeline.stages import Gate, Passage, Stages
from kpl_core.records.aggregated_record import MAGIC
from kpl_core.records.hash_key import hash_key_digest, hash_key_to_digest, parse_explicit_hash_key
from kpl_core.records.kinesis_record import DetachedUserRecord, KinesisRecord
from kpl_core.records.outcome import Outcome, ResultHandle
from kpl_core.records.put_records import PutRecordsRequest
from kpl_core.records.record_result import SHUTDOWN, UNKNOWN, WRONG_SHARD, Attempt
from kpl_core.records.user_record import UserRecord, encode_partition_key

NEVER_SENT: Final = "the producer was closed before this record could be sent"


def digest_of(key: bytes, explicit_hash_key: str | None) -> bytes:
    """Return the hash key of a valid user record as 16 big-endian bytes; `key` is its partition key in UTF-8."""
    if explicit_hash_key is None:
        return hash_key_digest(key)
    return hash_key_to_digest(parse_explicit_hash_key(explicit_hash_key))


class Reaggregator:
    """Puts detached user records into lanes."""

    def __init__(self, stages: Stages, fair: FairIntake | None) -> None:
        config = stages.config
        self._batch = stages.batch
        self._shard_map = stages.shard_map
        self._aggregator = stages.aggregator
        self._limiter = stages.limiter
        self._ledger = stages.ledger
        self._generations = stages.ledger.generations
        self._fair = fair
        self._in_order = config.ordering == "per_key"
        self._for_kcl = config.consumer == "kcl"
        self._retry_delay_seconds = config.retry_delay_seconds
        self._ttl_seconds = config.record_ttl_ms / 1000
        # The lanes of records that came back from a durable store, until they are released.
        self.returned_to: set[Lane] = set()

    def add(self, detached: Iterable[DetachedUserRecord], now: float) -> None:
        """Put user records into the lanes of their predicted shards, each with its arrival and its attempts."""
        left: dict[Outcome, None] = {}
        for each in detached:
            record = each.user_record
            key = encode_partition_key(record.partition_key)
            digest = digest_of(key, record.explicit_hash_key)
            shard_id = self._shard_map.predict(digest)
            if self._must_travel_alone(each):
                lane = self._aggregator.single_lane(shard_id, each.tier)
            else:
                lane = self._aggregator.lane(shard_id, each.tier)
            # It waits for other user records at most half of the time it has left. If a flush waits for it, not at all.
            patience = min(self._retry_delay_seconds, (each.arrived_at + self._ttl_seconds - now) / 2)
            if each.generation < self._generations.current:
                patience = 0.0
            self._join(each, lane, lane.entry(key, digest), now + patience)
            left[each.outcome] = None
        # After the last move. Each user record of an aggregated record may have a waiter, which looks once more.
        for outcome in left:
            outcome.wake()

    def _join(self, detached: DetachedUserRecord, lane: Lane, key_entry: bytes, deadline: float) -> None:
        record = detached.user_record
        delivery = lane.add_any(
            record.partition_key,
            key_entry,
            record.data,
            detached.size_bytes,
            detached.arrived_at,
            explicit_hash_key=record.explicit_hash_key,
            detached=detached,
            deadline=deadline,
        )
        self._ledger.move(detached, delivery)

    def _must_travel_alone(self, detached: DetachedUserRecord) -> bool:
        """Return True if a user record must not be aggregated, now or ever.

        One that missed its shard under a map that is still in use would be aggregated by that map, and miss again
        until it expires. Alone, the service routes it by its hash key.
        """
        notes = detached.outcome.notes
        note = None if notes is None else notes.get(detached.index)
        if note is not None and note.is_alone:
            return True
        if self.travels_alone(detached.user_record, detached.user_record.flow if note is None else note.flow):
            return True
        if detached.history is None or not self._shard_map.refresh_wanted:
            return False
        return detached.history.attempt.error_code == WRONG_SHARD and self._for_kcl

    def travels_alone(self, record: UserRecord, flow: str | None) -> bool:
        """Return True if a user record is never aggregated.

        That is one that another producer has aggregated, because no consumer looks for it inside another aggregate,
        and one of a flow without aggregation.
        """
        if record.data.startswith(MAGIC):
            return True
        return self._fair is not None and self._fair.travels_alone(flow)

    def return_to_place(self, record: KinesisRecord, left: list[DetachedUserRecord], now: float) -> bool:
        """Return True if the rest of an expired Kinesis record took its place in the limiter.

        Only in arrival order: closed behind the records that wait already, it would be overtaken. So it becomes a
        Kinesis record of its own, in the place of the expired one, before another of its shard is looked at.
        """
        shard_id = record.predicted_shard
        has_place = self._in_order and not self._limiter.is_forced and shard_id in self._shard_map.open_shards
        if not left or not has_place or shard_id is None:
            return False
        lane = self._aggregator.lane_apart(shard_id, record.tier)
        for detached in left:
            self._join(detached, lane, lane.entry(detached.user_record.partition_key.encode(), None), now)
        record.outcome.wake()
        lane.close()
        rest = self._aggregator.output.closed.pop()
        rest.sequence = record.sequence
        self._limiter.put_back(rest, now)
        return True

    def arrival_with(self, record: UserRecord, earlier: ResultHandle) -> float | None:
        """Return the arrival time of `earlier` if `record` would share its Kinesis record, else None.

        Records that share one are both delivered or both fail. To share the time to live too, pass the returned time
        as `now` when putting `record`.
        """
        if self.travels_alone(record, record.flow):
            return None
        # What waits there joins before it, and may close the Kinesis record.
        self._batch.drain()
        try:
            key = encode_partition_key(record.partition_key)
            digest = digest_of(key, record.explicit_hash_key)
        except InvalidUserRecord:
            return None
        shard_id = self._shard_map.predict(digest)
        if self._fair is not None and not self._fair.lets_pass(shard_id):
            return None
        lane = self._aggregator.lane(shard_id, record.tier)
        entry = lane.entry(key, digest)
        return lane.arrival_with(earlier, record.partition_key, entry, record.data, record.explicit_hash_key)

    def release_returned(self, now: float) -> None:
        """Let the records that came back from a durable store wait for no further records."""
        lanes, self.returned_to = self.returned_to, set()
        for lane in lanes:
            lane.make_due(now)


class Forwarder:
    """Moves Kinesis records of one stream between lanes, limiter, gate and collector."""

    def __init__(self, stages: Stages, reaggregator: Reaggregator, gate: Gate | None) -> None:
        self._reaggregator = reaggregator
        self._gate = gate
        self._shard_map = stages.shard_map
        self._aggregator = stages.aggregator
        self._output = stages.aggregator.output
        self._limiter = stages.limiter
        self._collector = stages.collector
        self._send_queue = stages.send_queue
        self._router = stages.router
        self._retrier = stages.retrier
        self._backoff_queue = stages.backoff_queue
        self._ledger = stages.ledger
        self._generations = stages.ledger.generations
        self._in_order = stages.config.ordering == "per_key"
        # True if the gate refused a record since the pipeline last looked.
        self.has_refused = False

    def limit_closed(self, now: float) -> None:
        """Hand the closed Kinesis records of all lanes to the limiter, and on as far as it admits them."""
        output = self._output
        while output.closed:
            # Handing a record on may expire it, which may aggregate its neighbours and close another.
            closed = output.take_closed(now)
            if len(closed) == 1:
                self.limit(closed[0], now)
                continue
            runs: defaultdict[str | None, list[KinesisRecord]] = defaultdict(list)
            for record in closed:
                runs[record.predicted_shard].append(record)
            for run in runs.values():
                self._limit_run(run, now)
        if output.drain_at <= now:
            output.drain_at = math.inf

    def _limit_run(self, records: list[KinesisRecord], now: float) -> None:
        """Hand on Kinesis records of one shard: all at once if there are tokens for all, else one by one."""
        count = self._limiter.admit_run(records, now) if len(records) > 1 else 0
        if count:
            self._pass_gate(records[:count], now)
        for record in records[count:]:
            self.limit(record, now)

    def limit(self, record: KinesisRecord, now: float) -> None:
        """Hand one Kinesis record to the limiter, and on if it is admitted."""
        drained = self._limiter.put(record, now)
        if drained is None:
            self._pass_gate((record,), now)
        else:
            self.collect((drained,), now)

    def limit_again(self, records: Iterable[KinesisRecord], now: float) -> None:
        """Limit Kinesis records again that waited between two attempts, or at the gate."""
        for record in records:
            self._limiter.finished(record, now)
            self.limit(record, now)

    def collect(self, drained: Iterable[Drained], now: float) -> None:
        """Hand on the records that left the limiter."""
        for each in drained:
            for record in each.admitted:
                self._pass_gate((record,), now)
            self.expire(each.expired, now)

    def _pass_gate(self, records: Sequence[KinesisRecord], now: float) -> None:
        gate = self._gate
        if gate is None:
            self._pack(records, now)
            return
        for record in records:
            passage = gate.decide(record, now)
            if isinstance(passage, Attempt):
                self._limiter.finished(record, now)
                self._ledger.fail(record, passage)
                self.has_refused = True
            elif passage is not Passage.KEPT:
                if passage is Passage.PROBE:
                    # The breaker must get the answers to its probes in time, so they wait for no pause.
                    self._send_queue.pause.probe_from(now)
                self._pack((record,), now)

    def _pack(self, records: Sequence[KinesisRecord], now: float) -> None:
        current = self._generations.current
        # Without a flush so far there is no earlier generation.
        if current and self._generations.has_earlier:
            for record in records:
                if record.generation < current:
                    # A flush waits for it, so it does not wait for other records.
                    record.deadline = now
        self._collector.add_run(records, now)

    def fill_up(self, now: float) -> None:
        """Close open records that can join a request that leaves although it is not full.

        Otherwise each shard's aggregated record, due at a time of its own, would soon want a request: at a few
        thousand records a second that is most of what they cost. Those that left together are due together again.
        """
        output = self._output
        by = now + output.rules.company_seconds
        if output.deadlines.next_at <= by and (places := self._send_queue.free_places(now)) > 0:
            self._aggregator.close_due(by, places)
            self.limit_closed(now)

    def let_in(self, fair: FairIntake, now: float) -> None:
        """Let user records in, in fair order, until something waits for tokens again."""
        while (detached := fair.next_ready(now)) is not None:
            self._reaggregator.add((detached,), now)
            self._generations.release(detached.generation)
            self.limit_closed(now)

    def expire(self, records: Iterable[KinesisRecord], now: float) -> None:
        """Fail the expired user records of these Kinesis records; the others travel on."""
        for record in records:
            self._limiter.finished(record, now)
            left = self._retrier.expire(record, now)
            if not self._reaggregator.return_to_place(record, left, now):
                self._reaggregator.add(left, now)

    def try_gate_again(self, gate: Gate, now: float) -> None:
        """Limit the records again that the gate lets go: their tokens were spent when they were kept."""
        ready, facts = gate.take_ready(now)
        if self._ledger.listening:
            self._ledger.facts += facts
        self.limit_again(ready, now)

    def retry(self, retries: Retries, now: float) -> None:
        """Let records travel again as the retrier decided."""
        if retries.reaggregate:
            if self._in_order:
                self._aggregate_ahead(retries, now)
            else:
                self._reaggregator.add(retries.reaggregate, now)
        for record in retries.finished:
            self._limiter.finished(record, now)
        open_shards = {None, *self._shard_map.open_shards} if retries.resend else set()
        for at, record in retries.resend:
            if record.predicted_shard in open_shards:
                self._backoff_queue.add(record, at)
            else:
                # Its shard closed while it was away. Sent as it is, no consumer would expect it where it is stored.
                self._route_apart(record, now)

    def _route_apart(self, record: KinesisRecord, now: float) -> None:
        """Aggregate the user records of a Kinesis record again, because its prediction is no longer valid."""
        self._limiter.finished(record, now)
        self._reaggregator.add(record.take_apart(), now)
        self._ledger.detach(record)

    def _aggregate_ahead(self, retries: Retries, now: float) -> None:
        """Aggregate user records again ahead of those that wait for the same shards, which would overtake them."""
        shard_ids = {record.predicted_shard for record in retries.finished}.intersection(self._shard_map.open_shards)
        # The records they leave are not finished yet, so all that is closed here waits for them.
        self._aggregator.close_lanes(shard_ids)
        self.limit_closed(now)
        waiting = self._limiter.take(shard_ids)
        self._reaggregator.add(retries.reaggregate, now)
        self._aggregator.close_lanes(shard_ids)
        self.limit_closed(now)
        for record in waiting:
            record.sequence = self._output.next_sequence()
            self.limit(record, now)

    def drain_all(self, now: float) -> None:
        """Hand everything on to the collector, without tokens."""
        self.collect(self._limiter.drain_force(now), now)
        self.close_open(now)

    def close_open(self, now: float) -> None:
        """Close everything open, and hand it on as far as the limits allow."""
        self._aggregator.close_all()
        self.limit_closed(now)
        self._collector.flush()

    def use_shards(self, shards: Iterable[Shard], now: float) -> set[str] | None:
        """Use a new shard map, and route the waiting records again whose shard is not stable.

        Return the shards whose range of hash keys stays the same, or None if no shard changed.
        """
        before = self._shard_map.open_ranges()
        changed = self._shard_map.update(shards, now)
        if changed:
            self._router.forget()
        # Records that awaited the map were sent before all that wait, so they travel again first.
        self.retry(self._retrier.shards_changed(now), now)
        if not changed:
            return None
        after = self._shard_map.open_ranges()
        stable = {shard_id for shard_id, bounds in after.items() if before.get(shard_id, bounds) == bounds}
        self._route_again(stable, now)
        return stable

    def _route_again(self, stable: set[str], now: float) -> None:
        """Route the waiting records again whose shard is not in `stable`."""
        self._aggregator.close_lanes_except(stable)
        waiting = self._aggregator.take_closed() + self._limiter.take_all()
        # A collected record has its tokens, and keeps its place.
        packed = self._collector.take_all()
        for record in packed:
            if record.predicted_shard in stable:
                self._collector.add(record, now)
        waiting += [record for record in packed if record.predicted_shard not in stable]
        waiting += self._backoff_queue.take_except(stable)
        if self._gate is not None:
            waiting += self._gate.take_except(stable, set(self._shard_map.open_shards))
        waiting.sort(key=lambda record: record.sequence)
        self._limiter.keep_only(stable)
        for record in waiting:
            if record.predicted_shard in stable:
                self.limit(record, now)
            else:
                self._route_apart(record, now)
        self.limit_closed(now)

    def would_overtake(self, shards: Iterable[Shard], in_flight: Iterable[PutRecordsRequest]) -> bool:
        """Return True if a record is in flight under a prediction that these shards make invalid."""
        new = {shard.shard_id: shard.digests for shard in shards}
        old = self._shard_map.open_ranges()
        valid = {shard_id for shard_id, bounds in old.items() if new.get(shard_id) == bounds}
        sent = [request.records for request in in_flight] + [list(self._retrier.bisection)]
        return any(record.predicted_shard not in valid for records in sent for record in records)

    def abandon(self, in_flight: Iterable[PutRecordsRequest], now: float) -> None:
        """Fail every record in a stage or in flight, because the producer closes."""
        self._aggregator.close_all()
        left = self._limiter.take_all() + self._send_queue.take_all() + self._aggregator.take_closed()
        left += self._backoff_queue.take_except(set())
        if self._gate is not None:
            left += self._gate.take_except(set(), set())
        for record in left:
            self._ledger.fail(record, Attempt(False, SHUTDOWN, NEVER_SENT, now, now))  # noqa: FBT003
        for request in in_flight:
            for record in request.records:
                text = "the producer was closed before the request was answered; the record may be stored"
                self._ledger.fail(record, Attempt(False, UNKNOWN, text, request.started_at, now))  # noqa: FBT003
        for record in self._retrier.take_awaiting_map():
            text = "the producer was closed before the shard map said whether consumers expect it where it is stored"
            self._ledger.fail(record, Attempt(False, UNKNOWN, text, now, now))  # noqa: FBT003
