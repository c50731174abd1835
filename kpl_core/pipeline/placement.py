"""Where each user record of one stream is put: into its lane, or, while its shard does not keep up, into a queue.

Each run of records comes in here: a part of a `put_many`, or a group of one flow. The kernel `append_pairs` is a cache
in front of the loop: it takes the records that only fill open aggregated records.
"""

import sys
from typing import Any, Final

from kpl_core.pipeline.forwarding import digest_of
from kpl_core.pipeline.intake.fair_intake import FairIntake
from kpl_core.pipeline.lane import Lane
from kpl_core.pipeline.open_record import COMPILED, PAIR, append_pairs
from kpl_core.pipeline.stages import GroupTerms, Stages
from kpl_core.records.outcome import ResultHandle, ResultHandles
from kpl_core.records.record_result import INTERNAL, Attempt
from kpl_core.records.user_record import Tier, UserRecord

# The terms of records put one by one: each pair has no flow.
ANY_PUT: Final = GroupTerms(None)
# The room (records, bytes) of a run whose room was reserved.
RESERVED: Final = (sys.maxsize, sys.maxsize)
# The lane of a user record, the lane's entry for its partition key, and the bytes of that key.
Place = tuple[Lane, bytes, int]


class Placement:
    """Puts the checked user records of one stream. `fair` says which shards keep up; without it all do."""

    def __init__(self, stages: Stages, fair: FairIntake | None) -> None:
        self._stages = stages
        self._fair = fair
        self._router = stages.router
        self._aggregator = stages.aggregator
        self._output = stages.aggregator.output

    def of(self, partition_key: str, explicit_hash_key: str | None, tier: Tier, *, aggregate: bool = True) -> Place:
        """Return the place of a valid user record."""
        router = self._router
        if tier == "normal" and aggregate:
            route = router.routes.get(partition_key) or router.find(partition_key)
            if explicit_hash_key is None:
                return route[:3]
            explicit = router.explicit_routes.get(explicit_hash_key) or router.find_explicit(explicit_hash_key)
            lane = explicit[0]
            # The partition key alone belongs to another kind of lane, perhaps.
            entry = lane.entry(partition_key.encode(), None) if route[3] is None else route[1]
            return lane, entry, route[2]
        key = partition_key.encode()
        digest = digest_of(key, explicit_hash_key)
        shard_id = self._stages.shard_map.predict(digest)
        lane = (self._aggregator.lane if aggregate else self._aggregator.single_lane)(shard_id, tier)
        return lane, lane.entry(key, digest), len(key)

    def place(self, key: str, data: bytes, explicit: str | None, flow: str | None, now: float) -> ResultHandle:
        """Put a record of a batch that opens or closes an aggregated record, or must wait for the turn of its flow."""
        lane, key_entry, key_bytes = self.of(key, explicit, "normal")
        if not (self._fair is None or self._fair.lets_pass(lane.shard_id)):
            return self._queue(lane.shard_id, UserRecord(key, data, explicit, flow), now)
        return lane.add_any(key, key_entry, data, len(data) + key_bytes, now, explicit_hash_key=explicit)

    def fail(self, record: UserRecord, now: float, error: BaseException) -> ResultHandle:
        """Fail a record that `place` could not put."""
        detached = self._stages.accept_detached(record, now)
        self._stages.ledger.fail_waiting(detached, Attempt(False, INTERNAL, repr(error), now, now))  # noqa: FBT003
        return self._stages.delivery(detached.outcome, 0)

    def place_run(
        self,
        run: list[Any],
        part: tuple[int, int],
        now: float,
        terms: GroupTerms,
        room: tuple[int, int],
        handles: ResultHandles | None,
    ) -> tuple[int, int]:
        """Put this part of a run, and store the handles, if these are given.

        The run has tuples of partition key (str) and data (bytes), and perhaps an explicit hash key (str). Returns the
        next position, and how many bytes of key and data it has put. It stops at what is not a tuple, at what finds no
        room (records, bytes), and whenever a lane has closed a record: handed on, it may be too much for its shard.
        """
        output, is_durable = self._output, self._stages.ledger.is_durable
        # Only a durable store, and what is not aggregated, needs to know whose a record is.
        note = terms.note() if is_durable or not terms.aggregate else None
        all_pass = self.all_pass()
        is_plain = all_pass and note is None and terms.aggregate and terms.tier == "normal"
        router, routes = self._router, self._router.routes
        position, end = part
        last, free_bytes = min(end, position + max(0, room[0])), room[1]
        if is_plain:
            position, taken = append_pairs(run, part, router, room, now, handles)
            free_bytes -= taken
        # By lane: this can only change when a lane has closed a record.
        passing: dict[Lane, bool] = {}
        # One that opens or closes a record, in Python those with new keys, and all of a run that is not plain.
        is_known = False
        while position < last and not (is_known or output.has_closed) and type(record := run[position]) is tuple:
            key, data = record[0], record[1]
            explicit = None if len(record) == PAIR else record[PAIR]
            if is_plain and explicit is None:
                route = routes.get(key)
                is_known = COMPILED or route is not None
                lane, key_entry, key_bytes, _ = route or router.find(key)
            else:
                is_known = is_plain and (COMPILED or (key in routes and explicit in router.explicit_routes))
                lane, key_entry, key_bytes = self.of(key, explicit, terms.tier, aggregate=terms.aggregate)
            size = len(data) + key_bytes
            if size > free_bytes:
                break
            if not (all_pass or self._lets_pass(lane, passing)):
                handle = self._queue(lane.shard_id, UserRecord(key, data, explicit, terms.flow, terms.tier), now)
            elif explicit is None:
                handle = lane.add(key, key_entry, data, size, now)
            else:
                handle = lane.add_any(key, key_entry, data, size, now, explicit_hash_key=explicit)
            if note is not None:
                handle.remark(note)
            if handles is not None:
                handles.set(position, handle)
            free_bytes -= size
            position += 1
        return position, room[1] - free_bytes

    def all_pass(self) -> bool:
        """Return True if no user record waits for the turn of its flow, as is usual."""
        return self._fair is None or self._fair.all_let_pass()

    def _lets_pass(self, lane: Lane, passing: dict[Lane, bool]) -> bool:
        lets_pass = passing.get(lane)
        if lets_pass is None:
            lets_pass = passing[lane] = self._fair is None or self._fair.lets_pass(lane.shard_id)
        return lets_pass

    def _queue(self, shard_id: str | None, record: UserRecord, now: float) -> ResultHandle:
        """Let a user record wait for its turn."""
        assert self._fair is not None  # noqa: S101 - a shard does not keep up
        detached = self._stages.accept_detached(record, now)
        self._fair.waiting.put(shard_id, detached)
        return self._stages.delivery(detached.outcome, 0)
