"""A request's outbox: what a request puts, kept until its response says whether it counts.

Room in the producer's buffer is reserved at the put, so that a full buffer is known while there still is
an answer to give; to publish is to exchange the reservation for the put itself, in one step.
"""

import threading
from collections.abc import Generator, Iterable, Mapping
from typing import Any, Literal, TypedDict, Unpack

import msgspec

from kpl_core import (
    BufferFull,
    Config,
    Delivery,
    KplError,
    Producer,
    ProducerReport,
    RecordResult,
    UserRecord,
    WrongEventLoop,
)
from kpl_core.pipeline.pipeline_statistics import PipelineStatistics
from kpl_core.records.user_record import BytesLike, Tier, as_bytes, check_user_record

__all__ = ["OutboxDelivery", "OutboxProducer", "ResultBeforeResponse"]

Fate = Literal["open", "published", "discarded"]


class PutOptions(TypedDict, total=False):
    """The options of a put that most have no need of, as `Producer.put_nowait` tells them."""

    explicit_hash_key: str | None
    flow: str | None
    tier: Tier
    metadata: Mapping[str, Any] | None


class ResultBeforeResponse(KplError, RuntimeError):  # noqa: N818 - reads as a sentence where it is raised
    """A result was asked for that cannot come before the response, or came to nothing with it."""


class OutboxDelivery:
    """The handle of a user record in an outbox; awaitable once the response has begun."""

    __slots__ = ("_delivery", "_fate")

    def __init__(self) -> None:
        self._delivery: Delivery | None = None
        self._fate: Fate = "open"

    def published(self, delivery: Delivery) -> None:
        """From now on the producer knows the result."""
        self._delivery = delivery
        self._fate = "published"

    def discarded(self) -> None:
        """Never was put."""
        self._fate = "discarded"

    @property
    def done(self) -> bool:
        """Say whether the result is known; a discarded record never has one."""
        return self._delivery is not None and self._delivery.done

    def result(self) -> RecordResult:
        """Return the result.

        Raises:
            ResultPending: it is not known yet.
            ResultBeforeResponse: the record was not published.
        """
        return self._published().result()

    def __await__(self) -> Generator[Any, Any, RecordResult]:
        """Wait for the result.

        Raises:
            ResultBeforeResponse: the record was not published.
        """
        return self._published().__await__()

    def _published(self) -> Delivery:
        if self._delivery is None:
            if self._fate == "discarded":
                message = "this user record was discarded with its request, whose response was 500 or above"
            else:
                message = (
                    "this user record is published when the response begins, so awaiting its delivery inside the "
                    "request would wait for ever; await it in a background task, or put it in a route without "
                    "RequestOutboxMiddleware"
                )
            raise ResultBeforeResponse(message)
        return self._delivery


def _paired(partition_key: str, data: BytesLike) -> UserRecord:
    return UserRecord(partition_key, as_bytes(data))


def _published(delivery: Delivery) -> OutboxDelivery:
    published = OutboxDelivery()
    published.published(delivery)
    return published


