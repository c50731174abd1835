"""A lane: where the user records of one predicted shard and tier become Kinesis records.

There are two kinds. In an `AggregatingLane` user records share an open aggregated record (`open_record.py`). In a
`SingleLane` each user record becomes a Kinesis record at once, because aggregation is off or the shard is unknown. All
lanes of a stream hand their closed Kinesis records to one `LaneOutput`.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any, Final

from kpl_core.options.stage_rules import AggregationRules
from kpl_core.pipeline.ledger import Generations
from kpl_core.pipeline.open_record import SHUT, OpenRecord
from kpl_core.pipeline.wakeups import Wakeups
from kpl_core.records.aggregated_record import PARTITION_KEY_HEAD, explicit_hash_key_entry, record_head
from kpl_core.records.hash_key import md5
from kpl_core.records.kinesis_record import DetachedUserRecord, KinesisRecord
from kpl_core.records.outcome import Outcome, ResultHandle
from kpl_core.records.user_record import Tier


class LaneOutput:
    """What all lanes of a stream share: the Kinesis records they closed, and when to take them."""

    def __init__(self, rules: AggregationRules, generations: Generations, delivery: type[ResultHandle]) -> None:
        self.rules = rules
        self.generations = generations
        self.delivery = delivery
        # The deadline of each lane's open aggregated record.
        self.deadlines: Wakeups[AggregatingLane] = Wakeups()
        # Closed Kinesis records that the pipeline has not taken yet, and when it must take them.
        self.closed: list[KinesisRecord] = []
        self.drain_at = math.inf
        # True if a lane closed a record, or opened one and so set a deadline, since the pipeline last looked.
        # The pipeline reads it after every put.
        self.has_closed = False
        # Called when a Kinesis record opens, in the context of the put that opens it. None: no hook asked for it.
        self.opening_context: Callable[[], object] | None = None
        # The sequence of the Kinesis record closed last, and how many user records in closed ones came from a put.
        self.closed_count = 0
        self.fresh_count = 0
        # How many records in `closed` have one user record from a put. They join their generation, and the count,
        # all at once when they are taken.
        self.single_count = 0

    def next_sequence(self) -> int:
        """Return the sequence of one more Kinesis record: behind all that were closed before."""
        self.closed_count += 1
        return self.closed_count

    def take_closed(self, now: float = math.inf) -> list[KinesisRecord]:
        """Remove and return the closed Kinesis records, in the order they were closed."""
        closed, self.closed = self.closed, []
        if self.single_count:
            # They belong to the current generation: a flush takes what is closed before it starts the next one.
            self.generations.retain(self.generations.current, self.single_count)
            self.fresh_count += self.single_count
            self.single_count = 0
        # A single lane that set a time will soon close more. Looking again anyway saves it from asking each time.
        looks_again = bool(closed) and math.isfinite(self.drain_at)
        self.drain_at = now + self.rules.run_seconds if looks_again else math.inf
        return closed


class AggregatingLane:
    """The open aggregated record of one predicted shard and tier."""

    def __init__(self, output: LaneOutput, shard_id: str, tier: Tier) -> None:
        self.shard_id = shard_id
        self.tier = tier
        self._output = output
        self._rules = output.rules
        # A put that knows the lane appends to it directly, and calls the lane where that returns None.
        self.open_record = OpenRecord(output.delivery)
        self._start()

    def _start(self) -> None:
        self.open_record.restart(Outcome())
        self._rejoined = 0
        self._first_explicit_hash_key: str | None = None
        self._oldest_arrival = math.inf
        self.generation = 0
        self.deadline = math.inf

    @property
    def user_record_count(self) -> int:
        """Return how many user records are in the open aggregated record."""
        return len(self.open_record.arrivals)

    @property
    def fresh_count(self) -> int:
        """Return how many of them came from a put and not from a retry."""
        return len(self.open_record.arrivals) - self._rejoined

    def entry(self, key: bytes, digest: bytes | None) -> bytes:  # noqa: ARG002 - the other kind of lane needs the digest
        """Return a partition key's entry in the key table."""
        return PARTITION_KEY_HEAD[len(key)] + key

    def add(self, partition_key: str, key_entry: bytes, data: bytes, user_bytes: int, now: float) -> ResultHandle:
        """Append a user record to the open aggregated record; return its delivery.

        `key_entry` is what `entry` returned, `user_bytes` counts key and data.
        """
        delivery = self.open_record.append(partition_key, key_entry, data, user_bytes, now)
        return self.add_any(partition_key, key_entry, data, user_bytes, now) if delivery is None else delivery

    def add_any(
        self,
        partition_key: str,
        key_entry: bytes,
        data: bytes,
        user_bytes: int,
        arrived_at: float,
        *,
        explicit_hash_key: str | None = None,
        detached: DetachedUserRecord | None = None,
        deadline: float = math.inf,
    ) -> ResultHandle:
        """Append any user record: the first or last of a record, a large one, an explicit hash key, a detached one.

        Closes the open record first if the user record would not fit. A `detached` user record brings its history and
        its own `deadline`; the record that it joins takes the earlier deadline.
        """
        limit = self._rules.size_limit
        record = self.open_record
        size, head = self._grown(partition_key, key_entry, data, explicit_hash_key)
        if record.arrivals and size > limit:
            self.close()
            size, head = self._grown(partition_key, key_entry, data, explicit_hash_key)
        if not record.arrivals:
            self._open(arrived_at, explicit_hash_key)
        if detached is not None:
            self._rejoin(detached, deadline)
        new_explicit: tuple[Any, ...] = ()
        if explicit_hash_key is not None and record.explicit_index(explicit_hash_key) is None:
            new_explicit = explicit_hash_key, explicit_hash_key_entry(explicit_hash_key)
        delivery = record.add(partition_key, key_entry, head, data, user_bytes, arrived_at, *new_explicit)
        record.size = size
        left = math.inf if self._rules.count_limit is None else self._rules.count_limit - len(record.arrivals)
        if size >= limit or left <= 0:
            # The user record is in it, so the put has succeeded. The next one, or the deadline, closes it then.
            with contextlib.suppress(MemoryError):
                self.close()
        else:
            # With a count limit any user record may be the last one, so each comes here.
            record.limit = limit if left == math.inf else SHUT
        return delivery

    def arrival_with(
        self, earlier: ResultHandle, partition_key: str, key_entry: bytes, data: bytes, explicit_hash_key: str | None
    ) -> float | None:
        """Return when `earlier` arrived, if a user record added now would join its aggregated record; else None."""
        if earlier.follow() is not self.open_record.outcome:
            return None
        if self._grown(partition_key, key_entry, data, explicit_hash_key)[0] > self._rules.size_limit:
            return None
        return self.open_record.arrivals[earlier.index]

    def make_due(self, now: float) -> None:
        """Make the open aggregated record due now instead of waiting for more user records."""
        if self.open_record.arrivals and now < self.deadline:
            self.deadline = now
            self._output.deadlines.schedule(self, now)

    def _grown(
        self, partition_key: str, key_entry: bytes, data: bytes, explicit_hash_key: str | None
    ) -> tuple[int, bytes]:
        """Return the exact size of the open record with this user record in it, and the user record's head."""
        record = self.open_record
        size = record.size
        index = record.key_index(partition_key)
        if index is None:
            index = record.key_count
            size += len(key_entry)
        explicit_index = None
        if explicit_hash_key is not None:
            explicit_index = record.explicit_index(explicit_hash_key)
            if explicit_index is None:
                explicit_index = record.explicit_count
                size += len(explicit_hash_key_entry(explicit_hash_key))
        head = record_head(index, explicit_index, len(data))
        return size + len(head) + len(data), head

    def _open(self, arrived_at: float, explicit_hash_key: str | None) -> None:
        output = self._output
        self._first_explicit_hash_key = explicit_hash_key
        self._oldest_arrival = arrived_at
        if output.opening_context is not None:
            self.open_record.outcome.opened_in = output.opening_context()
        self.generation = output.generations.current
        output.generations.retain(self.generation)
        self.deadline = arrived_at + self._rules.buffered_seconds
        output.deadlines.schedule(self, self.deadline)
        output.has_closed = True

    def _rejoin(self, detached: DetachedUserRecord, deadline: float) -> None:
        output = self._output
        self._rejoined += 1
        self._oldest_arrival = min(self._oldest_arrival, detached.arrived_at)
        if detached.generation < self.generation:
            output.generations.retain(detached.generation)
            output.generations.release(self.generation)
            self.generation = detached.generation
        if not self.open_record.arrivals or deadline < self.deadline:
            self.deadline = deadline
            output.deadlines.schedule(self, deadline)

    def close(self) -> None:
        """Close the open aggregated record, if it has any user record, and hand it to the output."""
        record = self.open_record
        arrivals = record.arrivals
        if not arrivals:
            return
        first_key = record.first_key
        first_explicit = self._first_explicit_hash_key
        aggregated = len(arrivals) > 1
        data = record.aggregated() if aggregated else record.only_data
        partition_key = first_key if self._rules.first_partition_key or not aggregated else "a"
        expires_at = self._oldest_arrival + self._rules.ttl_seconds
        output = self._output
        # By position: with keywords it takes twice as long.
        closed = KinesisRecord(
            data,
            partition_key,
            first_explicit or decimal_hash_key(first_key.encode()),
            len(data) + len(partition_key.encode()),
            aggregated,
            arrivals,
            record.user_bytes,
            record.outcome,
            self.shard_id,
            None if aggregated else first_explicit,
            self.tier,
            min(self.deadline, expires_at),
            expires_at,
            self.generation,
            output.closed_count + 1,
            0,
            not aggregated,
        )
        output.closed.append(closed)
        output.closed_count += 1
        output.fresh_count += len(arrivals) - self._rejoined
        output.drain_at = -math.inf
        output.has_closed = True
        self._start()

    def __repr__(self) -> str:
        record = self.open_record
        return (
            f"<AggregatingLane {self.shard_id} {self.tier}: {len(record.arrivals)} user records, {record.size} bytes>"
        )


