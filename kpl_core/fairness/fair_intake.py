"""The fair intake: user records wait per flow in front of an overloaded shard, and enter aggregation in fair order.

Each shard has a gate. It is open while records that pass it would travel on at once: nothing of the shard waits for
tokens or for its next attempt, and little of it is sent and not answered. Then a user record goes straight to its lane.
Behind a closed gate it waits in its flow (`fair_shards.py`). When the gate opens, user records enter in fair
order until it closes again.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from kpl_core.fairness.fair_shards import FairShards
from kpl_core.options.policy import FairnessPolicy
from kpl_core.pipeline.forwarding import digest_of
from kpl_core.pipeline.lane import Lane
from kpl_core.pipeline.open_record import COMPILED, append_pairs
from kpl_core.pipeline.stages import GroupPlace, GroupTerms, Stages
from kpl_core.records.kinesis_record import DetachedUserRecord, KinesisRecord
from kpl_core.records.outcome import Note, ResultHandle, ResultHandles
from kpl_core.records.user_record import (
    Tier,
    UserRecord,
    encode_partition_key,
    require_notes,
    require_size,
)

# How much of a shard's capacity may be sent and not answered before its gate closes.
UNANSWERED_SECONDS: Final = 0.25


class FairIntake:
    """The fair queues of one stream and the gates behind them."""

    def __init__(self, stages: Stages, policy: FairnessPolicy) -> None:
        config = stages.config
        self._stages = stages
        self._policy = policy
        self._buffer_limit = stages.buffer_limit
        self._shard_map = stages.shard_map
        self._aggregator = stages.aggregator
        self._output = stages.aggregator.output
        self._router = stages.router
        self._limiter = stages.limiter
        self._backoff_queue = stages.backoff_queue
        self._delivery = stages.delivery
        self._waiting = FairShards(policy, stages.buffer_limit, ttl_seconds=config.record_ttl_ms / 1000)
        # The flows whose user records are not aggregated, because their last put said so.
        self._lone_flows: set[str | None] = set()
        self._unanswered_limit = UNANSWERED_SECONDS * config.rate_limit_bytes_per_sec_per_shard
        self._unanswered_bytes: dict[str | None, int] = {}
        # The shards that have reached the limit.
        self._unanswering: set[str | None] = set()
        self._is_forced = False

    # The gates

    def is_open(self, shard_id: str | None) -> bool:
        """Return True if the gate of a shard is open."""
        if self._is_forced:
            return True
        if self._limiter.is_waiting(shard_id) or self._backoff_queue.has_shard(shard_id):
            return False
        return shard_id not in self._unanswering

    def lets_pass(self, shard_id: str | None) -> bool:
        """Return True if a user record put now enters aggregation at once: the gate is open, and no record waits."""
        return not self._waiting.is_waiting(shard_id) and self.is_open(shard_id)

    def all_let_pass(self) -> bool:
        """Return True if nothing waits anywhere, as is usual: then no gate needs a look of its own."""
        if self._waiting or self._unanswering or self._backoff_queue:
            return False
        # A shard with records that wait for tokens has a wake-up.
        return self._limiter.next_wakeup() == math.inf

    def sent(self, records: Iterable[KinesisRecord]) -> None:
        """Note that a request left with these records."""
        unanswered = self._unanswered_bytes
        for record in records:
            shard_id = record.predicted_shard
            sent = unanswered[shard_id] = unanswered.get(shard_id, 0) + record.size_bytes
            if sent >= self._unanswered_limit:
                self._unanswering.add(shard_id)

    def answered(self, records: Iterable[KinesisRecord]) -> None:
        """Note that the request with these records was answered."""
        unanswered = self._unanswered_bytes
        for record in records:
            shard_id = record.predicted_shard
            left = unanswered.get(shard_id, 0) - record.size_bytes
            if left < self._unanswered_limit:
                self._unanswering.discard(shard_id)
            if left > 0:
                unanswered[shard_id] = left
            else:
                unanswered.pop(shard_id, None)

    def force(self) -> None:
        """Let every user record enter from now on, because the producer is closing."""
        self._is_forced = True

    # The queues behind closed gates

    def require_share(self, flow: str | None, size_bytes: int, *, records: int, tier: Tier) -> None:
        """Raise BufferFull if the flow has used up its share of the buffer."""
        self._waiting.require_share(flow, size_bytes, records=records, tier=tier)

    def travels_alone(self, flow: str | None) -> bool:
        """Return True if the user records of this flow are not aggregated."""
        return flow in self._lone_flows or not self._policy.aggregates(flow)

    def enqueue(self, shard_id: str | None, detached: DetachedUserRecord) -> None:
        """Let a user record wait for its turn."""
        self._waiting.put(shard_id, detached, detached.size_bytes)

    def next_ready(self, now: float) -> DetachedUserRecord | None:
        """Remove and return the next user record that may enter aggregation, None if none may."""
        waiting = self._waiting
        if not waiting or waiting.next_wakeup() <= now:
            # Expired user records leave first: the next poll takes them.
            return None
        for shard_id in waiting.waiting_shards:
            if self.is_open(shard_id):
                return waiting.take(shard_id)
        return None

    def take_expired(self, now: float) -> list[DetachedUserRecord]:
        """Remove and return user records whose time to live is over."""
        return self._waiting.take_expired(now)

    def take_all(self) -> list[DetachedUserRecord]:
        """Remove and return every waiting user record."""
        return self._waiting.drain(self._waiting.waiting_shards)

    def route_again(self, stable: set[str]) -> None:
        """Move the user records whose shard is not in `stable` to the queue of their new shard."""
        moved = [shard_id for shard_id in self._waiting.waiting_shards if shard_id not in stable]
        for detached in self._waiting.drain(moved):
            self.enqueue(self._stages.shard_of(detached.user_record), detached)

    def next_wakeup(self) -> float:
        """Return when the first user record may expire, `math.inf` if none waits."""
        return self._waiting.next_wakeup()

    @property
    def user_record_count(self) -> int:
        """Return how many user records wait."""
        return self._waiting.user_record_count

    @property
    def waiting_by_flow(self) -> dict[Any, tuple[int, int]]:
        """Return how many user records, of how many bytes, each flow has in the queue."""
        return self._waiting.queued_by_flow

    def oldest_by_flow(self) -> dict[Any, float]:
        """Return when the oldest user record of each flow in the queue arrived."""
        return self._waiting.oldest_by_flow()

    # Many user records of one flow together, all or none. Room is taken once for all, and behind an open gate each then
    # costs as much as without fairness. `enter_group` and `enter_pairs` return whenever a lane has closed a record, so
    # that the pipeline hands it on: that may close the gate. A group that has room already was accepted: a size limit
    # that has become lower since then does not refuse its records.

    def admit_group(self, records: Sequence[UserRecord], terms: GroupTerms) -> list[GroupPlace]:
        """Check the records, take room for all of them, and return where each is put."""
        flow, tier, has_room = terms.flow, terms.tier, terms.has_room
        require_notes(flow, None)
        if tier == "normal" and terms.aggregate:
            places = self._places_by_key(records, has_room=has_room)
        else:
            places = [self._place(record, terms) for record in records]
        size_bytes = 0
        for place in places:
            size_bytes += place[3]
        if not has_room:
            self.reserve(size_bytes, len(places), flow, tier)
        if not terms.aggregate:
            self._lone_flows.add(flow)
        return places

    def reserve(self, size_bytes: int, records: int, flow: str | None, tier: Tier) -> None:
        """Take room for so many records of a flow together; raises BufferFull, and then nothing was taken."""
        self._waiting.require_share(flow, size_bytes, records=records, tier=tier)
        self._buffer_limit.reserve(size_bytes=size_bytes, records=records, tier=tier)
        if self._lone_flows:
            self._lone_flows.discard(flow)

    def _places_by_key(self, records: Sequence[UserRecord], *, has_room: bool) -> list[GroupPlace]:
        """Return where each user record is aggregated, by the routes that every put uses where that is possible."""
        most = self._stages.max_record_bytes
        routes, find = self._router.routes, self._router.find
        places: list[GroupPlace] = []
        for record in records:
            key = record.partition_key
            if record.explicit_hash_key is None:
                lane, key_entry, key_bytes, _ = routes.get(key) or find(key)
            else:
                lane, key_entry, key_bytes, _ = self._explicit_route(key, record.explicit_hash_key)
            size = len(record.data) + key_bytes
            if size > most and not has_room:
                require_size(key_bytes, len(record.data), max_record_bytes=most)
            places.append((record, lane, key_entry, size))
        return places

    def _explicit_route(self, key: str, explicit_hash_key: str) -> tuple[Lane, bytes, int, bytes]:
        """Return the lane of an explicit hash key, the partition key's entry and bytes, and the other's entry."""
        router = self._router
        lane, entry = router.explicit_routes.get(explicit_hash_key) or router.find_explicit(explicit_hash_key)
        _, key_entry, key_bytes, open_record = router.routes.get(key) or router.find(key)
        if open_record is None:
            # The partition key alone belongs to another kind of lane, perhaps.
            key_entry = lane.entry(key.encode(), None)
        return lane, key_entry, key_bytes, entry

    def _place(self, record: UserRecord, terms: GroupTerms) -> GroupPlace:
        key = encode_partition_key(record.partition_key)
        digest = digest_of(key, record.explicit_hash_key)
        shard_id = self._shard_map.predict(digest)
        lane = (self._aggregator.lane if terms.aggregate else self._aggregator.single_lane)(shard_id, terms.tier)
        size = len(record.data) + len(key)
        if not terms.has_room:
            require_size(len(key), len(record.data), max_record_bytes=self._stages.max_record_bytes)
        return record, lane, lane.entry(key, digest), size

    def enter_group(
        self, places: Sequence[GroupPlace], deliveries: list[ResultHandle], now: float, terms: GroupTerms
    ) -> None:
        """Put the next user records into their lanes or queues, and append their deliveries."""
        first = len(deliveries)
        # The gate of each lane's shard. It can only close when a lane has closed a record.
        is_open: dict[Lane, bool] = {}
        for record, lane, key_entry, size in places[first:]:
            gate = is_open.get(lane)
            if gate is None:
                gate = is_open[lane] = self.lets_pass(lane.shard_id)
            if not gate:
                deliveries.append(self._queue(lane.shard_id, record, now, terms.flow, terms.tier))
                continue
            key, data, explicit = record.partition_key, record.data, record.explicit_hash_key
            if explicit is None:
                deliveries.append(lane.add(key, key_entry, data, size, now))
            else:
                deliveries.append(lane.add_any(key, key_entry, data, size, now, explicit_hash_key=explicit))
            if self._output.has_closed:
                break
        if self._stages.ledger.is_durable or not terms.aggregate:
            note = Note(terms.flow, None if terms.keep else "caller")
            for delivery in deliveries[first:]:
                delivery.remark(note)

    def _queue(
        self, shard_id: str | None, record: UserRecord, now: float, flow: str | None, tier: Tier
    ) -> ResultHandle:
        """Let a user record that has room wait for its turn."""
        detached = self._stages.accept_detached(msgspec.structs.replace(record, flow=flow, tier=tier), now)
        self.enqueue(shard_id, detached)
        return self._delivery(detached.outcome, 0)

    def enter_pairs(
        self, pairs: list[Any], part: tuple[int, int], now: float, flow: str | None, handles: ResultHandles | None
    ) -> int:
        """Put this part of checked pairs into their lanes or queues, and store their handles, if that is given.

        Returns the position behind the last one that was put: a lane may have closed a record before the end.
        """
        routes, explicit_routes = self._router.routes, self._router.explicit_routes
        all_let_pass = self.all_let_pass()
        is_open: dict[Lane, bool] = {}
        position, end = part
        if all_let_pass:
            room = sys.maxsize, sys.maxsize
            position, _ = append_pairs(pairs, part, self._router, room, now, handles)
        # One that opens or closes a record, in Python those with new partition keys, and all while a gate is closed.
        is_known = False
        while position < end and not (is_known or self._output.has_closed):
            key, data, *explicit = pairs[position]
            is_known = all_let_pass and (COMPILED or (key in routes and {*explicit} <= explicit_routes.keys()))
            if explicit:
                lane, key_entry, key_bytes, _ = self._explicit_route(key, explicit[0])
            else:
                lane, key_entry, key_bytes, _ = routes.get(key) or self._router.find(key)
            gate = all_let_pass or is_open.get(lane)
            if gate is None:
                gate = is_open[lane] = self.lets_pass(lane.shard_id)
            size = len(data) + key_bytes
            if not gate:
                handle = self._queue(lane.shard_id, UserRecord(key, data, *explicit), now, flow, "normal")
            elif explicit:
                handle = lane.add_any(key, key_entry, data, size, now, explicit_hash_key=explicit[0])
            else:
                handle = lane.add(key, key_entry, data, size, now)
            if handles is not None:
                handles.set(position, handle)
            position += 1
        return position
