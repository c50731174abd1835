"""What was put, read back and compared, for each emulator and consumer: the proof that all were used."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.interop.consumers.user_records import ReadUserRecord


@dataclass(frozen=True)
class PutUserRecord:
    """A user record as a test put it."""

    partition_key: str
    data: bytes
    explicit_hash_key: str | None = None

    @property
    def identity(self) -> tuple[str, bytes]:
        return self.partition_key, self.data


@dataclass
class Row:
    """The counts of one emulator read by one consumer."""

    tests: int = 0
    put: int = 0
    read: int = 0
    compared_bytes: int = 0
    duplicates: int = 0
    misplaced: int = 0


@dataclass
class Ledger:
    """All counts of one run, and the reason for each part that was not used."""

    rows: dict[tuple[str, str], Row] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def compare(
        self,
        emulator: str,
        consumer: str,
        *,
        put: Sequence[PutUserRecord],
        read: Sequence[ReadUserRecord],
        duplicates_allowed: bool = False,
        misplaced: int = 0,
    ) -> int:
        """Assert that `read` is what was `put`, byte for byte, and return how many came more than once.

        Every record has to come back as often as it was put, with its explicit hash key where it
        had one and the consumer tells; nothing else may come. With `duplicates_allowed` it may
        come more often: at least once is what Kinesis promises. `misplaced` counts those of the stream
        that the KCL's rule took out of `read` before.
        """
        expected = Counter(record.identity for record in put)
        found = Counter((record.partition_key, record.data) for record in read)
        lost, surplus = expected - found, found - expected
        assert not lost, f"{lost.total()} of {len(put)} records lost between {emulator} and {consumer}: {_some(lost)}"
        foreign = Counter({identity: count for identity, count in surplus.items() if identity not in expected})
        assert not foreign, f"{consumer} read from {emulator} what nobody put: {_some(foreign)}"
        duplicates = surplus.total()
        assert duplicates_allowed or not duplicates, f"{consumer} read from {emulator} twice: {_some(surplus)}"
        _compare_explicit_hash_keys(put, read)

        row = self.rows.setdefault((emulator, consumer), Row())
        row.tests += 1
        row.put += len(put)
        row.read += len(read)
        row.compared_bytes += sum(len(record.partition_key.encode()) + len(record.data) for record in read)
        row.duplicates += duplicates
        row.misplaced += misplaced
        return duplicates

    def lines(self) -> Iterator[str]:
        """Yield the table printed at the end of a run."""
        form = "{:<14} {:<27} {:>6} {:>9} {:>9} {:>12} {:>11} {:>10}"
        yield form.format("emulator", "consumer", "tests", "put", "read", "bytes equal", "duplicates", "misplaced")
        for (emulator, consumer), row in sorted(self.rows.items()):
            counts = (row.tests, row.put, row.read, row.compared_bytes, row.duplicates, row.misplaced)
            yield form.format(emulator, consumer, *(f"{count:,}" for count in counts))
        for what, reason in self.skipped.items():
            yield f"NOT USED: {what}: {reason}"


def _compare_explicit_hash_keys(put: Sequence[PutUserRecord], read: Sequence[ReadUserRecord]) -> None:
    """Two consumers invent an explicit hash key where none was put, so only those put are compared."""
    expected: dict[tuple[str, bytes], set[str | None]] = {}
    for record in put:
        expected.setdefault(record.identity, set()).add(record.explicit_hash_key)
    for user_record in read:
        allowed = expected[user_record.partition_key, user_record.data]
        told = user_record.explicit_hash_key
        assert None in allowed or told in allowed or (told is None and not user_record.aggregated), (
            f"the explicit hash key of {user_record.partition_key!r} came back as {told}, put was {allowed}"
        )


def _some(records: "Counter[tuple[str, bytes]]") -> str:
    shown = [f"({key!r}, {data[:40]!r} of {len(data)} bytes) x {count}" for (key, data), count in records.items()]
    return ", ".join(shown[:3]) + (", ..." if len(shown) > 3 else "")
