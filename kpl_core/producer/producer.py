"""The public interface of the asynchronous driver, which adds clock, tasks and waiting to the pipelines."""

import threading
import time
from asyncio import _get_running_loop
from collections.abc import Iterable, Mapping, Sequence
from types import BuiltinFunctionType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, Unpack

import anyio
import anyio.lowlevel

from kpl_core.durability.circuit_breaker import CircuitBreaker
from kpl_core.errors import BufferFull
from kpl_core.hooks import Hook
from kpl_core.options.config import Config, config_or_default
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.open_record import COMPILED, fork_count, put_method
from kpl_core.producer.checked_records import Puttable, as_user_record, checked_records, puttable
from kpl_core.producer.delivery import Deliveries, Delivery, wait_for_spool
from kpl_core.producer.internal import InternalProducer
from kpl_core.producer.lifecycle import DEFAULT_CLOSE_SECONDS, Lifecycle
from kpl_core.producer.report import ProducerReport, counted, unready_because
from kpl_core.records.pipeline_statistics import PipelineStatistics
from kpl_core.records.user_record import (
    BytesLike,
    PutOptions,
    Tier,
    UserRecord,
    as_bytes,
)
from kpl_core.transport.transport import KinesisTransport

if TYPE_CHECKING:
    from aiobotocore.session import AioSession

    from kpl_core.coordination.store import CoordinationStore
    from kpl_core.durability.dead_letters import DeadLetterQueue, DeadLetterSink
    from kpl_core.durability.spool import Spool
    from kpl_core.pipeline.intake.write_ahead import SpoolState
    from kpl_core.producer.coordination_driver import CoordinationDriver

# `put_many` is faster with each. So many of the largest records that are aggregated occupy the loop for 10 ms.
RECORDS_PER_CHECKPOINT: Final = 250
# With the kernels so many records of at most these bytes, on average, take no longer than 250 take in Python.
SMALL_RECORDS_PER_CHECKPOINT: Final = 1_000
SMALL_RECORD_BYTES: Final = 1_024


