"""The wire protocol: decoded requests, encoded answers, and the service's messages for invalid requests."""

import sys
from typing import Any, NamedTuple

import botocore.session
import cbor2
import msgspec
import pytest
from hypothesis import given, strategies as st

from kpl_integrations.kinesis_protocol.requests import (
    CONSTRAINTS,
    REQUEST_TYPES,
    Constraint,
    CreateStream,
    GetShardIterator,
    ListShards,
    ListShardsFilter,
    PutRecord,
    PutRecords,
    PutRecordsRequestEntry,
    RequestRefused,
    StreamModeDetails,
)
from kpl_integrations.kinesis_protocol.wire import Timestamp, error_body, operation_of, request_of, wire_of

JSON = wire_of("application/x-amz-json-1.1")
CBOR = wire_of("application/x-amz-cbor-1.1")


class Result(NamedTuple):
    """One line of a PutRecords answer."""

    shard_id: str | None = None
    sequence_number: str | None = None
    error_code: str | None = None
    error_message: str | None = None


MODEL = botocore.session.Session().get_service_model("kinesis")
# Not supported here: tags, consumers, modes of the account; a stream id instead of name or ARN.
NOT_SUPPORTED = {
    "DryRun",
    "EnforceConsumerDeletion",
    "RecordDistributionStrategy",
    "StreamId",
    "Tags",
    "WarmThroughputMiBps",
}


def rows() -> list[tuple[type[msgspec.Struct], Any]]:
    """Return each request with the service's own model of it."""
    inputs = [(request, MODEL.operation_model(name).input_shape) for name, request in REQUEST_TYPES.items()]
    nested: dict[str, type[msgspec.Struct]] = {
        "PutRecordsRequestEntry": PutRecordsRequestEntry,
        "ShardFilter": ListShardsFilter,
        "StreamModeDetails": StreamModeDetails,
    }
    return inputs + [(request, MODEL.shape_for(name)) for name, request in nested.items()]


@pytest.mark.parametrize(("request_type", "shape"), rows(), ids=lambda value: getattr(value, "__name__", ""))
def test_the_constraints_match_the_services_model(request_type: type[msgspec.Struct], shape: Any) -> None:
    wire_names = dict(zip(request_type.__struct_fields__, request_type.__struct_encode_fields__, strict=True))
    assert set(wire_names.values()) >= set(shape.members) - NOT_SUPPORTED
    constraints = {wire_names[name]: constraint for name, constraint in CONSTRAINTS[request_type].items()}
    for name, member_shape in shape.members.items():
        if name in NOT_SUPPORTED or (request_type is CreateStream and name == "StreamARN"):
            continue
        ours, theirs = constraints.get(name, Constraint()), member_shape.metadata
        assert (ours.least or 0) == theirs.get("min", 0)
        if ours.most != 2**31 - 1:
            assert ours.most == theirs.get("max")
        assert set(ours.one_of) == set(theirs.get("enum", ()))
        assert (ours.pattern or "").strip("()") == theirs.get("pattern", "").strip("^$").strip("()")
    required = {name for name, member in constraints.items() if member.required}
    extra = {"PartitionKey", "Data"}  # optional in the model of an entry, required by the service
    assert required - extra == set(shape.required_members) - extra


def test_every_request_has_constraints() -> None:
    assert set(REQUEST_TYPES.values()) < set(CONSTRAINTS)


@pytest.mark.parametrize(
    "target", [None, "", "PutRecords", "Kinesis_20131202.", "Kinesis_20131202.Nothing", "X.PutRecords"]
)
def test_a_target_without_a_known_operation_is_rejected(target: str | None) -> None:
    with pytest.raises(RequestRefused, match="UnknownOperationException"):
        operation_of(target)


def test_a_target_names_its_operation() -> None:
    for name in REQUEST_TYPES:
        assert operation_of(f"Kinesis_20131202.{name}") == name


@pytest.mark.parametrize(
    ("content_type", "selected"),
    [
        ("application/x-amz-json-1.1", "application/x-amz-json-1.1"),
        ("application/x-amz-cbor-1.1", "application/x-amz-cbor-1.1"),
        ("Application/X-AMZ-CBOR-1.1; charset=utf-8", "application/x-amz-cbor-1.1"),
        ("text/plain", "application/x-amz-json-1.1"),
        (None, "application/x-amz-json-1.1"),
    ],
)
def test_the_content_type_selects_the_format(content_type: str | None, selected: str) -> None:
    assert wire_of(content_type).content_type == selected


