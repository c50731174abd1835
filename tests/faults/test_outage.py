"""Ten seconds of answers 500, five of refused connections, then health again: in virtual time."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import pytest

from kpl_core import BreakerPolicy, Config, FairnessPolicy, Producer
from kpl_core.pipeline.shard_map import Shard
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsRequest, RequestFailure
from kpl_core.testing import ErrorAnswer, FakeKinesis, Hang, ResetBeforeCommit, SplitDuringRequest, When
from kpl_core.testing.fake_transport import FakeTransport
from tests.faults.books import STREAM, Books
from tests.support.virtual_time import Backend

pytestmark = pytest.mark.anyio
BEGINS_AT, REFUSES_AT, HEALS_AT = 1.0, 11.0, 16.0


@pytest.fixture
def anyio_backend(virtual_time_backend: Backend) -> Backend:
    return virtual_time_backend


class Line(FakeTransport):
    """Gives up a request after 6 s, as the real transport does, and counts listings."""

    def __init__(self, kinesis: FakeKinesis) -> None:
        super().__init__(kinesis, latency_seconds=0.01)
        self.listings = 0

    def sent_between(self, starts_at: float, ends_at: float) -> int:
        return sum(starts_at <= request.started_at < ends_at for request in self.requests)

    async def put_records(self, request: PutRecordsRequest) -> PutRecordsAnswer:
        with anyio.move_on_after(6.0):
            return await super().put_records(request)
        return RequestFailure("Internal", "timed out")

    async def list_shards(self, stream: str) -> Sequence[Shard] | RequestFailure:
        self.listings += 1
        return await super().list_shards(stream)


def _errors(kinesis: FakeKinesis) -> None:
    kinesis.faults.add(ErrorAnswer("InternalFailure"), When(starts_at=BEGINS_AT, ends_at=REFUSES_AT))
    kinesis.faults.add(ResetBeforeCommit(), When(starts_at=REFUSES_AT, ends_at=HEALS_AT))


def _errors_and_a_split(kinesis: FakeKinesis) -> None:
    _errors(kinesis)
    kinesis.faults.add(SplitDuringRequest(), When(operation="PutRecords", starts_at=HEALS_AT, times=1))


Trouble = Callable[[FakeKinesis], None]


@pytest.mark.parametrize(("trouble", "listings"), [(_errors, 1), (_errors_and_a_split, 2)])
async def test_an_outage_of_15_seconds_loses_nothing_and_asks_little_meanwhile(trouble: Trouble, listings: int) -> None:
    kinesis = FakeKinesis({STREAM: 4})
    trouble(kinesis)
    transport = Line(kinesis)
    async with Producer(Config(region="us-east-1"), transport=transport) as producer:
        books = Books(producer)
        pending = 0
        while anyio.current_time() < HEALS_AT:
            books.put_nowait(20)
            pending = books.pending
            await anyio.sleep(0.1)
        healed_at = anyio.current_time()
        # Counted while nothing can leave yet: the last sleep may end after the healing, and a retry be quick.
        assert pending > 2_500
        await producer.flush()
        # A backoff is 5 s at most, and the time to live is 30.
        assert anyio.current_time() - healed_at < 6.0
        assert producer.buffer_limit.outstanding_records == 0
        assert len(kinesis.open_shards(STREAM)) == 3 + listings
    assert set(books.outcomes()) == {""}
    assert transport.listings == listings
    # One probe in each backoff; what waits meanwhile is not sent for nothing.
    assert transport.sent_between(BEGINS_AT + 0.5, HEALS_AT) < 40
    assert books.balance(kinesis).duplicates == 0


MODES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "in order": {"ordering": "per_key"},
    "single records": {"aggregation_enabled": False},
    "with a breaker": {"breaker": BreakerPolicy()},
    "with flows": {"fairness": FairnessPolicy()},
}


@pytest.mark.parametrize("mode", MODES)
async def test_after_an_outage_everything_is_delivered_soon_and_in_the_order_promised(mode: str) -> None:
    kinesis = FakeKinesis({STREAM: 2})
    _errors(kinesis)
    transport = Line(kinesis)
    async with Producer(Config(region="us-east-1", **MODES[mode]), transport=transport) as producer:
        books = Books(producer)
        while anyio.current_time() < HEALS_AT:
            for number in range(5):
                books.put_nowait(2, key=f"key-{number}")
            await anyio.sleep(0.1)
        healed_at = anyio.current_time()
        await producer.flush()
        assert anyio.current_time() - healed_at < 10.0
        assert transport.sent_between(BEGINS_AT + 0.5, HEALS_AT) < 80
    assert set(books.outcomes()) == {""}
    reading = books.balance(kinesis)
    if mode == "in order":
        put: dict[str, list[bytes]] = defaultdict(list)
        for key, data in books.deliveries:
            put[key].append(data)
        read: dict[str, list[bytes]] = defaultdict(list)
        for key, data in reading.kept:
            read[key].append(data)
        assert read == put


async def test_the_end_of_a_black_hole_is_found_in_the_longest_backoff_not_after_a_timeout() -> None:
    kinesis = FakeKinesis({STREAM: 1})
    kinesis.faults.add(Hang(), When(operation="PutRecords", starts_at=BEGINS_AT, ends_at=HEALS_AT))
    config = Config(region="us-east-1", retry_backoff_cap_ms=2_000, record_ttl_ms=60_000)
    async with Producer(config, transport=Line(kinesis)) as producer:
        books = Books(producer)
        while anyio.current_time() < HEALS_AT:
            books.put_nowait(10)
            await anyio.sleep(0.1)
        healed_at = anyio.current_time()
        (fresh,) = books.put_nowait(1)
        assert (await fresh).successful
        assert anyio.current_time() - healed_at < 2.5
        await producer.flush()
    assert set(books.outcomes()) == {""}
    books.balance(kinesis)


async def test_a_close_that_runs_out_of_time_tries_once_more_instead_of_waiting_for_a_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("random.random", lambda: 0.5)
    kinesis = FakeKinesis({STREAM: 1})
    kinesis.faults.add(ErrorAnswer("ServiceUnavailable"), When(operation="PutRecords", ends_at=20.0))
    config = Config(region="us-east-1", retry_backoff_base_ms=1e6, retry_backoff_cap_ms=1e6, record_ttl_ms=1e9)
    async with Producer(config, transport=Line(kinesis)) as producer:
        books = Books(producer)
        for _ in range(2):
            books.put_nowait(1)
            await anyio.sleep(1.0)
        books.put_nowait(10)
        await anyio.sleep(20.0)
        report = await producer.close(timeout=5.0)
    # Two failed and back off for very long; what was not sent since then is sent when there is no later.
    assert (report.delivered, dict(report.failed)) == (10, {"Shutdown": 2})


async def test_an_outage_longer_than_the_time_to_live_fails_with_its_reason_and_only_then() -> None:
    kinesis = FakeKinesis({STREAM: 4})
    kinesis.faults.add(ErrorAnswer("ServiceUnavailable"), When(operation="PutRecords", starts_at=BEGINS_AT))
    async with Producer(Config(region="us-east-1"), transport=Line(kinesis)) as producer:
        books = Books(producer)
        books.put_nowait(100)
        await producer.flush()
        await anyio.sleep(BEGINS_AT)
        put_at = anyio.current_time()
        for delivery in books.put_nowait(100):
            result = await delivery
            assert [attempt.error_code for attempt in result.attempts[-2:]] == ["ServiceUnavailable", "Expired"]
        assert 30.0 <= anyio.current_time() - put_at < 31.0
    assert books.outcomes() == {"": 100, "Expired": 100}
    books.balance(kinesis)


@pytest.mark.long
async def test_after_hanging_requests_a_stream_is_not_flooded_with_what_was_admitted_meanwhile() -> None:
    """A limiter that goes on admitting while no request can leave would send all of it at once in the end."""
    kinesis = FakeKinesis({STREAM: 1})
    kinesis.faults.add(Hang(), When(operation="PutRecords", starts_at=BEGINS_AT, ends_at=HEALS_AT))
    config = Config(region="us-east-1", aggregation_enabled=False, max_in_flight_requests=4, record_ttl_ms=120_000)
    async with Producer(config, transport=Line(kinesis)) as producer:
        books = Books(producer)
        while anyio.current_time() < HEALS_AT:
            books.put_nowait(90)
            await anyio.sleep(0.1)
        await producer.flush()
    assert set(books.outcomes()) == {""}
    statistics = kinesis.statistics(STREAM)
    assert statistics.records_throttled < 0.05 * statistics.records_stored
    books.balance(kinesis)
