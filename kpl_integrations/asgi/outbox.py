"""A request's outbox: records are published if the response's status is below 400, and discarded otherwise.

`publish_when` is another rule for the status. The first message of the response decides, before it is sent. A request
without a response, because of an exception or a cancellation, counts as 500. A client that disconnects changes
nothing: the app still responds, and the status decides.

A put reserves capacity in the producer's buffer, so that the app learns of a full buffer while it can still respond.
It also learns then of a spool that refuses records. `publish` exchanges each reservation for the put, in one step.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from typing import Any, Final, Literal, Unpack

import msgspec

from kpl_core import (
    Config,
    Delivery,
    KplError,
    Producer,
    ProducerReport,
    RecordResult,
    UserRecord,
)
from kpl_core.records.pipeline_statistics import PipelineStatistics
from kpl_core.records.user_record import BytesLike, PutOptions, as_bytes, check_user_record
from kpl_integrations.asgi.protocol import STATE_KEY, ASGIApp, Message, Receive, Scope, Send, producer_of

_log: Final = logging.getLogger(__name__)
_FIRST_ERROR: Final = 400
_NO_RESPONSE: Final = 500

Outcome = Literal["open", "published", "discarded"]


class ResultBeforeResponse(KplError, RuntimeError):  # noqa: N818 - reads as a sentence where it is raised
    """The result of a record that is not published before the response, or was discarded with it."""


class OutboxDelivery:
    """The handle of a user record in an outbox. It can be awaited once the response has begun."""

    __slots__ = ("_delivery", "_outcome")

    def __init__(self, delivery: Delivery | None = None) -> None:
        self._delivery = delivery
        self._outcome: Outcome = "open" if delivery is None else "published"

    def published(self, delivery: Delivery) -> None:
        """Follow the producer's delivery from now on."""
        self._delivery = delivery
        self._outcome = "published"

    def discarded(self) -> None:
        """Mark the record as discarded."""
        self._outcome = "discarded"

    @property
    def done(self) -> bool:
        """Return True if the result is known; a discarded record never has one."""
        return self._delivery is not None and self._delivery.done

    def result(self) -> RecordResult:
        """Return the result.

        Raises:
            ResultPending: the result is not known yet.
            ResultBeforeResponse: the record was not published.
        """
        return self._published().result()

    def wait(self, timeout: float | None = None) -> RecordResult:
        """Wait for the result in a thread, such as that of a background task; see `Delivery.wait`.

        Raises:
            ResultBeforeResponse: the record was not published.
        """
        return self._published().wait(timeout)

    def __await__(self) -> Generator[Any, Any, RecordResult]:
        """Wait for the result.

        Raises:
            ResultBeforeResponse: the record was not published.
        """
        return self._published().__await__()

    def _published(self) -> Delivery:
        if self._delivery is None:
            if self._outcome == "discarded":
                message = "this user record was discarded with its request, because of the status of the response"
            else:
                message = (
                    "this user record is published when the response begins, so awaiting its delivery inside the "
                    "request would never return; await it in a background task, or put it in a route without "
                    "RequestOutboxMiddleware"
                )
            raise ResultBeforeResponse(message)
        return self._delivery


