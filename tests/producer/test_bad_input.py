"""The issue's list of bad input: each a clear error or a failed result, neighbours unharmed, nothing left pending."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from kpl_core import BlockingProducer, Config, ConfigError, InvalidUserRecord, Producer, ProducerClosed, WrongEventLoop
from kpl_core.errors import KplError
from kpl_core.hooks import Fact, RecordsFinished
from kpl_core.testing import ErrorAnswer, Hang, RecordingHook, ResetBeforeCommit, When
from kpl_integrations.asgi import KinesisLifespan
from tests.support.producer_scene import STREAM, assert_books_close, producer, put, reasons, service, unmetered

pytestmark = pytest.mark.anyio

BAD_RECORDS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"partition_key": ""}, InvalidUserRecord, r"partition_key has 0 characters.* 1 to 256"),
    ({"partition_key": "k" * 257}, InvalidUserRecord, r"partition_key has 257 characters.* 1 to 256"),
    ({"partition_key": "k" * 300}, InvalidUserRecord, r"partition_key has 300 characters.* 1 to 256"),
    ({"partition_key": "k\ud800"}, InvalidUserRecord, r"partition_key has a lone surrogate at character 1"),
    ({"partition_key": 5}, TypeError, r"partition_key must be a str .* not int"),
    ({"partition_key": b"k"}, TypeError, r"partition_key must be a str .* not bytes"),
    ({"partition_key": None}, TypeError, r"partition_key must be a str .* not NoneType"),
    ({"partition_key": ["k"]}, TypeError, r"partition_key must be a str .* not list"),
    ({"explicit_hash_key": "-1"}, InvalidUserRecord, r"explicit_hash_key is '-1'; .* 0 \.\. 2\*\*128 - 1"),
    ({"explicit_hash_key": str(2**128)}, InvalidUserRecord, r"explicit_hash_key is \d+; .* 2\*\*128 - 1"),
    ({"explicit_hash_key": "abc"}, InvalidUserRecord, r"explicit_hash_key is 'abc'"),
    ({"explicit_hash_key": "007"}, InvalidUserRecord, r"explicit_hash_key is '007'"),
    ({"explicit_hash_key": 7}, TypeError, r"explicit_hash_key must be a str .* not int"),
    ({"data": "text"}, TypeError, r"data must be bytes.* not str; encode it first"),
    ({"data": None}, TypeError, r"data must be bytes.* not NoneType"),
    ({"data": {"a": 1}}, TypeError, r"data must be bytes.* not dict"),
    ({"data": 5}, TypeError, r"data must be bytes.* not int"),
    ({"data": bytes(1_048_576)}, InvalidUserRecord, r"1,048,577 bytes together; the stream accepts at most 1,048,576"),
    ({"data": bytes(11_000_000)}, InvalidUserRecord, r"11,000,001 bytes together"),
    ({"tier": "urgent"}, InvalidUserRecord, r"tier is 'urgent'; it must be one of"),
    ({"flow": 5}, TypeError, r"flow must be a str.* not int"),
    ({"flow": ["tenant"]}, TypeError, r"flow must be a str.* not list"),
    ({"flow": "t\ud800"}, InvalidUserRecord, r"flow has a lone surrogate at character 1"),
    ({"metadata": ["ERROR"]}, TypeError, r"metadata must be a mapping.* not list"),
    ({"metadata": "ERROR"}, TypeError, r"metadata must be a mapping.* not str"),
    ({"stream": ""}, InvalidUserRecord, r"stream is empty"),
    ({"stream": None}, TypeError, r"stream must be a str.* not NoneType"),
    ({"stream": 5}, TypeError, r"stream must be a str.* not int"),
    ({"stream": b"orders"}, TypeError, r"stream must be a str.* not bytes"),
]


def arguments(bad: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    options = {"stream": STREAM, "partition_key": "k", "data": b"x", **bad}
    return options.pop("stream"), options


@pytest.mark.parametrize(("bad", "error", "problem"), BAD_RECORDS)
async def test_a_bad_user_record_is_refused_at_put_and_its_neighbours_are_delivered(bad, error, problem):
    transport = service()
    async with producer(transport) as orders:
        deliveries = put(orders, 5)
        stream, options = arguments(bad)
        with pytest.raises(error, match=problem):
            await orders.put_nowait(stream, **options)
        with pytest.raises(error, match=problem):
            await (await orders.put(stream, **options))
        deliveries += put(orders, 5)
        report = await orders.flush()
        assert anyio.current_time() < 1.0
    assert_books_close(report, deliveries)
    assert report.delivered == 10


async def test_a_refusal_never_repeats_the_data():
    async with producer(service()) as orders:
        with pytest.raises(InvalidUserRecord) as refused:
            put(orders, 1, size=2_000_000)
        assert len(str(refused.value)) < 300


async def test_a_record_over_the_streams_own_limit_is_refused_once_the_limit_is_known():
    transport = service()
    transport.kinesis.update_max_record_size(STREAM, max_record_size_kib=2_048, now=0.0)
    async with producer(transport) as orders:
        with pytest.raises(InvalidUserRecord, match="the stream accepts at most 1,048,576"):
            put(orders, 1, size=2_000_000)
        await anyio.sleep(0.1)
        with pytest.raises(InvalidUserRecord, match="the stream accepts at most 2,097,152"):
            put(orders, 1, size=2_200_000)
        small = put(orders, 10)
        await anyio.sleep(0.2)
        # Neighbours are not delayed by what was refused.
        assert reasons(small) == {"": 10}
        large = put(orders, 1, size=2_000_000)
    assert reasons(large) == {"": 1}


# What only the service can know


@pytest.mark.parametrize("stream", ["unknown", "arn:aws:kinesis:us-east-1:000000000000:stream/unknown"])
async def test_an_unknown_stream_fails_quickly_and_harms_no_other(stream, caplog):
    transport = service()
    async with producer(transport) as orders:
        lost = put(orders, 20, stream=stream)
        good = put(orders, 20)
        report = await orders.flush()
        assert anyio.current_time() < 1.0
    assert reasons(lost) == {"ResourceNotFoundException": 20}
    assert reasons(good) == {"": 20}
    assert_books_close(report, [*lost, *good])
    assert caplog.text.count("cannot be listed") == 1
    assert "unknown" in caplog.text


@pytest.mark.parametrize(
    ("code", "attempts"),
    [
        ("AccessDeniedException", 1),
        ("UnrecognizedClientException", 1),
        ("InvalidSignatureException", 2),
        ("KMSAccessDeniedException", 1),
    ],
)
async def test_denied_credentials_fail_at_once_with_the_services_words(code, attempts):
    transport = service()
    transport.kinesis.faults.add(ErrorAnswer(code, "User: nobody is not authorized"))
    async with producer(transport) as orders:
        deliveries = put(orders, 20)
        report = await orders.flush()
        assert anyio.current_time() < 1.0
    assert_books_close(report, deliveries)
    for delivery in deliveries:
        result = delivery.result()
        assert result.error_code == code
        assert "not authorized" in (result.error_message or "")
        assert len(result.attempts) == attempts


async def test_a_request_whose_signature_is_refused_once_is_sent_again_and_nothing_pauses():
    """As after a suspend of the machine, or a step of its clock."""
    transport = service()
    transport.kinesis.faults.add(ErrorAnswer("InvalidSignatureException", "Signature expired"), When(times=4))
    async with producer(transport, max_in_flight_requests=1, collection_max_count=1) as orders:
        deliveries = put(orders, 8)
        report = await orders.flush()
        assert anyio.current_time() < 1.0
    assert_books_close(report, deliveries)
    assert report.delivered == 8
    assert max(len(delivery.result().attempts) for delivery in deliveries) == 2


async def test_an_unreachable_endpoint_is_retried_until_the_records_expire():
    transport = service()
    transport.kinesis.faults.add(ResetBeforeCommit())
    async with producer(transport, record_ttl_ms=5_000) as orders:
        deliveries = put(orders, 20)
        report = await orders.flush()
        assert 5.0 <= anyio.current_time() < 6.0
    assert_books_close(report, deliveries)
    for delivery in deliveries:
        codes = [attempt.error_code for attempt in delivery.result().attempts]
        assert codes[-1] == "Expired"
        assert set(codes[:-1]) == {"Internal"}
        text = delivery.result().error_message or ""
        assert text.endswith("; the last attempt: Internal: connection reset before the request was stored")
        assert 3 <= len(codes) < 60


async def test_an_endpoint_that_comes_back_gets_everything():
    transport = service()
    transport.kinesis.faults.add(ResetBeforeCommit(), When(ends_at=8.0))
    async with producer(transport) as orders:
        deliveries = put(orders, 200)
        report = await orders.flush()
        assert anyio.current_time() < 16.0
    assert_books_close(report, deliveries)
    assert report.delivered == 200


# Event loops


def elsewhere(use: Callable[[], Any]) -> BaseException | None:
    """Run something in another thread, and return what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            use()
        except KplError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def in_another_loop(use: Callable[[], Any]) -> BaseException | None:
    """Await something in an event loop of its own, and return what it raised."""

    async def run() -> None:
        await use()

    return elsewhere(lambda: asyncio.run(run()))