def test_cbor_without_its_package_is_rejected_with_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cbor2", None)
    monkeypatch.delitem(sys.modules, "kpl_integrations.kinesis_protocol.cbor_wire")
    with pytest.raises(RequestRefused, match=r"install kpl-integrations\[cbor\]") as refusal:
        wire_of("application/x-amz-cbor-1.1")
    assert refusal.value.status == 415


def test_json_members_may_be_unknown_null_or_missing() -> None:
    request = JSON.decode(b'{"StreamName":"s","Strange":{"a":[1]},"StreamARN":null}', ListShards)
    assert (request.stream_name, request.stream_arn, request.next_token) == ("s", None, None)


def test_an_error_lists_all_violations_up_to_ten() -> None:
    body = b'{"ShardId":"","ShardIteratorType":"","StartingSequenceNumber":"","StreamName":""}'
    with pytest.raises(RequestRefused) as refusal:
        request_of(JSON, "GetShardIterator", body)
    constraint = "failed to satisfy constraint: Member must"
    assert refusal.value.message == (
        "6 validation errors detected: "
        f"Value '' at 'shardId' {constraint} satisfy regular expression pattern: [a-zA-Z0-9_.-]+; "
        f"Value '' at 'shardId' {constraint} have length greater than or equal to 1; "
        f"Value '' at 'shardIteratorType' {constraint} satisfy enum value set: "
        "[AFTER_SEQUENCE_NUMBER, LATEST, AT_TIMESTAMP, AT_SEQUENCE_NUMBER, TRIM_HORIZON]; "
        f"Value '' at 'startingSequenceNumber' {constraint} satisfy regular expression pattern: 0|([1-9]\\d{{0,128}}); "
        f"Value '' at 'streamName' {constraint} satisfy regular expression pattern: [a-zA-Z0-9_.-]+; "
        f"Value '' at 'streamName' {constraint} have length greater than or equal to 1"
    )
    many = {"StreamName": "s", "Records": [{"PartitionKey": "", "Data": ""}] * 20}
    with pytest.raises(RequestRefused, match="10 validation errors detected"):
        request_of(JSON, "PutRecords", msgspec.json.encode(many))


def test_missing_members_are_reported_as_null_like_the_service_does() -> None:
    with pytest.raises(RequestRefused) as refusal:
        request_of(JSON, "PutRecords", b'{"Records":[{}]}')
    null = "failed to satisfy constraint: Member must not be null"
    assert refusal.value.message == (
        f"3 validation errors detected: Value null at 'records.1.member.partitionKey' {null}; "
        f"Value null at 'records.1.member.data' {null}; Value null at 'streamName' {null}"
    )


@pytest.mark.parametrize(
    ("operation", "members", "words"),
    [
        ("GetRecords", {"ShardIterator": "i", "Limit": 0}, "Value '0' at 'limit' .* greater than or equal to 1"),
        (
            "GetRecords",
            {"ShardIterator": "i", "Limit": 10_001},
            "Value '10001' at 'limit' .* less than or equal to 10000",
        ),
        ("GetRecords", {"ShardIterator": "i" * 513}, "at 'shardIterator' .* less than or equal to 512"),
        ("ListShards", {"StreamARN": "nonsense"}, "at 'streamARN' failed"),
        ("CreateStream", {"StreamName": "s", "ShardCount": 0}, "Value '0' at 'shardCount'"),
        (
            "CreateStream",
            {"StreamName": "s", "StreamModeDetails": {"StreamMode": "SOME"}},
            r"at 'streamModeDetails.streamMode' .* enum value set: \[PROVISIONED, ON_DEMAND\]",
        ),
        ("UpdateMaxRecordSize", {"StreamARN": "a", "MaxRecordSizeInKiB": 1}, "Value '1' at 'maxRecordSizeInKiB'"),
        ("UpdateShardCount", {"StreamName": "s", "TargetShardCount": 2}, "Value null at 'scalingType'"),
        ("SplitShard", {"StreamName": "s", "ShardToSplit": "x", "NewStartingHashKey": "-1"}, "at 'newStartingHashKey'"),
    ],
)
def test_a_violated_bound_is_reported_with_the_value(operation: str, members: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestRefused, match=words) as refusal:
        request_of(JSON, operation, msgspec.json.encode(members))
    assert (refusal.value.code, refusal.value.status) == ("ValidationException", 400)