class OutboxProducer:
    """Replaces the producer within a request: it keeps puts until the response, and delegates everything else.

    After `publish` puts go directly to the producer; after `discard` they are dropped. Threads may call `put_nowait`,
    as a route without `async` does.
    """

    def __init__(self, producer: Producer, discarded: Counter[int]) -> None:
        self._producer = producer
        self._discarded = discarded
        self._status = _NO_RESPONSE
        self._loop_thread = threading.get_ident()
        # Held by puts of other threads, and by the loop while it decides.
        self._lock = threading.Lock()
        self._kept: list[tuple[str, UserRecord, int, OutboxDelivery]] = []
        self._outcome: Outcome = "open"

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
        """Keep a user record until the response begins; options and errors are those of `Producer.put_nowait`."""
        return self.put_record_nowait(stream, UserRecord(partition_key, as_bytes(data), **options))

    def put_record_nowait(self, stream: str, record: UserRecord) -> OutboxDelivery:
        """Keep a user record like `put_nowait`."""
        if threading.get_ident() == self._loop_thread:
            return self._put(stream, record, self._producer.buffer_limit.reserve)
        with self._lock:
            return self._put(stream, record, self._producer.internal.threads.reserve)

    def _put(self, stream: str, record: UserRecord, reserve: Callable[..., None]) -> OutboxDelivery:
        size = self._checked_size(stream, record)
        if self._outcome == "published":
            return OutboxDelivery(self._producer.internal.put_record_nowait(stream, record))
        delivery = OutboxDelivery()
        if self._outcome == "discarded":
            delivery.discarded()
            self._discarded[self._status] += 1
        else:
            if not isinstance(record.data, bytes):
                # Copy a mutable buffer, because the caller may overwrite it before the response.
                record = msgspec.structs.replace(record, data=as_bytes(record.data))
            self._require_spool(stream, record)
            reserve(size_bytes=size, tier=record.tier)
            self._kept.append((stream, record, size, delivery))
        return delivery

    async def put(
        self,
        stream: str,
        *,
        partition_key: str,
        data: BytesLike,
        **options: Unpack[PutOptions],
    ) -> OutboxDelivery:
        """Keep a user record; raises as `put_nowait`, also `BufferFull` where the producer's own put would wait.

        Requests that wait for capacity while they hold some could deadlock. After `publish` the request holds none, so
        this waits like the producer.
        """
        if self._outcome == "published":
            return OutboxDelivery(await self._producer.put(stream, partition_key=partition_key, data=data, **options))
        return self.put_record_nowait(stream, UserRecord(partition_key, as_bytes(data), **options))

    def put_blocking(
        self,
        stream: str,
        *,
        partition_key: str,
        data: BytesLike,
        timeout: float | None = 5.0,
        **options: Unpack[PutOptions],
    ) -> OutboxDelivery:
        """Keep a user record; like `put` it raises `BufferFull`, and waits only after `publish`."""
        record = UserRecord(partition_key, as_bytes(data), **options)
        if self._outcome == "published":
            return OutboxDelivery(self._producer.internal.threads.put_blocking(stream, record, timeout))
        return self.put_record_nowait(stream, record)

    async def put_many(
        self, stream: str, records: Iterable[tuple[str, BytesLike] | UserRecord]
    ) -> list[OutboxDelivery]:
        """Keep many user records; if one is invalid, or the buffer or the spool refuses one, keep none of them.

        After `publish` this is the producer's own `put_many`.
        """
        if self._outcome == "published":
            return [OutboxDelivery(after) for after in await self._producer.put_many(stream, records)]
        checked = [
            record if isinstance(record, UserRecord) else UserRecord(record[0], as_bytes(record[1]))
            for record in records
        ]
        for record in checked:
            self._checked_size(stream, record)
        with self._lock:
            # First count what threads have reserved, and let them keep nothing in between.
            self._producer.internal.threads.drain()
            before = len(self._kept)
            try:
                return [self._put(stream, record, self._producer.buffer_limit.reserve) for record in checked]
            except KplError:
                self._release(before)
                raise

    def publish(self) -> None:
        """Put all kept records in order; their capacity is already reserved.

        Raises:
            ProducerClosed: the producer was closed; no record was put.
            BufferFull: a flow's own limit is reached; the records before are put, the rest is discarded.
            NotSpooled: the spool has refused a record since its put; as above.
        """
        with self._lock:
            # First count what threads have reserved for these records.
            self._producer.internal.threads.drain()
            kept, self._kept = self._kept, []
            self._outcome = "discarded"
            for index, (stream, record, size, delivery) in enumerate(kept):
                try:
                    delivery.published(self._producer.internal.threads.put_reserved(stream, record, size))
                except KplError:
                    self._kept = kept[index + 1 :]
                    delivery.discarded()
                    self._release(0)
                    raise
            self._outcome = "published"

    def discard(self, status: int) -> bool:
        """Drop all kept records and release their capacity; return True if a waiting put may need that capacity."""
        with self._lock:
            self._producer.internal.threads.drain()
            self._outcome, self._status = "discarded", status
            self._discarded[status] += len(self._kept)
            # A put waits only while the buffer lacks room for a record, so a buffer with room has no waiting puts.
            limit = self._producer.buffer_limit
            may_have_waiters = bool(self._kept) and not all(
                limit.has_room(size_bytes=self._producer.internal.max_record_bytes(stream))
                for stream in {stream for stream, _, _, _ in self._kept}
            )
            self._release(0)
            return may_have_waiters

    def _release(self, start: int) -> None:
        for _, _, size, delivery in self._kept[start:]:
            self._producer.buffer_limit.release(records=1, size_bytes=size)
            delivery.discarded()
        del self._kept[start:]

    def _checked_size(self, stream: str, record: UserRecord) -> int:
        return check_user_record(record, max_record_bytes=self._producer.internal.max_record_bytes(stream))

    def _require_spool(self, stream: str, record: UserRecord) -> None:
        """Raise NotSpooled if the producer would refuse the record now."""
        state = self._producer.spool_state
        if state is not None and state.writes_ahead:
            in_order = self._producer.config.ordering == "per_key"
            _ = state.goes_straight(stream, (record.partition_key,), durable=False, in_order=in_order)

    # Delegated to the producer

    @property
    def config(self) -> Config:
        """The producer's options."""
        return self._producer.config

    async def flush(self, timeout: float | None = None) -> ProducerReport:
        """Flush the producer; records in this outbox are not included."""
        return await self._producer.flush(timeout)

    def report(self) -> ProducerReport:
        """Return the producer's counts; records in this outbox are not included."""
        return self._producer.report()

    def statistics(self) -> dict[str, PipelineStatistics]:
        """Return the producer's counts of each stream."""
        return self._producer.statistics()

    def unready(self) -> list[str]:
        """Return the reasons why the producer is not ready."""
        return self._producer.unready()


