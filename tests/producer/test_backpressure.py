"""Room: bounded by records and bytes, given in the order of asking, and never lost."""

import anyio
import pytest

from kpl_core import BufferFull, Delivery, InvalidUserRecord, ProducerClosed, UserRecord
from kpl_core.testing import ErrorAnswer, Hang, When
from tests.support.producer_scene import (
    STREAM,
    assert_books_close,
    know_shards,
    producer,
    put,
    reasons,
    service,
    unmetered,
)

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("options", "fits"), [({"max_outstanding_records": 10}, 10), ({"max_outstanding_bytes": 1_100}, 9)]
)
async def test_a_full_buffer_refuses_at_once_and_takes_again_when_there_is_room(options, fits):
    async with producer(service(), **options) as orders:
        for _ in range(3):
            deliveries = []
            for _ in range(fits):
                deliveries += put(orders, 1, size=100, keys=["twelve bytes"])
            with pytest.raises(BufferFull, match="outstanding"):
                put(orders, 1, size=100)
            report = await orders.flush()
            assert reasons(deliveries) == {"": fits}
            assert report.buffered == report.buffered_bytes == 0


async def test_a_put_waits_for_room_and_memory_stays_bounded():
    transport = unmetered(latency_seconds=0.5)
    async with producer(transport, max_outstanding_records=100, aggregation_max_count=10) as orders:
        most = 0
        deliveries = []
        for number in range(1_000):
            deliveries.append(await orders.put(STREAM, partition_key=str(number), data=b"x"))
            most = max(most, orders.report().buffered)
        report = await orders.flush()
    assert most == 100
    assert_books_close(report, deliveries)
    assert report.delivered == 1_000


async def test_a_record_larger_than_the_whole_buffer_passes_alone():
    async with producer(service(), max_outstanding_bytes=1_000) as orders:
        put(orders, 1, size=10)
        with pytest.raises(BufferFull):
            put(orders, 1, size=5_000)
        delivery = await orders.put(STREAM, partition_key="k", data=bytes(5_000))
        with pytest.raises(BufferFull):
            put(orders, 1, size=1)
        assert (await delivery).successful
        put(orders, 1, size=1)


async def test_waiting_puts_are_served_in_the_order_they_came():
    """Two woken at once changed places."""
    transport = unmetered(latency_seconds=0.1)
    served: list[int] = []

    async def wait(number: int) -> None:
        # The largest waits longest; small ones behind it must not overtake.
        delivery = await orders.put(STREAM, partition_key="k", data=bytes(900 if number % 5 == 0 else 10))
        served.append(number)
        await delivery

    async with producer(transport, max_outstanding_records=3, max_outstanding_bytes=1_000) as orders:
        put(orders, 3)
        async with anyio.create_task_group() as tasks:
            for number in range(30):
                tasks.start_soon(wait, number)
                await anyio.wait_all_tasks_blocked()
    assert served == list(range(30))
    assert orders.report().delivered == 33


