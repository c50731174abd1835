from contextlib import suppress
from hashlib import md5

import pytest
from hypothesis import example, given, strategies as st

from kpl_core.errors import MalformedAggregatedRecord
from kpl_core.records.aggregated_record import MAGIC, decode, encode, partition_key_entry, varint
from kpl_core.records.user_record import UserRecord
from tests.support.material import user_records

LARGEST_HASH_KEY = "340282366920938463463374607431768211455"

# Computed with a protobuf library, for the format of awslabs/amazon-kinesis-producer, aggregation-format.md.
GOLDEN = [
    (
        [UserRecord("a", b"x"), UserRecord("a", b"y")],
        "f3899ac20a01611a0508001a01781a0508001a01794ce17b1ac841e7ccc082e6c0e097f7f6",
    ),
    (
        [UserRecord("k1", b"hello"), UserRecord("k2", b"")],
        "f3899ac20a026b310a026b321a0908001a0568656c6c6f1a0408011a00841a6e29305fd33575c54e2d8379eab7",
    ),
    (
        [UserRecord("pk", b"\x00\x01", "0"), UserRecord("pk", b"z", LARGEST_HASH_KEY)],
        (
            "f3899ac20a02706b120130122733343032383233363639323039333834363334363333373436303734333137363832313134"
            "35351a08080010001a0200011a07080010011a017a332e502b4b0cf82f610b5a783531e578"
        ),
    ),
]


def sealed(protobuf: bytes) -> bytes:
    """Return these bytes in a valid envelope: magic and MD5."""
    return b"\xf3\x89\x9a\xc2" + protobuf + md5(protobuf, usedforsecurity=False).digest()


def field(number: int, content: bytes | int) -> bytes:
    """Return a protobuf field of less than 128 bytes."""
    if isinstance(content, int):
        return bytes((number << 3, content))
    return bytes((number << 3 | 2, len(content))) + content


KEY = field(1, b"k")
RECORD = field(3, field(1, 0) + field(3, b"x"))


@pytest.mark.parametrize(("records", "expected"), GOLDEN)
def test_the_encoded_bytes_are_those_of_the_kpl(records, expected):
    assert encode(records).hex() == expected
    assert decode(bytes.fromhex(expected)) == tuple(records)


@given(st.lists(user_records, min_size=1, max_size=8))
@example([UserRecord("k", b"")])
@example([UserRecord(f"key {index}", b"x") for index in range(300)])
@example([UserRecord(f"{index % 7}", bytes(index), str(index % 3)) for index in range(200)])
def test_decoding_returns_the_encoded_records(records):
    assert decode(encode(records)) == tuple(records)


def test_key_indices_of_one_two_and_three_bytes_are_decoded():
    records = [UserRecord(f"key {index}", b"") for index in range(17_000)]
    assert decode(encode(records)) == tuple(records)


def test_each_table_lists_each_entry_once_in_the_order_of_first_use():
    encoded = encode([UserRecord("b", b"1", "7"), UserRecord("a", b"2"), UserRecord("b", b"3", "7")])
    tables = field(1, b"b") + field(1, b"a") + field(2, b"7")
    assert encoded[4:].startswith(tables)
    assert encoded.count(field(1, b"b")) == 1


def test_index_0_and_empty_data_are_written_out():
    assert encode([UserRecord("k", b"")]) == sealed(KEY + field(3, field(1, 0) + field(3, b"")))


@given(st.integers(0, 2**63 - 1))
def test_a_varint_has_seven_bits_per_byte_lowest_first(number):
    encoded = varint(number)
    assert sum((byte & 0x7F) << 7 * index for index, byte in enumerate(encoded)) == number
    assert [byte >= 0x80 for byte in encoded] == [True] * (len(encoded) - 1) + [False]


