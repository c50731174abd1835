"""The producer: the async shell around the pipelines of all streams.

Everything that decides is below; here are the clock, the tasks, and the waiting.
"""

import contextlib
from asyncio import _get_running_loop
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import anyio
import anyio.lowlevel

from kpl_core.errors import BufferFull, ConfigError, NotSpooled
from kpl_core.pipeline.stages import GroupTerms
from kpl_core.producer.checked_records import checked_records
from kpl_core.producer.delivery import Delivery, wait_with
from kpl_core.producer.producer_life import ProducerLife
from kpl_core.records.record_result import NOT_SPOOLED
from kpl_core.records.user_record import BytesLike, Tier, UserRecord, as_bytes, check_user_record, with_bytes

__all__ = ["Producer"]

# `put_many` is quicker with each; so many of the largest that are aggregated keep the loop for 10 ms.
RECORDS_PER_CHECKPOINT: Final = 250


class Producer(ProducerLife):
    """Ships user records to Kinesis; an async context manager that loses nothing silently.

    Use it from the event loop that entered it, in any task. `session` is an aiobotocore session
    (profiles, assumed roles); `transport` replaces the network; `hooks` are told the facts;
    `dead_letter_sink` takes what `Config.dead_letters` would keep in a file.
    """

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
        """Accept a user record now, or not at all.

        Raises:
            TypeError: the partition key is no str, or the data not bytes-like.
            InvalidUserRecord: Kinesis would never take it; names field, value and bound.
            BufferFull: no room. Nothing was reserved; see `put`. (With a spool it goes there instead;
                bulk with dead letters goes there.)
            ProducerClosed: the producer is closed, or was not entered.
            WrongEventLoop: it was called in another event loop than the producer's, or in none.
        """
        pipeline = self._open.get(stream)
        if pipeline is None:
            pipeline = self._pipeline(stream)
        if _get_running_loop() is not self._asyncio_loop:
            self._require_own_loop()
        if explicit_hash_key is None and flow is None and metadata is None and tier == "normal":
            delivery = pipeline.put(partition_key, data, self._clock())
        else:
            record = UserRecord(partition_key, data, explicit_hash_key, flow, tier, metadata)  # type: ignore[arg-type] # `put_record` makes it bytes
            delivery = pipeline.put_record(record, self._clock())
        if pipeline.attention:
            self._own_streams().wake(stream)
        return delivery  # type: ignore[return-value] # the pipeline makes what `delivery=` names

    def put_together_nowait(
        self,
        stream: str,
        records: Sequence[UserRecord],
        *,
        flow: str | None = None,
        tier: Tier = "normal",
        aggregate: bool = True,
        keep: bool = True,
    ) -> list[Delivery]:
        """Accept all user records of one flow and tier now, or none of them; needs `Config.fairness`.

        `flow` and `tier` hold for all, whatever each says. Without `aggregate` each travels in a Kinesis record
        of its own. Nothing overflows into a spool: where there is no room, the caller hears of it. Without `keep`
        what is not delivered has failed, spool and dead letters or not: for a caller who then puts it again.

        Raises:
            TypeError, InvalidUserRecord: one can never be accepted.
            BufferFull: no room for all of them, or the flow has used up its share. Nothing was reserved.
            ConfigError: the producer has no fair queue.
            ProducerClosed, WrongEventLoop: as `put_nowait`.
        """
        pipeline = self._open.get(stream)
        if pipeline is None:
            pipeline = self._pipeline(stream)
        if _get_running_loop() is not self._asyncio_loop:
            self._require_own_loop()
        if pipeline.fair is None:
            raise _no_fair_queue()
        if any(type(record.data) is not bytes for record in records):
            records = [with_bytes(record) for record in records]
        deliveries = pipeline.put_together(records, self._clock(), GroupTerms(flow, tier, aggregate, keep))
        if pipeline.attention:
            self._own_streams().wake(stream)
        return deliveries  # type: ignore[return-value] # as `put_nowait`

    def put_pairs_together_nowait(
        self, stream: str, pairs: Sequence[tuple[str, bytes]], *, flow: str | None = None
    ) -> None:
        """Accept all pairs of partition key (str) and data (bytes) of one flow now, or none of them; no deliveries.

        For callers who answer for a whole request at once, and leave the rest to hooks and `report`. Half the price
        of `put_together_nowait`, which raises the same.
        """
        pipeline = self._open.get(stream)
        if pipeline is None:
            pipeline = self._pipeline(stream)
        if _get_running_loop() is not self._asyncio_loop:
            self._require_own_loop()
        if pipeline.fair is None:
            raise _no_fair_queue()
        pipeline.put_together(pairs, self._clock(), GroupTerms(flow, wants_deliveries=False))
        if pipeline.attention:
            self._own_streams().wake(stream)

    async def acknowledged(self, deliveries: Iterable[Delivery]) -> None:
        """Wait until the write-ahead spool has what was put; without one, return at once.

        Raises:
            NotSpooled: the spool did not take all of it; what it did take is delivered all the same.
        """
        if self._writes_ahead:
            for delivery in deliveries:
                await self._acknowledged(delivery)

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

        A put that is cancelled has put nothing. (One that waits for the spool to acknowledge it may
        have put: what is in the spool is delivered.)

        Raises:
            NotSpooled: in write-ahead mode, the spool is full or its disk fails; nothing was put.
        """
        turns = self._turns
        turns.left -= 1
        if turns.left <= 0:
            await turns.let_others_run()
        if not (self._lines.lines and self._lines.has_line(tier, flow)) and (
            not self._overflows or self._has_room(partition_key, data, tier)
        ):
            try:
                delivery = self.put_nowait(
                    stream,
                    partition_key=partition_key,
                    data=data,
                    explicit_hash_key=explicit_hash_key,
                    flow=flow,
                    tier=tier,
                    metadata=metadata,
                )
            except BufferFull:
                pass
            else:
                if self._writes_ahead:
                    await self._acknowledged(delivery)
                return delivery
        record = UserRecord(partition_key, as_bytes(data), explicit_hash_key, flow, tier, metadata)
        delivery = await self._put_in_turn(stream, record)
        if self._writes_ahead:
            await self._acknowledged(delivery)
        return delivery

    def put_record_nowait(self, stream: str, record: UserRecord) -> Delivery:
        """Accept a user record as `put_nowait` does."""
        return self.put_nowait(
            stream,
            partition_key=record.partition_key,
            data=record.data,
            explicit_hash_key=record.explicit_hash_key,
            flow=record.flow,
            tier=record.tier,
            metadata=record.metadata,
        )

    async def put_unacknowledged(self, stream: str, record: UserRecord) -> Delivery:
        """Accept a user record as `put` does, waiting for room but not for the spool; see `acknowledged`."""
        if not self._lines.has_line(record.tier, record.flow) and (
            not self._overflows or self._has_room(record.partition_key, record.data, record.tier)
        ):
            with contextlib.suppress(BufferFull):
                return self.put_record_nowait(stream, record)
        return await self._put_in_turn(stream, record)

    def _has_room(self, partition_key: str, data: BytesLike, tier: Tier) -> bool:
        return self._buffer_limit.has_room(size_bytes=len(partition_key) + len(data), tier=tier)

    @staticmethod
    async def _acknowledged(delivery: Delivery) -> None:
        """Wait until the spool has what was put."""
        first = delivery.outcome
        while not first.settled and first.moved is None:
            answered = anyio.Event()
            wait_with(first, answered)
            await answered.wait()
        result = delivery.peek()
        if result is not None and result.error_code == NOT_SPOOLED:
            raise NotSpooled(result.error_message)

    async def _put_in_turn(self, stream: str, record: UserRecord) -> Delivery:
        # Nobody waits only to be refused in the end.
        check_user_record(record, max_record_bytes=self._pipeline(stream).max_record_bytes)
        with self._lines.stand(record.tier, record.flow) as place:
            while True:
                await place.wait()
                has_room = not self._overflows or self._has_room(record.partition_key, record.data, record.tier)
                if not has_room and self._state == "open":
                    continue
                with contextlib.suppress(BufferFull):
                    return self.put_record_nowait(stream, record)

    async def put_many(self, stream: str, records: Iterable[tuple[str, BytesLike] | UserRecord]) -> list[Delivery]:
        """Accept many user records in their order, waiting for room; return a delivery for each.

        All are checked before any is put. If it is cancelled, or the producer closes meanwhile, the
        user records put so far stay put.

        Raises:
            TypeError, InvalidUserRecord: as `put_nowait`; the message begins with the index.
            ProducerClosed: the producer is closed.
        """
        checked = checked_records(records, max_record_bytes=self._pipeline(stream).max_record_bytes)
        self._require_own_loop()
        deliveries: list[Delivery] = []
        for start in range(0, len(checked), RECORDS_PER_CHECKPOINT):
            await anyio.lowlevel.checkpoint()
            await self._put_chunk(stream, checked[start : start + RECORDS_PER_CHECKPOINT], deliveries)
        return deliveries

    async def _put_chunk(
        self, stream: str, chunk: Sequence[tuple[str, bytes] | UserRecord], deliveries: list[Delivery]
    ) -> None:
        """Put a chunk at one instant, as far as there is room and nobody waits for it; the rest waits in line."""
        rest = iter(chunk)
        while True:
            pipeline = self._pipeline(stream)
            if self._lines.has_line("normal", None):
                record = next(rest, None)
            else:
                record = pipeline.put_pairs(rest, self._clock(), deliveries)  # type: ignore[arg-type] # as `put_nowait`
            if pipeline.attention:
                # Before waiting: what was put is what makes room.
                self._own_streams().wake(stream)
            if record is None:
                break
            user_record = record if isinstance(record, UserRecord) else UserRecord(*record)
            deliveries.append(
                await self.put(
                    stream,
                    partition_key=user_record.partition_key,
                    data=user_record.data,
                    explicit_hash_key=user_record.explicit_hash_key,
                    flow=user_record.flow,
                    tier=user_record.tier,
                    metadata=user_record.metadata,
                )
            )
        if self._writes_ahead:
            for delivery in deliveries[-len(chunk) :]:
                await self._acknowledged(delivery)

    def __repr__(self) -> str:
        return f"<Producer {self._state}, {len(self.statistics())} streams, {self._buffer_limit!r}>"


def _no_fair_queue() -> ConfigError:
    return ConfigError("to put many together needs a fair queue; give Config(fairness=FairnessPolicy())")
