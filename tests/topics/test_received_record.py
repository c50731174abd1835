"""The user records of what consumers receive; aws-kinesis-agg must find the same ones."""

import base64
import gc
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from aws_kinesis_agg.deaggregator import iter_deaggregate_records
from hypothesis import given, strategies as st

from kpl_core import ConfigError, DuplicateFilter, ReceivedRecord, UserRecord, content_of, encode, user_records
from kpl_core.records.received_record import Source

ARRIVED = 1_700_000_000.5
AGGREGATED = (UserRecord("key 1", b"one"), UserRecord("key 2", b"two", "7"), UserRecord("key 1", b""))


def lambda_event(*data: bytes, first: int = 0, arrived_at: float = ARRIVED) -> dict[str, Any]:
    """The event of an AWS Lambda function (docs.aws.amazon.com/lambda/latest/dg/with-kinesis.html)."""
    return {
        "Records": [
            {
                "kinesis": {
                    "kinesisSchemaVersion": "1.0",
                    "partitionKey": "of the Kinesis record",
                    "sequenceNumber": str(number),
                    "data": base64.b64encode(each).decode(),
                    "approximateArrivalTimestamp": arrived_at,
                },
                "eventSource": "aws:kinesis",
                "eventVersion": "1.0",
                "eventID": f"shardId-000000000006:{number}",
                "eventName": "aws:kinesis:record",
                "awsRegion": "us-east-2",
            }
            for number, each in enumerate(data, first)
        ]
    }


def get_records_answer(*data: bytes) -> dict[str, Any]:
    return {
        "Records": [
            {
                "SequenceNumber": str(number),
                "ApproximateArrivalTimestamp": datetime.fromtimestamp(ARRIVED, UTC),
                "Data": each,
                "PartitionKey": "of the Kinesis record",
            }
            for number, each in enumerate(data)
        ],
        "NextShardIterator": "...",
        "MillisBehindLatest": 0,
    }


def test_a_lambda_event_has_plain_and_aggregated_records() -> None:
    records = list(user_records(lambda_event(b"plain", encode(AGGREGATED))))
    plain = ReceivedRecord(
        partition_key="of the Kinesis record",
        data=b"plain",
        sequence_number="0",
        shard_id="shardId-000000000006",
        arrived_at=ARRIVED,
    )
    assert records[0] == plain
    assert [(each.partition_key, each.data, each.explicit_hash_key) for each in records[1:]] == [
        ("key 1", b"one", None),
        ("key 2", b"two", "7"),
        ("key 1", b"", None),
    ]
    assert [(each.sequence_number, each.sub_sequence_number) for each in records[1:]] == [("1", 0), ("1", 1), ("1", 2)]
    assert [each.is_aggregated for each in records] == [False, True, True, True]
    assert {(each.shard_id, each.arrived_at) for each in records} == {("shardId-000000000006", ARRIVED)}


def test_an_answer_of_get_records_and_its_records_say_the_same() -> None:
    answer = get_records_answer(b"plain", encode(AGGREGATED))
    records = list(user_records(answer))
    assert [each.data for each in records] == [b"plain", b"one", b"two", b""]
    assert {(each.shard_id, each.arrived_at) for each in records} == {(None, ARRIVED)}
    assert list(user_records(answer["Records"])) == records
    assert [each for part in answer["Records"] for each in user_records(part)] == records


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_the_data_of_one_record_is_a_source(kind: Any) -> None:
    assert list(user_records(kind(b"plain"))) == [ReceivedRecord(partition_key="", data=b"plain")]
    assert [(each.partition_key, each.data) for each in user_records(kind(encode(AGGREGATED)))] == [
        (record.partition_key, record.data) for record in AGGREGATED
    ]


@pytest.mark.parametrize("source", [{"body": "of SQS"}, {"Records": [{"body": "of SQS"}]}, [{"body": "of SQS"}]])
def test_other_events_are_rejected(source: Source) -> None:
    with pytest.raises(TypeError, match=r"has the fields \['body'\].*give the event of a Lambda"):
        list(user_records(source))


@pytest.mark.parametrize("source", [{"Records": []}, []])
def test_an_empty_batch_has_no_records(source: Source) -> None:
    assert list(user_records(source)) == []


# Agreement with aws-kinesis-agg

keys = st.text(min_size=1, max_size=10)
inside = st.builds(
    UserRecord,
    keys,
    st.binary(max_size=50),
    st.none() | st.integers(min_value=0, max_value=2**128 - 1).map(str),
)
batches = st.lists(st.binary(max_size=50) | st.lists(inside, min_size=1, max_size=10).map(encode), max_size=6)


Found = tuple[str, bytes, str | None, str, int]


def found_by_aws_kinesis_agg(records: Sequence[Any], *, is_boto3: bool) -> Iterator[Found]:
    for each in iter_deaggregate_records(records, "Boto3" if is_boto3 else None):
        kinesis = each["kinesis"]
        # It encodes the user records of aggregated records in base64, also for boto3.
        is_plain = is_boto3 and "subSequenceNumber" not in kinesis
        data = kinesis["data"] if is_plain else base64.b64decode(kinesis["data"])
        yield (
            kinesis["partitionKey"],
            data,
            kinesis.get("explicitHashKey"),
            kinesis["sequenceNumber"],
            kinesis.get("subSequenceNumber", 0),
        )


