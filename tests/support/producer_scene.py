"""What a scenario of the driver is made of: a service, a producer, many puts, and the books that must close."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import anyio

from kpl_core import Config, Delivery, Producer, ProducerReport, RecordResult
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsRequest
from kpl_core.testing import FakeKinesis, ServiceLimits
from kpl_core.testing.fake_transport import FakeTransport
from tests.support.consumers import read_as_kcl, read_everything
from tests.support.material import even_shards, keys_in

STREAM = "orders"


class EndOfTheDriver(BaseException):
    """No failure of a request: what raises it ends the producer's tasks."""


class Watched(FakeTransport):
    """Counts how many requests are in flight at a time."""

    def __init__(self, kinesis: FakeKinesis, *, latency_seconds: float = 0.0) -> None:
        super().__init__(kinesis, latency_seconds=latency_seconds)
        self.in_flight = 0
        self.most_in_flight = 0

    async def put_records(self, request: PutRecordsRequest) -> PutRecordsAnswer:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await super().put_records(request)
        finally:
            self.in_flight -= 1


def service(
    shards: int = 1, *, latency_seconds: float = 0.01, streams: Mapping[str, int] | None = None, **options: Any
) -> Watched:
    """A transport to a fake service that throttles as the real one does."""
    return Watched(FakeKinesis(streams or {STREAM: shards}, **options), latency_seconds=latency_seconds)


def unmetered(shards: int = 1, *, latency_seconds: float = 0.01, **options: Any) -> Watched:
    """The same without limits: what the producer holds back is its own doing."""
    return service(shards, latency_seconds=latency_seconds, enforce_limits=False, **options)


def producer(transport: FakeTransport, **options: Any) -> Producer:
    return Producer(Config(**options), transport=transport)


def put(
    producer: Producer, count: int, *, stream: str = STREAM, size: int = 10, keys: Sequence[str] = ()
) -> list[Delivery]:
    """Put user records "0", "1", ... padded to `size`, keys in turn."""
    names = keys or [f"key {number}" for number in range(100)]
    return [
        producer.put_nowait(
            stream, partition_key=names[number % len(names)], data=str(number).encode().ljust(size, b".")
        )
        for number in range(count)
    ]


def key_of_each_shard(count: int) -> list[str]:
    """A partition key for each shard of a stream that has `count`."""
    return [keys_in(shard, 1)[0] for shard in even_shards(count)]


def results(deliveries: Iterable[Delivery]) -> list[RecordResult]:
    """All results; every delivery must have one."""
    return [delivery.result() for delivery in deliveries]


def reasons(deliveries: Iterable[Delivery]) -> Counter[str]:
    """How often which code ended a user record; "" is a success."""
    return Counter(result.error_code or "" for result in results(deliveries))


def assert_books_close(report: ProducerReport, deliveries: Sequence[Delivery]) -> None:
    """Everything accepted has its result, and the report says the same."""
    assert report.accepted == len(deliveries) == report.delivered + report.failed_total + report.buffered
    assert report.buffered == report.buffered_bytes == 0
    outcomes = reasons(deliveries)
    assert report.delivered == outcomes.pop("", 0)
    assert dict(report.failed) == dict(outcomes)


def stored(transport: FakeTransport, stream: str = STREAM) -> list[tuple[str, bytes]]:
    """Every user record a consumer gets, duplicates included."""
    return [(read.partition_key, read.data) for read in read_everything(transport.kinesis, stream)]


def seen_by_kcl(transport: FakeTransport, *, now: float, stream: str = STREAM) -> set[bytes]:
    return {read.data for read in read_as_kcl(transport.kinesis, stream, now=now)}


def sent_records(transport: FakeTransport) -> list[tuple[float, str | None, int]]:
    """Of each Kinesis record in each request: when it was sent, to which shard, and its size."""
    return [
        (request.started_at, record.predicted_shard, record.size_bytes)
        for request in transport.requests
        for record in request.records
    ]


def most_above_the_rate(sent: Iterable[tuple[float, float]], *, per_second: float) -> float:
    """The most by which any window of any length exceeds `per_second` times its length.

    At each instant the excess since the best start before it, as in Kadane's maximum subarray.
    """
    totals: dict[float, float] = {}
    for at, cost in sent:
        totals[at] = totals.get(at, 0.0) + cost
    instants = sorted(totals)
    gaps = [0.0, *(later - earlier for earlier, later in pairwise(instants))]
    excess = accumulate(
        zip(gaps, (totals[at] for at in instants), strict=True),
        lambda before, step: max(before - per_second * step[0], 0.0) + step[1],
        initial=0.0,
    )
    return max(excess)


# A tenth of the service, for scenarios that last many virtual seconds.
TENTH = ServiceLimits(records_per_second_per_shard=100.0, bytes_per_second_per_shard=104_857.6)
AT_A_TENTH: dict[str, Any] = {
    "rate_limit_records_per_sec_per_shard": 100.0,
    "rate_limit_bytes_per_sec_per_shard": 104_857.6,
}


async def know_shards(producer: Producer, *, stream: str = STREAM) -> None:
    """Put one user record and wait for it, so that the shard map is there for what follows."""
    put(producer, 1, stream=stream)
    await producer.flush()
    await anyio.sleep(1.0)