async def test_a_put_from_a_second_event_loop_raises():
    async def put_now() -> None:
        put(orders, 1)

    async with producer(service()) as orders:
        errors = [
            in_another_loop(put_now),
            in_another_loop(lambda: orders.put(STREAM, partition_key="k", data=b"")),
            in_another_loop(lambda: orders.put_many(STREAM, [("k", b"")])),
            in_another_loop(orders.flush),
            in_another_loop(orders.close),
        ]
        assert [type(error) for error in errors] == [WrongEventLoop] * 5
        assert "make one producer for each loop" in str(errors[0])
        deliveries = put(orders, 3)
    assert reasons(deliveries) == {"": 3}


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_put_from_a_second_event_loop_raises_on_a_stream_in_use_too():
    async def put_now() -> None:
        put(orders, 1)

    async with producer(unmetered()) as orders:
        await put(orders, 1)[0]
        errors = [
            in_another_loop(put_now),
            in_another_loop(lambda: orders.put(STREAM, partition_key="k", data=b"")),
            in_another_loop(lambda: orders.put_many(STREAM, [("k", b"")])),
        ]
        assert [type(error) for error in errors] == [WrongEventLoop] * 3
    assert orders.report().accepted == 1


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_delivery_can_be_awaited_in_another_loop():
    async with producer(unmetered()) as orders:
        (delivery,) = put(orders, 1)

        def wait() -> bool:
            async def result() -> bool:
                return (await delivery).successful

            return asyncio.run(asyncio.wait_for(result(), 5))

        assert await anyio.to_thread.run_sync(wait)