@pytest.mark.parametrize("hash_key", ["٣", "1" * 40, "00", "+5", " 5", "5\n"])
def test_a_hash_key_that_is_not_plain_decimal_is_rejected(hash_key: str) -> None:
    body = {"StreamName": "s", "Records": [{"PartitionKey": "k", "Data": "", "ExplicitHashKey": hash_key}]}
    with pytest.raises(RequestRefused, match=r"at 'records.1.member.explicitHashKey'"):
        request_of(JSON, "PutRecords", msgspec.json.encode(body))


entries = st.lists(
    st.builds(
        PutRecordsRequestEntry,
        partition_key=st.text(min_size=1, max_size=256),
        explicit_hash_key=st.none() | st.integers(0, 2**128 - 1).map(str),
        data=st.binary(max_size=100),
    ),
    min_size=1,
    max_size=20,
)


@given(entries)
def test_both_formats_decode_what_a_client_encodes(records: list[PutRecordsRequestEntry]) -> None:
    wanted = PutRecords(stream_name="s", records=records)
    assert request_of(JSON, "PutRecords", msgspec.json.encode(wanted)) == wanted
    members = [
        {"PartitionKey": record.partition_key, "Data": record.data}
        | ({} if record.explicit_hash_key is None else {"ExplicitHashKey": record.explicit_hash_key})
        for record in records
    ]
    for indefinite in (False, True):
        body = cbor2.dumps({"StreamName": "s", "Records": members}, indefinite_containers=indefinite)
        assert request_of(CBOR, "PutRecords", body) == wanted


results = st.lists(
    st.one_of(
        st.builds(Result, shard_id=st.just("shardId-000000000001"), sequence_number=st.integers(0).map(str)),
        st.builds(Result, error_code=st.sampled_from(["InternalFailure"]), error_message=st.text()),
    ),
    max_size=20,
)


@given(results)
def test_both_formats_encode_the_same_put_results(given_results: list[Result]) -> None:
    wanted = {
        "FailedRecordCount": sum(result.error_code is not None for result in given_results),
        "Records": [
            {"ShardId": result.shard_id, "SequenceNumber": result.sequence_number}
            if result.error_code is None
            else {"ErrorCode": result.error_code, "ErrorMessage": result.error_message}
            for result in given_results
        ],
    }
    assert msgspec.json.decode(JSON.encode_put_results(given_results)) == wanted
    assert cbor2.loads(CBOR.encode_put_results(given_results)) == wanted


def test_blobs_and_timestamps_are_encoded_in_each_format() -> None:
    answer = {"Data": b"\x00\xff", "At": Timestamp(1_700_000_000_123), "Nested": [{"At": Timestamp(0)}]}
    assert JSON.encode(answer) == b'{"Data":"AP8=","At":1700000000.123,"Nested":[{"At":0.0}]}'
    decoded = cbor2.loads(CBOR.encode(answer), semantic_decoders={1: lambda ms, _: ("ms", ms)})
    assert decoded == {"Data": b"\x00\xff", "At": ("ms", 1_700_000_000_123), "Nested": [{"At": ("ms", 0)}]}
    assert repr(Timestamp(5)) == "Timestamp(5)"
    with pytest.raises(TypeError, match="cannot contain a object"):
        JSON.encode({"Strange": object()})


@pytest.mark.parametrize(
    ("sent", "seconds"), [(1_700_000_000_123, 1_700_000_000.123), (1_700_000_000, 1.7e9), (1.5, 1.5)]
)
def test_a_cbor_timestamp_may_be_in_milliseconds_or_seconds(sent: float, seconds: float) -> None:
    body = cbor2.dumps({"StreamName": "s", "Timestamp": cbor2.CBORTag(1, sent)})
    assert CBOR.decode(body, GetShardIterator).timestamp == seconds


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"\xa1",
        cbor2.dumps([]),
        cbor2.dumps({1: 2}),
        cbor2.dumps({"Data": "text"}),
        cbor2.dumps({"PartitionKey": b"bytes"}),
        cbor2.dumps({"SequenceNumberForOrdering": cbor2.CBORTag(1, "no number")}),
        cbor2.dumps({"Strange": cbor2.CBORTag(1, True)}),
        b"\x81" * 100_000,
        b"\xd8\x1c" * 1_000,
    ],
)
def test_invalid_cbor_is_a_serialization_error(body: bytes) -> None:
    with pytest.raises(RequestRefused, match="SerializationException"):
        CBOR.decode(body, PutRecord)