def is_no_error(status: int) -> bool:
    """Return True for a status below 400."""
    return status < _FIRST_ERROR


class RequestOutboxMiddleware:
    """Replaces the producer of each HTTP request by an outbox. WebSockets have no status and keep the producer.

    If an application has this middleware twice, the outer one decides.

    Args:
        publish_when: returns True for a response status whose request publishes its records. If it raises, they are
            discarded and the exception is logged.
        discarded: counts the discarded records by status. Give it to `outbox_source` to have it in the metrics.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        publish_when: Callable[[int], bool] = is_no_error,
        discarded: Counter[int] | None = None,
    ) -> None:
        self._app = app
        self._publish_when = publish_when
        self._discarded: Counter[int] = Counter() if discarded is None else discarded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app with an outbox in the request's state."""
        if scope["type"] != "http" or STATE_KEY not in (scope.get("state") or {}):
            await self._app(scope, receive, send)
            return
        producer = producer_of(scope)
        if isinstance(producer, OutboxProducer):
            await self._app(scope, receive, send)
            return
        outbox = OutboxProducer(producer, self._discarded)

        async def deciding_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                await self._decide(outbox, producer, message["status"])
            await send(message)

        try:
            # A copy, because servers may share the state between requests.
            await self._app({**scope, "state": {**scope["state"], STATE_KEY: outbox}}, receive, deciding_send)
        finally:
            if len(outbox):
                try:
                    await self._decide(outbox, producer, _NO_RESPONSE)
                except KplError:
                    _log.exception("the records of a request without a response were not published")

    async def _decide(self, outbox: OutboxProducer, producer: Producer, status: int) -> None:
        if self._is_published(status):
            outbox.publish()
        elif outbox.discard(status):
            # The flush advances every stream, which wakes puts that wait for capacity.
            await producer.flush(timeout=0.0)

    def _is_published(self, status: int) -> bool:
        try:
            return self._publish_when(status)
        except Exception:  # noqa: BLE001 - the caller's code, and it is logged
            _log.exception("publish_when failed for status %s, so the request's records are discarded", status)
            return False
