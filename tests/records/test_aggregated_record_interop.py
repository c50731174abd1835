"""Aggregated records compared with an independent codec: aws-kinesis-agg from PyPI, with Google's protobuf."""

import base64
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from aws_kinesis_agg import DIGEST_SIZE, MAGIC
from aws_kinesis_agg.aggregator import RecordAggregator
from aws_kinesis_agg.deaggregator import iter_deaggregate_records
from aws_kinesis_agg.messages_pb2 import AggregatedRecord
from hypothesis import given, settings, strategies as st

from kpl_core.options.kinesis_limits import MAX_HASH_KEY
from kpl_core.records.aggregated_record import decode, encode
from kpl_core.records.user_record import UserRecord

LOTS = 100
AGGREGATES_PER_LOT = 100

# At these lengths a varint grows by a byte, or the prepared pieces of the encoder end.
EDGES = (0, 1, 127, 128, 1279, 1280, 16_383, 16_384)

partition_keys = st.text(st.characters(codec="utf-8"), min_size=1, max_size=256)
explicit_hash_keys = st.integers(0, MAX_HASH_KEY).map(str)


@st.composite
def lots_of_aggregates(draw: st.DrawFn) -> list[list[UserRecord]]:
    """Draw keys and data with Hypothesis and combine them into a hundred aggregated records.

    Drawing each record separately would take minutes. The seed is drawn too, so a failure can be reproduced.
    """
    keys = draw(st.lists(partition_keys, min_size=1, max_size=6, unique=True))
    hash_keys: list[str | None] = [None, *draw(st.lists(explicit_hash_keys, max_size=3, unique=True))]
    data = draw(st.lists(st.binary(max_size=64), min_size=1, max_size=6))
    chance = Random(draw(st.integers(0, 2**64 - 1)))
    return [
        [
            UserRecord(chance.choice(keys), chance.choice(data), chance.choice(hash_keys))
            for _ in range(chance.randint(1, 12))
        ]
        for _ in range(AGGREGATES_PER_LOT)
    ]


@pytest.mark.long
@settings(max_examples=LOTS)
@given(lots_of_aggregates())
def test_aws_kinesis_agg_decodes_ten_thousand_aggregated_records_in_the_same_way(lot: list[list[UserRecord]]) -> None:
    for user_records in lot:
        encoded = encode(user_records)

        _assert_read_alike(encoded, user_records)
        assert decode(encoded) == tuple(user_records)


@settings(max_examples=LOTS)
@given(lots_of_aggregates())
def test_google_protobuf_encodes_to_the_same_bytes(lot: list[list[UserRecord]]) -> None:
    for user_records in lot:
        encoded = encode(user_records)
        parsed = AggregatedRecord.FromString(encoded[len(MAGIC) : -DIGEST_SIZE])

        assert [_read_by_protobuf(parsed, record) for record in parsed.records] == user_records
        assert parsed.SerializeToString() == encoded[len(MAGIC) : -DIGEST_SIZE]


@pytest.mark.parametrize("size", EDGES)
def test_data_at_the_boundaries_of_a_length_is_decoded_in_the_same_way(size: int) -> None:
    user_records = [UserRecord("key", bytes(size)), UserRecord("other", b"\xff" * size, str(MAX_HASH_KEY))]

    _assert_read_alike(encode(user_records), user_records)


@pytest.mark.parametrize("count", [127, 128, 129, 2047, 2048, 2049, 16_385])
def test_keys_at_the_boundaries_of_an_index_are_decoded_in_the_same_way(count: int) -> None:
    user_records = [UserRecord(f"key-{number}", b"data", str(number)) for number in range(count)]

    _assert_read_alike(encode(user_records), user_records)


@given(st.lists(st.builds(UserRecord, partition_keys, st.binary(), st.none() | explicit_hash_keys), min_size=1))
def test_aws_kinesis_agg_encodes_to_the_same_bytes(user_records: list[UserRecord]) -> None:
    aggregator = RecordAggregator()
    for record in user_records:
        aggregator.add_user_record(record.partition_key, record.data, record.explicit_hash_key)
    _, _, encoded = aggregator.clear_and_get().get_contents()

    assert encode(user_records) == encoded
    assert decode(encoded) == tuple(user_records)


def _assert_read_alike(encoded: bytes, user_records: Sequence[UserRecord]) -> None:
    """Compare all fields, with one exception.

    The package invents an explicit hash key for a record without one, if another record in the same aggregated
    record has one.
    """
    read = list(iter_deaggregate_records([_lambda_event_record(encoded)]))
    assert len(read) == len(user_records)
    for number, (record, there) in enumerate(zip(user_records, read, strict=True)):
        kinesis = there["kinesis"]
        assert kinesis["aggregated"] is True
        assert kinesis["subSequenceNumber"] == number
        assert kinesis["partitionKey"] == record.partition_key
        assert base64.b64decode(kinesis["data"]) == record.data
        if record.explicit_hash_key is not None:
            assert kinesis["explicitHashKey"] == record.explicit_hash_key


def _lambda_event_record(data: bytes) -> dict[str, dict[str, str]]:
    return {
        "kinesis": {
            "kinesisSchemaVersion": "1.0",
            "sequenceNumber": "1",
            "approximateArrivalTimestamp": "0",
            "partitionKey": "a",
            "data": base64.b64encode(data).decode(),
        }
    }


def _read_by_protobuf(parsed: Any, record: Any) -> UserRecord:
    return UserRecord(
        partition_key=parsed.partition_key_table[record.partition_key_index],
        data=record.data,
        explicit_hash_key=(
            parsed.explicit_hash_key_table[record.explicit_hash_key_index]
            if record.HasField("explicit_hash_key_index")
            else None
        ),
    )
