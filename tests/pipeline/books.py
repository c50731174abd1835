"""A retrier with everything around it, and the answers it may get."""

from typing import Any, Literal

from kpl_core.options.config import Config
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.ledger import Ledger
from kpl_core.pipeline.retrier import Retrier, Retries
from kpl_core.pipeline.shard_map import ShardMap
from kpl_core.records.kinesis_record import KinesisRecord
from kpl_core.records.put_records import PutRecordsEntry, PutRecordsRequest, RequestFailure
from kpl_core.records.record_result import Attempt, RecordResult
from kpl_core.records.user_record import UserRecord
from tests.support.material import deliveries_of, even_shards, keys_in, kinesis_record, shard_id, split

Mode = Literal["kcl", "per_user_record", "range_blind", "kpl_compatible"]
OURS: tuple[Mode, ...] = ("kcl", "per_user_record", "range_blind")
EVERY: tuple[Mode, ...] = (*OURS, "kpl_compatible")
BOTH: tuple[Mode, ...] = ("kcl", "kpl_compatible")

THROTTLED = "ProvisionedThroughputExceededException"
INCURABLE = [
    "AccessDeniedException",
    "ResourceNotFoundException",
    "InvalidArgumentException",
    "UnrecognizedClientException",
    "InvalidSignatureException",
    "KMSDisabledException",
    "KMSAccessDeniedException",
    "KMSNotFoundException",
]
CURABLE = [
    "KMSThrottlingException",
    "LimitExceededException",
    "InternalFailure",
    "ServiceUnavailable",
    "Internal",
    "RecordCountMismatch",
    "ExpiredTokenException",
]


# One shard that was split, and keys of its two children.
PARENT = even_shards(1)
CHILDREN = split(PARENT, shard_id(0))
LOWER, UPPER = (keys_in(child, 8) for child in CHILDREN)


class _WatchedMap(ShardMap):
    """A shard map that notes when refreshes were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.refreshes: list[float] = []

    def invalidate(self, *, seen_at: float) -> None:
        self.refreshes.append(seen_at)
        super().invalidate(seen_at=seen_at)


class Books:
    """A retrier with everything around it, for one stream whose map has one shard, split or not."""

    def __init__(self, *, chance: float = 0.5, **options: Any) -> None:
        mode = options.pop("mode", "kcl")
        self.config = Config.kpl_compatible(**options) if mode == "kpl_compatible" else Config(consumer=mode, **options)
        self.buffer_limit = BufferLimit(max_records=1_000, max_bytes=10**9)
        self.ledger = Ledger("s", self.buffer_limit)
        self.generations = self.ledger.generations
        self.shard_map = _WatchedMap()
        self.shard_map.update(PARENT, 0.0)
        self.refreshes = self.shard_map.refreshes
        self.retrier = Retrier(self.config, self.shard_map, self.ledger, chance=lambda: chance)

    def record(self, *keys: str, arrivals: tuple[float, ...] = (), **fields: Any) -> KinesisRecord:
        record = kinesis_record(
            *(UserRecord(key, b"data of " + key.encode()) for key in keys or LOWER[:1]),
            arrivals=arrivals,
            **{"predicted_shard": shard_id(0), **fields},
        )
        for size in [record.user_bytes, *[0] * (len(record.arrivals) - 1)]:
            self.buffer_limit.reserve(size_bytes=size)
        self.generations.retain(record.generation)
        return record

    def answer(
        self,
        records: KinesisRecord | list[KinesisRecord],
        answer: RequestFailure | PutRecordsEntry | list[PutRecordsEntry],
        *,
        started_at: float = 1.0,
        now: float = 2.0,
    ) -> Retries:
        sent = records if isinstance(records, list) else [records]
        entries = [answer] if isinstance(answer, PutRecordsEntry) else answer
        return self.retrier.answered(PutRecordsRequest("s", sent, started_at=started_at), entries, now)

    @property
    def is_closed(self) -> bool:
        """Nothing outstanding, nothing held, no flush would wait."""
        outstanding = self.buffer_limit.outstanding_records, self.buffer_limit.outstanding_bytes
        return outstanding == (0, 0) and self.generations.is_finished(self.generations.current)


def stored(shard: int = 0, number: str = "49") -> PutRecordsEntry:
    return PutRecordsEntry(sequence_number=number, shard_id=shard_id(shard))


def refused(code: str = THROTTLED, message: str = "Rate exceeded") -> PutRecordsEntry:
    return PutRecordsEntry(error_code=code, error_message=message)


def results(record: KinesisRecord) -> list[RecordResult | None]:
    return [delivery.peek() for delivery in deliveries_of(record)]


def failure(code: str, message: str, *, started_at: float = 1.0, ended_at: float = 2.0) -> Attempt:
    return Attempt(False, code, message, started_at, ended_at)


SUCCESS = Attempt(True, None, None, 1.0, 2.0)


def past(record: KinesisRecord, index: int = 0) -> tuple[Attempt, ...]:
    """All attempts of one user record so far."""
    history = record.outcome.history_of(index)
    return () if history is None else history.to_tuple()