@pytest.mark.parametrize("is_boto3", [False, True])
@given(batch=batches)
def test_aws_kinesis_agg_finds_the_same_records(batch: Sequence[bytes], *, is_boto3: bool) -> None:
    source = get_records_answer(*batch) if is_boto3 else lambda_event(*batch)
    theirs = list(found_by_aws_kinesis_agg(source["Records"], is_boto3=is_boto3))
    ours: list[Found] = [
        (each.partition_key, each.data, each.explicit_hash_key, each.sequence_number or "", each.sub_sequence_number)
        for each in user_records(source)
    ]
    # For a record without an explicit hash key it reports the first one of another record.
    theirs = [(*their[:2], our[2] and their[2], *their[3:]) for their, our in zip(theirs, ours, strict=True)]
    assert ours == theirs


# Duplicates


def test_two_events_with_equal_content_are_no_duplicates() -> None:
    """Sequence numbers 1 and 2 with the same key and data: a second order for the same thing."""
    seen = DuplicateFilter()
    order = b'{"customer": "ada", "total": 12}'
    received = list(user_records(lambda_event(order, order, first=1), duplicates=seen))
    assert [each.sequence_number for each in received] == ["1", "2"]
    assert seen.dropped == []


def test_a_kinesis_record_that_comes_again_is_dropped_and_returned() -> None:
    seen = DuplicateFilter()
    event = lambda_event(b"plain", encode(AGGREGATED))
    first = list(user_records(event, duplicates=seen))
    assert (len(first), seen.dropped) == (4, [])
    assert list(user_records(event, duplicates=seen)) == []
    assert seen.dropped == first
    list(user_records([], duplicates=seen))
    assert seen.dropped == []


def test_equal_sequence_numbers_of_two_shards_are_two_records() -> None:
    seen = DuplicateFilter()
    event = lambda_event(b"of shard 6")
    elsewhere = json.loads(json.dumps(event).replace("shardId-000000000006", "shardId-000000000007"))
    received = [each.shard_id for source in (event, elsewhere) for each in user_records(source, duplicates=seen)]
    assert received == ["shardId-000000000006", "shardId-000000000007"]


def test_a_record_without_a_place_is_no_duplicate_and_not_remembered() -> None:
    seen = DuplicateFilter(max_records=1)
    assert [len(list(user_records(b"same", duplicates=seen))) for _ in range(3)] == [1, 1, 1]
    assert seen.dropped == []


@given(batch=batches, again=st.lists(st.integers(0, 5), max_size=4))
def test_every_record_is_yielded_once_or_returned_as_dropped(batch: Sequence[bytes], again: Sequence[int]) -> None:
    seen = DuplicateFilter()
    event = lambda_event(*batch)
    everything = list(user_records(event))
    received = list(user_records(event, duplicates=seen))
    assert received == everything
    parts = [event["Records"][number] for number in again if number < len(batch)]
    for part in parts:
        inside = list(user_records(part))
        assert list(user_records(part, duplicates=seen)) == []
        assert seen.dropped == inside


def test_a_shard_that_is_behind_another_keeps_its_duplicates() -> None:
    seen = DuplicateFilter(window_seconds=60, key=content_of)
    batches = [lambda_event(b"a", arrived_at=ARRIVED + 5_000), lambda_event(b"b", arrived_at=ARRIVED)] * 2
    received = [each.data for batch in batches for each in user_records(batch, duplicates=seen)]
    assert received == [b"a", b"b"]


def test_duplicates_within_the_window_are_dropped() -> None:
    seen = DuplicateFilter(window_seconds=60, key=content_of)
    batches = [
        lambda_event(b"a", b"b", b"a", arrived_at=ARRIVED),
        lambda_event(b"b", b"c", first=3, arrived_at=ARRIVED + 60),
        # The latest "b" and "c" arrived 61 s before, so they are other records.
        lambda_event(b"c", b"a", first=5, arrived_at=ARRIVED + 121),
    ]
    received = [[each.data for each in user_records(batch, duplicates=seen)] for batch in batches]
    assert received == [[b"a", b"b"], [b"c"], [b"c", b"a"]]


def test_a_record_differs_from_another_by_its_keys_too() -> None:
    records = [UserRecord("1", b"x"), UserRecord("2", b"x"), UserRecord("1", b"x", "7"), UserRecord("1", b"x")]
    received = list(user_records(encode(records), duplicates=DuplicateFilter(key=content_of)))
    assert [(each.partition_key, each.explicit_hash_key) for each in received] == [("1", None), ("2", None), ("1", "7")]


def test_a_key_of_the_caller_decides() -> None:
    seen = DuplicateFilter(key=lambda record: record.data[:2])
    event = lambda_event(b"1 first", b"2 other", b"1 again")
    assert [each.data for each in user_records(event, duplicates=seen)] == [b"1 first", b"2 other"]


def test_a_record_whose_handling_failed_comes_again_and_those_before_it_do_not() -> None:
    seen = DuplicateFilter()
    event = lambda_event(encode(AGGREGATED))
    handled: list[bytes] = []

    def handle(*, fails_at: bytes | None) -> None:
        for record in user_records(event, duplicates=seen):
            if record.data == fails_at:
                raise RuntimeError
            handled.append(record.data)

    with pytest.raises(RuntimeError):
        handle(fails_at=b"two")
    gc.collect()
    handle(fails_at=None)
    assert handled == [b"one", b"two", b""]


def test_the_filter_remembers_a_bounded_number_of_records() -> None:
    seen = DuplicateFilter(max_records=2, key=content_of)
    received = [list(user_records(each, duplicates=seen))[:1] for each in (b"a", b"b", b"c", b"b", b"a")]
    assert [[each.data for each in batch] for batch in received] == [[b"a"], [b"b"], [b"c"], [], [b"a"]]


@pytest.mark.parametrize("options", [{"window_seconds": 0}, {"window_seconds": float("nan")}, {"max_records": 0}])
def test_an_empty_window_is_rejected(options: Any) -> None:
    with pytest.raises(ConfigError, match="both must be above 0"):
        DuplicateFilter(**options)
