"""The producer over a bad network: for every fault, nothing put is lost or stays outstanding."""

import asyncio

import pytest

from kpl_core import Producer
from kpl_integrations.local_kinesis import LocalKinesis
from tests.faults.books import STREAM, Books
from tests.faults.scene import config
from tests.support.tcp_proxy import TcpProxy, Weather
from tests.support.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.anyio
# Of one answer: below it no status is read, above it a part of the body may be.
SOME_BYTES = (0, 1, 100, 400)
RECORDS = 300
# Of each, as `Books` makes them.
SIZE = 20


def options(**more: float) -> dict[str, float]:
    return {"request_timeout_ms": 400, "connect_timeout_ms": 400, "max_in_flight_requests": 4, **more}


@pytest.mark.parametrize("passing", SOME_BYTES)
async def test_requests_reset_on_their_way_are_sent_again_and_stored_once(passing: int) -> None:
    async with LocalKinesis({STREAM: 2}) as service, TcpProxy(service.endpoint_url) as network:
        async with Producer(config(network.endpoint_url, **options())) as producer:
            books = Books(producer)
            books.put_nowait()
            await producer.flush()
            network.to_service = Weather(reset_after_bytes=passing, times=4)
            books.put_nowait(RECORDS)
        assert network.resets
        assert books.outcomes() == {"": RECORDS + 1}
        assert books.balance(service.fake).duplicates == 0


@pytest.mark.parametrize("passing", SOME_BYTES)
async def test_answers_reset_on_their_way_cost_a_copy_each_and_nothing_else(passing: int) -> None:
    async with LocalKinesis({STREAM: 2}) as service, TcpProxy(service.endpoint_url) as network:
        async with Producer(config(network.endpoint_url, **options())) as producer:
            books = Books(producer)
            books.put_nowait()
            await producer.flush()
            network.to_client = Weather(reset_after_bytes=passing, times=4)
            books.put_nowait(RECORDS)
        assert books.outcomes() == {"": RECORDS + 1}
        again = sum(len(result.attempts) - 1 for result in books.results())
        assert 0 < books.balance(service.fake).duplicates <= again


@pytest.mark.parametrize("passing", SOME_BYTES)
async def test_answers_that_end_in_the_middle_are_no_answers(passing: int) -> None:
    async with LocalKinesis({STREAM: 2}) as service, TcpProxy(service.endpoint_url) as network:
        async with Producer(config(network.endpoint_url, **options())) as producer:
            books = Books(producer)
            books.put_nowait()
            await producer.flush()
            network.to_client = Weather(close_after_bytes=passing, times=3)
            books.put_nowait(RECORDS)
        assert books.outcomes() == {"": RECORDS + 1}
        again = sum(len(result.attempts) - 1 for result in books.results())
        assert 0 < books.balance(service.fake).duplicates <= again


async def test_a_black_hole_is_left_by_the_timeout() -> None:
    async with LocalKinesis({STREAM: 2}) as service, TcpProxy(service.endpoint_url) as network:
        async with Producer(config(network.endpoint_url, **options())) as producer:
            books = Books(producer)
            books.put_nowait()
            await producer.flush()
            network.to_service = Weather(black_hole=True)
            books.put_nowait(RECORDS)
            # All of it, in base64.
            await until(lambda: network.swallowed_bytes > RECORDS * SIZE * 4 // 3)
            assert books.pending == RECORDS
            network.heal()
        assert books.outcomes() == {"": RECORDS + 1}
        assert {result.attempts[0].error_code for result in books.results()[1:]} == {"Internal"}
        books.balance(service.fake)


@pytest.mark.long
async def test_a_stall_shorter_than_the_timeout_is_only_slow() -> None:
    async with LocalKinesis({STREAM: 2}) as service, TcpProxy(service.endpoint_url) as network:
        async with Producer(config(network.endpoint_url, request_timeout_ms=PATIENCE_SECONDS * 1_000)) as producer:
            books = Books(producer)
            books.put_nowait()
            await producer.flush()
            network.to_service = Weather(stalled=True)
            books.put_nowait(RECORDS)
            await asyncio.sleep(0.3)
            assert books.pending == RECORDS
            network.heal()
        assert books.outcomes() == {"": RECORDS + 1}
        assert all(len(result.attempts) == 1 for result in books.results())
        assert books.balance(service.fake).duplicates == 0


@pytest.mark.long
async def test_a_long_narrow_line_carries_everything() -> None:
    async with LocalKinesis({STREAM: 2}) as service, TcpProxy(service.endpoint_url) as network:
        network.to_service = Weather(latency_seconds=0.05, bytes_per_second=300_000)
        network.to_client = Weather(latency_seconds=0.05)
        async with Producer(config(network.endpoint_url, request_timeout_ms=PATIENCE_SECONDS * 1_000)) as producer:
            books = Books(producer)
            books.put_nowait(300, size=1_000)
        assert books.outcomes() == {"": 300}
        assert all(len(result.attempts) == 1 for result in books.results())
        assert books.balance(service.fake).duplicates == 0


async def test_a_line_that_breaks_again_and_again_delivers_in_the_end() -> None:
    async with LocalKinesis({STREAM: 2}) as service, TcpProxy(service.endpoint_url) as network:
        async with Producer(config(network.endpoint_url, **options())) as producer:
            books = Books(producer)
            books.put_nowait()
            await producer.flush()
            for round_number in range(10):
                network.refusing = round_number % 3 == 0
                network.to_service = Weather(reset_after_bytes=round_number * 50, times=2)
                network.to_client = Weather(close_after_bytes=round_number * 30, times=1)
                books.put_nowait(50)
                await asyncio.sleep(0.02)
            network.heal()
        assert books.outcomes() == {"": 501}
        books.balance(service.fake)
