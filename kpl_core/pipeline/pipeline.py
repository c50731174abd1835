"""The journey of a user record through one stream, from top to bottom.

    put -> (intake) -> aggregate -> limit -> (gate) -> collect -> (the driver sends) -> classify -> finish or retry

The pipeline is synchronous and reads no clock. The driver puts user records, polls for the requests to send, and hands
the answers back. Between two calls the state is whole, so a cancellation never leaves half a change. Nothing is pushed:
`poll` lets time pass, and returns what may leave and when to poll again. `stages.py` has what is in parentheses.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from kpl_core.errors import BufferFull
from kpl_core.hooks import ShardMapRefreshed, ShardRateChanged
from kpl_core.pipeline.forwarding import NEVER_SENT, Forwarder, Reaggregator
from kpl_core.pipeline.intake.fair_intake import FairIntake
from kpl_core.pipeline.intake.write_ahead import WriteAhead
from kpl_core.pipeline.lane import Lane
from kpl_core.pipeline.open_record import PutBatch
from kpl_core.pipeline.placement import ANY_PUT, RESERVED, Placement
from kpl_core.pipeline.router import Route
from kpl_core.pipeline.shard_map import Shard
from kpl_core.pipeline.stages import Gate, GroupTerms, Poll, Stages
from kpl_core.records.kinesis_record import DetachedUserRecord
from kpl_core.records.outcome import Note, Origin, Outcome, ResultHandle, ResultHandles
from kpl_core.records.pipeline_statistics import PipelineStatistics
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsRequest, completed_fact
from kpl_core.records.record_result import RATE_LIMITED, SHUTDOWN, Attempt
from kpl_core.records.user_record import (
    BytesLike,
    UserRecord,
    as_bytes,
    check_user_record,
    encode_partition_key,
    require_size,
    with_bytes,
)


class StreamPipeline:
    """Everything the producer knows about one stream."""

    def __init__(
        self,
        stages: Stages,
        *,
        now: float,
        write_ahead: WriteAhead | None = None,
        fair: FairIntake | None = None,
        gate: Gate | None = None,
    ) -> None:
        self.stream = stages.stream
        self.shard_map = stages.shard_map
        self.ledger = stages.ledger
        self.write_ahead = write_ahead
        self.fair = fair
        self.gate = gate
        self.stages = stages
        self._buffer_limit = stages.buffer_limit
        self._delivery = stages.delivery
        self._generations = stages.ledger.generations
        self._router = stages.router
        self._is_direct = write_ahead is None and fair is None
        # Empty with an intake, which looks at every record.
        self._routes: dict[str, Route[Lane]] = stages.router.routes if self._is_direct else {}
        # Of user records put one by one, until the pipeline does anything else.
        self._batch = stages.batch = PutBatch(self, stages.router, stages.buffer_limit, stages.delivery)
        # The batch for the put method in C; None where each record needs a look, or is no other's neighbour.
        batches = write_ahead is None and (fair is None or not stages.ledger.is_durable)
        self.entrance = self._batch if batches and stages.aggregator.output.rules.any_count else None
        self._batch.takes_flows = not stages.ledger.is_durable and (fair is None or fair.aggregates_all)
        # Makes the outcome of a batch; that of the driver has a `batch_runner`.
        self.new_outcome: Callable[[], Outcome] = Outcome
        self.max_record_bytes = stages.max_record_bytes
        self._aggregator = stages.aggregator
        self._output = stages.aggregator.output
        self._placement = Placement(stages, fair)
        self.place: Callable[[str, bytes, str | None, str | None, float], ResultHandle] = self._placement.place
        self.all_pass: Callable[[], bool] = self._placement.all_pass
        self.limiter = stages.limiter
        self._send_queue = stages.send_queue
        self._retrier = stages.retrier
        self._backoff_queue = stages.backoff_queue
        self.reaggregator = Reaggregator(stages, fair)
        self._forwarder = Forwarder(stages, self.reaggregator, gate)
        self._in_flight: set[PutRecordsRequest] = set()
        self._in_order = stages.config.ordering == "per_key"
        # A newer shard map. It waits until no record is in flight that the records it moves could overtake.
        self._next_shards: Sequence[Shard] | None = None
        self._promised_wakeup = now
        # True if a put wants attention earlier than the last poll's `wakeup`. The driver clears it.
        self.attention = False

    # A record comes in

    def put(self, partition_key: str, data: BytesLike, now: float) -> ResultHandle:
        """Accept a user record.

        Raises:
            TypeError, InvalidUserRecord: it can never be accepted.
            BufferFull: there is no room for it now. Nothing was reserved in either case.
        """
        if self._batch.count:
            self._batch.drain()
        try:
            route = self._routes.get(partition_key)
        except TypeError:
            encode_partition_key(partition_key)
            raise
        if route is None:
            if not self._is_direct:
                return self.put_record(UserRecord(partition_key, as_bytes(data)), now)
            route = self._router.find(partition_key)
        lane, key_entry, key_bytes, open_record = route
        if type(data) is not bytes:
            data = as_bytes(data)
        size = len(data) + key_bytes
        if size > self._max_record_bytes:
            require_size(key_bytes, len(data), max_record_bytes=self._max_record_bytes)
        limit = self._buffer_limit
        free_records = limit.free_records - 1
        free_bytes = limit.free_bytes - size
        if (free_records < 0 or free_bytes < 0) and not limit.has_room(size_bytes=size):
            return self._overflow(UserRecord(partition_key, data), limit.full(), now)
        limit.free_records, limit.free_bytes = free_records, free_bytes
        delivery = None if open_record is None else open_record.append(partition_key, key_entry, data, size, now)
        if delivery is None:
            # It opens or closes a record, or makes one of its own.
            add = lane.add if open_record is None else lane.add_any
            delivery = add(partition_key, key_entry, data, size, now)
            if self._output.has_closed:
                self.attend(now)
        return delivery

    def fail_put(
        self, key: str, data: bytes, explicit: str | None, flow: str | None, now: float, error: BaseException
    ) -> ResultHandle:
        """Fail a record of the batch that `place` could not put."""
        self.attention = True
        return self._placement.fail(UserRecord(key, data, explicit, flow), now, error)

    def put_pairs(self, records: list[Any], part: tuple[int, int], now: float, handles: ResultHandles) -> int:
        """Accept checked user records in this part of a list as `put` does each, and store their handles.

        Returns the position of the first record that is not a pair of key and data, or finds no room.
        """
        position, end = part
        self._batch.drain()
        if not self._is_direct:
            return self._put_each(records, position, end, now, handles)
        limit = self._buffer_limit
        # Something else than a put has closed a record, perhaps, such as a new shard map.
        self.attend(now)
        while position < end:
            room = limit.free_records, limit.free_bytes
            reached, taken = self._placement.place_run(records, (position, end), now, ANY_PUT, room, handles)
            limit.free_records -= reached - position
            limit.free_bytes -= taken
            self.attend(now)
            if reached == position:
                break
            position = reached
        return position

    def _put_each(self, records: list[Any], start: int, end: int, now: float, handles: ResultHandles) -> int:
        position = start
        with contextlib.suppress(BufferFull):
            while position < end and type(record := records[position]) is tuple:
                handles.set(position, self._accept(UserRecord(record[0], as_bytes(record[1])), now, None))
                position += 1
        return position

    def put_record(self, record: UserRecord, now: float, origin: Origin | None = None) -> ResultHandle:
        """Accept any user record; raises as `put`, and NotSpooled. With an `origin` a durable store still has it.

        A record from a caller that finds no room goes to the disk where one is configured for that.
        """
        record = with_bytes(record)
        if self._batch.count:
            self._batch.drain()
        try:
            return self._accept(record, now, origin)
        except BufferFull as full:
            if origin is not None:
                raise
            return self._overflow(record, full, now)

    def _accept(self, record: UserRecord, now: float, origin: Origin | None) -> ResultHandle:
        size = check_user_record(record, max_record_bytes=self._max_record_bytes)
        fair, disk = self.fair, self.write_ahead if origin is None else None
        is_straight = disk is not None and disk.goes_straight((record.partition_key,))
        if fair is not None:
            fair.waiting.require_share(record.flow, size, tier=record.tier)
        self._buffer_limit.reserve(size_bytes=size, tier=record.tier)
        if disk is not None:
            if not is_straight:
                return self._write_first(record, disk, now, durable=disk.state.failure == "refuse")
            disk.state.bypassed += 1
        key, data, explicit = record.partition_key, record.data, record.explicit_hash_key
        lane, key_entry, _ = self._placement.of(key, explicit, record.tier)
        if origin is not None:
            self.stages.returned[origin] += 1
        is_apart = fair is not None and (fair.travels_alone(record.flow) or not fair.lets_pass(lane.shard_id))
        if is_apart or (origin is not None and self.reaggregator.travels_alone(record, record.flow)):
            detached = self.stages.accept_detached(record, now, origin)
            delivery = self._delivery(detached.outcome, 0)
            self._enter(detached, lane.shard_id, now)
        else:
            if explicit is None:
                delivery = lane.add(key, key_entry, data, size, now)
            else:
                delivery = lane.add_any(key, key_entry, data, size, now, explicit_hash_key=explicit)
            if record.metadata is not None:
                delivery.note(record.metadata)
            if origin is not None or (record.flow is not None and self.ledger.is_durable):
                delivery.remark(Note(record.flow, origin))
            if origin is not None:
                self.reaggregator.returned_to.add(lane)
        self.attend(now)
        return delivery

    def _overflow(self, record: UserRecord, full: BufferFull, now: float) -> ResultHandle:
        """Spill a user record that finds no room to the disk, or raise."""
        if not self.ledger.can_spill(record):
            raise full
        detached = self.stages.accept_detached(record, now)
        self.ledger.spill_to_disk(detached, Attempt(False, RATE_LIMITED, str(full), now, now))  # noqa: FBT003
        self.attention = True
        return self._delivery(detached.outcome, 0)

    def _write_first(self, record: UserRecord, disk: WriteAhead, now: float, *, durable: bool) -> ResultHandle:
        detached = self.stages.accept_detached(record, now)
        disk.add(detached, durable=durable)
        self.attention = True
        return self._delivery(detached.outcome, 0)

    def start_written(self, detached: DetachedUserRecord, now: float, *, is_stored: bool = True) -> ResultHandle:
        """Let a user record start, because the write-ahead spool has stored it, or cannot. Poll after the last one."""
        if self.write_ahead is not None:
            self.write_ahead.left(detached)
        if is_stored:
            notes = detached.outcome.notes
            note = Note(None) if notes is None else notes[0]
            detached.outcome.notes = {0: note._replace(origin="write_ahead")}
        self._enter(detached, self.stages.shard_of(detached.user_record), now)
        detached.outcome.wake()
        return self._delivery(detached.outcome, 0)

    def _enter(self, detached: DetachedUserRecord, shard_id: str | None, now: float) -> None:
        """Let an accepted user record into its lane, or let it wait for its flow's turn."""
        if self.fair is not None and not self.fair.lets_pass(shard_id):
            self.fair.waiting.put(shard_id, detached)
        else:
            self.reaggregator.add((detached,), now)
            self._generations.release(detached.generation)

    def put_group(
        self, run: list[Any], part: tuple[int, int], now: float, terms: GroupTerms, handles: ResultHandles | None
    ) -> None:
        """Accept this part of a run of checked user records, pairs or triples, for all of which room was reserved."""
        position, end = part
        self._batch.drain()
        disk = self.write_ahead
        if disk is not None and terms.straight:
            disk.state.bypassed += end - position
        elif disk is not None and terms.keep:
            note = terms.note()
            for at in range(position, end):
                record = replace(UserRecord(*run[at]), flow=terms.flow, tier=terms.tier)
                handle = self._write_first(record, disk, now, durable=terms.durable)
                if note is not None:
                    handle.remark(note)
                if handles is not None:
                    handles.set(at, handle)
            return
        while position < end:
            position, _ = self._placement.place_run(run, (position, end), now, terms, RESERVED, handles)
            if self._output.has_closed:
                self.attend(now)

    def attend(self, now: float) -> None:
        """Hand on what a put closed, and set `attention` if the driver must poll earlier than it plans to."""
        output = self._output
        if not output.has_closed:
            return
        output.has_closed = False
        limiter = self.limiter
        if output.drain_at <= now or limiter.is_paused:
            self._forwarder.limit_closed(now)
            if self._forwarder.has_refused:
                self._forwarder.has_refused = False
                self.attention = True
        promised = self._promised_wakeup
        # A put can move these to an earlier time, and no other stage's.
        if promised != -math.inf and (
            output.drain_at < promised
            or output.deadlines.next_at < promised
            or self._send_queue.next_wakeup(may_send=not limiter.is_paused) < promised
            or limiter.next_wakeup() < promised
        ):
            self.attention = True
            # Once is enough, until the next poll promises another time.
            self._promised_wakeup = self._batch.opens_at = -math.inf

    # Time passes

    def poll(self, now: float, free_requests: int) -> Poll:
        """Let time pass; return the requests to send, at most `free_requests`, and when to poll again."""
        if self._batch.count:
            self._batch.drain()
        if self.limiter.is_paused:
            # Full requests may leave only below, so the limiter still waits for them.
            self._pause_limiter(now, may_send=False)
        self._advance(now)
        if self._output.closed:
            # The rest of an expired aggregated record was aggregated again, and may have filled what it joined.
            self._forwarder.limit_closed(now)
        if self.fair is not None:
            self._forwarder.let_in(self.fair, now)
        requests: list[PutRecordsRequest] = []
        while (wants_more := self._send_queue.is_due(now)) and len(requests) < free_requests:
            self._forwarder.fill_up(now)
            records = self._send_queue.next_records(now)
            if records is None:
                continue
            request = PutRecordsRequest(self.stream, records, started_at=now)
            self._in_flight.add(request)
            if self.fair is not None:
                self.fair.sent(records)
            requests.append(request)
        may_send = not wants_more
        # All that can pause the limiter, or keep it paused.
        if wants_more or self.limiter.is_paused or self._next_shards is not None or self._send_queue.pause.is_failing:
            self._pause_limiter(now, may_send=may_send)
        self._promised_wakeup = wakeup = max(now, self._earliest_wakeup(may_send=may_send))
        # A record that waits in the batch until then is in time: it may wait as long for others of its shard.
        self._batch.opens_at = wakeup - self._output.rules.buffered_seconds
        if self._batch.count:
            # A signal handler has put meanwhile, for which the pipeline was to be polled earlier, perhaps.
            self._promised_wakeup = wakeup = now
        return Poll(requests, wakeup, wants_more)

    def _advance(self, now: float) -> None:
        """Close what is due, expire, and admit what the tokens allow."""
        output = self._output
        if self.fair is not None and self.fair.waiting.next_at <= now:
            for detached in self.fair.waiting.take_expired(now):
                self.ledger.fail_waiting(detached, self._retrier.expired_attempt(detached, now))
        if self.gate is not None and self.gate.next_wakeup() <= now:
            self._forwarder.try_gate_again(self.gate, now)
        if output.deadlines.next_at <= now:
            self._aggregator.close_due(now)
        if self._backoff_queue.next_at <= now:
            self._forwarder.limit_again(self._backoff_queue.take_due(now), now)
        if output.closed or output.drain_at <= now:
            self._forwarder.limit_closed(now)
        if self.limiter.wakeups.next_at <= now:
            self._forwarder.collect(self.limiter.drain_due(now), now)
        if expired := self._send_queue.take_expired(now):
            self._forwarder.expire(expired, now)
        if self._retrier.next_at <= now:
            self._forwarder.retry(self._retrier.overdue(now), now)

    def _pause_limiter(self, now: float, *, may_send: bool) -> None:
        next_shards = self._next_shards
        overtakes = next_shards is not None and self._forwarder.would_overtake(next_shards, self._in_flight)
        # Of several shards that closed, one would always have a record in flight, and the map would never be used.
        until = math.inf if overtakes else self._send_queue.paused_until(now, may_send=may_send)
        self.limiter.pause(until, now)

    def _earliest_wakeup(self, *, may_send: bool) -> float:
        output, limiter = self._output, self.limiter
        at = min(
            output.drain_at,
            output.deadlines.next_at,
            limiter.next_wakeup() if limiter.is_paused else limiter.wakeups.next_at,
            self._send_queue.next_wakeup(may_send=may_send),
            self._backoff_queue.next_at,
            self._retrier.next_at,
        )
        if self.fair is not None:
            at = min(at, self.fair.waiting.next_at)
        return at if self.gate is None else min(at, self.gate.next_wakeup())

    # An answer comes back

    def request_completed(self, request: PutRecordsRequest, answer: PutRecordsAnswer, now: float) -> None:
        """Finish, retry or fail the records of a request. An answer after `abandon` comes too late."""
        if request not in self._in_flight:
            return
        if self._batch.count:
            self._batch.drain()
        self._in_flight.remove(request)
        if self.fair is not None:
            self.fair.answered(request.records)
        if self.gate is not None:
            self.gate.answered(request, answer, now)
            self._forwarder.try_gate_again(self.gate, now)
        retries = self._retrier.answered(request, answer, now)
        self._send_queue.pause.ended(now, failed=retries.request_failed)
        listening = self.ledger.listening
        for shard_id, sent in retries.sent.items():
            fraction = self.limiter.answered(shard_id, sent=sent, throttled=retries.throttled[shard_id], now=now)
            if fraction is not None and listening:
                self.ledger.facts.append(ShardRateChanged(self.stream, shard_id or "", fraction))
        if listening:
            self.ledger.facts.append(completed_fact(request, answer, throttled=retries.throttled, now=now))
        self._forwarder.retry(retries, now)
        next_shards = () if retries.stream_deleted else self._next_shards
        if next_shards is not None:
            self.shards_changed(next_shards, now)
        if self.fair is not None:
            self._forwarder.let_in(self.fair, now)
        self.attention = True

    # Flush and close

    def flush(self, now: float) -> int:
        """Close everything open; limits still apply. Returns the generation to ask `is_flushed` for."""
        self._batch.drain()
        self._forwarder.close_open(now)
        self.attention = True
        return self._generations.advance()

    def is_flushed(self, generation: int) -> bool:
        """Return True if everything put before the flush of this generation has its final result."""
        return self._generations.is_finished(generation)

    def drain_force(self, now: float) -> None:
        """Let everything leave that has not expired, without tokens, because a close runs out of time.

        From now on no record waits for tokens. A record that the service refuses still backs off.
        """
        self._batch.drain()
        if self.fair is not None:
            self.fair.force()
        self._send_queue.pause.lift()
        self._forwarder.drain_all(now)
        if self.fair is not None:
            self._forwarder.let_in(self.fair, now)
            self._forwarder.drain_all(now)
        self.attention = True

    def abandon(self, now: float) -> None:
        """Give every user record that is left its final result: never sent, or sent and never answered."""
        self._batch.drain()
        if self.fair is not None:
            for detached in self.fair.waiting.drain(self.fair.waiting.shards):
                self.ledger.fail_waiting(detached, Attempt(False, SHUTDOWN, NEVER_SENT, now, now))  # noqa: FBT003
        self._forwarder.abandon(self._in_flight, now)
        self._in_flight.clear()

    # The shard map changes

    def shards_changed(self, shards: Sequence[Shard], now: float) -> None:
        """Use a new shard map, and route every waiting record again whose prediction is no longer valid.

        In arrival order the map waits until the records in flight to a shard that is gone have come back.
        """
        self._batch.drain()
        if self._in_order and self._forwarder.would_overtake(shards, self._in_flight):
            self._next_shards = shards
            return
        self._next_shards = None
        stable = self._forwarder.use_shards(shards, now)
        if self.fair is not None and stable is not None:
            self.fair.route_again(stable)
        if self.ledger.listening:
            self.ledger.facts.append(ShardMapRefreshed(self.stream, len(self.shard_map.open_shards)))
        self.attention = True

    # Facts and counts

    @property
    def max_record_bytes(self) -> int:
        """The most bytes of key and data in one user record, as far as known; the driver sets it."""
        return self._max_record_bytes

    @max_record_bytes.setter
    def max_record_bytes(self, value: int) -> None:
        self._max_record_bytes = self.stages.max_record_bytes = self._batch.most = value

    def on_opening(self, opening_context: Callable[[], object] | None) -> None:
        """Call `opening_context` whenever a Kinesis record opens; the fact about its request has the results."""
        self._output.opening_context = opening_context
        # With a context each record is put at once, in its own.
        self._batch.limit = 1 if opening_context is not None else self.stages.batch_limit

    def statistics(self) -> PipelineStatistics:
        """Count the user records in every stage, in flight, and in what fills the places."""
        return self.stages.statistics(
            self._in_flight,
            self.gate,
            queueing=0 if self.fair is None else self.fair.waiting.user_record_count,
            before_disk=0 if self.write_ahead is None else self.write_ahead.count,
        )
