"""application/json, application/x-ndjson and application/octet-stream."""

import json

import pybase64
import pytest
from hypothesis import given, strategies as st

from kpl_core import UserRecord, encode
from kpl_core.options.kinesis_limits import MAX_HASH_KEY
from kpl_integrations.ingest.decoding import Decoded, DecodeLimits, DecodeRefusal, RecordProblem, decode, decode_plain
from kpl_integrations.ingest.decoding.decoded import RECORDS_PER_KEY, NeighbourKeys

LIMITS = DecodeLimits(max_records=1000, max_record_bytes=4096, max_depth=8)
JSON = "application/json"
NDJSON = "application/x-ndjson"


def decoded(content_type: str, body: bytes, headers: dict[str, str] | None = None) -> Decoded:
    counter = iter(range(10**6))
    return decode(content_type, body, limits=LIMITS, headers=headers or {}, new_key=lambda: f"key-{next(counter)}")


def refusal(content_type: str, body: bytes, headers: dict[str, str] | None = None) -> DecodeRefusal:
    with pytest.raises(DecodeRefusal) as raised:
        decoded(content_type, body, headers)
    return raised.value


# A record as a client writes it, and its user record.
SHAPES: list[tuple[str, UserRecord]] = [
    ('{"partition_key":"k","data":"text"}', UserRecord("k", b"text")),
    ('{"partition_key":"k","data":"a\\n\\u00e9"}', UserRecord("k", "a\né".encode())),
    ('{"partition_key":"k","data":"é"}', UserRecord("k", "é".encode())),
    ('{"partition_key":"k","data":""}', UserRecord("k", b"")),
    ('{"partition_key":"ключ","data":"x"}', UserRecord("ключ", b"x")),
    ('{"partition_key":"k","data":{"a": 1.50}}', UserRecord("k", b'{"a": 1.50}')),
    ('{"partition_key":"k","data":[1,2]}', UserRecord("k", b"[1,2]")),
    ('{"partition_key":"k","data":12345678901234567890123}', UserRecord("k", b"12345678901234567890123")),
    ('{"partition_key":"k","data":false}', UserRecord("k", b"false")),
    ('{"partition_key":"k","data_base64":"AAEC"}', UserRecord("k", b"\x00\x01\x02")),
    ('{"partition_key":"k","data":"x","explicit_hash_key":"7"}', UserRecord("k", b"x", "7")),
    ('{"partition_key":"k","data":"x","explicit_hash_key":"0"}', UserRecord("k", b"x", "0")),
    (
        f'{{"partition_key":"k","data":"x","explicit_hash_key":"{MAX_HASH_KEY}"}}',
        UserRecord("k", b"x", str(MAX_HASH_KEY)),
    ),
    ('{"partition_key":"k","data":{},"explicit_hash_key":"7"}', UserRecord("k", b"{}", "7")),
    ('{"data":"x"}', UserRecord("key-0", b"x")),
]


@pytest.mark.parametrize(("text", "record"), SHAPES)
def test_every_form_decodes_the_same_alone_in_an_envelope_and_on_a_line(text, record):
    assert decoded(JSON, text.encode()) == Decoded([record], [])
    assert decoded(JSON, f'{{"records":[{text}]}}'.encode()) == Decoded([record], [])
    assert decoded(NDJSON, f"\n{text}\r\n\n".encode()) == Decoded([record], [])


# An invalid record, the field, and a part of the error message.
FAULTS: list[tuple[str, str, str]] = [
    ("{}", "data", "no data"),
    ('{"data":null}', "data", "no data"),
    ('{"data":"x","data_base64":"AA=="}', "data_base64", "one of them"),
    ('{"data_base64":"A"}', "data_base64", "not base64"),
    ('{"data_base64":"A A="}', "data_base64", "not base64"),
    ('{"partition_key":"","data":"x"}', "partition_key", "0 characters"),
    ('{"partition_key":"' + "k" * 257 + '","data":"x"}', "partition_key", "257 characters"),
    ('{"partition_key":7,"data":"x"}', "partition_key", "Expected `str | null`, got `int`"),
    (
        '{"partitionKey":"k","data":"x"}',
        "partitionKey",
        "unknown field `partitionKey`; leave it out, or spell it as /openapi.json does",
    ),
    ('{"data":"x","explicit_hash_key":"01"}', "explicit_hash_key", "decimal"),
    ('{"data":"x","explicit_hash_key":"340282366920938463463374607431768211456"}', "explicit_hash_key", "largest"),
    *(
        (f'{{"partition_key":"k","data":"x","explicit_hash_key":"{number}"}}', "explicit_hash_key", said)
        for number, said in {
            str(MAX_HASH_KEY + 1): "largest",
            **dict.fromkeys(("", "01", "+1", "1 ", "1_0", "\uff11", "1" * 40), "decimal"),
        }.items()
    ),
    ('{"partition_key":"k","data":"' + "x" * 4096 + '"}', "data", "4,097 bytes"),
    ('{"data":' + "[" * 9 + "]" * 9 + "}", "data", "more than 8 deep"),
    ('{"partition_key":"k","data":' + '{"a":' * 9 + "1" + "}" * 9 + "}", "data", "more than 8 deep"),
    ("3", "$", "Expected `object`"),
]


