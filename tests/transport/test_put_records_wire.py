"""PutRecords in JSON and CBOR: requests have the bytes of botocore, and all kinds of answers are parsed."""

import base64
import json

import cbor2
import msgspec
import pytest
from hypothesis import given, strategies as st

from kpl_core.records.put_records import PutRecordsEntry, PutRecordsRequest
from kpl_core.records.user_record import UserRecord
from kpl_core.transport.put_records_wire import (
    CBOR_WIRE,
    cbor_body,
    cbor_entries,
    json_body,
    json_entries,
    stream_argument,
)
from tests.support.material import kinesis_record, user_records


def request_of(*records: UserRecord, stream: str = "s") -> PutRecordsRequest:
    return PutRecordsRequest(stream, [kinesis_record(record) for record in records], started_at=0.0)


@given(st.lists(user_records, min_size=1, max_size=8))
def test_both_bodies_have_the_content_of_botocores(records):
    request = request_of(*records, stream='st"ream')
    expected = {
        "StreamName": 'st"ream',
        "Records": [
            {
                "Data": record.data,
                "PartitionKey": record.partition_key,
                "ExplicitHashKey": record.explicit_hash_key,
            }
            for record in request.records
        ],
    }
    assert cbor2.loads(cbor_body(request)) == expected
    body = json.loads(json_body(request))
    for record in body["Records"]:
        record["Data"] = base64.b64decode(record["Data"], validate=True)
    assert body == expected


class Text(str):
    """A subclass of str, like numpy's."""

    __slots__ = ()

    def __str__(self) -> str:
        return "something else"


@pytest.mark.parametrize("size", [1, 1_000])
def test_a_key_of_a_subclass_of_str_is_sent_as_a_str(size):
    """msgspec rejected such a key, so every attempt of the whole request failed until its records expired."""
    request = request_of(UserRecord(Text("key"), bytes(size)), stream=Text("orders"))
    body = json.loads(json_body(request))
    assert (body["StreamName"], body["Records"][0]["PartitionKey"]) == ("orders", "key")
    assert cbor2.loads(cbor_body(request))["Records"][0]["PartitionKey"] == "key"


def test_a_key_that_is_not_a_str_is_rejected():
    with pytest.raises(TypeError, match="has a object where a str is needed"):
        json_body(PutRecordsRequest("s", [kinesis_record(partition_key=object())], started_at=0.0))


@pytest.mark.parametrize("size", [0, 23, 24, 255, 256, 65_535, 65_536, 100_000])
def test_cbor_lengths_of_every_width_are_read_back(size):
    request = request_of(UserRecord("k" * min(max(size, 1), 256), bytes(size)))
    (record,) = cbor2.loads(cbor_body(request))["Records"]
    assert len(record["Data"]) == size


def test_a_stream_is_sent_as_an_arn_or_a_name():
    assert stream_argument("orders") == {"StreamName": "orders"}
    arn = "arn:aws:kinesis:us-east-1:000000000000:stream/orders"
    assert stream_argument(arn) == {"StreamARN": arn}


@pytest.mark.parametrize(
    "records",
    [
        [{"SequenceNumber": "1", "ShardId": "s", "ErrorCode": None, "ErrorMessage": None}],
        [{"SequenceNumber": "1", "ShardId": "s"}],
        [{"SequenceNumber": "1", "ShardId": "s", "EncryptionType": "KMS", "Unheard": [1, {"of": 2}]}],
    ],
)
def test_answers_are_parsed_with_and_without_nulls(records):
    expected = [PutRecordsEntry("1", "s", None, None)]
    assert json_entries(json.dumps({"FailedRecordCount": 0, "Records": records}).encode()) == expected
    assert cbor_entries(cbor2.dumps({"FailedRecordCount": 0, "Records": records})) == expected


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b"null", b'{"Records": 5}', b'{"Records": [5]}', b"<html>", b"\xff"]
)
def test_an_invalid_json_answer_is_an_error(body):
    with pytest.raises(msgspec.MsgspecError):
        json_entries(body)


@pytest.mark.parametrize("answer", [{}, [], None, 5, {"Records": 5}, {"Records": [5]}])
def test_an_invalid_cbor_answer_is_an_error(answer):
    with pytest.raises(ValueError, match="has no results"):
        cbor_entries(cbor2.dumps(answer))


def test_the_error_page_of_a_proxy_is_left_to_botocore():
    error_as_json = CBOR_WIRE.error_as_json
    assert error_as_json is not None
    assert error_as_json(b"<html>502") == b"<html>502"
    assert json.loads(error_as_json(cbor2.dumps({"__type": "Odd"}))) == {"__type": "Odd"}