@pytest.mark.parametrize("length", [0, 23, 24, 255, 256, 65_535, 65_536, 300_000])
def test_cbor_of_every_length_is_decoded(length: int) -> None:
    record = {"PartitionKey": "k" * length, "Data": b"x" * length, "Unknown": [{"a": 1.5, "b": [None, True, -(2**40)]}]}
    decoded = CBOR.decode(cbor2.dumps(record), PutRecord)
    assert (decoded.partition_key, decoded.data) == ("k" * length, b"x" * length)
    pieces = b"\xa1" + cbor2.dumps("Data") + b"\x5f" + cbor2.dumps(b"x" * length) * 2 + b"\xff"
    assert CBOR.decode(pieces, PutRecord).data == b"x" * length * 2


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"\x9a\x00\x02\x00\x00" + b"\xf6" * 131_072, "more than 8,192 items"),
        (b"\xa1\x64Data\x5b" + b"\xff" * 8 + b"x", "longer than the body"),
        (b"\xa1\x67Records\x9b" + b"\x00\x00\x00\x10" * 2, "longer than the body"),
        (b"\xa1\x64Data\x43xx", "longer than the body"),
        (cbor2.dumps({"Limit": 2**70}), "tag other than 1"),
        (cbor2.dumps({"Data": cbor2.CBORTag(28, b"x")}), "tag other than 1"),
        (cbor2.dumps({"Data": cbor2.CBORTag(55_799, b"x")}), "tag other than 1"),
        (b"\x1c", "not CBOR"),
    ],
)
def test_cbor_is_counted_before_it_is_decoded(body: bytes, words: str) -> None:
    with pytest.raises(RequestRefused, match=words):
        CBOR.decode(body, PutRecord)


def test_a_request_of_too_many_objects_is_refused_and_braces_in_keys_are_not() -> None:
    with pytest.raises(RequestRefused, match="more than 131,072 objects"):
        request_of(JSON, "PutRecords", b'{"StreamName":"s","Records":[' + b"{}," * 131_072 + b"{}]}")
    records = [{"PartitionKey": "{" * 256, "Data": ""}] * 500
    request_of(JSON, "PutRecords", msgspec.json.encode({"StreamName": "s", "Records": records}))


@pytest.mark.parametrize("region", ["eu-west-1", "", "us-gov-west-1"])
def test_an_arn_is_valid_in_every_region_and_partition(region: str) -> None:
    for partition in ("aws", "aws-cn", "aws-us-gov"):
        arn = f"arn:{partition}:kinesis:{region}:111122223333:stream/orders"
        request_of(JSON, "DescribeStream", msgspec.json.encode({"StreamARN": arn}))


def test_only_500_records_are_checked_and_a_long_value_is_cut() -> None:
    good = {"PartitionKey": "k", "Data": ""}
    with pytest.raises(RequestRefused) as refusal:
        request_of(JSON, "PutRecords", msgspec.json.encode({"StreamName": "s", "Records": [good] * 500 + [{}]}))
    constraint = "failed to satisfy constraint: Member must have length less than or equal to"
    assert refusal.value.message == f"1 validation error detected: Value at 'records' {constraint} 500"
    with pytest.raises(RequestRefused) as refusal:
        request_of(JSON, "DescribeStream", msgspec.json.encode({"StreamARN": "a" * 100_000}))
    cut = "a" * 2_048 + "..."
    assert refusal.value.message == f"1 validation error detected: Value '{cut}' at 'streamARN' {constraint} 2048"


def test_an_error_body_has_a_type_and_a_message() -> None:
    assert JSON.encode({"__type": "X", "message": "ü"}) == error_body(JSON, "X", "ü")
    assert cbor2.loads(error_body(CBOR, "X", "ü")) == {"__type": "X", "message": "ü"}


@given(st.binary(max_size=64))
def test_any_body_is_decoded_or_rejected(body: bytes) -> None:
    for wire in (JSON, CBOR):
        for operation in REQUEST_TYPES:
            try:
                request_of(wire, operation, body)
            except RequestRefused as refusal:
                assert refusal.code in {"SerializationException", "ValidationException"}  # noqa: PT017 - both outcomes are valid
