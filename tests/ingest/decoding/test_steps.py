"""Large bodies decoded in steps give what they give at once, wherever their pieces begin, and no step is long."""

import gzip
import json
from collections.abc import Generator
from itertools import accumulate
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings, strategies as st

from kpl_integrations.ingest.decoding import (
    Decoded,
    DecodeLimits,
    DecodeRefusal,
    decode,
    decode_in_steps,
    decode_plain,
    json_text,
    otlp_in_steps,
    otlp_records,
    pieces_of,
    steps as step_module,
)
from kpl_integrations.ingest.decoding.json_text import string_in_steps, too_deep
from kpl_integrations.ingest.decoding.otlp_body import JSON, PROTOBUF
from kpl_integrations.ingest.decoding.put_records_body import put_records_in_steps
from kpl_integrations.ingest.decoding.record_counts import result_of
from kpl_integrations.ingest.decoding.steps import STEP_BYTES, STEP_RECORDS, STEP_TOKENS, ArrayRuns
from kpl_integrations.kinesis_protocol.requests import PutRecords, RequestRefused
from kpl_integrations.kinesis_protocol.wire import request_of, wire_of

NDJSON, NATIVE, BATCH = "application/x-ndjson", "application/json", "application/cloudevents-batch+json"
LIMITS = DecodeLimits(max_records=3_000, max_uncut_bytes=200_000)
NO_DEEPER = too_deep("an element", 64)
EVENT = {"specversion": "1.0", "id": "1", "source": "s", "type": "t", "partitionkey": "k"}

data = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a"\\[]{},:é', max_size=3), inner, max_size=3),
    max_leaves=8,
)
record = st.fixed_dictionaries(
    {},
    optional={
        "partition_key": st.text(max_size=4) | st.just("k"),
        "data": data | st.text('a"\\[]{},:é\n', max_size=9),
        "data_base64": st.sampled_from(["", "aGVsbG8=", "84mawg==", "no base64"]),
        "explicit_hash_key": st.sampled_from(["0", "5", "-1"]),
        "other": st.just(1),
    },
)


def cut(body: bytes, size: int) -> Any:
    return iter([body[at : at + size] for at in range(0, len(body), size)])


def at_once(content_type: str, body: bytes) -> Decoded | str:
    try:
        return decode(content_type, body, limits=LIMITS, headers={}, new_key=lambda: "new")
    except DecodeRefusal as refusal:
        return refusal.code


def in_steps(content_type: str, body: bytes, size: int) -> Decoded | str:
    steps = decode_in_steps(content_type, cut(body, size), limits=LIMITS, headers={}, new_key=lambda: "new")
    try:
        decoded = result_of(steps)
    except DecodeRefusal as refusal:
        return refusal.code
    return decoded.with_records()


