"""What the gateway and the handlers of this distribution need of a producer, beyond its public API.

They reach it as `producer.internal`. It may change in any version, so it is not for other programs.

A `GroupPut` puts a large group of user records in slices, so that other work of the event loop runs between them. Room
for the whole group is taken first. So the group is accepted as a whole or not at all, and a later slice cannot be
refused. The caller must call `finish`, also if it is cancelled. A producer that closes finishes its open groups first.
"""

import contextlib
from asyncio import _get_running_loop
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, Final

from kpl_core.errors import BufferFull, ConfigError
from kpl_core.options.config import Config
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.pipeline.stages import GroupTerms
from kpl_core.producer.checked_records import Pairs, checked_run
from kpl_core.producer.delivery import Deliveries, Delivery, wait_for_spool_of_all
from kpl_core.producer.lifecycle import Lifecycle, OpenGroup
from kpl_core.producer.report import counted
from kpl_core.producer.thread_puts import ThreadPuts
from kpl_core.records.hash_key import hash_key_digest
from kpl_core.records.user_record import (
    Tier,
    UserRecord,
    check_user_record,
    require_notes,
    require_stream,
)

# What a slice has at most, if it has several records: about a millisecond of work.
SLICE_RECORDS: Final = 250
SLICE_BYTES: Final = 262_144


@lru_cache(maxsize=1_024)
def _usual_terms(flow: str | None) -> GroupTerms:
    return GroupTerms(flow)


def reserved_run(
    pipeline: StreamPipeline, records: Sequence[UserRecord] | Pairs, terms: GroupTerms
) -> tuple[list[Any], GroupTerms]:
    """Check the records, take room for all of them, and return them as a run, and its terms: does it go straight?

    Raises:
        TypeError, InvalidUserRecord: a put would not accept one; the message begins with the index.
        NotSpooled: the spool cannot store, and so the group is refused.
        BufferFull: there is no room for all of them. Nothing was reserved in any case.
    """
    fair, disk = pipeline.fair, pipeline.write_ahead
    assert fair is not None  # noqa: S101 - the producer checked
    require_notes(terms.flow, None)
    run, size_bytes = checked_run(records, max_record_bytes=pipeline.max_record_bytes)
    if disk is not None and not disk.state.can_store and (terms.keep or disk.state.failure == "refuse"):
        keys = (each[0] for each in run)
        terms = terms._replace(straight=disk.goes_straight(keys, durable=terms.durable))
    # An error that it raises must leave nothing reserved.
    pipeline.stages.batch.drain()
    fair.reserve(size_bytes, len(run), terms)
    return run, terms


class GroupPut:
    """User records of one flow that have room. `step` puts the next ones, `finish` all that are left."""

    __slots__ = (
        "_clock",
        "_deliveries",
        "_open_groups",
        "_pipeline",
        "_put_count",
        "_run",
        "_terms",
        "_wake",
    )

    def __init__(
        self,
        pipeline: StreamPipeline,
        records: Sequence[UserRecord] | Pairs,
        terms: GroupTerms,
        clock: Callable[[], float],
        wake: Callable[[], object],
        open_groups: set[OpenGroup],
    ) -> None:
        # A copy: the caller may change its list before the last slice is put.
        self._run, self._terms = reserved_run(pipeline, [*records], terms)
        self._pipeline = pipeline
        self._clock = clock
        self._wake = wake
        self._put_count = 0
        self._deliveries = Deliveries(len(self._run))
        # The producer's groups with records that are not put yet.
        self._open_groups = open_groups
        open_groups.add(self)

    @property
    def deliveries(self) -> Deliveries:
        """Return the deliveries of the records put so far."""
        return self._deliveries[: self._put_count]

    def step(self) -> bool:
        """Put the next records; return True if there are more."""
        start, size_bytes = self._put_count, 0
        for record in self._run[start : start + SLICE_RECORDS]:
            size_bytes += len(record[1])
            self._put_count += 1
            if size_bytes >= SLICE_BYTES:
                break
        self._put(start)
        return self._put_count < len(self._run)

    def finish(self) -> None:
        """Put all that are left at once."""
        start, self._put_count = self._put_count, len(self._run)
        self._put(start)

    def _put(self, start: int) -> None:
        """Put the records from this position on, up to those that are left."""
        stop = self._put_count
        if stop == len(self._run):
            self._open_groups.discard(self)
        if start == stop:
            return
        pipeline = self._pipeline
        pipeline.put_group(self._run, (start, stop), self._clock(), self._terms, self._deliveries)
        if pipeline.attention:
            self._wake()