async def test_a_put_does_not_overtake_those_who_wait():
    transport = unmetered(latency_seconds=10.0)
    order: list[str] = []

    async def wait(name: str) -> None:
        delivery = await orders.put(STREAM, partition_key="k", data=b"")
        order.append(name)
        await delivery

    async def late() -> None:
        # Runs in the very moment in which room appears: its own delivery is the news of it.
        await first
        await wait("late")

    async with producer(transport, max_outstanding_records=1) as orders:
        (first,) = put(orders, 1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(late)
            await anyio.wait_all_tasks_blocked()
            for name in ("a", "b"):
                tasks.start_soon(wait, name)
                await anyio.wait_all_tasks_blocked()
    assert order == ["a", "b", "late"]


async def test_a_cancelled_waiting_put_has_put_nothing_and_passes_its_turn_on():
    transport = unmetered(latency_seconds=1.0)
    async with producer(transport, max_outstanding_records=1) as orders:
        put(orders, 1)
        got: list[Delivery] = []

        async def patient() -> None:
            got.append(await orders.put(STREAM, partition_key="k", data=b"patient"))

        async with anyio.create_task_group() as tasks:
            with anyio.move_on_after(0.5) as impatient:
                got.append(await orders.put(STREAM, partition_key="k", data=b"impatient"))
            assert impatient.cancelled_caught
            tasks.start_soon(patient)
        await orders.flush()
        assert orders.report().accepted == 2
    assert reasons(got) == {"": 1}


async def test_a_put_cancelled_at_any_moment_is_either_in_or_not():
    transport = unmetered(latency_seconds=0.01)
    async with producer(transport, max_outstanding_records=5, record_max_buffered_time_ms=10) as orders:
        got: list[Delivery] = []

        async def put_impatiently(number: int) -> None:
            with anyio.move_on_after(0.001 * number):
                got.append(await orders.put(STREAM, partition_key=str(number), data=b"x"))

        async with anyio.create_task_group() as tasks:
            for number in range(200):
                tasks.start_soon(put_impatiently, number)
        report = await orders.flush()
    assert report.accepted == len(got) > 5
    assert_books_close(report, got)


@pytest.mark.parametrize(
    "bad",
    [UserRecord("", b""), UserRecord("k", b"", "-1"), UserRecord("k", bytes(2_000_000)), UserRecord("k" * 257, b"")],
)
async def test_a_bad_record_does_not_wait_to_be_refused_and_leaves_the_line_moving(bad):
    """A refused put left the line asleep, and waited for its turn to be refused."""
    transport = unmetered(latency_seconds=10.0)
    async with producer(transport, max_outstanding_records=1) as orders:
        put(orders, 1)
        async with anyio.create_task_group() as tasks:
            got: list[Delivery] = []

            async def good() -> None:
                got.append(await orders.put(STREAM, partition_key="k", data=b""))

            tasks.start_soon(good)
            await anyio.wait_all_tasks_blocked()
            began = anyio.current_time()
            with pytest.raises(InvalidUserRecord):
                await (
                    await orders.put(
                        STREAM,
                        partition_key=bad.partition_key,
                        data=bad.data,
                        explicit_hash_key=bad.explicit_hash_key,
                    )
                )
            assert anyio.current_time() == began
            tasks.start_soon(good)
        assert len(got) == 2


async def test_puts_that_wait_for_room_when_the_producer_closes_raise():
    transport = service()
    transport.kinesis.faults.add(Hang(), When(operation="PutRecords"))
    refused: list[float] = []

    async def wait() -> None:
        try:
            await (await orders.put(STREAM, partition_key="k", data=b""))
        except ProducerClosed:
            refused.append(anyio.current_time())

    async with producer(transport, max_outstanding_records=1) as orders:
        put(orders, 1)
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(wait)
            await anyio.sleep(1.0)
            await orders.close(timeout=5.0)
    assert refused == [1.0] * 3


async def test_put_many_waits_for_room_in_its_order():
    transport = unmetered(latency_seconds=0.05)
    async with producer(transport, max_outstanding_records=50, ordering="per_key") as orders:
        records = [("key", str(number).encode()) for number in range(500)]
        deliveries = await orders.put_many(STREAM, records)
        report = await orders.flush()
    assert_books_close(report, deliveries)
    numbers = [int(delivery.result().sequence_number or 0) for delivery in deliveries]
    assert numbers == sorted(numbers)


async def test_put_many_into_a_small_buffer_of_an_idle_producer_wakes_the_runner_that_makes_room():
    """It put what fitted, and waited for room, but no runner was woken to make it."""
    transport = unmetered()
    async with producer(transport, max_outstanding_records=50) as orders:
        await know_shards(orders)
        with anyio.fail_after(10.0):
            deliveries = await orders.put_many(STREAM, [("k", b"x")] * 200)
            report = await orders.flush()
        assert report.delivered == 201
        assert reasons(deliveries) == {"": 200}


async def test_put_many_takes_pairs_and_user_records_alike():
    transport = unmetered()
    records: list[tuple[str, bytes] | UserRecord] = [
        ("a", b"1"),
        UserRecord("b", b"2", "7"),
        UserRecord("c", b"3", tier="bulk"),
        ("d", b"4"),
    ]
    async with producer(transport) as orders:
        deliveries = await orders.put_many(STREAM, iter(records))
        assert len(await orders.put_many(STREAM, [])) == 0
    assert reasons(deliveries) == {"": 4}


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (("", b"x"), InvalidUserRecord),
        (("k" * 257, b"x"), InvalidUserRecord),
        (("\ud800", b"x"), InvalidUserRecord),
        (("k", bytes(2_000_000)), InvalidUserRecord),
        (UserRecord("k", b"", "007"), InvalidUserRecord),
        ((5, b"x"), TypeError),
        (("k", "text"), TypeError),
        (("k",), TypeError),
        (("k", b"x", "5"), TypeError),
        (["k", b"x"], TypeError),
        ("kx", TypeError),
        (None, TypeError),
    ],
)
async def test_put_many_checks_all_before_it_puts_any_and_names_the_index(bad, error):
    async with producer(service()) as orders:
        with pytest.raises(error, match=r"records\[2\]: "):
            await orders.put_many(STREAM, [("a", b"1"), ("b", b"2"), bad, ("c", b"3")])
        assert orders.report().accepted == 0


async def test_a_cancelled_put_many_keeps_what_it_put():
    transport = service(latency_seconds=1.0)
    async with producer(transport, max_outstanding_records=10) as orders:
        with anyio.move_on_after(0.5) as scope:
            await orders.put_many(STREAM, [("k", b"x")] * 100)
        assert scope.cancelled_caught
        report = await orders.flush()
    assert (report.accepted, report.delivered, report.buffered) == (10, 10, 0)


async def test_an_await_of_put_lets_others_run_now_and_then():
    """A loop of puts that always find room would keep the requests from leaving."""
    transport = unmetered(latency_seconds=0.0)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await anyio.lowlevel.checkpoint()

    async with producer(transport) as orders, anyio.create_task_group() as tasks:
        tasks.start_soon(tick)
        for _ in range(10_000):
            await orders.put(STREAM, partition_key="k", data=b"x")  # type: ignore[unused-awaitable]
        tasks.cancel_scope.cancel()
    assert ticks >= 90


async def test_failures_give_room_back_too():
    transport = service()
    transport.kinesis.faults.add(ErrorAnswer("AccessDeniedException"), When(operation="PutRecords"))
    async with producer(transport, max_outstanding_records=10) as orders:
        deliveries = [await orders.put(STREAM, partition_key="k", data=b"x") for _ in range(50)]
        await orders.flush()
    assert reasons(deliveries) == {"AccessDeniedException": 50}
