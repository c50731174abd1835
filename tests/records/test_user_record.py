import dataclasses
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kpl_core.errors import InvalidUserRecord
from kpl_core.records.user_record import (
    TIERS,
    UserRecord,
    as_bytes,
    check_user_record,
    encode_partition_key,
    rank_of,
    require_size,
    user_record_digest,
)
from tests.support.material import digest, hash_key, partition_keys

MIB = 1024 * 1024


@given(partition_keys)
def test_a_key_of_1_to_256_characters_of_any_width_is_valid(partition_key):
    assert encode_partition_key(partition_key) == partition_key.encode("utf-8")


def test_characters_are_counted_as_code_points():
    assert len(encode_partition_key("\U0001f600" * 256)) == 1_024
    with pytest.raises(InvalidUserRecord, match="257 characters"):
        encode_partition_key("\U0001f600" * 257)


@pytest.mark.parametrize(
    ("partition_key", "problem"),
    [
        ("", r"partition_key has 0 characters; Kinesis accepts 1 to 256"),
        ("x" * 257, r"partition_key has 257 characters; Kinesis accepts 1 to 256"),
        ("ok\ud800", r"partition_key has a lone surrogate at character 2"),
        ("\udfff", r"partition_key has a lone surrogate at character 0"),
    ],
)
def test_a_key_that_kinesis_would_reject_is_rejected_with_the_bound(partition_key, problem):
    with pytest.raises(InvalidUserRecord, match=problem):
        encode_partition_key(partition_key)


@pytest.mark.parametrize("partition_key", [None, 5, b"k", ["k"], {"k": 1}, True])
def test_a_key_that_is_not_a_str_is_a_type_error(partition_key):
    with pytest.raises(TypeError, match=f"partition_key must be a str .* not {type(partition_key).__name__}"):
        encode_partition_key(partition_key)


class Bytes(bytes):
    """A subclass of bytes."""


@pytest.mark.parametrize(
    "data", [b"abc", bytearray(b"abc"), memoryview(b"abc"), memoryview(b"xabcx")[1:4], Bytes(b"abc")]
)
def test_data_can_be_any_bytes_like_object(data):
    assert as_bytes(data) == b"abc"
    # Not an instance of a subclass either, because encoders reject those.
    assert type(as_bytes(data)) is bytes


def test_a_later_change_of_the_buffer_does_not_change_the_record():
    buffer = bytearray(b"abc")
    data = as_bytes(buffer)
    buffer[0] = 0
    assert data == b"abc"


@pytest.mark.parametrize("data", ["text", None, 5, [1, 2], {"a": 1}, object()])
def test_data_of_another_type_is_a_type_error_with_advice(data):
    with pytest.raises(TypeError, match=f"data must be bytes.* not {type(data).__name__}; encode it first"):
        as_bytes(data)


def test_the_size_limit_covers_key_and_data_together():
    require_size(256, MIB - 256, max_record_bytes=MIB)
    with pytest.raises(InvalidUserRecord, match=r"1,048,577 bytes together; the stream accepts at most 1,048,576"):
        require_size(256, MIB - 255, max_record_bytes=MIB)


def test_a_tier_must_be_one_of_three():
    assert TIERS == ("critical", "normal", "bulk")
    for tier in TIERS:
        rank_of(tier)
    with pytest.raises(InvalidUserRecord, match="tier is 'urgent'; it must be one of critical, normal, bulk"):
        rank_of("urgent")  # type: ignore[arg-type]


def made(*fields: Any, **others: Any) -> UserRecord:
    return UserRecord(*fields, **others)


def test_the_check_covers_every_field_and_returns_the_size():
    assert check_user_record(UserRecord("kü", b"abc"), max_record_bytes=6) == 6
    with pytest.raises(InvalidUserRecord, match="partition_key"):
        check_user_record(UserRecord("", b""), max_record_bytes=6)
    with pytest.raises(InvalidUserRecord, match="explicit_hash_key"):
        check_user_record(UserRecord("k", b"", "-1"), max_record_bytes=6)
    with pytest.raises(InvalidUserRecord, match="tier"):
        check_user_record(made("k", b"", tier="x"), max_record_bytes=6)
    with pytest.raises(InvalidUserRecord, match="7 bytes together"):
        check_user_record(UserRecord("kü", b"abcd"), max_record_bytes=6)
    with pytest.raises(TypeError, match="data"):
        check_user_record(made("k", "text"), max_record_bytes=6)


@given(partition_keys, st.none() | st.integers(0, 2**128 - 1))
def test_the_hash_key_is_the_explicit_one_or_that_of_the_partition_key(partition_key, explicit):
    expected = hash_key(partition_key) if explicit is None else explicit
    text = None if explicit is None else str(explicit)
    assert user_record_digest(partition_key, text) == digest(expected)


def test_the_fields_of_a_user_record_cannot_be_changed():
    record = UserRecord("k", b"d", "7", flow="tenant", tier="bulk", metadata={"severity": 5})
    assert (record.partition_key, record.data, record.explicit_hash_key) == ("k", b"d", "7")
    assert (record.flow, record.tier, record.metadata) == ("tenant", "bulk", {"severity": 5})
    with pytest.raises((AttributeError, dataclasses.FrozenInstanceError)):
        setattr(record, "data", b"other")  # noqa: B010 - what mypy rejects must also fail at run time