class OutboxProducer:
    """What a request sees in the producer's place: puts are kept, all else is the producer's.

    After `publish` its puts go straight on, after `discard` to nowhere: the response has decided. Like the producer it
    belongs to its loop: another thread's put raises `WrongEventLoop`.
    """

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        # The buffer's counts are the loop's: two threads that reserve at once would leave room taken for ever.
        self._thread = threading.get_ident()
        self._kept: list[tuple[str, UserRecord, int, OutboxDelivery]] = []
        self._fate: Fate = "open"

    def __len__(self) -> int:
        return len(self._kept)

    def put_nowait(
        self,
        stream: str,
        *,
        partition_key: str,
        data: BytesLike,
        **options: Unpack[PutOptions],
    ) -> OutboxDelivery:
        """Keep a user record until the response begins; options and errors are `Producer.put_nowait`'s."""
        return self._keep(stream, UserRecord(partition_key, as_bytes(data), **options))

    def put_record_nowait(self, stream: str, record: UserRecord) -> OutboxDelivery:
        """Keep a user record as `put_nowait` does."""
        return self._keep(stream, record)

    async def put(
        self,
        stream: str,
        *,
        partition_key: str,
        data: BytesLike,
        **options: Unpack[PutOptions],
    ) -> OutboxDelivery:
        """Keep a user record; raises `BufferFull` where the producer's own put would wait.

        Requests that hold room and wait for more would wait for one another. After `publish` it holds none, and waits.
        """
        if self._fate == "published":
            after = await self._producer.put(stream, partition_key=partition_key, data=data, **options)
            return _published(after)
        return self._keep(stream, UserRecord(partition_key, as_bytes(data), **options))

    async def put_many(
        self, stream: str, records: Iterable[tuple[str, BytesLike] | UserRecord]
    ) -> list[OutboxDelivery]:
        """Keep many user records, all or, if one is invalid or there is no room, none of them.

        After `publish` it is the producer's own `put_many`.
        """
        if self._fate == "published":
            return [_published(after) for after in await self._producer.put_many(stream, records)]
        checked = [record if isinstance(record, UserRecord) else _paired(*record) for record in records]
        for record in checked:
            self._checked_size(stream, record)
        before = len(self._kept)
        try:
            return [self._keep(stream, record) for record in checked]
        except BufferFull:
            self._give_back(before)
            raise

    def _keep(self, stream: str, record: UserRecord) -> OutboxDelivery:
        self._require_own_thread()
        size = self._checked_size(stream, record)
        if self._fate == "published":
            return _published(self._put(stream, record))
        delivery = OutboxDelivery()
        if self._fate == "discarded":
            delivery.discarded()
        else:
            if not isinstance(record.data, bytes):
                # Whoever filled the buffer may fill it anew before the response.
                record = msgspec.structs.replace(record, data=as_bytes(record.data))
            self._producer.buffer_limit.reserve(size_bytes=size, tier=record.tier)
            self._kept.append((stream, record, size, delivery))
        return delivery

    def publish(self) -> None:
        """Put everything kept, in its order; there is room, because it was reserved.

        Raises:
            ProducerClosed: the producer closed meanwhile; nothing was put.
            BufferFull: a flow's own limit had no room; what came before is put, the rest discarded.
        """
        kept, self._kept = self._kept, []
        self._fate = "discarded"
        for index, (stream, record, size, delivery) in enumerate(kept):
            try:
                delivery.published(self._exchange(stream, record, size))
            except KplError:
                self._kept = kept[index + 1 :]
                delivery.discarded()
                self._give_back(0)
                raise
        self._fate = "published"

    def _exchange(self, stream: str, record: UserRecord, size: int) -> Delivery:
        """Put a user record in the place of its reservation, which no other tier's records can have taken."""
        limit = self._producer.buffer_limit
        limit.release(records=1, size_bytes=size)
        # Critical records may have used their reserve meanwhile, and normal ones the part that bulk must leave.
        free_records, free_bytes = limit.free_for(record.tier)
        short_records, short_bytes = max(0, 1 - free_records), max(0, size - free_bytes)
        limit.release(records=short_records, size_bytes=short_bytes)
        try:
            return self._put(stream, record)
        finally:
            limit.release(records=-short_records, size_bytes=-short_bytes)

    def discard(self) -> bool:
        """Forget everything kept and give back its room; say whether somebody may have waited for that room."""
        self._fate = "discarded"
        # Whoever waits was refused, and nothing has made room since: an emptier buffer has no line.
        limit = self._producer.buffer_limit
        may_be_awaited = bool(self._kept) and not all(
            limit.has_room(size_bytes=self._producer.max_record_bytes(stream))
            for stream in {stream for stream, _, _, _ in self._kept}
        )
        self._give_back(0)
        return may_be_awaited

    def _give_back(self, start: int) -> None:
        for _, _, size, delivery in self._kept[start:]:
            self._producer.buffer_limit.release(records=1, size_bytes=size)
            delivery.discarded()
        del self._kept[start:]

    def _put(self, stream: str, record: UserRecord) -> Delivery:
        return self._producer.put_nowait(
            stream,
            partition_key=record.partition_key,
            data=record.data,
            explicit_hash_key=record.explicit_hash_key,
            flow=record.flow,
            tier=record.tier,
            metadata=record.metadata,
        )

    def _require_own_thread(self) -> None:
        if threading.get_ident() != self._thread:
            message = (
                "this outbox belongs to the event loop, and frameworks run a route without `async` in another thread; "
                "declare the route `async def`, or put by anyio.from_thread.run_sync(partial(producer.put_nowait, ...))"
            )
            raise WrongEventLoop(message)

    def _checked_size(self, stream: str, record: UserRecord) -> int:
        return check_user_record(record, max_record_bytes=self._producer.max_record_bytes(stream))

    # The producer's own

    @property
    def config(self) -> Config:
        """Return the producer's options."""
        return self._producer.config

    async def flush(self, timeout: float | None = None) -> ProducerReport:
        """Flush the producer; what is in this outbox is not there yet."""
        return await self._producer.flush(timeout)

    def report(self) -> ProducerReport:
        """Return the producer's counts; what is in this outbox is not among them."""
        return self._producer.report()

    def statistics(self) -> dict[str, PipelineStatistics]:
        """Return the producer's counts of each stream."""
        return self._producer.statistics()

    def unready(self) -> list[str]:
        """Return the producer's reasons for which traffic should go elsewhere."""
        return self._producer.unready()

    def max_record_bytes(self, stream: str) -> int:
        """Return the most bytes of key and data that `stream` takes in one record."""
        return self._producer.max_record_bytes(stream)
