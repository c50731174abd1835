"""What every consumer returns, and the rule by which one of them drops records."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from tests.interop.streams import KinesisRecord, Shard, hash_key


@dataclass(frozen=True)
class ReadUserRecord:
    """A user record as a consumer returned it.

    Attributes:
        explicit_hash_key: None if there was none, or the consumer does not return it.
        aggregated: whether it was in an aggregated record; None if the consumer does not say.
        shard_id: the shard it was read from.
        sequence_number: of the Kinesis record that carried it.
    """

    partition_key: str
    explicit_hash_key: str | None
    data: bytes
    aggregated: bool | None
    shard_id: str
    sequence_number: str

    def lies_in(self, shard: Shard) -> bool:
        return shard.takes(hash_key(self.partition_key, self.explicit_hash_key))


Deaggregate = Callable[[Sequence[KinesisRecord]], list[ReadUserRecord]]


def as_the_kcl_keeps_them(read: Iterable[ReadUserRecord], shards: Iterable[Shard]) -> list[ReadUserRecord]:
    """Drop every aggregated record with a user record outside the shard it was read from.

    This is the rule of the KCL (`AggregatorUtil.deaggregate`), applied to what a consumer without
    it read; test_kcl.py shows the KCL itself doing so. Single records are always kept.
    """
    by_id: Mapping[str, Shard] = {shard.shard_id: shard for shard in shards}
    kept: list[ReadUserRecord] = []
    for _, group in groupby(read, key=lambda record: (record.shard_id, record.sequence_number)):
        user_records = list(group)
        if all(not record.aggregated or record.lies_in(by_id[record.shard_id]) for record in user_records):
            kept += user_records
    return kept
