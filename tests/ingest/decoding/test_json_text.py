"""The nesting depth of a JSON text, and the cost of finding it."""

import json
import tracemalloc
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, strategies as st

from kpl_integrations.ingest.decoding import DecodeRefusal, json_text
from kpl_integrations.ingest.decoding.json_text import is_deeper_than, require_text

MIB = 1024 * 1024
texts = st.text(st.sampled_from('[]{}"\\a\n'), max_size=8)
values = st.recursive(
    texts | st.none(), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
)


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


@given(values, st.integers(0, 5), st.sampled_from([1, 2, 3, 7, 65_536]))
def test_brackets_in_strings_do_not_count(value, depth, piece_bytes):
    with mock.patch.object(json_text, "_PIECE_BYTES", piece_bytes):
        assert is_deeper_than(depth, json.dumps(value).encode()) == (depth_of(value) > depth)


@pytest.mark.parametrize(
    "text",
    [
        b'{"data":"' + b"[" * MIB + b'"}',
        b'{"data":"' + b"\\\\[" * (MIB // 3) + b'"}',
        b'{"data":[' + b'[],"",' * (MIB // 6) + b"[]]}",
    ],
    ids=["a long string", "escapes", "many"],
)
def test_the_check_needs_memory_for_a_few_copies_of_the_text_at_most(text):
    assert json.loads(text)
    tracemalloc.start()
    try:
        assert not is_deeper_than(64, text)
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("at", [0, 5, 65_533, 65_536, 200_000])
def test_the_byte_that_is_not_utf8_is_found_in_a_long_body(at):
    text = ("é😀" * 50_000).encode()
    require_text(text)
    wrong = text[:at].decode(errors="ignore").encode()
    with pytest.raises(DecodeRefusal, match=f"byte {len(wrong)} of the body"):
        require_text(wrong + b"\xff" + text)


def test_a_body_may_have_an_object_in_16_bytes_and_a_million_in_any_case():
    require_text(b"{}" * (MIB - 1))
    with pytest.raises(DecodeRefusal, match="more than 1,048,576 JSON objects") as refusal:
        require_text(b"{}" * (MIB + 1))
    assert refusal.value.status == 413
    require_text((b"{}" + b" " * 14) * (MIB + 1))


@pytest.mark.parametrize("depth", [1, 4, 5, 63, 64, 65, 400])
def test_chains_of_any_length_are_as_deep_as_they_are(depth):
    for text in (b"[" * depth + b"]" * depth, b"[" + b"[[],[" * (depth // 2) + b"]]" * (depth // 2) + b"]"):
        for bound in (1, 3, 4, 63, 64, 399):
            assert is_deeper_than(bound, text) == (depth_of(json.loads(text)) > bound)