@pytest.mark.parametrize(("text", "field", "said"), FAULTS)
def test_an_invalid_record_is_named_by_its_index_and_field_and_does_not_affect_the_others(text, field, said):
    good = '{"partition_key":"k","data":"x"}'
    for content_type, body in ((NDJSON, f"{good}\n{text}\n{good}"), (JSON, f'{{"records":[{good},{text},{good}]}}')):
        result = decoded(content_type, body.encode())
        assert [record.data for record in result.records] == [b"x", b"x"]
        assert [(problem.index, problem.field) for problem in result.problems] == [(1, field)]
        assert said in result.problems[0].detail
        assert result.positions() == [0, 2]


@pytest.mark.parametrize("text", [fault[0] for fault in FAULTS if fault[0] != "3"])
def test_a_single_invalid_record_is_a_problem_at_index_0(text):
    result = decoded(JSON, text.encode())
    assert result.records == []
    assert [problem.index for problem in result.problems] == [0]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "truncated"),
        (b'{"data":', "truncated"),
        (b'{"data":"x', "truncated"),
        (b'{"data":"x"}}', "malformed"),
        (b"[1]", "malformed"),
        (b'"text"', "malformed"),
        (b'{"data":01}', "malformed"),
        (b'{"data":NaN}', "malformed"),
        (b"\xef\xbb\xbf{}", "malformed"),
        (b'{"data":"\xff"}', "encoding"),
        (b'{"partition_key":"\xc3\x28","data":"x"}', "encoding"),
        ('{"data":"x"}'.encode("utf-16"), "encoding"),
        (b'{"records":3}', "malformed"),
        (b'{"records":[]}', "malformed"),
        (b'{"records":[{"data":"x"}],"data":"y"}', "malformed"),
        (b'{"data":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "too-deep"),
        (b'{"data":' + b'{"a":' * 100_000, "too-deep"),
    ],
)
def test_a_body_that_is_not_json_of_records_is_rejected_completely(body, code):
    refused = refusal(JSON, body)
    assert (refused.status, refused.code) == (400, code)
    assert refused.detail.isprintable()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"records":{}}', "records: Expected `array`, got `object`"),
        (b'\xef\xbb\xbf{"data":1}', "this is not JSON: invalid character (byte 0), perhaps a byte order mark"),
    ],
)
def test_a_refusal_names_what_is_wrong(body, said):
    assert refusal(JSON, body).detail == said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"data":', "too early"),
        (b"nonsense", "not JSON"),
        (b'{"data":"x"}{"data":', "not JSON"),
        (b'{"data":' + b"[" * 100_000, "too deep"),
    ],
)
def test_a_line_that_is_not_json_is_a_problem_of_that_line(line, said):
    result = decoded(NDJSON, b'{"data":"x"}\n\n' + line + b'\n{"data":"z"}')
    assert [record.data for record in result.records] == [b"x", b"z"]
    assert [(problem.index, problem.field) for problem in result.problems] == [(1, "$")]
    assert said in result.problems[0].detail


def test_texts_with_explicit_hash_keys_are_decoded_at_once():
    lines = [
        b'{"partition_key":"k","data":"x","explicit_hash_key":"%d"}' % number for number in (7, 10**38, MAX_HASH_KEY)
    ]
    found = decode_plain(NDJSON, b"\n".join(lines), LIMITS, NeighbourKeys(lambda: "k"))
    assert found == [("k", b"x", str(number)) for number in (7, 10**38, MAX_HASH_KEY)]


def test_a_body_without_lines_is_rejected():
    assert refusal(NDJSON, b"\n \r\n").field == "records"
    assert refusal(NDJSON, b"").status == 400


@pytest.mark.parametrize("line", [b'{"partition_key":"k","data":"x"}', b'{"data":1}', b"{}", b"nonsense"])
def test_more_records_than_the_bound_are_too_many_in_every_format(line):
    refused = refusal(NDJSON, b"\n".join([line] * 1001))
    assert (refused.status, refused.code) == (413, "too-many-records")


@pytest.mark.parametrize(
    ("line", "number"), [(b'{"partition_key":"k","data":"x"}', "1,500"), (b"nonsense", "more than 1,000")]
)
def test_the_refusal_of_too_many_records_names_their_number_as_far_as_they_were_counted(line, number):
    refused = refusal(NDJSON, b"\n".join([line] * 1_500))
    assert refused.detail == f"the request has {number} records; send at most 1,000 at once"


def test_successive_records_without_a_key_share_one():
    lines = b"\n".join(b'{"data":%d}' % index for index in range(RECORDS_PER_KEY + 1))
    keys = [record.partition_key for record in decoded(NDJSON, lines).records]
    assert keys == ["key-0"] * RECORDS_PER_KEY + ["key-1"]


