"""The Java KCL: the consumer of most streams, and the one that drops whole aggregates."""

from collections.abc import Callable
from functools import partial

import pytest

from tests.interop.consumers import kcl as kcl_consumer, pypi
from tests.interop.consumers.kcl import KinesisClientLibrary
from tests.interop.consumers.user_records import as_the_kcl_keeps_them
from tests.interop.emulators import MIB
from tests.interop.ledger import Ledger, PutUserRecord
from tests.interop.material import at_the_edges, every_key_and_data, numbered
from tests.interop.production import assert_all_delivered, assert_delivered_where_told, produce, produce_during
from tests.interop.streams import Stream, hash_key
from tests.interop.test_emulators_and_consumers import aggregated_elsewhere
from tests.interop.test_reshard import double, lots, merge_the_first_two, split_all


def test_the_kcl_reads_aggregates_of_another_library(kcl: KinesisClientLibrary, ledger: Ledger) -> None:
    put = every_key_and_data()
    for shard in kcl.stream.open_shards():
        inside = [record for record in put if shard.takes(hash_key(record.partition_key))]
        kcl.stream.put_records([("a", str(shard.starting_hash_key), aggregated_elsewhere(inside))])

    ledger.compare(str(kcl.stream.emulator), kcl_consumer.NAME, put=put, read=kcl.read())


def test_the_kcl_drops_an_aggregate_with_one_record_outside_its_shard(kcl: KinesisClientLibrary) -> None:
    """The rule behind `consumer="kcl"`, and the proof that filtering the other consumers' records by it is right."""
    first, *_ = kcl.stream.open_shards()
    records = numbered(200, seed=21)
    inside = [record for record in records if first.takes(hash_key(record.partition_key))]
    outside = [record for record in records if not first.takes(hash_key(record.partition_key))]
    whole, spoilt = inside[:20], [*inside[20:40], outside[0], *inside[40:60]]
    single = PutUserRecord(outside[1].partition_key, b"alone and outside")
    by_explicit_hash_key = [PutUserRecord(outside[2].partition_key, b"moved inside", str(first.ending_hash_key))] * 2
    kcl.stream.put_records(
        [
            ("a", str(first.starting_hash_key), aggregated_elsewhere(spoilt)),
            ("a", str(first.starting_hash_key), aggregated_elsewhere(whole)),
            (single.partition_key, str(first.starting_hash_key), single.data),
            ("a", str(first.starting_hash_key), aggregated_elsewhere(by_explicit_hash_key)),
        ]
    )

    read = kcl.read()

    kept = [record.identity for record in [*whole, single, *by_explicit_hash_key]]
    assert sorted((record.partition_key, record.data) for record in read) == sorted(kept)
    everything = pypi.deaggregate(kcl.stream.read())
    here = {record.identity for record in [*spoilt, *whole, single, *by_explicit_hash_key]}
    filtered = as_the_kcl_keeps_them(everything, kcl.stream.shards())
    identities = [(record.partition_key, record.data) for record in filtered]
    assert sorted(identity for identity in identities if identity in here) == sorted(kept)


def test_the_kcl_reads_what_the_producer_puts(kcl: KinesisClientLibrary, ledger: Ledger) -> None:
    kcl.read()
    put = [
        *every_key_and_data(kcl.stream.emulator.abilities.key_length),
        *numbered(1000, seed=22),
        *at_the_edges(kcl.stream.open_shards()),
    ]

    results = produce(kcl.stream, put)
    assert_all_delivered(put, results)

    read = kcl.read()
    ledger.compare(str(kcl.stream.emulator), kcl_consumer.NAME, put=put, read=read)
    assert_delivered_where_told(put, results, read)


@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")  # aiohttp's, above 1 MiB
def test_the_kcl_reads_records_above_one_mib(kcl: KinesisClientLibrary, ledger: Ledger) -> None:
    """No larger ones: kinesis-local needs seconds per MiB of its answer, and the KCL times out."""
    kcl.read()
    kcl.stream.accept_records_of(2 * MIB)
    put = [
        PutUserRecord("one and a half", bytes(range(256)) * (6 * 1024)),
        PutUserRecord("one byte over", b"1" * (MIB + 1)),
    ]

    results = produce(kcl.stream, put, max_record_size=2 * MIB)
    assert_all_delivered(put, results)

    read = kcl.read()
    ledger.compare(str(kcl.stream.emulator), kcl_consumer.NAME, put=put, read=read)
    assert_delivered_where_told(put, results, read)


@pytest.mark.parametrize(
    ("change", "first_lot"), [(double, 10_000), (merge_the_first_two, 20_000), (split_all, 30_000)]
)
def test_the_kcl_loses_no_record_during_resharding(
    kcl: KinesisClientLibrary, ledger: Ledger, change: Callable[[Stream], None], first_lot: int
) -> None:
    """It may read records twice: where it does not know a shard yet it does not drop either, as its log says.

    Then what the producer sent again for its sake comes again, but nothing else does.
    """
    kcl.read()

    put, results = produce_during(kcl.stream, partial(change, kcl.stream), lots(first_lot))
    assert_all_delivered(put, results)

    read = kcl.read()
    identities = {record.identity for record in put}
    stored = [
        record for record in pypi.deaggregate(kcl.stream.read()) if (record.partition_key, record.data) in identities
    ]
    misplaced = len(stored) - len(as_the_kcl_keeps_them(stored, kcl.stream.shards()))
    duplicates = ledger.compare(
        str(kcl.stream.emulator), kcl_consumer.NAME, put=put, read=read, duplicates_allowed=True, misplaced=misplaced
    )
    assert_delivered_where_told(put, results, read)
    assert duplicates <= misplaced
