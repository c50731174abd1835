"""What a caller may get wrong, and must not pay for with a hang or with others' records."""

import math
import threading
from typing import Any

import pytest

from kpl_core import BlockingDelivery, BlockingProducer, BufferFull, Config, Delivery, InvalidUserRecord, Producer
from kpl_core.hooks import Fact, RecordsFinished
from kpl_core.options.policy import FairnessPolicy
from kpl_core.testing import ErrorAnswer, When
from kpl_core.testing.fake_transport import FakeTransport
from tests.support.producer_scene import STREAM, assert_books_close, producer, put, reasons, service

IMPOSSIBLE = [
    ("my stream", InvalidUserRecord),
    ("x" * 129, InvalidUserRecord),
    ("größe", InvalidUserRecord),
    ("arn:aws:kinesis:us-east-1:42:stream/orders", InvalidUserRecord),
    ("", InvalidUserRecord),
    (None, TypeError),
    (7, TypeError),
]


@pytest.mark.anyio
@pytest.mark.parametrize(("stream", "error"), IMPOSSIBLE)
async def test_a_stream_that_cannot_exist_is_refused_at_put_and_costs_no_request(stream, error):
    transport = service()
    async with producer(transport) as orders:
        with pytest.raises(error, match="stream"):
            put(orders, 1, stream=stream)
        with pytest.raises(error, match="stream"):
            await orders.put_many(stream, [("k", b"")])
        deliveries = put(orders, 1)
    assert reasons(deliveries) == {"": 1}
    assert len(transport.requests) == 1


@pytest.mark.anyio
async def test_a_close_without_a_timeout_takes_as_long_as_it_takes():
    transport = service()
    transport.kinesis.faults.add(ErrorAnswer("InternalFailure", ""), When(operation="PutRecords", ends_at=50.0))
    async with producer(transport, record_ttl_ms=600_000) as orders:
        deliveries = put(orders, 10)
        report = await orders.close(timeout=None)
    assert_books_close(report, deliveries)
    assert reasons(deliveries) == {"": 10}


WRONG_TIMEOUTS: list[tuple[Any, type[Exception], str]] = [
    (math.nan, ValueError, "timeout is nan s; it must be 0 or more"),
    (-1, ValueError, "timeout is -1 s; it must be 0 or more"),
    (-math.inf, ValueError, "timeout is -inf s; it must be 0 or more"),
    ("5", TypeError, "timeout is of type str; it must be a number of seconds"),
    (True, TypeError, "timeout is of type bool; it must be a number of seconds"),
]


@pytest.mark.anyio
@pytest.mark.parametrize(("timeout", "error", "message"), WRONG_TIMEOUTS)
async def test_a_wrong_timeout_is_refused_and_has_closed_nothing(timeout, error, message):
    async with producer(service()) as orders:
        deliveries = put(orders, 10)
        with pytest.raises(error, match=message):
            await orders.close(timeout=timeout)
        with pytest.raises(error, match=message):
            await orders.flush(timeout=timeout)
        deliveries += put(orders, 10)
    assert reasons(deliveries) == {"": 20}


@pytest.mark.anyio
@pytest.mark.parametrize("timeout", [None, math.inf, 1e300])
async def test_an_endless_timeout_waits_for_the_end(timeout):
    async with producer(service()) as orders:
        deliveries = put(orders, 10)
        assert (await orders.flush(timeout=timeout)).complete
        assert (await orders.close(timeout=timeout)).complete
    assert reasons(deliveries) == {"": 10}


@pytest.mark.anyio
async def test_a_hook_may_put_to_a_stream_that_is_new():
    transport = service(streams={STREAM: 1, "audit": 1})
    audited: list[Delivery] = []

    def audit(fact: Fact) -> None:
        if not audited:
            audited.extend(put(orders, 1, stream="audit"))

    async with Producer(Config(), transport=transport, hooks=[audit]) as orders:
        deliveries = put(orders, 10)
        await orders.flush()
    assert reasons(deliveries) == {"": 10}
    assert reasons(audited) == {"": 1}


def blocking(transport: FakeTransport, **options) -> BlockingProducer:
    return BlockingProducer(Config(record_max_buffered_time_ms=5, **options), transport=transport)