class InternalProducer:
    """The further calls of one producer. `threads` takes the puts of threads."""

    def __init__(self, life: Lifecycle, put_nowait: Callable[..., Delivery]) -> None:
        self.config: Config = life.config
        self.buffer_limit: BufferLimit = life.buffer_limit
        self._life = life
        self._put_nowait = put_nowait
        spool = life.config.spool
        # `put` waits for room although `put_nowait` would spill to the disk; and it waits for the write-ahead spool.
        self.overflows = spool is not None or life.config.dead_letters is not None
        self.writes_ahead = spool is not None and spool.mode == "write_ahead"
        self.threads = life.threads = ThreadPuts(self, Delivery)

    # One record

    def put_record_nowait(self, stream: str, record: UserRecord) -> Delivery:
        """Accept a user record as `Producer.put_nowait` does."""
        return self._put_nowait(
            stream,
            partition_key=record.partition_key,
            data=record.data,
            explicit_hash_key=record.explicit_hash_key,
            flow=record.flow,
            tier=record.tier,
            metadata=record.metadata,
        )

    async def put_unacknowledged(self, stream: str, record: UserRecord) -> Delivery:
        """Accept a user record as `Producer.put` does, waiting for room but not for the spool; see `acknowledged`."""
        if not self._life.waiters.has_line(record.tier, record.flow) and (
            not self.overflows or self._has_room(stream, record)
        ):
            with contextlib.suppress(BufferFull):
                return self.put_record_nowait(stream, record)
        return await self._put_in_turn(stream, record)

    def _has_room(self, stream: str, record: UserRecord) -> bool:
        size = check_user_record(record, max_record_bytes=self._life.pipeline(stream).max_record_bytes)
        return self.buffer_limit.has_room(size_bytes=size, tier=record.tier)

    async def _put_in_turn(self, stream: str, record: UserRecord) -> Delivery:
        # Check first: a put must not wait for room only to be refused.
        check_user_record(record, max_record_bytes=self._life.pipeline(stream).max_record_bytes)
        with self._life.waiters.wait_in_line(record.tier, record.flow) as place:
            while True:
                if place.is_first:
                    self.make_room()
                await place.wait()
                if self.overflows and self._life.state == "open" and not self._has_room(stream, record):
                    continue
                with contextlib.suppress(BufferFull):
                    return self.put_record_nowait(stream, record)

    async def acknowledged(self, deliveries: Iterable[Delivery]) -> None:
        """Wait until the write-ahead spool has what was put; without one, or if it was bypassed, return at once.

        Raises:
            NotSpooled: the spool did not take all of it; what it did take is delivered all the same.
        """
        if self.writes_ahead:
            await wait_for_spool_of_all(deliveries, self._life.waits_for_spool)

    # All records of one flow together, or none

    def put_together_nowait(
        self,
        stream: str,
        records: Sequence[UserRecord] | Pairs,
        *,
        flow: str | None = None,
        tier: Tier = "normal",
        aggregate: bool = True,
        keep: bool = True,
        durable: bool = False,
    ) -> Deliveries:
        """Accept all user records of one flow and tier now, or none of them; needs `Config.fairness`.

        `flow` and `tier` hold for all; those of the records, and their metadata, do not count. Without `aggregate` each
        travels in a Kinesis record of its own. They do not spill to a spool: without room the call raises. Without
        `keep` a record that is not delivered has failed, and no disk stores it: for a caller that then puts it again.
        With `durable` none goes straight to Kinesis while the spool cannot store.

        Raises:
            TypeError, InvalidUserRecord: one can never be accepted.
            NotSpooled: the spool cannot store, and `SpoolOptions.failure` says to refuse.
            BufferFull: no room for all of them, or the flow has used up its share. Nothing was reserved.
            ConfigError: the producer has no fair queue.
            ProducerClosed, WrongEventLoop: as `Producer.put_nowait`.
        """
        terms = GroupTerms(flow, tier, aggregate, keep, durable=durable)
        deliveries = Deliveries(len(records))
        self._put_group(stream, records, terms, deliveries)
        return deliveries

    def put_pairs_together_nowait(self, stream: str, pairs: Pairs, *, flow: str | None = None) -> None:
        """Accept all pairs of partition key (str) and data of one flow now, or none of them; no deliveries.

        All of them may have an explicit hash key (str) as a third item. For a caller that answers a whole request at
        once, and leaves the rest to hooks and `report`; `begin_group` gives deliveries. Raises as
        `put_together_nowait`, of which it costs a fraction.
        """
        self._put_group(stream, pairs, _usual_terms(flow), None)

    def _put_group(
        self, stream: str, records: Sequence[UserRecord] | Pairs, terms: GroupTerms, deliveries: Deliveries | None
    ) -> None:
        pipeline = self._fair_pipeline(stream)
        run, terms = reserved_run(pipeline, records, terms)
        pipeline.put_group(run, (0, len(run)), self._life.clock(), terms, deliveries)
        if pipeline.attention:
            self._life.own_streams().wake(stream)

    def begin_group(
        self,
        stream: str,
        records: Sequence[UserRecord] | Pairs,
        *,
        flow: str | None = None,
        tier: Tier = "normal",
        aggregate: bool = True,
        keep: bool = True,
        durable: bool = False,
    ) -> GroupPut:
        """Take room for all records now, or raise as `put_together_nowait`. The caller puts the returned group."""
        terms = GroupTerms(flow, tier, aggregate, keep, durable=durable)
        pipeline, wake = self._fair_pipeline(stream), partial(self._life.own_streams().wake, stream)
        return GroupPut(pipeline, records, terms, self._life.clock, wake, self._life.open_groups)

    def _fair_pipeline(self, stream: str) -> StreamPipeline:
        life = self._life
        pipeline = life.pipelines.get(stream) or life.pipeline(stream)
        if _get_running_loop() is not life.asyncio_loop:
            life.require_own_loop()
        if pipeline.fair is None:
            message = "putting records as one group needs a fair queue; set Config(fairness=FairnessPolicy())"
            raise ConfigError(message)
        return pipeline

    # The state of the producer

    def make_room(self) -> None:
        """Send batches that are not full now if all outstanding records are in them.

        For a caller with its own wait for room: nothing else would free any before the batches are due.
        """
        self._life.make_room()

    def on_progress(self, listener: Callable[[], None]) -> None:
        """Call `listener` on the loop after results may have arrived or buffer space may have been freed.

        It must return quickly. An exception that it raises is logged.
        """
        self._life.listeners.append(listener)

    def log_no_loss(self) -> None:
        """Log no report when the producer closes: the adapter counts its losses in spans or lines, and reports them."""
        self._life.logs_loss = False

    def max_record_bytes(self, stream: str) -> int:
        """Return the most bytes of key and data that `stream` takes in one record, as far as known.

        Raises:
            TypeError, InvalidUserRecord: no stream has such a name.
        """
        pipeline = self._life.pipelines.get(stream)
        if pipeline is not None:
            return pipeline.max_record_bytes
        require_stream(stream)
        return self.config.for_stream(stream).known_max_record_size

    def predicted_shard(self, stream: str, partition_key: str) -> str | None:
        """Return the shard that `partition_key` belongs to by the shard map in use, None before there is one.

        For a caller in any thread that may put what belongs to one shard into one user record.
        """
        pipeline = self._life.pipelines.get(stream)
        if pipeline is None:
            return None
        try:
            return pipeline.shard_map.predict(hash_key_digest(partition_key.encode()))
        except IndexError:
            # The loop changes the map at this moment.
            return None

    def waits_by_flow(self) -> dict[str | None, float]:
        """Return how many seconds the oldest user record of each flow has waited in the fair queue."""
        return {} if (streams := self._life.streams) is None else counted(streams.waits_by_flow)
