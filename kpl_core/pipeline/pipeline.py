"""The journey of a user record through one stream, from top to bottom.

    put -> aggregate -> limit -> collect -> (the driver sends) -> classify -> finish or retry

The pipeline is synchronous and reads no clock. The driver puts user records,
asks for the next request, sends it, and hands the answer back; between two
calls the state is whole, so a cancellation never sees half a change. It is
pulled: `next_request` says what to send, `next_wakeup` how long to sleep.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kpl_core.hooks import ShardMapRefreshed, ShardRateChanged
from kpl_core.pipeline.retrier import Retries
from kpl_core.pipeline.shard_limiter import Drained
from kpl_core.pipeline.shard_map import Shard
from kpl_core.pipeline.stream_stages import StreamStages
from kpl_core.records.hash_key import parse_explicit_hash_key
from kpl_core.records.kinesis_record import KinesisRecord
from kpl_core.records.outcome import Delivery, Note, Origin
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsRequest, completed_fact
from kpl_core.records.record_result import SHUTDOWN, UNKNOWN, Attempt
from kpl_core.records.user_record import (
    Tier,
    UserRecord,
    as_bytes,
    encode_partition_key,
    require_notes,
    require_size,
    require_tier,
)

__all__ = ["StreamPipeline"]


class StreamPipeline(StreamStages):
    """Everything the producer knows about one stream."""

    # Per user record

    def put(self, partition_key: Any, data: Any, now: float) -> Delivery:  # noqa: ANN401 - checked here, compiled or not
        """Accept a user record: a str key, bytes-like data.

        Raises:
            TypeError, InvalidUserRecord: it can never be accepted.
            BufferFull: there is no room for it now. Nothing was reserved in either case.
        """
        try:
            route = self._routes.get(partition_key)
        except TypeError:
            encode_partition_key(partition_key)
            raise
        if route is None:
            route = self._router.find(partition_key)
        lane, key_entry, key_bytes = route
        if data.__class__ is not bytes:
            data = as_bytes(data)
        size = len(data) + key_bytes
        if size > self.max_record_bytes:
            require_size(key_bytes, len(data), max_record_bytes=self.max_record_bytes)
        limit = self._buffer_limit
        free_records = limit.free_records - 1
        free_bytes = limit.free_bytes - size
        if free_records < 0 or free_bytes < 0:
            limit.require_room(size_bytes=size)
        limit.free_records = free_records
        limit.free_bytes = free_bytes
        delivery = lane.add(partition_key, key_entry, data, size, now)
        if self._lanes_output.news:
            self._attend(now)
        return delivery

    def put_pairs(self, records: Iterator[Any], now: float, deliveries: list[Delivery]) -> Any:  # noqa: ANN401 - a record
        """Accept checked user records as `put` does each, while they are pairs of partition key and data.

        Appends their deliveries. Returns the first that is no pair or finds no room, None if all were accepted.
        """
        routes, router, limit, output = self._routes, self._router, self._buffer_limit, self._lanes_output
        free_records, free_bytes = limit.free_records, limit.free_bytes
        # Not yet taken from the limit; they are before anybody else may look at it.
        taken_records = taken_bytes = 0
        try:
            for record in records:
                if type(record) is not tuple:
                    return record
                partition_key, data = record
                route = routes.get(partition_key)
                if route is None:
                    route = router.find(partition_key)
                lane, key_entry, key_bytes = route
                if type(data) is not bytes:
                    data = as_bytes(data)
                size = len(data) + key_bytes
                if taken_bytes + size > free_bytes or taken_records >= free_records:
                    return record
                taken_bytes += size
                taken_records += 1
                deliveries.append(lane.add(partition_key, key_entry, data, size, now))
                if output.news:
                    limit.free_records -= taken_records
                    limit.free_bytes -= taken_bytes
                    taken_records = taken_bytes = 0
                    self._attend(now)
                    free_records, free_bytes = limit.free_records, limit.free_bytes
        finally:
            limit.free_records -= taken_records
            limit.free_bytes -= taken_bytes
        return None

    def put_any(
        self,
        partition_key: Any,  # noqa: ANN401 - as `put`
        data: Any,  # noqa: ANN401
        now: float,
        *,
        explicit_hash_key: Any = None,  # noqa: ANN401
        flow: Any = None,  # noqa: ANN401
        tier: Tier = "normal",
        metadata: Any = None,  # noqa: ANN401
    ) -> Delivery:
        """Accept a user record with an explicit hash key, a flow, a tier or metadata; raises like `put`."""
        require_notes(flow, metadata)
        if explicit_hash_key is not None and not isinstance(explicit_hash_key, str):
            # Refused here, in our words: compiled code would refuse to read it from the record, in its own.
            parse_explicit_hash_key(explicit_hash_key)
        if data.__class__ is not bytes:
            data = as_bytes(data)
        return self._accept(UserRecord(partition_key, data, explicit_hash_key, flow, tier, metadata), now)

    def _accept(self, record: UserRecord, now: float, origin: Origin | None = None) -> Delivery:
        key = encode_partition_key(record.partition_key)
        digest = self._digest(key, record.explicit_hash_key)
        require_tier(record.tier)
        size = len(key) + len(record.data)
        require_size(len(key), len(record.data), max_record_bytes=self.max_record_bytes)
        self._reserve(record, size)
        delivery = self._enter(record, key, digest, now)
        if record.metadata is not None:
            delivery.note(record.metadata)
        if origin is not None or record.flow is not None:
            delivery.remark(Note(record.flow, origin))
        self._attend(now)
        return delivery

    def _enter(self, record: UserRecord, key: bytes, digest: bytes, now: float) -> Delivery:
        """Let an accepted user record begin its journey."""
        lane = self._aggregator.lane(self.shard_map.predict(digest), record.tier)
        return lane.add_any(
            record.partition_key,
            lane.entry(key, digest),
            record.data,
            len(key) + len(record.data),
            now,
            explicit_hash_key=record.explicit_hash_key,
        )

    def _attend(self, now: float) -> None:
        """Hand on what a put closed, and see whether the driver must look earlier than it plans to."""
        output = self._lanes_output
        output.news = False
        if output.take_at <= now or self._limiter.is_held:
            self._limit_closed(now)
        promised = self._promised_wakeup
        # A put can bring forward these; the rest of `_earliest_wakeup` it cannot.
        if promised != -math.inf and (
            output.take_at < promised
            or self._departures.next_wakeup(may_send=not self._limiter.is_held) < promised
            or self._aggregator.next_wakeup() < promised
            or self._limiter.next_wakeup() < promised
        ):
            self.attention = True
            # Once is enough, until the driver has looked and is promised another instant.
            self._promised_wakeup = -math.inf

    # Per request

    def next_request(self, now: float) -> PutRecordsRequest | None:
        """Return the next request that is full or due, None if there is none now."""
        self.advance(now)
        self._close_company(now)
        self._limit_closed(now)
        records = self._departures.next_records(now)
        if records is None:
            return None
        request = PutRecordsRequest(self.stream, records, started_at=now)
        self._in_flight.add(request)
        return request

    def advance(self, now: float) -> None:
        """Let time pass: close what is due, expire, and admit what tokens allow."""
        self._aggregator.close_due(now)
        for record in self._backing_off.take_due(now):
            self._limiter.finished(record, now)
            self._limit(record, now)
        self._limit_closed(now)
        for drained in self._limiter.drain_due(now):
            self._collect(drained, now)
        for record in self._departures.take_expired(now):
            self._expire(record, now)
        if self._retrier.next_wakeup() <= now:
            self._retry(self._retrier.overdue(now), now)
        # Neighbours of the expired were aggregated again, and may have filled what they joined.
        self._limit_closed(now)

    def _limit_closed(self, now: float) -> None:
        output = self._lanes_output
        while output.closed:
            # Handing one on may expire it, which may aggregate its neighbours and close another.
            closed = output.take_closed(now)
            runs: defaultdict[str | None, list[KinesisRecord]] = defaultdict(list)
            for record in closed:
                runs[record.predicted_shard].append(record)
            for run in runs.values():
                self._limit_run(run, now)
        if output.take_at <= now:
            output.take_at = math.inf

    def _limit_run(self, records: list[KinesisRecord], now: float) -> None:
        """Hand on Kinesis records of one shard: at once as far as its tokens are there, else one by one."""
        count = self._limiter.admit_run(records, now) if len(records) > 1 else 0
        if count:
            self._pack_run(records[:count], now)
        for record in records[count:]:
            self._limit(record, now)

    def _limit(self, record: KinesisRecord, now: float) -> None:
        drained = self._limiter.put(record, now)
        if drained is None:
            self._pack_run((record,), now)
        else:
            self._collect(drained, now)

    def _pack_run(self, records: Sequence[KinesisRecord], now: float) -> None:
        if self._generations.has_earlier:
            current = self._generations.current
            for record in records:
                if record.generation < current:
                    # A flush waits for it, so it waits for nobody.
                    record.deadline = now
        self._collector.add_run(records, now)

    def _collect(self, drained: Drained, now: float) -> None:
        for record in drained.admitted:
            self._pack_run((record,), now)
        for record in drained.expired:
            self._expire(record, now)

    def _expire(self, record: KinesisRecord, now: float) -> None:
        self._limiter.finished(record, now)
        self._aggregate_again(self._left_in_place(record, self._retrier.expire(record, now), now), now)

    def request_completed(self, request: PutRecordsRequest, answer: PutRecordsAnswer, now: float) -> None:
        """Finish, retry or fail what the request carried. An answer after `abandon` comes too late."""
        if request not in self._in_flight:
            return
        self._in_flight.remove(request)
        retries = self._retrier.answered(request, answer, now)
        self._pause.ended(now, failed=retries.request_failed)
        for shard_id, sent in retries.sent.items():
            fraction = self._limiter.answered(shard_id, sent=sent, throttled=retries.throttled[shard_id], now=now)
            if fraction is not None and self._listening:
                self._ledger.facts.append(ShardRateChanged(self.stream, shard_id or "", fraction))
        if self._listening:
            self._ledger.facts.append(completed_fact(request, answer, throttled=retries.throttled, now=now))
        self._retry(retries, now)
        if self._next_shards is not None:
            self.shards_changed(self._next_shards, now)
        self.attention = True

    def _retry(self, retries: Retries, now: float) -> None:
        if retries.apart and self._in_order:
            self._aggregate_ahead(retries, now)
        else:
            self._aggregate_again(retries.apart, now)
        for record in retries.gone:
            self._limiter.finished(record, now)
        open_shards = {None, *self.shard_map.open_shards} if retries.whole else set()
        for at, record in retries.whole:
            if record.predicted_shard in open_shards:
                self._backing_off.add(record, at)
            else:
                # Its shard closed while it was away; sent as it is, it would be stored where no consumer wants it.
                self._route_apart(record, now)

    def _route_apart(self, record: KinesisRecord, now: float) -> None:
        """Aggregate the user records of a Kinesis record again, because its prediction no longer holds."""
        self._limiter.finished(record, now)
        self._aggregate_again(record.take_apart(), now)
        self._ledger.leave(record)

    def _aggregate_ahead(self, retries: Retries, now: float) -> None:
        """Aggregate user records again ahead of what waits for the same shards: behind it, they would be overtaken."""
        shard_ids = {record.predicted_shard for record in retries.gone}.intersection(self.shard_map.open_shards)
        # What they leave is not finished yet, so all that is closed here waits for it.
        self._aggregator.close_lanes(shard_ids)
        self._limit_closed(now)
        waiting = self._limiter.take(shard_ids)
        self._aggregate_again(retries.apart, now)
        self._aggregator.close_lanes(shard_ids)
        self._limit_closed(now)
        for record in waiting:
            record.sequence = self._lanes_output.next_sequence()
            self._limit(record, now)

    # Rare

    def flush(self, now: float) -> int:
        """Close everything open; limits still hold. Returns the generation to ask `is_flushed` for."""
        self._aggregator.close_all()
        self._lanes_output.news = False
        self._limit_closed(now)
        self._collector.flush()
        self.attention = True
        return self._generations.advance()

    def drain_force(self, now: float) -> None:
        """Let everything leave that is not expired, tokens or not: closing runs out of time.

        From now on nothing waits for tokens; what is refused still backs off.
        """
        self._pause.lift()
        for drained in self._limiter.drain_force(now):
            self._collect(drained, now)
        self._aggregator.close_all()
        self._limit_closed(now)
        self._collector.flush()
        self.attention = True

    def abandon(self, now: float) -> None:
        """Give every user record that is left its final result: never sent, or sent and never answered."""
        self._aggregator.close_all()
        left = self._limiter.take_all() + self._departures.take_all() + self._aggregator.take_closed()
        left += self._backing_off.take_except(set())
        for record in left:
            text = "the producer was closed before this record could be sent"
            self._ledger.fail(record, Attempt(False, SHUTDOWN, text, now, now))  # noqa: FBT003
        for request in self._in_flight:
            for record in request.records:
                text = "the producer was closed before the request was answered; the record may be stored"
                self._ledger.fail(record, Attempt(False, UNKNOWN, text, request.started_at, now))  # noqa: FBT003
        for record in self._retrier.take_held():
            text = "the producer was closed before it was known whether consumers of the shard it is stored in want it"
            self._ledger.fail(record, Attempt(False, UNKNOWN, text, now, now))  # noqa: FBT003
        self._in_flight.clear()

    def shards_changed(self, shards: Iterable[Shard], now: float) -> None:
        """Use a new shard map; everything that waits under a prediction that no longer holds is routed again.

        In arrival order, what is on its way to a shard that is gone comes back first: the new map waits for it.
        """
        shards = tuple(shards)
        self._next_shards = shards if self._in_order and self._would_overtake(shards) else None
        if self._next_shards is not None:
            return
        before = self.shard_map.open_ranges()
        changed = self.shard_map.update(shards, now)
        if changed:
            self._router.forget()
        # What was held was sent before everything that waits, so it travels again before that.
        self._retry(self._retrier.shards_changed(now), now)
        if changed:
            after = self.shard_map.open_ranges()
            valid = {shard_id for shard_id, bounds in after.items() if before.get(shard_id, bounds) == bounds}
            self._route_again(valid, now)
        if self._listening:
            self._ledger.facts.append(ShardMapRefreshed(self.stream, len(self.shard_map.open_shards)))
        self.attention = True

    def _route_again(self, stable: set[str], now: float) -> None:
        self._aggregator.close_lanes_except(stable)
        waiting = self._aggregator.take_closed() + self._limiter.take_all()
        # What was admitted has its tokens, and keeps its place.
        packed = self._collector.take_all()
        for record in packed:
            if record.predicted_shard in stable:
                self._collector.add(record, now)
        waiting += [record for record in packed if record.predicted_shard not in stable]
        waiting += self._backing_off.take_except(stable)
        waiting.sort(key=lambda record: record.sequence)
        self._limiter.keep_only(stable)
        for record in waiting:
            if record.predicted_shard in stable:
                self._limit(record, now)
            else:
                self._route_apart(record, now)
        self._limit_closed(now)