@pytest.fixture(params=[False, True], ids=["", "long"])
def _long(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let records above 20 bytes be long, or none."""
    if request.param:
        monkeypatch.setattr(step_module, "STEP_BYTES", 10)
        monkeypatch.setattr(step_module, "_LONG_BYTES", 20)
        monkeypatch.setattr(json_text, "_PIECE_BYTES", 16)


@pytest.mark.usefixtures("_long")
@given(st.lists(record, max_size=6), st.integers(1, 80), st.booleans())
@example([{"data": 1}, {"data": {"a": "}"}}], 1, True)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_records_in_steps_are_those_of_the_whole_body(records, size, is_ascii):
    size = min(size, step_module.STEP_BYTES)
    texts = [json.dumps(each, ensure_ascii=is_ascii).encode() for each in records]
    assert in_steps(NDJSON, b"\n".join(texts), size) == at_once(NDJSON, b"\n".join(texts))
    body = b' {"records": [' + b" , ".join(texts) + b" ] } \n"
    assert in_steps(NATIVE, body, size) == at_once(NATIVE, body)
    if texts:
        assert in_steps(NATIVE, texts[0], size) == at_once(NATIVE, texts[0])


@pytest.mark.parametrize("piece_bytes", [13, 14, 15, 16, 17, 40])
@given(st.lists(st.sampled_from(["a", "é", "€", "\U0001f600", "\\", "\n", '"', "\x01", "u"])), st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_string_in_steps_is_the_whole_string(piece_bytes, monkeypatch, characters, drawn):
    escaped = [json.dumps(each, ensure_ascii=drawn.draw(st.booleans()))[1:-1] for each in characters]
    monkeypatch.setattr(json_text, "_PIECE_BYTES", piece_bytes)
    steps = string_in_steps(f'"{"".join(escaped)}"'.encode())
    assert result_of(steps) == "".join(characters).encode()


@pytest.mark.parametrize("form", ['{"data":%s}', '{"data":%s}\n', '{"records":[{"data":%s}]}'])
@pytest.mark.parametrize("text", ['"%s"' % (r"\n" * 99_000), '"%s"' % (r"\ud83d\ude00" * 16_000)])
def test_the_string_of_a_long_record_is_decoded_once_and_in_steps(form, text, monkeypatch):
    content_type, body = NDJSON if form.endswith("\n") else NATIVE, (form % text).encode()
    whole, sizes = at_once(content_type, body), [0]

    class Counted:
        """The decoder of strings, which counts the bytes it is given."""

        def decode(self, text: bytes, decoder: Any = json_text.STRING) -> Any:
            sizes[-1] += len(text)
            return decoder.decode(text)

    monkeypatch.setattr(json_text, "STRING", Counted())
    assert in_steps(content_type, body, STEP_BYTES) == whole
    assert sum(sizes) <= len(text) + 100
    for _ in decode_in_steps(content_type, cut(body, STEP_BYTES), limits=LIMITS, headers={}):
        sizes.append(0)  # noqa: PERF401 - the decoder counts between
    assert max(sizes[1:]) <= 65_538
    assert sum(sizes[1:]) == sizes[0]


@pytest.mark.parametrize("before", [None, 5, True, "text", "x" * 40_000])
@pytest.mark.parametrize("size", [STEP_BYTES, 1_000])
def test_a_value_before_a_long_record_does_not_hide_it(before, size):
    records = [before, {"data": "y" * 140_000}, {"data": "z"}, {"partition_key": ""}]
    body = json.dumps({"records": records}).encode()
    decoded, expected = in_steps(NATIVE, body, size), at_once(NATIVE, body)
    assert isinstance(decoded, Decoded)
    assert isinstance(expected, Decoded)
    assert [len(each.data) for each in decoded.with_records().records] == [140_000, 1]
    assert [problem.index for problem in decoded.problems] == [problem.index for problem in expected.problems] == [0, 3]


@pytest.mark.usefixtures("_long")
@given(st.lists(st.fixed_dictionaries({"data": data}), max_size=6), st.integers(1, 80))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_events_in_steps_are_those_of_the_whole_batch(events, size):
    size = min(size, step_module.STEP_BYTES)
    body = json.dumps([EVENT | each for each in events]).encode()
    assert in_steps(BATCH, body, size) == at_once(BATCH, body)


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 60), st.booleans())
def test_resources_in_steps_are_those_of_the_whole_export(resources, size, is_json):
    limits = DecodeLimits(max_record_bytes=60, max_records=5)
    if is_json:
        media_type, field = JSON, [{"r": each.hex()} for each in resources]
        body = json.dumps({"resourceLogs": field}).encode()
    else:
        media_type = PROTOBUF
        body = b"".join(b"\x0a" + bytes([len(each)]) + each + b"\x10\x05" for each in resources)

    def outcome(decoder: Any) -> object:
        try:
            return decoder()
        except DecodeRefusal as refusal:
            return refusal.status

    whole = outcome(lambda: otlp_records("logs", media_type, body, limits=limits, partition_key="k"))
    steps = otlp_in_steps("logs", media_type, cut(body, size), limits=limits, partition_key="k")
    assert outcome(lambda: result_of(steps)) == whole


@given(st.binary(max_size=300), st.integers(1, 40))
def test_any_bytes_are_decoded_or_refused(body, size):
    for content_type in (NDJSON, NATIVE, BATCH):
        in_steps(content_type, body, size)
        in_steps(content_type, b'{"records":[' + body, size)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"records":[{"data":1},{"data":2}', "truncated"),
        (b'{"records":[{"data":1} {"data":2}]}', "malformed"),
        (b'{"records":[{"data":1}],"records":[{"data":2}]}', "malformed"),
        (b'{"records":[{"data":1}]} {}', "malformed"),
        (b'{"records":[{"data":1}}}', "malformed"),
        (b'{"records":[' + b"[" * 100_000, "too-deep"),
        (b'{"records":[{"data":' + b"[" * 65, "too-deep"),
        (b'{"records":[]}', "malformed"),
        (b'{"records":[' + b'{"data":1},' * 3_000 + b'{"data":1}]}', "too-many-records"),
        (b'{"records":[{"data":"' + b"x" * 200_001, "too-large"),
        (b'{"data":"' + b"x" * 200_001, "too-large"),
    ],
)
def test_a_broken_body_is_refused(body, code):
    assert in_steps(NATIVE, body, 50) == code


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory():
    assert in_steps(NDJSON, b'{"data":"' + b"x" * 200_001, 1_000) == "too-large"


@pytest.mark.parametrize("encoding", [None, b"gzip", b"zstd"])
@pytest.mark.parametrize("data_bytes", [1, 2_000])
def test_no_step_has_many_bytes_or_records(encoding, data_bytes, monkeypatch):
    """A step is a unit of work between two chances for the event loop: here its bytes and records are counted."""
    limits = DecodeLimits(max_records=20_000)
    count = 4_000 if data_bytes > 1 else 20_000
    lines = [b'{"partition_key":"k","data":"%b"}' % (b"x" * data_bytes) for _ in range(count)]
    bodies = {NDJSON: b"\n".join(lines), NATIVE: b'{"records":[' + b",".join(lines) + b"]}"}
    for content_type, body in bodies.items():
        sent = body if encoding is None else (gzip.compress if encoding == b"gzip" else zstandard.compress)(body)
        inflated = [0]
        sizes: list[int] = []
        decoded: list[tuple[int, int]] = []
        pieces = pieces_of(encoding, sent, len(body), inflated)
        steps = decode_in_steps(content_type, _counted(pieces, sizes), limits=limits, headers={})
        plain = decode_plain
        monkeypatch.setattr(
            step_module,
            "decode_plain",
            lambda *args, plain=plain, seen=decoded: (seen.append((len(args[1]), args[1].count(b"{"))), plain(*args))[
                1
            ],
        )
        result = result_of(steps)
        monkeypatch.undo()
        assert len(result.pairs or ()) == count
        assert max(sizes) <= STEP_BYTES
        assert max(size for size, _ in decoded) <= 2 * STEP_BYTES
        assert max(records for _, records in decoded) <= STEP_RECORDS + 2
        assert inflated == [0 if encoding is None else len(body)]


def _counted(pieces: Any, sizes: list[int]) -> Any:
    for piece in pieces:
        sizes.append(len(piece))
        yield piece


def test_a_refusal_says_in_which_part_of_the_body_it_is():
    body = b"\n".join([b'{"data":"x"}'] * 2_000 + [b'{"data":"\xff"}'])
    with pytest.raises(DecodeRefusal) as raised:
        result_of(decode_in_steps(NDJSON, cut(body, 5_000), limits=LIMITS, headers={}))
    assert "the part of the body that begins with records[" in raised.value.detail


ENTRY = '{"PartitionKey":"k","Data":"aGVsbG8=","ExplicitHashKey":"5"}'


@pytest.mark.parametrize(
    "text",
    [
        '{"StreamName":"s","Records":[%s,%s]}',
        '{ "Records" : [ %s , %s ] , "StreamName" : "s" }',
        '{"Records":[%s,%s],"StreamARN":"arn:aws:kinesis:us-east-1:111122223333:stream/s"}',
        '{"Records":[%s,{"Data":%s}],"StreamName":"s"}',
        '{"Records":[%s,%s],"StreamName":"s","Other":1}',
        '{"Records":[%s,%s]}',
        '{"Records":[%s,%s',
    ],
)
def test_put_records_in_steps_is_the_whole_request(text):
    body = (text % (ENTRY, ENTRY)).encode()
    found: list[object] = []
    for decoder in (
        lambda: result_of(put_records_in_steps(body, 10_000)),
        lambda: request_of(wire_of(None), "PutRecords", body),
    ):
        try:
            found.append(decoder())
        except RequestRefused as refused:
            found.append(refused.code)
    # A member that the API does not have may not follow the records of a large request.
    assert found[0] == ("SerializationException" if "Other" in text else found[1])


def test_a_large_request_with_too_many_records_is_refused_like_a_small_one():
    body = f'{{"StreamName":"s","Records":[{",".join([ENTRY] * 700)}]}}'.encode()
    with pytest.raises(RequestRefused, match="length less than or equal to 500"):
        result_of(put_records_in_steps(body, 10_000))
    assert isinstance(
        result_of(put_records_in_steps(body.replace(ENTRY.encode() + b",", b"", 200), 10_000)), PutRecords
    )


def test_an_array_is_cut_between_its_elements_only():
    runs = ArrayRuns(1_000, 64, NO_DEEPER)
    text = b'{"a":"]}"},{"b":[{},{}]},{"c":"\\"}"}] rest'
    found = [run for at in range(len(text)) for run in runs.feed(text[at : at + 1])]
    assert b"".join(found) == text[:-6]
    assert {run for run in found if run} == {b'{"a":"]}"}', b',{"b":[{},{}]}', b',{"c":"\\"}"}'}
    assert (runs.is_closed, runs.tail) == (True, b" rest")


@pytest.mark.parametrize(
    ("content_type", "start"),
    [(NATIVE, b'{"records":[{"data":1}]'), (BATCH, b"[" + json.dumps(EVENT).encode() + b"]")],
)
def test_a_long_text_after_the_array_is_refused_before_it_is_read(content_type, start):
    sizes: list[int] = []
    pieces = _counted(cut(start + b" " * (1 << 20), 1_000), sizes)
    with pytest.raises(DecodeRefusal, match="after the array come more than"):
        result_of(decode_in_steps(content_type, pieces, limits=LIMITS, headers={}))
    assert sum(sizes) < 10_000


def test_each_piece_after_the_array_is_a_step():
    body = b'{"records":[{"data":1}]' + b" " * 8_000 + b"}"
    sizes: list[int] = []
    steps = decode_in_steps(NATIVE, _counted(cut(body, 100), sizes), limits=LIMITS, headers={})
    assert sum(1 for _ in steps) >= len(sizes) >= 80


@pytest.mark.parametrize("count", [STEP_RECORDS - 1, STEP_RECORDS, STEP_RECORDS + 1, 2 * STEP_RECORDS])
@given(st.sampled_from([b"", b",", b" , ", b",,", b",1", b"\x00"]), st.sampled_from([40, 999, STEP_BYTES]))
def test_the_end_of_an_array_is_valid_as_in_the_whole_body(count, end, size):
    body = b'{"records":[' + b",".join([b'{"data":"a"}'] * count) + end + b"]}"
    whole, made = at_once(NATIVE, body), in_steps(NATIVE, body, size)
    assert isinstance(made, str) is isinstance(whole, str)
    assert not isinstance(made, Decoded) or made == whole


@pytest.mark.parametrize("piece", [b'"",', b"[],", b'{"a":[]},'])
def test_a_step_looks_at_a_bounded_number_of_brackets_and_strings(piece, monkeypatch):
    seen = [0]

    class Counted:
        """The pattern, which counts its tokens."""

        def finditer(self, *args: Any, pattern: Any = step_module.TOKEN) -> Any:
            for token in pattern.finditer(*args):
                seen[0] += 1
                yield token

    monkeypatch.setattr(step_module, "TOKEN", Counted())
    before = 0
    for _ in ArrayRuns(1 << 20, 64, NO_DEEPER).feed(b'{"a":[' + piece * (STEP_BYTES // len(piece))):
        assert seen[0] - before <= STEP_TOKENS
        before = seen[0]
    assert seen[0] > 2 * STEP_TOKENS


@pytest.mark.parametrize(
    ("start", "piece"),
    [(b"", b"1,"), (b"", b"1,[],1,"), (b"", b'1,"a",1,'), (b'["', b"x"), (b'["', b"\\\\"), (b'["x', b"\\\\")],
)
def test_the_text_of_an_array_is_looked_at_once(start, piece, monkeypatch):
    seen_bytes = [0]

    class Counted:
        """A pattern, which counts the bytes it is given."""

        def __init__(self, pattern: Any) -> None:
            self._pattern = pattern

        def finditer(self, text: bytes, at: int) -> Any:
            seen_bytes[0] += len(text) - at
            return self._pattern.finditer(text, at)

        def match(self, text: bytes, at: int) -> Any:
            seen_bytes[0] += len(text) - at
            return self._pattern.match(text, at)

    for name in ("TOKEN", "_STRING_END"):
        monkeypatch.setattr(step_module, name, Counted(getattr(step_module, name)))
    runs, body = ArrayRuns(1 << 20, 64, NO_DEEPER), start + piece * (400_000 // len(piece))
    pieces = list(cut(body, STEP_BYTES))
    for fed in pieces:
        assert list(runs.feed(fed))
    assert seen_bytes[0] <= len(body) + 2 * len(pieces)


@given(st.lists(st.sampled_from(['"', "\\", "\\\\", "a", "é", "]", "{", "\n"]), max_size=12), st.integers(1, 9))
def test_a_string_is_whole_wherever_its_pieces_begin(characters, size):
    text = json.dumps(["".join(characters), 1]).encode()[1:]
    runs = ArrayRuns(1_000, 64, NO_DEEPER)
    assert b"".join(run for piece in cut(text + b" rest", size) for run in runs.feed(piece)) == text[:-1]
    assert (runs.is_closed, runs.tail) == (True, b" rest")


@pytest.mark.parametrize("depth", [1, 63, 64])
def test_data_of_a_large_body_may_be_as_deep_as_that_of_a_small_one(depth):
    body = b'{"records":[{"data":' + b"[" * depth + b"]" * depth + b"}]}"
    assert in_steps(NATIVE, body, 50) == at_once(NATIVE, body)
    assert isinstance(in_steps(NATIVE, body, 50), Decoded)


DEEP: Any = ["[" * 70 + "]" * 70, '{"a":' * 70 + "1" + "}" * 70]


@pytest.mark.parametrize("deep", DEEP)
@pytest.mark.parametrize(
    "form", ['{"data":%s}', '{"data":%s}\n{"data":1}\n', '{"records":[{"data":%s}]}', '[{"data":%s}]']
)
def test_a_long_record_that_is_nested_too_deep_is_refused(form, deep):
    media_type = BATCH if form[0] == "[" else NDJSON if "\n" in form else NATIVE
    body = (form % f"[{deep}{',[]' * 30_000}]").encode()
    with pytest.raises(DecodeRefusal, match=r"(data|an event) is nested more than 64 deep; flatten it") as raised:
        result_of(decode_in_steps(media_type, cut(body, STEP_BYTES), limits=LIMITS, headers={}))
    assert raised.value.code == "too-deep"


@pytest.mark.parametrize(
    ("content_type", "text"),
    [
        (NATIVE, b'{"data":[%b[]]}'),
        (NATIVE, b'{"records":[{"data":[%b[]]}]}'),
        (NDJSON, b'{"data":[%b[]]}\n{"data":2}\n'),
        (BATCH, b'[{"specversion":"1.0","id":"1","source":"s","type":"t","data":[%b[]]}]'),
        ("application/cloudevents+json", b'{"specversion":"1.0","id":"1","source":"s","type":"t","data":[%b[]]}'),
        (JSON, b'{"resourceLogs":[{"a":[%b[]]}]}'),
        (JSON, b'{"a":1,"resourceLogs":[{"a":[%b[]]}]}'),
    ],
)
def test_the_depth_of_a_long_text_is_checked_in_steps(content_type, text, monkeypatch):
    calls = [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return accumulate(*args, **kwargs)

    monkeypatch.setattr(json_text, "accumulate", counted)
    pieces = cut(text % (b"[]," * 200_000), STEP_BYTES)
    if b"resourceLogs" in text:
        steps: Generator[None, None, object] = otlp_in_steps(
            "logs", JSON, pieces, limits=DecodeLimits(), partition_key="k"
        )
    else:
        steps = decode_in_steps(content_type, pieces, limits=DecodeLimits(), headers={})
    before = 0
    for _ in steps:
        assert calls[0] - before <= 1
        before = calls[0]
