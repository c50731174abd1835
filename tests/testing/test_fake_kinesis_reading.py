"""Shard iterators and GetRecords in the fake service."""

import pytest

from kpl_core.options.kinesis_limits import MIB
from kpl_core.testing import FakeKinesis, KinesisError, PutRecord
from kpl_core.testing.shard_listing import ShardIterator, encode_token

ZERO, ONE, TWO = (f"shardId-{index:012d}" for index in range(3))


def filled() -> FakeKinesis:
    """Return a stream of one shard with five records, put at seconds 0 to 4. The epoch is 0."""
    kinesis = FakeKinesis({"orders": 1}, epoch=0.0)
    for second in range(5):
        kinesis.put_records("orders", [("k", None, b"%d" % second)], now=float(second))
    return kinesis


def numbers(kinesis: FakeKinesis) -> list[str]:
    return [record.sequence_number for record in kinesis.records("orders")]


def read(
    kinesis: FakeKinesis, iterator_type: str, *, number: str | None = None, timestamp_ms: int | None = None
) -> bytes:
    iterator = kinesis.get_shard_iterator(
        "orders",
        shard_id=ZERO,
        iterator_type=iterator_type,
        starting_sequence_number=number,
        timestamp_ms=timestamp_ms,
        now=10.0,
    )
    return b"".join(record.data for record in kinesis.get_records(iterator, now=10.0).records)


def test_each_iterator_type_starts_at_its_position() -> None:
    kinesis = filled()
    third = numbers(kinesis)[2]
    assert read(kinesis, "TRIM_HORIZON") == b"01234"
    assert read(kinesis, "LATEST") == b""
    assert read(kinesis, "AT_SEQUENCE_NUMBER", number=third) == b"234"
    assert read(kinesis, "AFTER_SEQUENCE_NUMBER", number=third) == b"34"
    assert read(kinesis, "AT_TIMESTAMP", timestamp_ms=3_000) == b"34"
    assert read(kinesis, "AT_TIMESTAMP", timestamp_ms=3_001) == b"4"
    start = kinesis.list_shards("orders", now=0.0).shards[0].starting_sequence_number
    assert read(kinesis, "AT_SEQUENCE_NUMBER", number=start) == b"01234"


def test_latest_reads_only_records_put_after_the_iterator() -> None:
    kinesis = filled()
    iterator = kinesis.get_shard_iterator("orders", shard_id=ZERO, iterator_type="LATEST", now=5.0)
    kinesis.put_records("orders", [("k", None, b"new")], now=6.0)
    assert [record.data for record in kinesis.get_records(iterator, now=7.0).records] == [b"new"]


def test_reading_in_steps_returns_each_record_once_and_the_delay() -> None:
    kinesis = filled()
    iterator: str | None = kinesis.get_shard_iterator("orders", shard_id=ZERO, now=10.0)
    seen, behind = [], []
    for _ in range(3):
        page = kinesis.get_records(iterator or "", limit=2, now=10.0)
        seen.append([record.data for record in page.records])
        behind.append(page.millis_behind_latest)
        iterator = page.next_shard_iterator
    assert seen == [[b"0", b"1"], [b"2", b"3"], [b"4"]]
    assert behind == [8_000, 6_000, 0]


def test_millis_behind_latest_is_above_zero_while_records_are_left() -> None:
    kinesis = FakeKinesis({"orders": 1})
    kinesis.put_records("orders", [("k", None, b"1"), ("k", None, b"2")], now=0.0)
    iterator = kinesis.get_shard_iterator("orders", shard_id=ZERO, now=0.0)
    assert kinesis.get_records(iterator, limit=1, now=0.0).millis_behind_latest == 1


def test_the_end_of_a_closed_shard_names_its_children() -> None:
    kinesis = filled()
    kinesis.split_shard("orders", shard_id=ZERO, new_starting_hash_key=100, now=5.0)
    iterator = kinesis.get_shard_iterator("orders", shard_id=ZERO, now=6.0)
    page = kinesis.get_records(iterator, limit=4, now=6.0)
    assert page.child_shards == ()
    end = kinesis.get_records(page.next_shard_iterator or "", now=6.0)
    assert [record.data for record in end.records] == [b"4"]
    assert (end.next_shard_iterator, end.millis_behind_latest) == (None, 0)
    assert [(child.shard_id, child.parent_shard_ids) for child in end.child_shards] == [(ONE, (ZERO,)), (TWO, (ZERO,))]
    assert [(child.starting_hash_key, child.ending_hash_key) for child in end.child_shards] == [
        (0, 99),
        (100, 2**128 - 1),
    ]


def test_a_merged_child_names_both_parents() -> None:
    kinesis = FakeKinesis({"orders": 2})
    kinesis.merge_shards("orders", shard_id=ZERO, adjacent_shard_id=ONE, now=0.0)
    for shard_id in (ZERO, ONE):
        iterator = kinesis.get_shard_iterator("orders", shard_id=shard_id, now=0.0)
        (child,) = kinesis.get_records(iterator, now=0.0).child_shards
        assert (child.shard_id, child.parent_shard_ids) == (TWO, (ZERO, ONE))


