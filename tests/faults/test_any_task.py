"""The producer is entered in one task and used in others: web handlers, gather, wait_for."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kpl_core import Delivery, Producer
from kpl_integrations.local_kinesis import LocalKinesis
from tests.faults.books import STREAM, Books
from tests.faults.scene import config
from tests.support.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.anyio
Way = Callable[[Books], Awaitable[object]]


async def _in_a_task(books: Books) -> object:
    return await asyncio.create_task(_put_and_wait(books))


async def _in_gather(books: Books) -> object:
    return await asyncio.gather(*(_put_and_wait(books) for _ in range(10)))


async def _in_wait_for(books: Books) -> object:
    return await asyncio.wait_for(_put_and_wait(books), PATIENCE_SECONDS)


async def _in_a_callback(books: Books) -> object:
    put: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(lambda: put.set_result(books.put_nowait()[0]))
    return await (await put)


async def _in_a_task_that_ends_at_once(books: Books) -> object:
    async def put() -> Delivery:
        return books.put_nowait()[0]

    return await (await asyncio.create_task(put()))


async def _in_a_task_cancelled_afterwards(books: Books) -> object:
    async def put() -> None:
        books.put_nowait()
        await asyncio.sleep(PATIENCE_SECONDS)

    handler = asyncio.create_task(put())
    await until(lambda: books.deliveries)
    handler.cancel()
    (delivery,) = books.deliveries.values()
    return await delivery


async def _put_and_wait(books: Books) -> object:
    (delivery,) = await books.put()
    return await delivery


@pytest.mark.parametrize(
    "way",
    [
        _in_a_task,
        _in_gather,
        _in_wait_for,
        _in_a_callback,
        _in_a_task_that_ends_at_once,
        _in_a_task_cancelled_afterwards,
    ],
)
async def test_the_first_put_may_come_from_any_task(way: Way) -> None:
    async with LocalKinesis({STREAM: 2}) as service:
        async with Producer(config(service.endpoint_url)) as producer:
            books = Books(producer)
            await asyncio.wait_for(way(books), PATIENCE_SECONDS)
        assert set(books.outcomes()) == {""}
        assert books.balance(service.fake).duplicates == 0


async def test_a_producer_may_be_entered_and_left_by_hand_in_one_task_and_used_in_others() -> None:
    async with LocalKinesis({STREAM: 2}) as service:
        producer = await Producer(config(service.endpoint_url)).__aenter__()
        books = Books(producer)
        await asyncio.gather(*(_put_and_wait(books) for _ in range(10)))
        await asyncio.create_task(_closing(producer))
        await producer.__aexit__(None, None, None)
        assert books.outcomes() == {"": 10}
        assert books.balance(service.fake).duplicates == 0


async def _closing(producer: Producer) -> None:
    await producer.close()
