"""Reading returns what was written, with any metadata, and detects changed bytes."""

import base64
import json
import zlib
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from kpl_core.durability.spool.envelope import (
    DeadLetter,
    SpooledRecord,
    dead_letter_of,
    decode_letter,
    decode_record,
    encode,
    letter_id,
    letter_to_json,
    record_to_json,
    spooled_record_of,
)
from kpl_core.records.record_result import REASON_BY_ERROR_CODE, REASONS, Attempt, reason_of
from tests.support.durability_scene import DELIVERED, EXPIRED, THROTTLED, failed, spooled

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
NOTES = st.none() | st.dictionaries(TEXT, st.none() | st.booleans() | st.integers(-(2**63), 2**63) | TEXT | st.binary())
RECORDS = st.builds(
    SpooledRecord,
    stream=TEXT,
    partition_key=TEXT,
    data=st.binary(max_size=2_000),
    accepted_at=st.floats(0, 4e9),
    explicit_hash_key=st.none() | st.integers(0, 2**128 - 1).map(str),
    flow=st.none() | TEXT,
    tier=st.sampled_from(["critical", "normal", "bulk"]),
    metadata=NOTES,
)


@given(RECORDS)
def test_a_decoded_record_equals_the_encoded_one(record: SpooledRecord) -> None:
    assert decode_record(*encode(record)) == record


