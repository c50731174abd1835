"""What a test put, what became of it, and the proof that nothing is missing.

Conservation, checked after every fault: what was reported delivered is read by a consumer with the
KCL's rule; what is read was put; what was reported failed was not stored, unless the producer could not know;
`accepted = delivered + failed + buffered`; and nothing stays reserved.
"""

from collections import Counter
from dataclasses import dataclass, field

from kpl_core import Delivery, Producer, RecordResult
from kpl_core.testing import FakeKinesis
from tests.support.consumers import Identity, Reading, read_stream

STREAM = "orders"
# Attempts after which a record may be stored all the same: no answer came, or an unreadable one.
PERHAPS_STORED = frozenset({"Unknown", "Internal", "RecordCountMismatch"})


@dataclass
class Books:
    """The user records a test put into one stream of one producer, numbered, and their deliveries."""

    producer: Producer
    stream: str = STREAM
    deliveries: dict[Identity, Delivery] = field(default_factory=dict)
    # Put by a task that was cancelled before it got the deliveries.
    unclaimed: set[Identity] = field(default_factory=set)
    # Other books of the same stream have these.
    name: str = "user-record"
    _numbers: int = 0

    def next_record(self, *, key: str | None = None, size: int = 20) -> Identity:
        number = self._numbers
        self._numbers += 1
        data = f"{self.name}-{number}".encode()
        return key or f"{self.name}-key-{number}", data.ljust(size, b".")

    def put_nowait(self, count: int = 1, *, key: str | None = None, size: int = 20) -> list[Delivery]:
        return [self._put_one(*self.next_record(key=key, size=size)) for _ in range(count)]

    def _put_one(self, key: str, data: bytes) -> Delivery:
        delivery = self.producer.put_nowait(self.stream, partition_key=key, data=data)
        self.deliveries[key, data] = delivery
        return delivery

    async def put(self, count: int = 1, *, key: str | None = None, size: int = 20) -> list[Delivery]:
        """Put, waiting for room, one after the other."""
        deliveries = []
        for _ in range(count):
            identity = self.next_record(key=key, size=size)
            delivery = await self.producer.put(self.stream, partition_key=identity[0], data=identity[1])
            self.deliveries[identity] = delivery
            deliveries.append(delivery)
        return deliveries

    async def put_many(self, count: int) -> list[Delivery]:
        records = [self.next_record() for _ in range(count)]
        self.unclaimed.update(records)
        deliveries = list(await self.producer.put_many(self.stream, records))
        self.unclaimed.difference_update(records)
        self.deliveries.update(zip(records, deliveries, strict=True))
        return deliveries

    @property
    def pending(self) -> int:
        return sum(not delivery.done for delivery in self.deliveries.values())

    def results(self) -> list[RecordResult]:
        return [delivery.result() for delivery in self.deliveries.values()]

    def outcomes(self) -> Counter[str]:
        """Return how many have which last error code; "" stands for delivered."""
        return Counter(result.error_code or "" for result in self.results())

    def balance(self, fake: FakeKinesis, *, now: float = 0.0) -> Reading:
        """Assert conservation for these books; return what the consumer found."""
        assert_closed(self.producer)
        reading = read_stream(fake, self.stream, now=now)
        mine = {identity for identity in reading.kept if identity[1].startswith(f"{self.name}-".encode())}
        foreign = mine - self.deliveries.keys() - self.unclaimed
        assert not foreign, f"read, but never put: {sorted(foreign)[:3]}"
        lost = [identity for identity, delivery in self.deliveries.items() if _is_lost(delivery, identity, reading)]
        assert not lost, f"{len(lost)} reported delivered, but not read: {lost[:3]}"
        false = [
            identity
            for identity, delivery in self.deliveries.items()
            if _is_not_stored(delivery.result()) and identity in reading.kept
        ]
        assert not false, f"{len(false)} reported failed, but read: {false[:3]}"
        return reading


def _is_lost(delivery: Delivery, identity: Identity, reading: Reading) -> bool:
    return delivery.result().successful and identity not in reading.kept


def _is_not_stored(result: RecordResult) -> bool:
    return not result.successful and not any(attempt.error_code in PERHAPS_STORED for attempt in result.attempts)


def assert_closed(producer: Producer) -> None:
    """Assert that every user record accepted is accounted for, and that nothing stays reserved."""
    report = producer.report()
    assert report.buffered == 0, f"{report}"
    assert report.accepted == report.delivered + report.failed_total, f"{report}"
    limit = producer.buffer_limit
    assert (limit.outstanding_records, limit.outstanding_bytes) == (0, 0), f"{limit!r}"
