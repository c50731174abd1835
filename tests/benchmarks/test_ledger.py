"""The sink's check: a clean run is reported as clean, and every fault of a producer is detected."""

from hashlib import md5
from itertools import pairwise

import pytest

from benchmarks.blob_reader import MAGIC, MalformedBlobError, open_blob
from benchmarks.ledger import Ledger, ShardRanges
from benchmarks.workload import Workload
from kpl_core.records.aggregated_record import encode
from kpl_core.records.hash_key import hash_key_of
from kpl_core.records.user_record import UserRecord

WORK = Workload(data_bytes=40, keys="10k", shard_count=4, record_count=40)


def ledger_of(workload: Workload = WORK) -> Ledger:
    return Ledger(workload, ShardRanges(workload.shard_count))


def enter_alone(ledger: Ledger, index: int) -> None:
    key = WORK.key_of(index)
    ledger.enter(ledger.ranges.shard_of(key, None), key, None, WORK.data_of(index))


def enter_aggregated(ledger: Ledger, shard: int, indexes: list[int]) -> None:
    blob = encode([UserRecord(WORK.key_of(index), WORK.data_of(index)) for index in indexes])
    ledger.enter(shard, "a", str(ledger.ranges.ranges[shard][0]), blob)


def by_shard(ledger: Ledger) -> dict[int, list[int]]:
    homes: dict[int, list[int]] = {}
    for index in range(WORK.record_count):
        homes.setdefault(ledger.ranges.shard_of(WORK.key_of(index), None), []).append(index)
    return homes


@pytest.mark.parametrize("keys", ["10k", "unique"])
def test_a_workload_recognises_every_record_of_its_own(keys: str) -> None:
    work = Workload(data_bytes=100, keys="unique" if keys == "unique" else "10k", record_count=140_000)
    records = work.records(0, 140_000)
    assert [work.index_of(data) for _, data in records] == list(range(140_000))
    assert {len(key) for key, _ in records} == {16}
    assert len({key for key, _ in records}) == (140_000 if keys == "unique" else 10_000)
    assert [key for key, _ in records] == [work.key_of(index) for index in range(140_000)]


def test_data_of_another_workload_is_not_recognised() -> None:
    assert WORK.index_of(Workload(data_bytes=41).data_of(3)) is None
    assert WORK.index_of(b"x" * 40) is None
    assert WORK.index_of(WORK.data_of(3)[:-1] + b"!") is None


def test_the_ranges_cover_every_hash_key_once() -> None:
    ranges = ShardRanges(7).ranges
    assert ranges[0][0] == 0
    assert ranges[-1][1] == 2**128 - 1
    assert all(end + 1 == start for (_, end), (start, _) in pairwise(ranges))


def test_a_key_belongs_to_the_shard_whose_range_contains_its_hash_key() -> None:
    ranges = ShardRanges(7)
    for number in range(200):
        start, end = ranges.ranges[ranges.shard_of(f"key {number}", None)]
        assert start <= hash_key_of(f"key {number}") <= end


def test_an_explicit_hash_key_overrides_the_partition_key() -> None:
    ranges = ShardRanges(4)
    assert [ranges.shard_of("a", str(start)) for start, _ in ranges.ranges] == [0, 1, 2, 3]
    assert [ranges.shard_of("a", str(end)) for _, end in ranges.ranges] == [0, 1, 2, 3]


def test_unaggregated_records_make_a_clean_run() -> None:
    ledger = ledger_of()
    for index in range(WORK.record_count):
        enter_alone(ledger, index)
    verdict = ledger.verdict()
    assert verdict.is_clean
    assert verdict.user_records == verdict.kinesis_records == WORK.record_count
    assert verdict.user_bytes == 40 * WORK.record_count


def test_records_aggregated_by_shard_make_a_clean_run() -> None:
    ledger = ledger_of()
    for shard, indexes in by_shard(ledger).items():
        enter_aggregated(ledger, shard, indexes)
    verdict = ledger.verdict()
    assert verdict.is_clean
    assert verdict.user_records == WORK.record_count
    assert verdict.kinesis_records == 4


def test_a_missing_record_is_lost_and_a_second_arrival_a_duplicate() -> None:
    ledger = ledger_of()
    for index in range(WORK.record_count - 1):
        enter_alone(ledger, index)
    enter_alone(ledger, 5)
    verdict = ledger.verdict()
    assert (verdict.lost, verdict.duplicated) == (1, 1)
    assert not verdict.is_clean


def test_user_records_of_other_shards_in_an_aggregated_record_are_misrouted() -> None:
    ledger = ledger_of()
    enter_aggregated(ledger, 2, list(range(WORK.record_count)))
    assert ledger.verdict().misrouted == WORK.record_count - len(by_shard(ledger)[2])


def test_a_record_with_another_key_is_reported() -> None:
    ledger = ledger_of()
    ledger.enter(ledger.ranges.shard_of("other", None), "other", None, WORK.data_of(0))
    assert ledger.verdict().wrong_keys == 1


def test_a_damaged_aggregated_record_is_malformed() -> None:
    ledger = ledger_of()
    blob = bytearray(encode([UserRecord(WORK.key_of(index), WORK.data_of(index)) for index in range(3)]))
    blob[10] ^= 1
    ledger.enter(0, "a", "0", bytes(blob))
    assert ledger.verdict().malformed == 1


def test_the_reader_agrees_with_the_encoder_of_the_core() -> None:
    records = [
        UserRecord("first", b""),
        UserRecord("schlüssel", b"x" * 300, "340282366920938463463374607431768211455"),
        UserRecord("first", b"\x00\xff" * 9_000, "0"),
        *(UserRecord(f"key {number}", b"y" * number) for number in range(300)),
    ]
    opened = open_blob(encode(records))
    assert opened == [(record.partition_key, record.explicit_hash_key, record.data) for record in records]


def test_a_blob_without_the_magic_is_not_an_aggregated_record() -> None:
    assert open_blob(b"") is None
    assert open_blob(MAGIC[:3]) is None


@pytest.mark.parametrize(
    "message",
    [
        b"\x1a\x02\x08\x05",  # key index 5 of an empty table
        b"\x1a\x00",  # a record without key and data
        b"\x1a\x7f\x08",  # a record that passes the end
        b"\x08\x01",  # a number where the key table should be
        b"\x0d\x00\x00\x00\x00",  # a 32-bit field
        b"\x0a\x01\xff",  # a key that is not UTF-8
        b"\x80",  # half a varint
    ],
)
def test_a_malformed_message_is_rejected(message: bytes) -> None:
    with pytest.raises(MalformedBlobError):
        open_blob(MAGIC + message + md5(message, usedforsecurity=False).digest())
