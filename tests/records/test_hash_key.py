import hashlib

import pytest
from hypothesis import given, strategies as st

from kpl_core.errors import InvalidUserRecord
from kpl_core.records.hash_key import (
    are_explicit_hash_keys,
    hash_key_digest,
    hash_key_of,
    hash_key_to_digest,
    parse_explicit_hash_key,
)
from tests.support.material import HASH_KEYS, partition_keys

# reference: the KPL's own test (UserRecord/HashKeyFromPartitionKey)
ABCD = 301716283811389038011477436469853762335


def test_the_hash_key_is_the_md5_of_the_key_as_a_big_endian_integer():
    assert hash_key_of("abcd") == ABCD == 0xE2FC714C4727EE9395F324CD2E7F331F
    assert hash_key_digest(b"abcd") == hash_key_to_digest(ABCD)


@given(partition_keys)
def test_every_character_is_hashed_as_utf_8(partition_key):
    expected = hashlib.md5(partition_key.encode("utf-8"), usedforsecurity=False).digest()
    assert hash_key_digest(partition_key.encode()) == expected
    assert hash_key_of(partition_key) == int.from_bytes(expected, "big")


@given(st.integers(0, HASH_KEYS - 1), st.integers(0, HASH_KEYS - 1))
def test_digests_sort_like_their_integers(one, other):
    assert (hash_key_to_digest(one) < hash_key_to_digest(other)) == (one < other)


@pytest.mark.parametrize("hash_key", [0, 1, 9, 10, ABCD, HASH_KEYS - 1])
def test_a_canonical_decimal_is_an_explicit_hash_key(hash_key):
    assert parse_explicit_hash_key(str(hash_key)) == hash_key


@pytest.mark.parametrize(
    "explicit_hash_key",
    ["-1", "-0", "+5", "007", "00", "", " 5", "5 ", "5\n", "abc", "0x10", "1e3", "1.0", "1_000", "٣", "9" * 40],
)
def test_a_hash_key_that_the_service_rejects_is_rejected_with_the_bound(explicit_hash_key):
    with pytest.raises(InvalidUserRecord, match=r"explicit_hash_key is .*2\*\*128 - 1"):
        parse_explicit_hash_key(explicit_hash_key)


@pytest.mark.parametrize("hash_key", [HASH_KEYS, HASH_KEYS + 1, 10**39 - 1])
def test_the_largest_explicit_hash_key_is_two_to_the_128_minus_one(hash_key):
    with pytest.raises(InvalidUserRecord, match=rf"explicit_hash_key is {hash_key}; the largest"):
        parse_explicit_hash_key(str(hash_key))


def test_an_error_does_not_quote_a_whole_megabyte():
    with pytest.raises(InvalidUserRecord) as refused:
        parse_explicit_hash_key("x" * 1_000_000)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("value", [5, 5.0, b"5", ["5"], True])
def test_an_explicit_hash_key_that_is_not_a_str_is_a_type_error(value):
    with pytest.raises(TypeError, match=f"explicit_hash_key must be a str .*{type(value).__name__}"):
        parse_explicit_hash_key(value)


@given(
    st.lists(
        st.integers(0, 2**128 - 1).map(str)
        | st.sampled_from(
            ["", "0", "00", "007", "+5", "-1", "5 ", "٣", "\ud800", str(2**128 - 1), str(2**128), "9" * 40]
        ),
        max_size=5,
    )
)
def test_many_explicit_hash_keys_are_accepted_together_only_if_each_one_is(texts):
    def is_accepted(text: str) -> bool:
        try:
            parse_explicit_hash_key(text)
        except InvalidUserRecord:
            return False
        return True

    assert are_explicit_hash_keys(texts) == (bool(texts) and all(map(is_accepted, texts)))