async def test_a_hook_that_raises_is_dropped_and_costs_no_record(caplog):
    heard = RecordingHook()

    def broken(fact: Fact, /) -> None:
        message = "no metrics today"
        raise OSError(message)

    async with Producer(Config(), transport=unmetered(), hooks=[broken, heard]) as orders:
        deliveries = put(orders, 100)
        await orders.flush()
        deliveries += put(orders, 100)
    assert reasons(deliveries) == {"": 200}
    assert sum(fact.user_records for fact in heard.of(RecordsFinished)) == 200
    assert [record.message.endswith("gets no more facts") for record in caplog.records] == [True]


def test_a_producer_that_outlived_its_loop_is_closed():
    transport = service()

    async def use(orders: Producer) -> None:
        async with orders:
            put(orders, 3)

    async def use_again(orders: Producer) -> None:
        with pytest.raises(ProducerClosed):
            put(orders, 3)

    orders = Producer(Config(), transport=transport)
    asyncio.run(use(orders))
    asyncio.run(use_again(orders))
    assert orders.report().delivered == 3


# Cancelled while everything hangs


async def test_a_cancelled_put_flush_and_close_leave_nothing_pending(caplog):
    transport = service()
    transport.kinesis.faults.add(Hang(), When(operation="PutRecords"))
    async with producer(transport, max_outstanding_records=10) as orders:
        deliveries = put(orders, 10)
        with anyio.move_on_after(1.0):
            deliveries.append(await orders.put(STREAM, partition_key="k", data=b""))
        with anyio.move_on_after(1.0):
            await orders.flush()
        assert orders.report().buffered == 10
        with anyio.move_on_after(1.0):
            await orders.close()
        assert anyio.current_time() == pytest.approx(3.0)
    assert_books_close(orders.report(), deliveries)
    assert reasons(deliveries) == {"Unknown": 10}
    assert "may be stored" in (deliveries[0].result().error_message or "")


@pytest.mark.parametrize("make", [Producer, BlockingProducer, BlockingProducer.shared, KinesisLifespan])
def test_a_config_of_another_type_is_named_with_what_to_do(make: Callable[..., object]):
    with pytest.raises(ConfigError, match="config is of type dict; it must be a Config; make one of a table by"):
        make({"region": "us-east-1"})


@pytest.mark.parametrize("make", [Producer, BlockingProducer])
def test_a_single_hook_outside_of_a_list_is_named(make: Callable[..., object]):
    with pytest.raises(TypeError, match="must be a list of hooks, also for a single one"):
        make(hooks=print)
