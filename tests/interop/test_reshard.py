"""Shards split and merge while the producer puts: a consumer that drops misplaced aggregates loses no record."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

import pytest

from tests.interop.consumers.user_records import Deaggregate, as_the_kcl_keeps_them
from tests.interop.emulators import ABILITIES, Emulator
from tests.interop.ledger import Ledger, PutUserRecord
from tests.interop.material import numbered
from tests.interop.production import assert_all_delivered, assert_delivered_where_told, produce_during
from tests.interop.streams import Stream

NewStream = Callable[..., Stream]

LOT = 25


def lots(first: int = 1_000) -> Iterator[list[PutUserRecord]]:
    """Yield small batches of records endlessly, each record unique."""
    return (numbered(LOT, seed=seed) for seed in count(first))


def split_the_first(stream: Stream) -> None:
    stream.split(stream.open_shards()[0])


def split_all(stream: Stream) -> None:
    for shard in stream.open_shards():
        stream.split(shard)


def merge_the_first_two(stream: Stream) -> None:
    first, second, *_ = stream.open_shards()
    stream.merge(first, second)


def split_and_merge_again(stream: Stream) -> None:
    split_the_first(stream)
    merge_the_first_two(stream)


def double(stream: Stream) -> None:
    stream.update_shard_count(2 * len(stream.open_shards()))


def halve(stream: Stream) -> None:
    stream.update_shard_count(len(stream.open_shards()) // 2)


RESHARDING = [name for name, abilities in ABILITIES.items() if abilities.reshards]
SPLITS = {split_the_first, split_all, double}

CHANGES = [
    pytest.param(name, change, id=f"{name}-{change.__name__}")
    for name, abilities in ABILITIES.items()
    for change, possible in {
        split_the_first: abilities.reshards,
        split_all: abilities.reshards,
        merge_the_first_two: abilities.reshards,
        split_and_merge_again: abilities.reshards,
        double: abilities.update_shard_count,
        halve: abilities.update_shard_count,
    }.items()
    if possible
]


@pytest.mark.parametrize(("emulator", "change"), CHANGES, indirect=["emulator"])
def test_no_record_is_lost_during_resharding(
    emulator: Emulator,
    change: Callable[[Stream], None],
    new_stream: NewStream,
    deaggregators: dict[str, Deaggregate],
    ledger: Ledger,
) -> None:
    stream = new_stream(emulator, shards=4)
    before = stream.open_shards()

    put, results = produce_during(stream, partial(change, stream), lots())
    assert_all_delivered(put, results)

    assert stream.open_shards() != before
    kinesis_records = stream.read()
    for name, deaggregate in deaggregators.items():
        read = deaggregate(kinesis_records)
        kept = as_the_kcl_keeps_them(read, stream.shards())
        misplaced = len(read) - len(kept)
        duplicates = ledger.compare(
            str(emulator), name, put=put, read=kept, duplicates_allowed=True, misplaced=misplaced
        )
        # Otherwise the test proves nothing: after a split the old map must mix both halves.
        assert misplaced or change not in SPLITS
        assert_delivered_where_told(put, results, kept)
        # A record is duplicated only if a successful attempt was followed by another one.
        assert duplicates <= sum(len(result.attempts) - 1 for result in results)


@pytest.mark.parametrize("emulator", RESHARDING, indirect=True)
def test_a_consumer_that_ignores_hash_ranges_reads_each_record_once_during_resharding(
    emulator: Emulator, new_stream: NewStream, deaggregators: dict[str, Deaggregate], ledger: Ledger
) -> None:
    """Lambda and Firehose accept a misplaced aggregate, so sending it again would only duplicate it."""
    stream = new_stream(emulator, shards=2)

    put, results = produce_during(stream, partial(split_all, stream), lots(), consumer="range_blind")
    assert_all_delivered(put, results)

    kinesis_records = stream.read()
    for name, deaggregate in deaggregators.items():
        read = deaggregate(kinesis_records)
        assert len(as_the_kcl_keeps_them(read, stream.shards())) < len(read)
        ledger.compare(str(emulator), name, put=put, read=read)
        assert_delivered_where_told(put, results, read)


@pytest.mark.parametrize("emulator", RESHARDING, indirect=True)
def test_a_consumer_that_filters_single_records_loses_none_during_resharding(
    emulator: Emulator, new_stream: NewStream, deaggregators: dict[str, Deaggregate], ledger: Ledger
) -> None:
    stream = new_stream(emulator, shards=2)

    put, results = produce_during(stream, partial(split_all, stream), lots(), consumer="per_user_record")
    assert_all_delivered(put, results)

    shards = {shard.shard_id: shard for shard in stream.shards()}
    kinesis_records = stream.read()
    for name, deaggregate in deaggregators.items():
        read = deaggregate(kinesis_records)
        kept = [record for record in read if record.lies_in(shards[record.shard_id])]
        misplaced = len(read) - len(kept)
        assert misplaced
        ledger.compare(str(emulator), name, put=put, read=kept, duplicates_allowed=True, misplaced=misplaced)
        assert_delivered_where_told(put, results, kept)
