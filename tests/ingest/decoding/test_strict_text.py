"""What JSON and CBOR do not allow is refused alike in small bodies and in large ones, which are decoded in steps."""

import json
from typing import Any

import cbor2
import pytest
from hypothesis import example, given, strategies as st

from kpl_integrations.ingest.decoding import (
    DecodeLimits,
    DecodeRefusal,
    decode,
    decode_in_steps,
    decode_singles,
    otlp_in_steps,
    otlp_records,
)
from kpl_integrations.ingest.decoding.otlp_body import JSON
from kpl_integrations.ingest.decoding.put_records_body import put_records_in_steps
from kpl_integrations.ingest.decoding.record_counts import result_of
from kpl_integrations.kinesis_protocol.requests import RequestRefused
from kpl_integrations.kinesis_protocol.wire import request_of, wire_of

NDJSON, NATIVE, EVENT = "application/x-ndjson", "application/json", "application/cloudevents+json"
BATCH = "application/cloudevents-batch+json"
LIMITS = DecodeLimits()
ATTRIBUTES = '"specversion" : "1.0" , "id" : "1" , "source" : "s" , "type" : "t" , "partitionkey" : "k"'
ENTRY = '{ "PartitionKey" : "k" , "Data" : "aGVsbG8=" }'
# Each blank is where JSON allows one.
NATIVE_TEXTS = [
    (NATIVE, ' { "partition_key" : "k" , "data" : "x" } '),
    (NATIVE, ' { "records" : [ { "partition_key" : "k" , "data" : "x" } , { "data" : { "a" : 1 } } ] } '),
    (EVENT, f' {{ {ATTRIBUTES} , "data" : "x" }} '),
    (BATCH, f' [ {{ {ATTRIBUTES} , "data" : "x" }} , {{ {ATTRIBUTES} }} ] '),
    (NDJSON, ' { "partition_key" : "k" , "data" : "x" } \n { "data" : { "a" : 1 } } '),
]


def both_ways(content_type: str, body: bytes, size: int = 7) -> list[Any]:
    """Return the records and the index of each problem, or the code of the refusal: at once, and in steps."""
    found: list[Any] = []
    pieces = iter([body[at : at + size] for at in range(0, len(body), size)])
    for decoded in (
        lambda: decode(content_type, body, limits=LIMITS, headers={}, new_key=lambda: "new"),
        lambda: result_of(
            decode_in_steps(content_type, pieces, limits=LIMITS, headers={}, new_key=lambda: "new")
        ).with_records(),
    ):
        try:
            made = decoded()
            found.append((made.records, [each.index for each in made.problems]))
        except DecodeRefusal as refusal:
            found.append(refusal.status)
    return found


def places(text: str) -> list[int]:
    return [at for at, character in enumerate(text) if character == " "]


@pytest.mark.parametrize(("content_type", "text"), NATIVE_TEXTS)
@pytest.mark.parametrize("blank", ["\v", "\f", "\x85", "\xa0", "\x00"])
def test_only_the_four_blanks_of_json_may_be_between_its_tokens(content_type, text, blank):
    for allowed in both_ways(content_type, text.replace(" ", "\t\r ").encode()):
        records, problems = allowed
        assert len(records) == 1 + (content_type in (BATCH, NDJSON) or "records" in text)
        assert not problems
    for at in places(text):
        at_once, in_steps = both_ways(content_type, (text[:at] + blank + text[at + 1 :]).encode("latin-1"))
        # A line of NDJSON is a problem of its own.
        assert at_once == 400 or (content_type == NDJSON and at_once[1])
        assert in_steps == at_once


@pytest.mark.parametrize("blank", ["\v", "\f"])
def test_put_records_has_only_the_blanks_of_json(blank):
    text = f' {{ "StreamName" : "s" , "Records" : [ {ENTRY} , {ENTRY} ] }} '
    assert len(result_of(put_records_in_steps(text.encode(), 10_000)).records or []) == 2
    for at in places(text):
        body = (text[:at] + blank + text[at + 1 :]).encode()
        with pytest.raises(RequestRefused):
            request_of(wire_of(None), "PutRecords", body)
        with pytest.raises(RequestRefused):
            result_of(put_records_in_steps(body, 10_000))


@pytest.mark.parametrize("blank", ["\v", "\f"])
def test_an_export_request_has_only_the_blanks_of_json(blank):
    text = ' { "resourceLogs" : [ { "a" : 1 } , { } ] } '
    for at in places(text):
        body = (text[:at] + blank + text[at + 1 :]).encode()
        with pytest.raises(DecodeRefusal):
            otlp_records("logs", JSON, body, limits=LIMITS, partition_key="k")
        with pytest.raises(DecodeRefusal):
            result_of(otlp_in_steps("logs", JSON, iter([body[:20], body[20:]]), limits=LIMITS, partition_key="k"))


