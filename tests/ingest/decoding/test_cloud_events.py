"""CloudEvents in their three HTTP modes. tests/ingest/routes/test_cloudevents_sdk.py has events of the official SDK."""

import json

import pytest

from kpl_core import UserRecord
from kpl_integrations.ingest.decoding import Decoded, DecodeLimits, DecodeRefusal, decode

LIMITS = DecodeLimits(max_records=3, max_record_bytes=4096, max_depth=8)
STRUCTURED = "application/cloudevents+json"
BATCHED = "application/cloudevents-batch+json"
EVENT = {"specversion": "1.0", "id": "1", "source": "/s", "type": "t"}
HEADERS = {f"ce-{name}": value for name, value in EVENT.items()}


def decoded(content_type: str, body: bytes, headers: dict[str, str] | None = None) -> Decoded:
    return decode(content_type, body, limits=LIMITS, headers=headers or {}, new_key=lambda: "random")


def test_a_structured_event_keeps_its_text():
    text = b'{"specversion":"1.0", "id":"1", "source":"/s", "type":"t", "partitionkey":"p", "data":{"n": 1.0}, "x":7}'
    assert decoded(STRUCTURED, text) == Decoded([UserRecord("p", text)], [])


@pytest.mark.parametrize("content_type", [STRUCTURED, STRUCTURED.title(), f"{STRUCTURED}; charset=utf-8"])
def test_a_structured_event_with_attribute_headers_is_not_binary(content_type):
    text = json.dumps({**EVENT, "partitionkey": "p"}).encode()
    assert decoded(content_type, text, HEADERS) == Decoded([UserRecord("p", text)], [])


def test_a_batch_with_attribute_headers_is_not_binary():
    text = json.dumps(EVENT).encode()
    assert decoded(BATCHED, b"[" + text + b"]", HEADERS) == Decoded([UserRecord("random", text)], [])


def test_an_event_in_an_unknown_format_is_rejected_and_not_wrapped_as_data():
    with pytest.raises(DecodeRefusal) as raised:
        decoded("application/cloudevents+xml", b"<event/>", HEADERS)
    assert raised.value.status == 415


def test_an_event_without_partitionkey_gets_a_random_one():
    text = json.dumps(EVENT).encode()
    assert decoded(f"{STRUCTURED}; charset=utf-8", text) == Decoded([UserRecord("random", text)], [])


def test_each_event_of_a_batch_is_a_record():
    first, second = json.dumps(EVENT), json.dumps({**EVENT, "partitionkey": "q", "data": "é"})
    result = decoded(BATCHED, f"[ {first} ,{second}]".encode())
    assert result == Decoded([UserRecord("random", first.encode()), UserRecord("q", second.encode())], [])


FAULTS: list[tuple[dict[str, object], str]] = [
    ({**EVENT, "id": ""}, "id"),
    ({**EVENT, "source": ""}, "source"),
    ({**EVENT, "type": 3}, "type"),
    ({name: value for name, value in EVENT.items() if name != "type"}, "type"),
    ({**EVENT, "specversion": "0.3"}, "specversion"),
    ({**EVENT, "partitionkey": ""}, "partitionkey"),
    ({**EVENT, "data": 1, "data_base64": "AA=="}, "data_base64"),
    ({**EVENT, "data": [[[[[[[[[]]]]]]]]]}, "$"),
    ({**EVENT, "data": "x" * 4096}, "data"),
]


@pytest.mark.parametrize(("event", "field"), FAULTS)
def test_an_invalid_event_is_named_by_its_index_and_field(event, field):
    alone = decoded(STRUCTURED, json.dumps(event).encode())
    assert [(each.index, each.field) for each in alone.problems] == [(0, field)]
    among = decoded(BATCHED, json.dumps([EVENT, event, EVENT]).encode())
    assert [(each.index, each.field) for each in among.problems] == [(1, field)]
    assert len(among.records) == 2


@pytest.mark.parametrize(
    ("content_type", "body", "code"),
    [
        (STRUCTURED, b"{", "truncated"),
        (STRUCTURED, b'{"id":"\xff"}', "encoding"),
        (STRUCTURED, b'{"x":' + b"[" * 100_000, "too-deep"),
        (BATCHED, b"[", "truncated"),
        (BATCHED, b"{}", "malformed"),
        (BATCHED, b"[]", "malformed"),
        (BATCHED, json.dumps([EVENT] * 4).encode(), "too-many-records"),
    ],
)
def test_a_body_without_events_is_rejected_completely(content_type, body, code):
    with pytest.raises(DecodeRefusal) as raised:
        decoded(content_type, body)
    assert raised.value.code == code


@pytest.mark.parametrize(
    ("content_type", "body", "member"),
    [
        ("application/json", b'{"n": 1.0}', {"data": {"n": 1.0}, "datacontenttype": "application/json"}),
        ("application/vnd.x+json", b"3", {"data": 3, "datacontenttype": "application/vnd.x+json"}),
        ("", b"3", {"data": 3}),
        ("text/plain", "é".encode(), {"data": "é", "datacontenttype": "text/plain"}),
        ("text/plain", b"\xff", {"data_base64": "/w==", "datacontenttype": "text/plain"}),
        ("application/octet-stream", b"\x00", {"data_base64": "AA==", "datacontenttype": "application/octet-stream"}),
        ("text/plain", b"", {"datacontenttype": "text/plain"}),
    ],
)
def test_a_binary_event_is_converted_to_the_json_format(content_type, body, member):
    headers = {**HEADERS, "ce-partitionkey": "p", "ce-subject": "%E2%82%AC 50%25", "ce-q": '"a\\"b"', "accept": "*/*"}
    result = decoded(content_type, body, headers)
    assert result.problems == []
    assert result.records[0].partition_key == "p"
    wanted = {**EVENT, "partitionkey": "p", "subject": "€ 50%", "q": 'a"b', **member}
    assert json.loads(result.records[0].data) == wanted


def test_a_binary_event_in_the_headers_has_precedence_over_a_body_of_records():
    result = decoded("application/json", b'{"records":[{"data":1}]}', HEADERS)
    assert json.loads(result.records[0].data)["data"] == {"records": [{"data": 1}]}


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ({"ce-id": ""}, "id"),
        ({"ce-data": "x"}, "ce-data"),
        ({"ce-not_a_name": "x"}, "ce-not_a_name"),
        ({"ce-specversion": "2.0"}, "specversion"),
    ],
)
def test_an_invalid_attribute_of_a_binary_event_is_named(headers, field):
    result = decoded("application/json", b"1", {**HEADERS, **headers})
    assert [(each.index, each.field) for each in result.problems] == [(0, field)]


@pytest.mark.parametrize(("headers", "body"), [({"ce-x": "%FF"}, b"1"), ({}, b"{"), ({}, b"\xff")])
def test_a_binary_event_that_cannot_be_json_is_rejected(headers, body):
    with pytest.raises(DecodeRefusal) as raised:
        decoded("application/json", body, {**HEADERS, **headers})
    assert raised.value.status == 400


def test_the_depth_of_an_event_that_is_too_large_is_not_checked():
    too_large = {**EVENT, "data": ["x" * 5_000, json.loads("[" * 20 + "]" * 20)]}
    (problem,) = decoded(STRUCTURED, json.dumps(too_large).encode()).problems
    assert problem.field == "data"