@given(st.lists(st.integers(0, 250), max_size=8))
def test_keys_are_the_same_whether_they_are_asked_for_together_or_singly(counts):
    together, singly = (NeighbourKeys(map("key-{}".format, range(100)).__next__) for _ in range(2))
    for count in counts:
        assert together.deal_many(count) == [singly.deal() for _ in range(count)]


def test_a_generated_key_is_random():
    records = [decode(JSON, b'{"data":1}', limits=LIMITS, headers={}).records[0] for _ in range(2)]
    assert records[0].partition_key != records[1].partition_key


def test_an_octet_stream_is_one_record_with_its_key_in_a_header():
    headers = {"x-partition-key": "ключ".encode().decode("latin-1"), "x-explicit-hash-key": "5"}
    body = bytes(range(256))
    assert decoded("application/octet-stream", body, headers) == Decoded([UserRecord("ключ", body, "5")], [])
    assert decoded("application/octet-stream", b"") == Decoded([UserRecord("key-0", b"")], [])
    assert refusal("application/octet-stream", b"", {"x-partition-key": "\xff"}).field == "X-Partition-Key"
    too_long = decoded("application/octet-stream", b"", {"x-partition-key": "k" * 257})
    assert [(each.index, each.field) for each in too_long.problems] == [(0, "X-Partition-Key")]


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json; charset=utf-8", None),
        ('Application/JSON;charset="UTF-8"', None),
        ("application/json; charset=utf-16", 415),
        ("application/jsonx", 415),
        ("text/plain", 415),
        ("", 415),
        ("application/json\r\nX: y", 415),
    ],
)
def test_the_content_type_selects_the_decoder(content_type, status):
    if status is None:
        assert len(decoded(content_type, b'{"data":1}').records) == 1
    else:
        refused = refusal(content_type, b'{"data":1}')
        assert refused.status == status
        assert refused.detail.isprintable()


def test_aggregated_records_of_a_client_are_detected_in_every_format_with_bytes():
    blob = encode([UserRecord("k", b"inside")])
    line = b'{"partition_key":"k","data_base64":"%s"}' % pybase64.b64encode(blob)
    for content_type, body in (
        ("application/octet-stream", blob),
        (JSON, line),
        (NDJSON, b'{"data":1}\n' + line),
        (NDJSON, b'{"data":null}\n' + line),
    ):
        assert decoded(content_type, body).counts is not None
    assert decoded("application/octet-stream", b"plain").counts is None
    assert decoded(NDJSON, b'{"data":1}').counts is None


key_texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=256).filter(
    lambda key: len(key.encode()) < 2000
)
json_values = st.recursive(
    st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text("abc", max_size=3), children, max_size=3),
    max_leaves=5,
)


@given(
    st.lists(
        st.tuples(st.none() | key_texts, json_values | st.binary(max_size=200), st.booleans()), min_size=1, max_size=10
    ),
    st.booleans(),
)
def test_written_records_are_decoded_in_order(rows, ascii_only):
    texts: list[str] = []
    wanted: list[bytes] = []
    for key, data, spaced in rows:
        members: dict[str, object] = {} if key is None else {"partition_key": key}
        if isinstance(data, bytes):
            members["data_base64"] = pybase64.b64encode(data).decode()
            wanted.append(data)
        else:
            members["data"] = data
        text = json.dumps(members, ensure_ascii=ascii_only, separators=(", ", ": ") if spaced else (",", ":"))
        texts.append(text)
        if not isinstance(data, bytes):
            is_text = isinstance(data, str)
            inner = json.dumps(data, ensure_ascii=ascii_only, separators=(", ", ": ") if spaced else (",", ":"))
            wanted.append(data.encode() if is_text else inner.encode())
    for content_type, body in ((NDJSON, "\n".join(texts)), (JSON, f'{{"records":[{",".join(texts)}]}}')):
        result = decoded(content_type, body.encode())
        assert result.problems == []
        assert [record.data for record in result.records] == wanted
        for record, (key, _, _) in zip(result.records, rows, strict=True):
            assert key is None or record.partition_key == key


@given(
    st.lists(st.sampled_from([text for text, _ in SHAPES] + [text for text, _, _ in FAULTS]), min_size=1, max_size=20)
)
def test_every_record_of_a_request_is_accepted_or_named_exactly_once(texts):
    good = {text for text, _ in SHAPES}
    for content_type, body in ((NDJSON, "\n".join(texts)), (JSON, f'{{"records":[{",".join(texts)}]}}')):
        result = decoded(content_type, body.encode())
        bad = [index for index, text in enumerate(texts) if text not in good]
        assert [problem.index for problem in result.problems] == bad
        assert result.positions() == [index for index in range(len(texts)) if index not in bad]
        assert all(isinstance(problem, RecordProblem) for problem in result.problems)