@given(RECORDS, st.data())
def test_any_flipped_bit_is_detected(record: SpooledRecord, data: st.DataObject) -> None:
    checksum, envelope = encode(record)
    bit = data.draw(st.integers(0, len(envelope) * 8 - 1))
    flipped = bytearray(envelope)
    flipped[bit // 8] ^= 1 << bit % 8
    assert decode_record(checksum, bytes(flipped)) is None


def test_bytes_of_another_type_are_rejected_even_with_a_valid_checksum() -> None:
    envelope = msgspec.msgpack.encode({"not": "a record"})
    assert decode_record(zlib.crc32(envelope), envelope) is None


def test_rows_of_older_and_newer_versions_are_readable() -> None:
    old = msgspec.msgpack.encode(["orders", "key", b"data", 1.0])
    new = msgspec.msgpack.encode(["orders", "key", b"data", 1.0, None, "flow", "bulk", None, "a field of tomorrow"])
    assert decode_record(zlib.crc32(old), old) == SpooledRecord("orders", "key", b"data", 1.0)
    assert decode_record(zlib.crc32(new), new) == SpooledRecord("orders", "key", b"data", 1.0, None, "flow", "bulk")


class Text(str):
    """A subclass of str, like numpy's."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "something else"


class Bytes(bytes):
    """A subclass of bytes."""

    def __repr__(self) -> str:
        return "something else"


def test_subclasses_of_str_and_bytes_are_stored_as_str_and_bytes() -> None:
    """They were stored as their `repr`: the key changed, and such data could not be decoded again."""
    record = SpooledRecord(
        Text("orders"), Text("key"), Bytes(b"data"), 1.0, metadata={"note": [Text("n"), Bytes(b"b")]}
    )
    read = decode_record(*encode(record))
    assert read == SpooledRecord("orders", "key", b"data", 1.0, metadata={"note": ["n", b"b"]})
    letter = json.loads(letter_to_json(dead_letter_of(record, id="1", reason="ttl", producer_version="1")))
    assert (letter["partition_key"], letter["data"], letter["metadata"]) == ("key", "ZGF0YQ==", {"note": ["n", "Yg=="]})


def test_metadata_nested_too_deeply_is_a_damaged_record() -> None:
    """It ended the spool's thread, and that of every process that opened the file later."""
    nested = b"\x98\xa1s\xa1k\xc4\x01d\xcb" + bytes(8) + b"\xc0\xc0\xa6normal" + b"\x81\xa1a" * 100_000 + b"\xc0"
    assert decode_record(zlib.crc32(nested), nested) is None


class Odd:
    def __repr__(self) -> str:
        return "<odd>"


@pytest.mark.parametrize(
    ("note", "kept"),
    [
        (Odd(), "<odd>"),
        ({1: "one"}, {1: "one"}),
        (datetime(2026, 11, 20, tzinfo=UTC), datetime(2026, 11, 20, tzinfo=UTC)),
    ],
)
def test_values_that_messagepack_does_not_support_are_stored_as_text(note: object, kept: object) -> None:
    record = msgspec.structs.replace(spooled(), metadata={"note": note})
    read = decode_record(*encode(record))
    assert read is not None
    assert read.metadata == {"note": kept}


def cycle() -> dict[str, Any]:
    notes: dict[str, Any] = {}
    notes["self"] = notes
    return notes


@pytest.mark.parametrize("note", [2**70, "\ud800", cycle()], ids=["70 bits", "a surrogate", "a cycle"])
def test_metadata_that_cannot_be_encoded_is_dropped_and_the_record_is_kept(note: object) -> None:
    record = msgspec.structs.replace(spooled(7), metadata={"note": note})
    read = decode_record(*encode(record))
    assert read is not None
    assert read.data == b"7"
    assert read.metadata is not None
    assert "unserialisable" in read.metadata


def test_a_record_copies_the_callers_metadata() -> None:
    notes = {"severity": "major"}
    record = spooled_record_of("orders", "key", b"data", accepted_at=1.0, metadata=notes)
    notes.clear()
    assert record.metadata == {"severity": "major"}
    assert record.size_bytes == 7


@pytest.mark.parametrize(("code", "reason"), REASON_BY_ERROR_CODE.items())
def test_the_code_of_the_last_attempt_gives_the_reason(code: str, reason: str) -> None:
    assert reason_of(failed(Attempt(False, code, "", 1.0, 2.0))) == reason
    assert reason in REASONS


def test_expiry_while_waiting_and_after_retries_have_different_reasons() -> None:
    assert reason_of(failed(EXPIRED)) == "ttl"
    assert reason_of(failed(THROTTLED, EXPIRED)) == "retries_exhausted"
    assert reason_of(failed(Attempt(False, "InternalFailure", "", 1.0, 2.0))) == "retries_exhausted"


def test_a_dead_letter_keeps_the_source_timestamp_and_severity_unchanged() -> None:
    record = spooled_record_of(
        "orders",
        "key",
        b"data",
        accepted_at=1_700_000_000.0,
        flow="tenant-1",
        tier="critical",
        metadata={"timestamp": "2026-11-20T10:00:00.123456789Z", "severity": 17, "traceparent": "00-ab-cd-01", "x": 1},
    )
    letter = dead_letter_of(
        record,
        id="id",
        reason="retries_exhausted",
        producer_version="1.2.3",
        result=failed(THROTTLED, EXPIRED),
        wall_offset=1_700_000_000.0,
    )
    assert letter == DeadLetter(
        id="id",
        stream="orders",
        partition_key="key",
        explicit_hash_key=None,
        data=b"data",
        tenant="tenant-1",
        tier="critical",
        severity=17,
        source_timestamp="2026-11-20T10:00:00.123456789Z",
        first_seen=1_700_000_000.0,
        last_attempt=1_700_000_003.0,
        attempts=2,
        error_code="Expired",
        error_message="Record expired",
        shard_id=None,
        reason="retries_exhausted",
        traceparent="00-ab-cd-01",
        producer_version="1.2.3",
        metadata={"x": 1},
    )
    assert letter.as_record() == record


def test_a_letter_without_an_attempt_has_no_last_attempt() -> None:
    letter = dead_letter_of(spooled(), id="id", reason="rate_limited", producer_version="1")
    assert (letter.attempts, letter.last_attempt, letter.error_code) == (0, None, None)
    assert letter.as_record() == spooled()


def test_unsupported_metadata_types_become_text_in_a_letter() -> None:
    record = msgspec.structs.replace(
        spooled(), metadata={"timestamp": datetime(2026, 11, 20, tzinfo=UTC), "severity": Odd(), "traceparent": 5}
    )
    letter = dead_letter_of(record, id="id", reason="ttl", producer_version="1", result=DELIVERED)
    assert (letter.source_timestamp, letter.severity, letter.traceparent) == ("2026-11-20T00:00:00+00:00", "<odd>", "5")


class Detached:
    """An object whose `repr` and `str` raise."""

    def __repr__(self) -> str:
        message = "there is no session any more"
        raise RuntimeError(message)


class Shy(dict[str, Any]):
    """A mapping that raises when it is read."""

    def keys(self) -> Any:
        message = "no"
        raise RuntimeError(message)


IN_ITSELF: dict[str, Any] = {}
IN_ITSELF["again"] = IN_ITSELF


@pytest.mark.parametrize(
    "metadata",
    [
        {"severity": Detached(), "timestamp": Detached(), "traceparent": Detached(), "row": Detached()},
        {"severity": 1 << 70, "timestamp": 1 << 70, "count": 1 << 70},
        {"severity": "\ud800", "timestamp": "\ud800", "traceparent": "\ud800", "text": "\ud800"},
        {"severity": [1], "timestamp": {}, "traceparent": b"00"},
        IN_ITSELF,
        Shy(a=1),
    ],
)
def test_no_metadata_prevents_a_record_from_being_stored(metadata: Any) -> None:
    record = spooled_record_of("orders", "k", b"x", accepted_at=1.0, metadata=metadata)
    assert decode_record(*encode(record)) is not None
    letter = dead_letter_of(record, id="id", reason="ttl", producer_version="1")
    read = decode_letter(*encode(letter))
    assert read is not None
    assert read.data == b"x"
    assert json.loads(letter_to_json(letter))["data"] == "eA=="


def test_an_error_message_with_lone_surrogates_stays_readable() -> None:
    result = failed(Attempt(False, "Odd\ud800", "said \ud800", 1.0, 2.0))
    letter = dead_letter_of(spooled(), id="id", reason="ttl", producer_version="1", result=result)
    read = decode_letter(*encode(letter))
    assert read is not None
    assert (read.error_code, read.error_message) == ("Odd\\ud800", "said \\ud800")


@given(RECORDS)
def test_a_decoded_letter_equals_the_encoded_one_and_returns_its_record(record: SpooledRecord) -> None:
    letter = dead_letter_of(record, id="id", reason="ttl", producer_version="1", result=failed(EXPIRED))
    assert decode_letter(*encode(letter)) == letter
    assert letter.as_record().data == record.data


def test_a_letter_in_json_uses_the_envelopes_field_names() -> None:
    letter = dead_letter_of(spooled(data=b"\x00\xff"), id="id", reason="ttl", producer_version="1")
    read = json.loads(letter_to_json(letter))
    assert set(read) == set(DeadLetter.__struct_fields__)
    assert read["data"] == "AP8="


def test_ids_sort_by_time() -> None:
    ids = [letter_id(now, b"\xff\x00") for now in (0.0, 1.0, 1_700_000_000.0, 1_700_000_000.001)]
    assert ids == sorted(ids)
    assert len(ids[0]) == 16


def test_a_record_that_cannot_be_encoded_without_metadata_raises() -> None:
    with pytest.raises(UnicodeEncodeError):
        encode(spooled(key="\ud800"))


def test_a_record_in_json_has_its_data_as_text_or_in_base64() -> None:
    fields = json.loads(record_to_json(spooled(1, data="näher".encode())))
    assert (fields["data"], "data_base64" in fields) == ("näher", False)
    fields = json.loads(record_to_json(spooled(1, data=b"\xff\x00")))
    assert ("data" in fields, base64.b64decode(fields["data_base64"])) == (False, b"\xff\x00")
