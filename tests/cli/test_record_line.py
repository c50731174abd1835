"""Decoding of one input line of `kpl put`."""

import pytest

from kpl_core import InvalidUserRecord, UserRecord
from kpl_core.durability.spool import SpooledRecord, letter_to_json
from kpl_core.durability.spool.envelope import dead_letter_of
from kpl_integrations.cli.options import InputFormat
from kpl_integrations.cli.put_input import reader_of

LINES, NDJSON = InputFormat


def record_of(line, *, input_format=NDJSON, key=None, key_field=None):
    return reader_of(input_format, key=key, key_field=key_field)(line, 7)


@pytest.mark.parametrize(
    ("line", "options", "expected"),
    [
        (b"text", {"input_format": LINES}, UserRecord("7", b"text")),
        (b"\xff\x00", {"input_format": LINES, "key": "k"}, UserRecord("k", b"\xff\x00")),
        (b'{"partition_key": "k", "data": "\xc3\xa9"}', {}, UserRecord("k", b"\xc3\xa9")),
        (b'{"partition_key": "k", "data": ""}', {}, UserRecord("k", b"")),
        (b'{"partition_key": "k", "data_base64": "/wA=", "more": 1}', {}, UserRecord("k", b"\xff\x00")),
        (b'{"partition_key": "k", "data": "d", "explicit_hash_key": "5"}', {}, UserRecord("k", b"d", "5")),
        (b'{"partition_key": "k", "data": "d", "explicit_hash_key": null}', {}, UserRecord("k", b"d")),
        (b'{"user": "ann"}', {"key_field": "user"}, UserRecord("ann", b'{"user": "ann"}')),
        (b'{"user":7, "n":1}', {"key_field": "user"}, UserRecord("7", b'{"user":7, "n":1}')),
        (b'{"n": 1}', {"key": "k"}, UserRecord("k", b'{"n": 1}')),
    ],
)
def test_a_line_becomes_a_record(line, options, expected):
    assert record_of(line, **options) == expected


@pytest.mark.parametrize(
    ("line", "options", "words"),
    [
        (b"nonsense", {}, "it is not JSON"),
        (b'{"partition_key": "k", "data": "\xff"}', {}, "it is not JSON"),
        (b'{"partition_key": "k", "data": "\\ud800"}', {}, "it is not JSON"),
        (b"[1]", {}, "Expected `object`"),
        (b'{"data": "d"}', {}, "partition_key"),
        (b'{"partition_key": 7, "data": "d"}', {}, "Expected `str`"),
        (b'{"partition_key": "k"}', {}, "either data"),
        (b'{"partition_key": "k", "data": "d", "data_base64": "ZA=="}', {}, "either data"),
        (b'{"partition_key": "k", "data_base64": "?"}', {}, "not base64"),
        (b'{"partition_key": "k", "data_base64": "\xc3\xa9"}', {}, "not base64"),
        (b'{"n": 1}', {"key_field": "user"}, "field 'user' is missing"),
        (b'{"user": true}', {"key_field": "user"}, "field 'user' is 'True'"),
        (b'{"user": 1.5}', {"key_field": "user"}, "a string or a whole number"),
        (b"7", {"key_field": "user"}, "Expected `object`"),
        (b"nonsense", {"key": "k"}, "it is not JSON"),
    ],
)
def test_an_invalid_line_raises_with_the_reason(line, options, words):
    with pytest.raises(InvalidUserRecord, match=words) as caught:
        record_of(line, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"\xff\x00", b"text", b"", b"true"])
def test_an_exported_dead_letter_becomes_its_record(data):
    record = SpooledRecord("orders", "k", data, 1_700_000_000.0, explicit_hash_key="5", flow="tenant")
    letter = dead_letter_of(record, id="0193", reason="ttl", producer_version="unknown")
    assert record_of(letter_to_json(letter)) == UserRecord("k", data, "5")
    # A line with only some of a letter's fields is not a letter.
    assert record_of(b'{"partition_key": "k", "data": "d", "reason": "ttl"}') == UserRecord("k", b"d")