@pytest.mark.parametrize(("stream", "error"), IMPOSSIBLE)
def test_a_put_to_an_impossible_stream_raises_in_its_thread_and_others_go_on(stream, error):
    with blocking(service(latency_seconds=0.0)) as orders:
        with pytest.raises(error, match="stream"):
            orders.put_nowait(stream, partition_key="k", data=b"")
        with pytest.raises(error, match="stream"):
            orders.put_many(stream, [("k", b"")])
        assert orders.put_nowait(STREAM, partition_key="k", data=b"").result(10).successful


def test_what_the_producer_cannot_take_is_refused_in_the_thread_that_put_it():
    with blocking(service(latency_seconds=0.0), fairness=FairnessPolicy()) as orders:
        with pytest.raises(TypeError):
            orders.put_nowait(STREAM, partition_key="k", data=b"", flow=["no", "flow"])  # type: ignore[arg-type]
        good = orders.put_nowait(STREAM, partition_key="k", data=b"", flow="a flow")
        assert good.result(10).successful
        report = orders.close(timeout=10)
    assert report.accepted == report.delivered == 1


def test_a_record_larger_than_a_limit_that_became_known_after_its_put_does_not_stay_in_the_way():
    entered, go_on = threading.Event(), threading.Event()

    def hold_the_loop(fact: Fact) -> None:
        if isinstance(fact, RecordsFinished):
            entered.set()
            go_on.wait(10)

    with BlockingProducer(
        Config(record_max_buffered_time_ms=5), transport=service(latency_seconds=0.0), hooks=[hold_the_loop]
    ) as orders:
        first = orders.put_nowait(STREAM, partition_key="k", data=b"")
        assert entered.wait(10)
        bad = orders.put_nowait(STREAM, partition_key="k", data=bytes(50_000))
        good = orders.put_nowait(STREAM, partition_key="k", data=b"")
        orders._producer._open[STREAM].max_record_bytes = 10_000  # noqa: SLF001 - as if the service had said so
        go_on.set()
        assert first.result(10).successful
        assert good.result(10).successful
        assert bad.result(10).error_code == "Internal"
        report = orders.close(timeout=10)
    assert report.accepted == 3
    assert dict(report.failed) == {"Internal": 1}


def test_a_thread_may_close_without_a_timeout():
    with blocking(service(latency_seconds=0.0)) as orders:
        delivery = orders.put_nowait(STREAM, partition_key="k", data=b"")
        assert orders.close(timeout=None).delivered == 1
    assert delivery.result(0).successful


def test_the_bound_on_bytes_holds_for_what_the_loop_has_not_seen_yet():
    looking, go_on = threading.Event(), threading.Event()

    def hold_the_loop(fact: Fact) -> None:
        if isinstance(fact, RecordsFinished):
            looking.set()
            go_on.wait(10)

    config = Config(record_max_buffered_time_ms=5, max_outstanding_bytes=1_000_000)
    with BlockingProducer(config, transport=service(latency_seconds=0.0), hooks=[hold_the_loop]) as orders:
        # Nothing is outstanding any more, and the loop is busy telling so.
        put_one(orders, size=1)
        assert looking.wait(10)
        deliveries = [put_one(orders, size=400_000) for _ in range(2)]
        with pytest.raises(BufferFull, match="2 of 100,000 records and 800,002 of 1,000,000 bytes"):
            put_one(orders, size=400_000)
        go_on.set()
        assert all(delivery.result(10).successful for delivery in deliveries)


def put_one(orders: BlockingProducer, *, size: int) -> BlockingDelivery:
    return orders.put_nowait(STREAM, partition_key="k", data=bytes(size))


@pytest.mark.parametrize("make", [Producer, BlockingProducer])
def test_a_hook_that_is_not_callable_is_refused_by_the_constructor(make):
    async def listen(fact: Fact) -> None: ...

    class Listener:
        async def __call__(self, fact: Fact) -> None: ...

    for hook, words in [
        (5, "must be a callable"),
        (listen, "is an async function"),
        (Listener(), "is an async function"),
    ]:
        with pytest.raises(TypeError, match=words):
            make(hooks=[hook])