def test_one_answer_has_at_most_10_mib_but_at_least_one_record() -> None:
    kinesis = FakeKinesis({"orders": 1}, enforce_limits=False)
    mebibyte: PutRecord = ("k", None, bytes(MIB - 1))
    kinesis.put_records("orders", [mebibyte] * 10, now=0.0)
    kinesis.put_records("orders", [("k", None, b"")], now=0.0)
    iterator = kinesis.get_shard_iterator("orders", shard_id=ZERO, now=0.0)
    page = kinesis.get_records(iterator, now=0.0)
    assert len(page.records) == 10
    assert len(kinesis.get_records(page.next_shard_iterator or "", now=0.0).records) == 1


def test_an_iterator_expires_after_300_seconds() -> None:
    kinesis = filled()
    iterator = kinesis.get_shard_iterator("orders", shard_id=ZERO, now=0.0)
    assert kinesis.get_records(iterator, now=299.9).records
    with pytest.raises(KinesisError, match=r"ExpiredIteratorException.*tolerated delay of 300000 milliseconds"):
        kinesis.get_records(iterator, now=300.0)


def test_text_that_is_not_an_iterator_is_rejected() -> None:
    kinesis = filled()
    token = kinesis.list_streams(limit=1, now=0.0).next_token or "bm9uc2Vuc2U="
    for made_up in ("nonsense", token, "ÄÖ"):
        with pytest.raises(KinesisError, match=r"InvalidArgumentException: Invalid ShardIterator."):
            kinesis.get_records(made_up, now=0.0)


def test_an_iterator_of_a_deleted_stream_finds_no_shard() -> None:
    kinesis = filled()
    iterator = kinesis.get_shard_iterator("orders", shard_id=ZERO, now=0.0)
    kinesis.delete_stream("orders", now=1.0)
    message = f"Shard {ZERO} in stream orders under account 000000000000 does not exist"
    with pytest.raises(KinesisError, match=message):
        kinesis.get_records(iterator, now=1.0)


@pytest.mark.parametrize(("recreated_at", "records_since"), [(1.0, 0), (2.0, 0), (2.0, 10)])
def test_an_iterator_of_a_deleted_stream_does_not_read_a_new_stream_of_that_name(
    recreated_at: float, records_since: int
) -> None:
    kinesis = filled()
    iterator = kinesis.get_shard_iterator("orders", shard_id=ZERO, iterator_type="LATEST", now=1.0)
    kinesis.delete_stream("orders", now=1.0)
    kinesis.create_stream("orders", shard_count=1, now=recreated_at)
    if records_since:
        kinesis.put_records("orders", [("k", None, b"new")] * records_since, now=recreated_at)
    message = f"Shard {ZERO} in stream orders under account 000000000000 does not exist"
    with pytest.raises(KinesisError, match=message):
        kinesis.get_records(iterator, now=recreated_at)


@pytest.mark.parametrize(("index", "position"), [(-1, 0), (-2, 0), (1, 0), (0, -1), (0, 6)])
def test_an_invented_iterator_finds_no_shard(index: int, position: int) -> None:
    made_up = encode_token(ShardIterator("orders", index, position, 0))
    with pytest.raises(KinesisError, match="ResourceNotFoundException"):
        filled().get_records(made_up, now=0.0)


OTHER = FakeKinesis({"orders": 3}).list_shards("orders", now=0.0).shards[2].starting_sequence_number

REFUSED: list[tuple[str, str | None, int | None, str]] = [
    ("AT_SEQUENCE_NUMBER", None, None, "Request specified AT_SEQUENCE_NUMBER and no StartingSequenceNumber."),
    ("LATEST", "5", None, "Request specified LATEST and also a StartingSequenceNumber."),
    ("AT_TIMESTAMP", None, None, "Request specified AT_TIMESTAMP and no Timestamp."),
    ("LATEST", None, 1, "Request specified LATEST and also a Timestamp."),
    ("AT_TIMESTAMP", None, 10_001, "cannot be greater than the currentTimestampInMillis"),
    ("AT_SEQUENCE_NUMBER", "5", None, "is invalid because it did not come from this stream."),
    ("AT_SEQUENCE_NUMBER", "abc", None, "is invalid because it did not come from this stream."),
    ("AT_SEQUENCE_NUMBER", OTHER, None, "is invalid because it did not come from this stream."),
]


@pytest.mark.parametrize(("iterator_type", "number", "timestamp_ms", "words"), REFUSED)
def test_an_iterator_whose_arguments_do_not_fit_its_type_is_rejected(
    iterator_type: str, number: str | None, timestamp_ms: int | None, words: str
) -> None:
    with pytest.raises(KinesisError, match=words) as refusal:
        read(filled(), iterator_type, number=number, timestamp_ms=timestamp_ms)
    assert refusal.value.code == "InvalidArgumentException"


def test_a_sequence_number_of_another_shard_is_rejected() -> None:
    kinesis = FakeKinesis({"orders": 2}, epoch=0.0)
    number = kinesis.list_shards("orders", now=0.0).shards[1].starting_sequence_number
    with pytest.raises(KinesisError, match=f"It encodes {ONE}, while it was used in a call to a shard with {ZERO}"):
        read(kinesis, "AT_SEQUENCE_NUMBER", number=number)


def test_an_iterator_for_an_unknown_shard_is_not_found() -> None:
    message = "Shard shardId-000000000005 in stream orders under account 000000000000 does not exist"
    with pytest.raises(KinesisError, match=message):
        filled().get_shard_iterator("orders", shard_id="shardId-5", now=0.0)
