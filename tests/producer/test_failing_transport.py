"""A transport that raises or never returns costs one request. What ends the driver all the same is never silent."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from kpl_core import Config, Delivery, Producer, ProducerClosed
from kpl_core.testing import FakeKinesis, FakeTransport
from tests.support.producer_scene import STREAM, EndOfTheDriver, assert_books_close, know_shards, put, reasons

pytestmark = pytest.mark.anyio

Failure = Callable[[], Awaitable[None]]


class Failing(FakeTransport):
    """Awaits `failures[method]` once before it answers."""

    def __init__(self, **failures: Failure) -> None:
        super().__init__(FakeKinesis({STREAM: 2}, enforce_limits=False), latency_seconds=0.01)
        self.failures = failures

    async def put_records(self, request: Any) -> Any:
        await self._fail_once("put_records")
        return await super().put_records(request)

    async def list_shards(self, stream: str) -> Any:
        await self._fail_once("list_shards")
        return await super().list_shards(stream)

    async def max_record_bytes(self, stream: str) -> Any:
        await self._fail_once("max_record_bytes")
        return await super().max_record_bytes(stream)

    async def _fail_once(self, method: str) -> None:
        failure = self.failures.pop(method, None)
        if failure is not None:
            await failure()


def raising(error: BaseException) -> Failure:
    async def fail() -> None:
        await anyio.sleep(0.01)
        raise error

    return fail


ERRORS = [MemoryError(), OSError("no buffer space"), ValueError("wrong"), RuntimeError("closed"), TimeoutError()]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
async def test_a_transport_that_raises_once_fails_one_request_and_everything_is_delivered(error: Exception) -> None:
    transport = Failing(put_records=raising(error))
    async with Producer(transport=transport) as orders:
        deliveries = put(orders, 200)
        report = await orders.flush(60)
        assert orders.unready() == []
    assert_books_close(report, deliveries)
    assert reasons(deliveries) == {"": 200}
    codes = {tuple(attempt.error_code for attempt in delivery.result().attempts) for delivery in deliveries}
    assert ("Internal", None) in codes
    messages = {
        each.error_message for delivery in deliveries for each in delivery.result().attempts if not each.success
    }
    assert messages == {f"the transport's put_records raised {error!r}"}


@pytest.mark.parametrize("method", ["list_shards", "max_record_bytes"])
@pytest.mark.parametrize("error", ERRORS, ids=repr)
async def test_a_call_in_the_background_that_raises_once_is_made_again(method: str, error: Exception) -> None:
    transport = Failing(**{method: raising(error)})
    async with Producer(transport=transport) as orders:
        deliveries = put(orders, 20)
        await anyio.sleep(5.0)
        deliveries += put(orders, 20)
        await orders.flush()
    assert reasons(deliveries) == {"": 40}
    assert transport.requests[-1].records[0].aggregated


@pytest.mark.parametrize("method", ["put_records", "list_shards", "max_record_bytes"])
async def test_a_call_that_never_returns_is_given_up_and_a_close_without_a_timeout_ends(method: str) -> None:
    transport = Failing(**{method: anyio.sleep_forever})
    async with Producer(transport=transport) as orders:
        deliveries = put(orders, 20)
        report = await orders.close(timeout=None)
    assert_books_close(report, deliveries)
    assert reasons(deliveries) == {"": 20}
    # request_timeout_ms, connect_timeout_ms and a second.
    assert anyio.current_time() < 20.0


async def test_a_transport_that_never_returns_at_all_lets_records_expire_and_a_close_end() -> None:
    class Silent(Failing):
        async def put_records(self, request: Any) -> Any:
            await anyio.sleep_forever()

    async with Producer(Config(record_ttl_ms=20_000), transport=Silent()) as orders:
        deliveries = put(orders, 20)
        report = await orders.close(timeout=None)
    assert_books_close(report, deliveries)
    assert reasons(deliveries) == {"Expired": 20}
    assert "did not return within 13 s" in str(deliveries[0].result().attempts[0].error_message)
    assert anyio.current_time() < 45.0


async def test_what_ends_the_driver_makes_puts_raise_and_the_producer_not_ready(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transport = Failing()
    orders = Producer(transport=transport)
    deliveries: list[Delivery] = []

    async def use() -> None:
        async with orders:
            await know_shards(orders)
            transport.failures["put_records"] = raising(EndOfTheDriver("now"))
            deliveries.extend(put(orders, 20))
            with anyio.CancelScope(shield=True):
                # An application whose server goes on after its lifespan task has died.
                await anyio.sleep(1.0)
                assert orders.unready() == ["the producer has failed with EndOfTheDriver"]
                with pytest.raises(ProducerClosed, match=r"has failed with EndOfTheDriver\('now'\)"):
                    put(orders, 1)
                with pytest.raises(ProducerClosed, match="make a new producer"):
                    await (await orders.put(STREAM, partition_key="k", data=b"x"))
                assert all(delivery.done for delivery in deliveries)
                assert not (await orders.flush(None)).complete
                assert not (await orders.close(None)).complete

    with pytest.raises(BaseExceptionGroup) as raised:
        await use()
    assert raised.group_contains(EndOfTheDriver)
    assert reasons(deliveries) == {"Unknown": 20}
    report = orders.report()
    assert (report.accepted, report.delivered, report.failed_total, report.buffered) == (21, 1, 20, 0)
    failures = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage().partition(":")[0] for record in failures] == [
        "the producer has failed and takes no more user records"
    ]


async def test_what_ends_the_driver_ends_a_close_and_a_put_of_other_tasks() -> None:
    orders = Producer(Config(max_outstanding_records=20), transport=Failing(put_records=raising(EndOfTheDriver())))
    ended: list[str] = []

    async def close() -> None:
        with anyio.CancelScope(shield=True):
            await orders.close(timeout=None)
            ended.append("close")

    async def wait_for_room() -> None:
        with anyio.CancelScope(shield=True):
            with pytest.raises(ProducerClosed):
                await (await orders.put(STREAM, partition_key="k", data=b"x"))
            ended.append("put")

    async def use() -> None:
        async with anyio.create_task_group() as tasks, orders:
            put(orders, 20)
            tasks.start_soon(wait_for_room)
            await anyio.lowlevel.checkpoint()
            tasks.start_soon(close)
            await anyio.sleep(60)

    with pytest.raises(BaseExceptionGroup):
        await use()
    assert sorted(ended) == ["close", "put"]
