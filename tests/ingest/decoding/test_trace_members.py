"""Records that carry the trace of their request: which do, and that nothing else about them changes."""

import base64
import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, strategies as st

from kpl_core.records.aggregated_record import MAGIC
from kpl_core.records.topic import trace_context_of
from kpl_integrations.ingest.decoding import DecodeLimits, decode, decode_in_steps, pieces_of, trace_members
from kpl_integrations.ingest.decoding.trace_members import with_trace

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
MEMBERS = trace_members(TRACEPARENT, "")
LIMITS = DecodeLimits(trace_members=MEMBERS)
JSON, NDJSON, EVENT, BATCH = (
    "application/json",
    "application/x-ndjson",
    "application/cloudevents+json",
    "application/cloudevents-batch+json",
)
ATTRIBUTES = {"specversion": "1.0", "id": "1", "source": "s", "type": "t"}

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)
blanks = st.text(" \t\r\n", max_size=3)


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Return an object as a client may write it: any numbers, blanks, escapes, and names twice."""
    numbers = st.sampled_from(["1.0", "1e400", "-0", "10000000000000000000000001", "1E+2", "0.10"])
    names = st.text(max_size=6) | st.sampled_from(["traceparent", "tracestate", "trace", "Traceparent"])
    members = []
    for _ in range(draw(st.integers(0, 5))):
        name = json.dumps(draw(names), ensure_ascii=draw(st.booleans()))
        value = draw(numbers | values.map(json.dumps))
        members.append(f"{draw(blanks)}{name}{draw(blanks)}:{draw(blanks)}{value}{draw(blanks)}")
    return f"{draw(blanks)}{{{draw(blanks)}{','.join(members)}}}{draw(blanks)}"


@given(texts().filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text)), st.sampled_from(["", "vendor=1"]))
@example("{}", "")
@example(' { "a" : "}" } ', "a=b")
@example('{"trace\\u0070arent":1}', "")
@example('{"a":{"traceparent":1},"b":"traceparent"}', "")
def test_an_object_without_the_added_member_is_the_object_byte_for_byte(text: str, state: str):
    before = text.encode()
    members = trace_members(TRACEPARENT, state)
    after = with_trace(before, DecodeLimits(trace_members=members), "key")
    own = json.loads(text, strict=False)
    if {"traceparent", "tracestate"} & own.keys():
        assert after == before
        return
    comma = b"," if own else b""
    assert after.count(members) == 1
    assert after.replace(comma + members, b"") == before
    pairs = json.loads(after, object_pairs_hook=list)
    added = [("traceparent", TRACEPARENT), *([("tracestate", state)] if state else [])]
    assert pairs == json.loads(before, object_pairs_hook=list) + added
    assert trace_context_of(after.strip()) == dict(added)


@given(values.filter(lambda value: not isinstance(value, dict)))
def test_what_is_no_object_stays(value: Any):
    text = json.dumps(value).encode()
    assert with_trace(text, LIMITS, "") == text


@pytest.mark.parametrize("more", [0, 1])
def test_an_object_that_would_become_too_large_stays(more):
    text = b'{"a":"%b"}' % (b"x" * (8_192 - len(MEMBERS) - 1 - 4 * 3 - 8 + more))
    limits = DecodeLimits(trace_members=MEMBERS, max_record_bytes=8_192)
    assert (with_trace(text, limits, "key") == text) is bool(more)


def data_of(content_type: str, body: bytes, headers: dict[str, str] | None = None) -> list[bytes]:
    return [record.data for record in decode(content_type, body, limits=LIMITS, headers=headers or {}).records]


def in_steps(content_type: str, body: bytes) -> list[bytes]:
    steps = decode_in_steps(content_type, pieces_of(None, body, len(body), [0]), limits=LIMITS, headers={})
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return [record.data for record in end.value.with_records().records]


NATIVE: list[tuple[dict[str, Any], bool]] = [
    ({"data": {"a": 1}}, True),
    ({"data": {}, "partition_key": "k"}, True),
    ({"data": {"a": 1}, "partition_key": "k", "explicit_hash_key": "7"}, True),
    ({"data": {"traceparent": None}, "partition_key": "k"}, False),
    ({"data": [1, {"a": 1}], "partition_key": "k"}, False),
    ({"data": "text", "partition_key": "k"}, False),
    # Bytes and texts are opaque, even if they look like an object.
    ({"data": '{"a":1}', "partition_key": "k"}, False),
    ({"data_base64": base64.b64encode(b'{"a":1}').decode(), "partition_key": "k"}, False),
    ({"data_base64": base64.b64encode(MAGIC + b"x" * 30).decode(), "partition_key": "k"}, False),
]


@pytest.mark.parametrize("content_type", [JSON, NDJSON])
def test_only_an_object_of_a_native_record_carries_the_trace(content_type):
    records = [record for record, _ in NATIVE]
    body = json.dumps({"records": records}) if content_type == JSON else "\n".join(map(json.dumps, records))
    plain = decode(content_type, body.encode(), limits=DecodeLimits(), headers={}).records
    for found in (data_of(content_type, body.encode()), in_steps(content_type, body.encode())):
        assert [MEMBERS in data for data in found] == [carries for _, carries in NATIVE]
        assert [data == before.data for data, before in zip(found, plain, strict=True)] == [not c for _, c in NATIVE]


def test_events_carry_the_trace_in_all_three_modes_unless_they_have_one():
    event, own = {**ATTRIBUTES, "data": {"a": 1.50}}, {**ATTRIBUTES, "traceparent": "mine", "partitionkey": "k"}
    text = json.dumps(event).encode()
    assert data_of(EVENT, text) == in_steps(EVENT, text) == [text[:-1] + b"," + MEMBERS + b"}"]
    batch = json.dumps([event, own]).encode()
    assert data_of(BATCH, batch) == in_steps(BATCH, batch) == [*data_of(EVENT, text), json.dumps(own).encode()]
    headers = {f"ce-{name}": value for name, value in ATTRIBUTES.items()}
    (made,) = data_of("text/plain", b"x", headers)
    assert msgspec.json.decode(made) == {
        **ATTRIBUTES, "datacontenttype": "text/plain", "data": "x", "traceparent": TRACEPARENT
    }  # fmt: skip
    (kept,) = data_of("text/plain", b"x", {**headers, "ce-traceparent": "mine"})
    assert msgspec.json.decode(kept)["traceparent"] == "mine"


def test_octets_stay_as_they_are():
    assert data_of("application/octet-stream", b'{"a":1}') == [b'{"a":1}']


def test_a_long_record_of_a_large_body_carries_the_trace():
    record = {"partition_key": "k", "data": {"a": "x" * 300_000}}
    for content_type, body in (
        (NDJSON, json.dumps(record) + "\n" + json.dumps(record)),
        (JSON, json.dumps({"records": [record, record]})),
        (JSON, json.dumps(record)),
    ):
        found = in_steps(content_type, body.encode())
        assert found
        assert all(trace_context_of(data) == {"traceparent": TRACEPARENT} for data in found)