blanks = st.sampled_from(["", "", "", " ", "\n", "\r\n", "\t", "\n\n"])
members = st.sampled_from(['"x"', '"}{"', '{"a":1}', '{"a":{}}', "{}", "[{},{}]", '"\\n"', "1"])


@st.composite
def ndjson(draw: st.DrawFn) -> str:
    """Records with blanks, line breaks among them, between all tokens."""
    text = ""
    for _ in range(draw(st.integers(0, 4))):
        value = draw(members).replace("{}", "{" + draw(blanks) + "}").replace("},{", "}" + draw(blanks) + ",{")
        text += "".join(f"{token}{draw(blanks)}" for token in ("{", '"data"', ":", value, "}"))
        text += draw(st.sampled_from(["\n", "\n", "\n", "", " ", ",", ",\n", "\r\n", "\n \n"]))
    return text


@given(ndjson(), st.integers(1, 60))
@example('{"data":"x"}{"data":"y"}\n{"data":\n"z"}', 60)
@example('{"data":\n{"data":1}\n}', 60)
@example('\n{"data":1}', 60)
@example('{"data":1},{"data":2}', 60)
@example('{"data":1}\n{"data":2},{"data":3}\n\n{"data":4}', 60)
def test_a_record_of_ndjson_is_one_line_and_a_line_is_one_record(text, size):
    lines = [line for line in text.split("\n") if line.strip(" \t\r")]
    valid: list[int] = []
    for index, line in enumerate(lines):
        try:
            json.loads(line)
        except ValueError:
            continue
        # As the text of a record, 1 and the like are another problem of their line.
        if '"data"' in line and line.strip(" \t\r")[0] == "{":
            valid.append(index)
    at_once, in_steps = both_ways(NDJSON, text.encode(), size)
    assert at_once == in_steps
    if not lines:
        assert at_once == 400
        return
    records, problems = at_once
    assert len(records) + len(problems) == len(lines)
    assert set(problems) | set(valid) == set(range(len(lines)))
    assert not set(problems) & set(valid)


def test_bodies_that_are_joined_as_lines_are_one_record_each():
    for bodies in (
        [b'{"partition_key":"k","data":"x"}{"partition_key":"k","data":"y"}', b'{"partition_key":"k",'],
        [b'{"partition_key":"k","data":"x"}{"partition_key":"k","data":"y"}', b'{"a":{}'],
    ):
        assert decode_singles(bodies, LIMITS) is None


@pytest.mark.parametrize("after", [b"\x00", b"\xf6", b"\xff", b" ", b"\xa0" * 9_000])
def test_bytes_after_the_item_of_cbor_are_refused(after):
    body = cbor2.dumps({"StreamName": "s", "Data": b"x", "PartitionKey": "k"})
    wire = wire_of("application/x-amz-cbor-1.1")
    request_of(wire, "PutRecord", body)
    with pytest.raises(RequestRefused) as raised:
        request_of(wire, "PutRecord", body + after)
    assert raised.value.code == "SerializationException"


@pytest.mark.parametrize(
    ("tail", "is_valid"),
    [
        (' , "extra" : { "a" : [ 1 ] } } ', True),
        (',"a":1,"b":"' + "x" * 20_000 + '"}', True),
        ("}", True),
        (',"a":1', False),
        (',"a"}', False),
        (',"a":\v1}', False),
        ("]}", False),
        ("}}", False),
        (f',"a":{"[" * 64}1{"]" * 64}}}', False),
    ],
)
def test_an_export_request_has_any_members_after_its_array(tail, is_valid):
    body = ('{"resourceLogs":[{"a":1},{"b":2}]' + tail).encode()
    for pieces in ([body], [body[:30], body[30:40], body[40:]]):
        steps = otlp_in_steps("logs", JSON, iter(pieces), limits=LIMITS, partition_key="k")
        if is_valid:
            assert [each.data for each in result_of(steps)] == [body]
        else:
            with pytest.raises(DecodeRefusal) as raised:
                result_of(steps)
            assert raised.value.status == 400


@pytest.mark.parametrize("is_large", [False, True])
def test_a_second_array_of_an_export_request_is_refused(is_large):
    body = b'{"resourceLogs":[{"a":1}],"resourceLogs":[{"b":2}]}'
    pieces = [body[:20], body[20:]] if is_large else [body]
    with pytest.raises(DecodeRefusal, match="resourceLogs is there twice; send one array"):
        result_of(otlp_in_steps("logs", JSON, iter(pieces), limits=LIMITS, partition_key="k"))


def test_data_may_have_the_name_of_the_array():
    body = (
        b'{"n":' + b"1" * 5_000 + b',"resourceLogs":[{"resourceLogs":[1],"a":"\\"resourceLogs\\"","b":"resourceLogs"}]}'
    )
    steps = otlp_in_steps("logs", JSON, iter([body]), limits=LIMITS, partition_key="k")
    assert [each.data for each in result_of(steps)] == [body]