class SingleLane:
    """User records of one shard, or of an unknown one, each in a Kinesis record of its own.

    The pipeline takes them in runs, because the next stages cost about as much for a run as for one record.
    """

    def __init__(self, output: LaneOutput, shard_id: str | None, tier: Tier) -> None:
        self.shard_id = shard_id
        self.tier = tier
        self._output = output
        self._delivery = output.delivery
        self._patience_seconds = min(output.rules.buffered_seconds, output.rules.ttl_seconds)
        self._ttl_seconds = output.rules.ttl_seconds
        self._run_count = output.rules.run_count
        self._run_seconds = output.rules.run_seconds

    user_record_count: Final = 0
    fresh_count: Final = 0
    open_record: Final = None

    def entry(self, key: bytes, digest: bytes | None) -> bytes:
        """Return a partition key's hash key in decimal."""
        return decimal_hash_key(key, digest).encode()

    def add(self, partition_key: str, key_entry: bytes, data: bytes, user_bytes: int, now: float) -> ResultHandle:
        """Make a Kinesis record of a user record; `key_entry` is what `entry` returned."""
        output = self._output
        outcome = Outcome()
        if output.opening_context is not None:
            outcome.opened_in = output.opening_context()
        sequence = output.closed_count = output.closed_count + 1
        output.single_count += 1
        closed = output.closed
        closed.append(
            # By position, as in `AggregatingLane.close`.
            KinesisRecord(
                data,
                partition_key,
                key_entry.decode(),
                user_bytes,
                False,  # noqa: FBT003 - not aggregated
                (now,),
                user_bytes,
                outcome,
                self.shard_id,
                None,
                self.tier,
                now + self._patience_seconds,
                now + self._ttl_seconds,
                output.generations.current,
                sequence,
            )
        )
        if len(closed) >= self._run_count:
            output.drain_at = now
            output.has_closed = True
        elif now + self._run_seconds < output.drain_at:
            output.drain_at = now + self._run_seconds
            output.has_closed = True
        return self._delivery(outcome, 0)

    def add_any(
        self,
        partition_key: str,
        key_entry: bytes,
        data: bytes,
        user_bytes: int,
        arrived_at: float,
        *,
        explicit_hash_key: str | None = None,
        detached: DetachedUserRecord | None = None,
        deadline: float = math.inf,
    ) -> ResultHandle:
        """Make a Kinesis record of any user record, also of a detached one with a history."""
        key_entry = key_entry if explicit_hash_key is None else explicit_hash_key.encode()
        delivery = self.add(partition_key, key_entry, data, user_bytes, arrived_at)
        record = self._output.closed[-1]
        record.user_explicit_hash_key = explicit_hash_key
        if detached is not None:
            self._output.single_count -= 1
            self._output.generations.retain(detached.generation)
            record.generation = detached.generation
            record.deadline = deadline
            self._output.drain_at = -math.inf
        return delivery

    def arrival_with(self, *_: object) -> None:
        """Return None: no two user records share a Kinesis record here."""

    def make_due(self, now: float) -> None:
        """Do nothing: this lane has no open record."""

    def close(self) -> None:
        """Do nothing: this lane has no open record."""

    def __repr__(self) -> str:
        return f"<SingleLane {self.shard_id} {self.tier}>"


Lane = AggregatingLane | SingleLane


def decimal_hash_key(key: bytes, digest: bytes | None = None) -> str:
    """Return the hash key of a UTF-8 encoded partition key in decimal."""
    return str(int.from_bytes(md5(key).digest() if digest is None else digest, "big"))
