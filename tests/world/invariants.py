"""What must be true of a producer after all faults: each function returns the sentences that are false."""

import asyncio
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from kpl_core import Config, Delivery, Producer, ProducerReport, RecordResult, UserRecord
from kpl_core.options.config import Consumer
from kpl_core.testing import FakeKinesis
from tests.support.consumers import read_as, read_everything

SHOWN = 3
CONSUMERS: Mapping[Consumer, str] = {
    "kcl": "a KCL",
    "per_user_record": "a consumer that looks at each user record",
    "range_blind": "a consumer that takes everything",
}
# When nothing has been answered for so long, and so many requests have failed.
OUTAGE_SECONDS, OUTAGE_REQUESTS = 5.0, 10
# With ordering per key, the records of one key leave one after the other.
STALLED_SECONDS = 60.0


class Run(NamedTuple):
    """What a story did: faults, simulated seconds, records, requests to Kinesis, and the sentences that are false.

    `steps` and `trace` are those of its loop (`WorldLoop.trace`).
    """

    faults: list[str]
    seconds: float
    records: int
    requests: int
    outcomes: Counter[str]
    false: list[str]
    steps: int
    trace: int


class Put:
    """One record that a client puts, and what it heard: a delivery, or None if it was refused."""

    __slots__ = ("data", "delivery", "flow", "is_refused", "key", "number", "tier")

    def __init__(self, number: int, key: str, size: int, tier: Any, flow: str | None) -> None:
        self.number, self.key, self.tier, self.flow = number, key, tier, flow
        self.data = f"{number}".encode().ljust(size, b".")
        self.delivery: Delivery | None = None
        self.is_refused = False

    def arguments(self) -> dict[str, Any]:
        return {"partition_key": self.key, "data": self.data, "tier": self.tier, "flow": self.flow}

    def record(self) -> UserRecord:
        return UserRecord(self.key, self.data, None, self.flow, self.tier)


class Ledger:
    """All records that clients made, in order."""

    def __init__(self) -> None:
        self.puts: list[Put] = []
        self.accepted_count = 0

    def made(self, key: str, size: int, *, tier: Any = "normal", flow: str | None = None) -> Put:
        self.puts.append(Put(len(self.puts), key, size, tier, flow))
        return self.puts[-1]

    def accepted(self, put: Put, delivery: Delivery) -> None:
        put.delivery = delivery
        self.accepted_count += 1

    def refused(self, put: Put) -> None:
        put.is_refused = True

    def with_results(self) -> Iterator[tuple[Put, RecordResult]]:
        """Yield the accepted records that have a result."""
        for put in self.puts:
            if put.delivery is not None and (result := put.delivery.peek()) is not None:
                yield put, result

    def results(self) -> list[RecordResult]:
        return [result for _, result in self.with_results()]

    def doubled(self, kinesis: FakeKinesis, stream: str, now: float, consumer: Consumer = "kcl") -> bool:
        """Return True if a consumer gets a record twice."""
        reads = Counter(read.data for read in read_as(consumer, kinesis, stream, now=now))
        return any(count > 1 for count in reads.values())


def shown(items: Iterable[object]) -> str:
    """Return the first of some items, and how many there are."""
    found = list(items)
    return f"{len(found)}, such as {', '.join(map(str, found[:SHOWN]))}"


def bounded(report: ProducerReport, config: Config) -> list[str]:
    """The producer holds no more records than its options say, at every moment."""
    most = config.max_outstanding_records
    return [] if report.buffered <= most else [f"{report.buffered} records buffered, max_outstanding_records is {most}"]


def outage_is_said(producer: Producer, failed_seconds: float, failed_requests: int) -> list[str]:
    """While every request fails, the breaker of the stream opens, and the producer is not ready while it is open."""
    if producer.config.breaker is None or failed_seconds < OUTAGE_SECONDS or failed_requests < OUTAGE_REQUESTS:
        return []
    states = [breaker.known_state for (_, shard), breaker in producer.breakers().items() if not shard]
    if "closed" in states:
        return [f"the stream's breaker is closed after {failed_requests} failures in {failed_seconds:.0f} s"]
    return [] if "open" not in states or producer.unready() else ["the breaker is open, and the producer is ready"]


def conserved(report: ProducerReport, ledger: Ledger) -> list[str]:
    """Every accepted record is in one place, at every moment."""
    there = report.delivered + report.failed_total + report.spooled + report.dead_lettered + report.buffered
    false = [] if report.accepted == there else [f"{report.accepted} accepted, {there} there: {report}"]
    if not ledger.accepted_count <= report.accepted <= len(ledger.puts):
        false.append(f"{ledger.accepted_count} puts returned, {report.accepted} accepted")
    return false