class Producer:
    """Ships user records to Kinesis; an async context manager that loses nothing silently.

    Use it from the event loop that entered it, in any task. On asyncio other threads may put too, see `put_blocking`.

    Args:
        config: the options; by default those of `Config()`.
        session: an aiobotocore session (profiles, assumed roles).
        transport: replaces the network.
        hooks: are called with the facts.
        dead_letter_sink: takes what `Config.dead_letters` would store in a file.
        coordination_store: replaces the store that `Config.coordination` names.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        session: "AioSession | None" = None,
        transport: KinesisTransport | None = None,
        hooks: Sequence[Hook] = (),
        dead_letter_sink: "DeadLetterSink | None" = None,
        coordination_store: "CoordinationStore | None" = None,
    ) -> None:
        self.config = config_or_default(config)
        self._life = Lifecycle(
            self.config,
            session=session,
            transport=transport,
            hooks=hooks,
            dead_letter_sink=dead_letter_sink,
            coordination_store=coordination_store,
        )
        self.internal = InternalProducer(self._life, self.put_nowait)
        self._buffer_limit = self._life.buffer_limit
        self._waiters = self._life.waiters
        # Empty unless the producer is open: a put finds its pipeline here, or fails.
        self._open = self._life.pipelines
        self._asyncio_loop = self._life.asyncio_loop
        self._yield_budget = self._life.yield_budget
        # What the put method in C needs to know, on asyncio.
        self._own_streams: tuple[Any, ...] | None = None

    async def __aenter__(self) -> Self:
        """Open the transport and start to accept user records."""
        life = self._life
        await life.open()
        self._clock = life.clock
        self._wake = life.own_streams().wake
        self._asyncio_loop = life.asyncio_loop
        self._yield_budget = life.yield_budget
        loop = self._asyncio_loop
        if loop is not None:
            attributes = getattr(loop, "__dict__", {})
            runs = (attributes, None) if "_thread_id" in attributes else (loop.is_running, threading.get_ident())
            # A test may replace the function. Then the coarse clock of the system does not move with it.
            is_systems = self._clock is time.monotonic and isinstance(self._clock, BuiltinFunctionType)
            inbox = self.internal.threads.for_kernel()
            self._own_streams = (*runs, self._clock, life.batches, fork_count(), is_systems, _get_running_loop, inbox)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Close; promptly if the block was cancelled, else with the default timeout."""
        return await self._life.exit(kind, error, traceback)

    # Put

    @put_method
    def put_nowait(
        self,
        stream: str,
        *,
        partition_key: str,
        data: BytesLike,
        explicit_hash_key: str | None = None,
        flow: str | None = None,
        tier: Tier = "normal",
        metadata: Mapping[str, Any] | None = None,
    ) -> Delivery:
        """Accept a user record now, or not at all; in the event loop, or in a thread without one.

        Raises:
            TypeError: the partition key is not a str, or the data is not bytes-like.
            InvalidUserRecord: Kinesis would never take it; names field, value and bound.
            BufferFull: no room. Nothing was reserved; see `put`. (A spool takes it instead, or dead letters if bulk.)
            NotSpooled: the spool cannot store, and `SpoolOptions.failure` says to refuse.
            ProducerClosed: the producer is closed, or was not entered.
            WrongEventLoop: it was called in another event loop than the producer's.
        """
        pipeline = self._open.get(stream)
        if pipeline is None or self._asyncio_loop is None or _get_running_loop() is not self._asyncio_loop:
            if self._asyncio_loop is not None and _get_running_loop() is None:
                record = puttable(partition_key, data, explicit_hash_key, flow, tier, metadata)
                return self.internal.threads.put(stream, record)
            pipeline = self._life.pipeline(stream)
            self._life.require_own_loop()
        try:
            if explicit_hash_key is None and flow is None and metadata is None and tier == "normal":
                return pipeline.put(partition_key, data, self._clock())  # type: ignore[return-value] # the pipeline makes what `delivery=` names
            record = UserRecord(partition_key, data, explicit_hash_key, flow, tier, metadata)  # type: ignore[arg-type] # `put_record` makes it bytes
            return pipeline.put_record(record, self._clock())  # type: ignore[return-value]
        finally:
            if pipeline.attention:
                # Also if this record is refused: those in the batch were put.
                self._wake(stream)

    async def put(
        self,
        stream: str,
        *,
        partition_key: str,
        data: BytesLike,
        explicit_hash_key: str | None = None,
        flow: str | None = None,
        tier: Tier = "normal",
        metadata: Mapping[str, Any] | None = None,
    ) -> Delivery:
        """Accept a user record, waiting for room, first come first served; else as `put_nowait`.

        A put that is cancelled has put nothing, unless it waits for the spool: what is in the spool is delivered.

        Raises:
            NotSpooled: the write-ahead spool cannot store, see `SpoolOptions.failure`; nothing was put.
        """
        budget = self._yield_budget
        budget.left -= 1
        if budget.left <= 0:
            await budget.let_others_run()
        is_plain = flow is None and metadata is None and tier == "normal"
        if is_plain and not (self.internal.overflows or self._waiters.lines):
            # No `suppress`, which takes longer than the put.
            try:
                return self.put_nowait(
                    stream, partition_key=partition_key, data=data, explicit_hash_key=explicit_hash_key
                )
            except BufferFull:
                pass
        record = UserRecord(partition_key, as_bytes(data), explicit_hash_key, flow, tier, metadata)
        delivery = await self.internal.put_unacknowledged(stream, record)
        if self.internal.writes_ahead:
            await wait_for_spool(delivery, self._life.waits_for_spool)
        return delivery

    def put_blocking(
        self,
        stream: str,
        *,
        partition_key: str,
        data: BytesLike,
        timeout: float | None = 5.0,
        **options: Unpack[PutOptions],
    ) -> Delivery:
        """Accept a user record in a thread, waiting up to `timeout` seconds (None: forever) for room; else as `put`.

        Raises:
            BufferFull: there was no room in that time.
            WrongEventLoop: an event loop runs in this thread; await `put` there.
        """
        record = puttable(partition_key, data, **options)
        return self.internal.threads.put_blocking(stream, record, timeout)

    async def put_many(self, stream: str, records: Iterable[tuple[str, BytesLike] | UserRecord]) -> Deliveries:
        """Accept many user records in their order, waiting for room; return a delivery for each.

        All are checked before any is put. If it is cancelled or raises, the user records put so far stay put.

        Raises:
            TypeError, InvalidUserRecord: as `put_nowait`; the message begins with the index.
            NotSpooled, ProducerClosed: as `put`.
        """
        checked, size_bytes = checked_records(records, max_record_bytes=self._life.pipeline(stream).max_record_bytes)
        self._life.require_own_loop()
        deliveries = Deliveries(len(checked))
        are_small = COMPILED and size_bytes <= SMALL_RECORD_BYTES * len(checked)
        start = 0
        while start < len(checked):
            await anyio.lowlevel.checkpoint()
            # Until the shards are known each record travels alone, so a turn of the loop may save more than it costs.
            is_long = are_small and self._life.pipeline(stream).shard_map.known
            end = min(len(checked), start + (SMALL_RECORDS_PER_CHECKPOINT if is_long else RECORDS_PER_CHECKPOINT))
            await self._put_part(stream, checked, (start, end), deliveries)
            start = end
        return deliveries

    async def _put_part(
        self, stream: str, checked: list[Puttable], part: tuple[int, int], deliveries: Deliveries
    ) -> None:
        """Put this part of the records.

        They are put at one instant while there is room and no other put waits for room. The others wait in line.
        """
        start, end = part
        position = start
        while True:
            pipeline = self._life.pipeline(stream)
            try:
                if not self._waiters.has_line("normal", None):
                    position = pipeline.put_pairs(checked, (position, end), self._clock(), deliveries)
            finally:
                if pipeline.attention:
                    # Before waiting: what was put is what makes room. Also if the spool has refused a later one.
                    self._wake(stream)
            if position == end:
                break
            user_record = as_user_record(checked[position])
            deliveries.set(position, await self.internal.put_unacknowledged(stream, user_record))
            position += 1
        if self.internal.writes_ahead:
            for delivery in deliveries[start:end]:
                await wait_for_spool(delivery, self._life.waits_for_spool)

    # Flush and close

    async def flush(self, timeout: float | None = None) -> ProducerReport:
        """Wait until everything put before has its final result, for `timeout` seconds at most; limits still apply.

        Raises:
            ValueError: the timeout is negative or NaN.
        """
        return await self._life.flush(timeout)

    async def close(self, timeout: float | None = DEFAULT_CLOSE_SECONDS) -> ProducerReport:
        """Accept no more user records, deliver those that are there, and report; at most `timeout` seconds.

        None takes as long as it takes: until the last user record is delivered, failed or expired.
        When 80 % of the time is over, records that wait for tokens are sent without them. Records left at the end have
        failed with `Shutdown`, those sent and not answered with `Unknown`. A second close waits for the first. A close
        that is cancelled gives up at once.

        Raises:
            ValueError: the timeout is negative or NaN; nothing was closed.
        """
        return await self._life.close(timeout)

    # Observe. Any thread may ask for counts, as a metrics server does. The loop changes them meanwhile, so from another
    # thread they are of no single instant.

    def report(self) -> ProducerReport:
        """Return where every accepted user record is now."""
        return self._life.report()

    def last_failure(self, stream: str) -> str | None:
        """Return code and message of the latest request to a stream, if it failed, else None.

        A message of the service may quote the request; show its first line only.
        """
        return self._life.own_streams().last_failure(stream)

    @property
    def buffer_limit(self) -> BufferLimit:
        """Return the bound on outstanding records, with its counts."""
        return self._buffer_limit

    def statistics(self) -> dict[str, PipelineStatistics]:
        """Return each stream's counts."""
        return {} if (streams := self._life.streams) is None else counted(streams.statistics)

    def waiting_by_flow(self) -> dict[str | None, tuple[int, int]]:
        """Return how many user records, of how many bytes, each flow has in the fair queue; empty without one."""
        return {} if (streams := self._life.streams) is None else counted(streams.waiting_by_flow)

    def breakers(self) -> Mapping[tuple[str, str], CircuitBreaker]:
        """Return the circuit breakers by stream and shard; shard "" is the stream as a whole."""
        return {} if (streams := self._life.streams) is None else counted(streams.breakers)

    @property
    def failure(self) -> BaseException | None:
        """Return what ended the producer's tasks before a close; None as long as it works. It never works again."""
        return self._life.failure

    def unready(self) -> list[str]:
        """Return the reasons, each a sentence, to send traffic elsewhere; an empty list: this producer is ready."""
        return unready_because(self._life.state, self._life.failure, self.breakers(), self.spool_state)

    @property
    def coordination(self) -> "CoordinationDriver | None":
        """Return the part that shares limits with other processes, None if none is configured."""
        return self._life.coordination

    @property
    def spool(self) -> "Spool | None":
        """Return the open spool, None if none is configured; give it to `spool_source` for metrics."""
        store = self._life.store
        return None if store is None or store.spool is None else store.spool.spool

    @property
    def spool_state(self) -> "SpoolState | None":
        """Return whether the spool can store, None without one; give it to `spool_state_source` for metrics."""
        return None if self.config.spool is None or self._life.store is None else self._life.store.state

    @property
    def dead_letters(self) -> "DeadLetterQueue | None":
        """Return the queue of dead letters in the spool's file, None if there is none."""
        return None if self._life.store is None else self._life.store.queue

    def __repr__(self) -> str:
        return f"<Producer {self._life.state}, {len(self.statistics())} streams, {self._buffer_limit!r}>"