def test_the_longest_partition_key_can_be_encoded():
    key = ("\U0010ffff" * 256).encode()
    assert partition_key_entry(key) == b"\x0a\x80\x08" + key


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"hello",
        MAGIC,
        MAGIC + bytes(15),
        b'{"json": true}' * 10,
        # The magic alone proves nothing: a user's data may start with the same bytes.
        MAGIC + bytes(16),
        MAGIC + KEY + RECORD + bytes(16),
        sealed(KEY + RECORD)[:-1] + b"\x00",
        sealed(KEY + RECORD)[:-1],
        sealed(KEY + RECORD) + b"\x00",
        b"\x00" + sealed(KEY + RECORD),
    ],
)
def test_data_without_the_magic_or_with_a_wrong_md5_is_a_plain_record(raw):
    assert decode(raw) is None


@given(st.lists(user_records, min_size=1, max_size=3), st.data())
def test_a_change_of_any_byte_is_detected(records, data):
    encoded = bytearray(encode(records))
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] ^= data.draw(st.integers(1, 255))
    assert decode(bytes(encoded)) is None


@given(st.lists(user_records, min_size=1, max_size=3), st.data())
def test_a_truncated_aggregated_record_is_a_plain_record(records, data):
    encoded = encode(records)
    assert decode(encoded[: data.draw(st.integers(0, len(encoded) - 1))]) is None


def test_an_empty_aggregated_record_has_no_user_records():
    assert decode(sealed(b"")) == ()


@pytest.mark.parametrize(
    "protobuf",
    [
        # tags, the fourth field of the format: a key and a value
        KEY + field(3, field(1, 0) + field(3, b"x") + field(4, field(1, b"tag") + field(2, b"value"))),
        # undefined fields of every wire type
        KEY + field(9, b"later") + RECORD,
        KEY + field(9, 7) + RECORD,
        KEY + bytes((9 << 3 | 1,)) + bytes(8) + RECORD,
        KEY + bytes((9 << 3 | 5,)) + bytes(4) + RECORD,
        KEY + field(3, field(1, 0) + field(3, b"x") + field(15, 1)),
        # known field numbers with another wire type
        KEY + field(1, 5) + RECORD,
        KEY + field(3, field(1, 0) + field(2, b"?") + field(3, b"x")),
        # data before the index, tables after the records
        field(3, field(3, b"x") + field(1, 0)) + KEY,
    ],
)
def test_unknown_fields_are_skipped(protobuf):
    assert decode(sealed(protobuf)) == (UserRecord("k", b"x"),)


@pytest.mark.parametrize(
    ("protobuf", "problem"),
    [
        (field(3, field(1, 0) + field(3, b"x")), "cannot be read"),
        (KEY + field(3, field(1, 1) + field(3, b"x")), "cannot be read"),
        (KEY + field(3, field(1, 0) + field(2, 0) + field(3, b"x")), "cannot be read"),
        (KEY + field(3, field(3, b"x")), "no partition key index"),
        (KEY + field(3, field(1, 0)), "no data"),
        (field(1, b"\xff") + RECORD, "cannot be read"),
        (KEY + RECORD[:-1], "1 bytes after the message"),
        (KEY + b"\x1a\x7f", "127 bytes after the message"),
        (KEY + b"\x1a", "cannot be read"),
        (KEY + b"\x80", "cannot be read"),
        (KEY + b"\x80" * 10 + b"\x01", "longer than ten bytes"),
        (KEY + bytes((3 << 3 | 3,)), "wire type 3"),
        (KEY + bytes((3 << 3 | 7,)), "wire type 7"),
    ],
)
def test_a_malformed_protobuf_with_the_right_md5_is_an_error(protobuf, problem):
    with pytest.raises(MalformedAggregatedRecord, match=problem):
        decode(sealed(protobuf))


@given(st.binary(max_size=60))
def test_any_bytes_in_a_valid_envelope_are_decoded_or_rejected(protobuf):
    with suppress(MalformedAggregatedRecord):
        assert isinstance(decode(sealed(protobuf)), tuple)