async def drained(producer: Producer) -> list[str]:
    """Without a fault everything leaves the buffer and the spool, and something leaves in every minute."""
    loop, spool = asyncio.get_running_loop(), producer.spool
    left, since = 0, loop.time()
    while there := producer.report().buffered + (0 if spool is None else spool.statistics().records):
        if there != left:
            left, since = there, loop.time()
        elif loop.time() > since + STALLED_SECONDS:
            return [f"not drained: {producer.report()}, {None if spool is None else spool.statistics()}"]
        await asyncio.sleep(0.5)
    return []


def one_result_each(ledger: Ledger) -> list[str]:
    """Every accepted record has a result, and every put has returned."""
    open_puts = [put.number for put in ledger.puts if put.delivery is None and not put.is_refused]
    without = [put.number for put in ledger.puts if put.delivery is not None and put.delivery.peek() is None]
    return [f"{name}: {shown(found)}" for name, found in (("not returned", open_puts), ("no result", without)) if found]


def report_equals_results(ledger: Ledger, report: ProducerReport) -> list[str]:
    """The counts of the report are those of the results."""
    failed = Counter(result.error_code or "" for result in ledger.results() if not result.successful)
    delivered = sum(result.successful for result in ledger.results())
    is_equal = (report.accepted, report.delivered, dict(report.failed), report.buffered, report.buffered_bytes) == (
        ledger.accepted_count, delivered, dict(failed), 0, 0,
    )  # fmt: skip
    return [] if is_equal else [f"the report says {report}, the results {delivered} delivered, {dict(failed)} failed"]


def delivered_is_stored(
    ledger: Ledger, kinesis: FakeKinesis, stream: str, now: float, consumer: Consumer = "kcl"
) -> list[str]:
    """A delivered record is where its result says and reaches its consumer; one that was refused is nowhere."""
    places: dict[bytes, set[tuple[str, str]]] = {}
    for read in read_everything(kinesis, stream):
        places.setdefault(read.data, set()).add((read.shard_id, read.sequence_number))
    missing = [
        put.number
        for put, result in ledger.with_results()
        if result.successful and (result.shard_id, result.sequence_number) not in places.get(put.data, set())
    ]
    kept = {read.data for read in read_as(consumer, kinesis, stream, now=now)}
    dropped = [put.number for put, result in ledger.with_results() if result.successful and put.data not in kept]
    stored = [put.number for put in ledger.puts if put.is_refused and put.data in places]
    found = (
        ("delivered and not stored", missing),
        (f"delivered and dropped by {CONSUMERS[consumer]}", dropped),
        ("refused and stored", stored),
    )
    return [f"{name}: {shown(numbers)}" for name, numbers in found if numbers]


def in_order(
    ledger: Ledger,
    kinesis: FakeKinesis,
    stream: str,
    now: float,
    consumer: Consumer = "kcl",
    *,
    among: Container[bytes] | None = None,
) -> list[str]:
    """With ordering per key a consumer first sees the records of a key in order, of those `among` these.

    One that takes everything finds a record also in the wrong half of a shard that was split, and reads halves at once.
    """
    keys = {put.data: (put.key, put.number) for put in ledger.puts}
    latest: dict[tuple[str, str], int] = {}
    seen: set[bytes] = set()
    late: list[str] = []
    for read in sorted(read_as(consumer, kinesis, stream, now=now), key=lambda read: int(read.sequence_number)):
        key, number = keys[read.data]
        if read.data not in seen and (among is None or read.data in among):
            seen.add(read.data)
            place = (key, read.shard_id if consumer == "range_blind" else "")
            if number < latest.get(place, -1):
                late.append(f"{number} after {latest[place]} of {key!r}")
            latest[place] = max(number, latest.get(place, -1))
    return [f"out of order: {shown(late)}"] if late else []


def violations(
    ledger: Ledger,
    report: ProducerReport,
    kinesis: FakeKinesis,
    stream: str,
    config: Config,
    last: list[Put],
    *,
    now: float,
) -> list[str]:
    """Return what is false after a close. `last` are the records that were put when no fault was left."""
    false = [
        *one_result_each(ledger),
        *report_equals_results(ledger, report),
        *delivered_is_stored(ledger, kinesis, stream, now, config.consumer),
    ]
    if config.ordering == "per_key":
        false += in_order(ledger, kinesis, stream, now, config.consumer)
    failed = [put.number for put in last if put.delivery is None or not put.delivery.result().successful]
    if failed:
        false.append(f"failed after the last fault: {shown(failed)}")
    return false
